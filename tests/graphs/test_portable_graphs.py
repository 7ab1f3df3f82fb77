"""The `portable` graphs: what other runtimes demand of the file, and f16 that is safe node by node."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import safetensors.numpy
from onnx import TensorProto

from qwen_onnx import contract
from support.checkpoints import CONFIGS
from support.exports import IDS, Exported, export_checkpoint, past_names
from support.f16 import outlier_config, outlier_weights
from support.marks import but_first
from support.portable import run
from support.strict import not_finite
from support.tolerances import BF16, F16, F32, Tolerance, assert_close, difference

Export = Callable[..., Exported]

STRICT: dict[str, Tolerance] = {"f32": F32, "f16": F16, "bf16": BF16}
F16_MAX = float(np.finfo(np.float16).max)
# No Range, LessOrEqual, Expand, Pow, Cos, Sin, Shape, Slice, Gemm, Not: each is refused or wrong somewhere.
OPERATORS_ALLOWED = {
    "Add", "And", "Cast", "Concat", "CumSum", "Div", "Equal", "Gather", "Less", "MatMul", "Mul", "ReduceMax",
    "ReduceMean", "Reshape", "Sigmoid", "Softmax", "Split", "Sqrt", "Sub", "Transpose", "Unsqueeze", "Where",
}  # fmt: skip


def graph_of(model: Exported) -> onnx.ModelProto:
    return onnx.load(model.path("prefill", "portable"), load_external_data=False)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3_bias"])
def test_node_by_node_as_the_reference(name: str, dtype: str, exported: Export) -> None:
    for values, wanted in run(exported(name, dtype)):
        assert_close(values[contract.LOGITS][:, 0], wanted, STRICT[dtype])


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_outliers_stay_finite_and_right(dtype: str, tmp_path: Path) -> None:
    """Scores beyond 65,504 and squares of such states too: TensorRT and WebGPU compute f16 as it is written."""
    raw = outlier_config(128)
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps(raw))
    safetensors.numpy.save_file(
        outlier_weights(raw), tmp_path / "checkpoint" / "model.safetensors", {"format": "pt"}
    )
    model = export_checkpoint(tmp_path / "checkpoint", tmp_path / "export", dtype)
    for values, wanted in run(model):
        assert not_finite(values) == []
        assert_close(values[contract.LOGITS][:, 0], wanted, STRICT[dtype])
        scores = [value for name, value in values.items() if name.endswith("0.self_attn/MatMul")]
        assert max(float(np.abs(value).max()) for value in scores) > F16_MAX


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_what_may_overflow_is_f32_in_the_graph(dtype: str, exported: Export) -> None:
    """No flag of a runtime is needed for it: TensorRT 11 has none."""
    values, _ = run(exported("qwen3", dtype))[0]
    for node in graph_of(exported("qwen3", dtype)).graph.node:
        if node.op_type in ("Softmax", "ReduceMean", "Sqrt", "Div", "CumSum"):
            assert values[node.output[0]].dtype == np.float32, node.name
        if node.op_type == "MatMul":
            inside = node.name.split("/")[0].endswith("self_attn")
            assert (values[node.output[0]].dtype == np.float32) is inside, node.name
    assert values[contract.LOGITS].dtype == np.float32


@pytest.mark.parametrize("dtype", but_first(["f16", "f32", "bf16"]))
@pytest.mark.parametrize("name", CONFIGS)
def test_plain_operators_plain_shapes(name: str, dtype: str, exported: Export) -> None:
    """A newer operator, or a shape computed at run time, and some runtime would refuse the file."""
    model = exported(name, dtype)
    proto = graph_of(model)
    assert [(opset.domain, opset.version) for opset in proto.opset_import] == [("", 17)]
    assert proto.ir_version == 8
    graph = proto.graph
    assert {node.op_type for node in graph.node} <= OPERATORS_ALLOWED
    stored = {tensor.name for tensor in graph.initializer}
    assert all(node.input[1] in stored for node in graph.node if node.op_type in ("Reshape", "Unsqueeze"))
    for node in graph.node:
        if node.op_type == "CumSum":  # whose defaults some runtimes get wrong
            assert {a.name: a.i for a in node.attribute} == {"exclusive": 0, "reverse": 0}
    dims = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    both = "past_sequence_length + sequence_length"
    assert dims["input_ids"] == dims["position_ids"] == ["batch_size", "sequence_length"]
    assert dims["attention_mask"] == ["batch_size", both]
    assert dims["logits"] == ["batch_size", 1, model.config.vocab_size]
    heads, size = model.config.num_key_value_heads, model.config.head_dim
    for layer in range(model.config.num_hidden_layers):
        assert dims[f"past_key_values.{layer}.key"] == ["batch_size", heads, "past_sequence_length", size]
        assert dims[f"present.{layer}.value"] == ["batch_size", heads, both, size]
    element = {"f32": TensorProto.FLOAT, "f16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}[dtype]
    assert all(
        value.type.tensor_type.elem_type == element
        for value in (*graph.input, *graph.output)
        if value.name.startswith(("past", "present"))
    )


def test_rows_that_end_before_the_others(exported: Export) -> None:
    """Padded on the right, as some runtimes pad: logits are of each row's last real token."""
    model = exported("qwen2")
    session, layers = model.session("prefill", "portable"), model.manifest.num_hidden_layers
    lengths = np.array([9, 4])
    mask = (np.arange(9) < lengths[:, None]).astype(np.int64)
    spec = model.cache_spec("prefill", "portable")
    empty = np.zeros((2, int(spec.shape[1]), 0, int(spec.shape[3])), np.float32)
    inputs = {
        contract.INPUT_IDS: IDS[:2, :9],
        contract.ATTENTION_MASK: mask,
        contract.POSITION_IDS: np.tile(np.arange(9), (2, 1)),
    } | dict.fromkeys(past_names(layers), empty)
    (logits,) = session.run([contract.LOGITS], inputs)
    for row, length in enumerate(lengths):
        wanted = model.wanted(IDS[row, :9])
        assert_close(logits[row, 0], wanted[length - 1], F32)
    assert difference(model.wanted(IDS[1, :9])[8], model.wanted(IDS[1, :9])[3]) > 1
