"""Every node of the graphs that are meant for CUDA has a kernel there for its types: known without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import pytest
from onnx import TensorProto, helper

from support.cuda import kernel_table as cuda_kernel_table
from support.cuda.kernels import TABLE, has_kernel, lacking, types_of
from support.exports import Exported
from support.marks import but_first

MODELS = ["qwen2", "qwen3", "qwen3_bias", "qwen2_14_2"]


@pytest.mark.parametrize("name", but_first(MODELS))
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_every_node_has_a_kernel(name: str, dtype: str, exported: Callable[..., Exported]) -> None:
    """No node of a graph for CUDA needs the CPU, which would copy before and after it and prevent capture."""
    model = exported(name, dtype)
    graphs = [graph for graph in model.manifest.graphs if "cuda" in graph.providers]
    assert {graph.entry for graph in graphs} == {"prefill", "decode", "greedy", "grow"}
    for graph in graphs:
        proto = onnx.load(model.folder / graph.file, load_external_data=False)
        assert not lacking(proto, types_of(proto)), graph.file


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_a_graph_of_a_type_without_a_kernel_is_seen(name: str, exported: Callable[..., Exported]) -> None:
    """The f16 graph in f32, and with its logits chosen from in bf16."""
    model = exported(name, "f16")
    proto = onnx.load(model.folder / model.manifest.graph("greedy", "cuda").file, load_external_data=False)
    types = types_of(proto)
    in_f32 = {
        value: TensorProto.FLOAT if kind == TensorProto.FLOAT16 else kind for value, kind in types.items()
    }
    assert lacking(proto, in_f32) == {"GroupQueryAttention"}
    (choice,) = (node for node in proto.graph.node if node.op_type == "ArgMax")
    assert lacking(proto, {**types, choice.input[0]: TensorProto.BFLOAT16}) >= {"ArgMax"}


@pytest.mark.parametrize(
    ("op", "kind", "found"),
    [
        ("ArgMax", TensorProto.FLOAT, True),
        ("ArgMax", TensorProto.BFLOAT16, False),
        ("Det", TensorProto.FLOAT, False),
    ],
)
def test_one_node(op: str, kind: int, found: bool) -> None:
    node = helper.make_node(op, ["x"], ["y"])
    assert has_kernel(node, 24, {"x": kind, "y": TensorProto.INT64 if op == "ArgMax" else kind}) is found


def test_a_newer_version_of_an_operator_is_not_served_by_an_open_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel of Squeeze 13 and later says nothing of Squeeze 24, unless its range names it."""
    node, types = helper.make_node("Squeeze", ["x"], ["y"]), {"x": TensorProto.FLOAT, "y": TensorProto.FLOAT}
    for until, found in ((None, False), (23, False), (24, True)):
        monkeypatch.setitem(TABLE["ai.onnx"], "Squeeze", [[13, until, {"T": "float"}]])
        assert has_kernel(node, 24, types) is found


def test_the_table_is_small() -> None:
    assert cuda_kernel_table.TABLE.stat().st_size < 120_000
    assert TABLE["onnxruntime"].startswith("1.31")
