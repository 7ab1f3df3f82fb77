"""What lies in the graph files: types, names, operators, shapes, and where the weights are."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
from checkpoints import CONFIGS
from exports import IDS, Exported, open_on_cpu
from onnx import TensorProto, helper
from tolerances import F16, F16_ORDER, assert_close

from qwen_onnx import contract
from qwen_onnx.graphs.build import verify
from qwen_onnx.safetensors_file import read_header

Export = Callable[..., Exported]

ELEMENT = {"f32": TensorProto.FLOAT, "f16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
DTYPES = list(ELEMENT)
EVERY_EXPORT = [
    *((name, "f32") for name in CONFIGS),
    *((name, dtype) for name in ("qwen2", "qwen3_bias") for dtype in ("f16", "bf16")),
]
QWEN2_DECODE = {
    "Add": 6, "And": 1, "Attention": 3, "Cast": 1, "Gather": 1, "Gemm": 22, "LessOrEqual": 1, "Mul": 6,
    "RMSNormalization": 7, "Range": 1, "Reshape": 13, "RotaryEmbedding": 6, "Shape": 1, "Sigmoid": 3, "Slice": 6,
    "Squeeze": 1, "TensorScatter": 6, "Transpose": 12, "Unsqueeze": 5, "Where": 1,
}  # fmt: skip
"""Operators of three layers. A change here is a change of every exported graph: make it on purpose."""


def graphs(model: Exported) -> dict[str, onnx.ModelProto]:
    """Every graph file, its weights left where they are."""
    return {
        path.name: onnx.load(path, load_external_data=False) for path in sorted(model.folder.glob("*.onnx"))
    }


def decoders(model: Exported) -> dict[str, onnx.ModelProto]:
    return {name: graph for name, graph in graphs(model).items() if not name.startswith("grow")}


def interface(graph: onnx.ModelProto) -> dict[str, tuple[int, list[int | str]]]:
    """Element type and shape of each input and output."""
    return {
        value.name: (
            value.type.tensor_type.elem_type,
            [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim],
        )
        for value in (*graph.graph.input, *graph.graph.output)
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["qwen2", "qwen3_bias"])
def test_types_are_those_that_were_asked_for(name: str, dtype: str, exported: Export) -> None:
    """A "half" export with f32 weights or outputs; rotary tables rounded along with the weights."""
    model = exported(name, dtype)
    for file, graph in decoders(model).items():
        hidden = TensorProto.FLOAT if ".cpu." in file else ELEMENT[dtype]
        for value, (element, _) in interface(graph).items():
            if value.startswith(("past_key_values.", "present.")):
                assert element == hidden, (file, value)
            else:
                wanted = TensorProto.FLOAT if value == contract.LOGITS else TensorProto.INT64
                assert element == wanted, (file, value)
        outside = [tensor for tensor in graph.graph.initializer if tensor.external_data]
        for tensor in outside:
            wanted = TensorProto.FLOAT if tensor.name.startswith("rotary.") else ELEMENT[dtype]
            assert tensor.data_type == wanted, (file, tensor.name)
        # The embedding is read in the weights' type, the states after it are in the export's.
        types = {v.name: v.type.tensor_type.elem_type for v in graph.graph.value_info}
        assert types["model.layers.1/Add"] == types["model.norm/RMSNormalization"] == hidden


@pytest.mark.parametrize(("name", "dtype"), EVERY_EXPORT)
def test_shapes_of_inputs_and_outputs(name: str, dtype: str, exported: Export) -> None:
    """Cache sized by query heads or by hidden / heads; logits of every position; nameless dimensions."""
    model = exported(name, dtype)
    config = model.config
    cache = ["batch_size", config.num_key_value_heads, "cache_capacity", config.head_dim]
    for file, graph in decoders(model).items():
        sequence = 1 if file.startswith("decode") else "sequence_length"
        shapes = {value: shape for value, (_, shape) in interface(graph).items()}
        assert shapes.pop("input_ids") == ["batch_size", sequence]
        assert shapes.pop("position_ids") == ["batch_size", sequence]
        assert shapes.pop("attention_mask") == ["batch_size", "total_sequence_length"]
        assert shapes.pop("write_indices") == ["batch_size"]
        assert shapes.pop("logits") == ["batch_size", 1, config.vocab_size]
        layers = config.num_hidden_layers
        assert list(shapes) == contract.past_names(layers) + contract.present_names(layers)
        assert all(shape == cache for shape in shapes.values())
        spec = next(spec for spec in model.manifest.graphs if spec.file == file)
        assert {value.name: list(value.shape) for value in spec.outputs}["logits"] == ["batch_size", 1, 320]


@pytest.mark.parametrize(("name", "dtype"), EVERY_EXPORT)
def test_graphs_are_plain_and_small(name: str, dtype: str, exported: Export) -> None:
    """IsNaN guards, Constant nodes, folded copies of weights, contrib operators: what exporters leave behind."""
    for file, proto in graphs(exported(name, dtype)).items():
        assert [(opset.domain, opset.version) for opset in proto.opset_import] == [("", 24)]
        assert proto.ByteSize() < 1_000_000
        assert not proto.functions
        graph = proto.graph
        verify(proto)
        names = [node.name for node in graph.node]
        assert len(set(names)) == len(names)
        stored = {tensor.name: tensor for tensor in graph.initializer}
        types = {tensor.name: tensor.data_type for tensor in graph.initializer}
        for value in (*graph.value_info, *graph.input, *graph.output):
            types[value.name] = value.type.tensor_type.elem_type
        for node in graph.node:
            where = (file, node.name)
            scope, _, kind = node.name.rpartition("/")
            assert kind.startswith(node.op_type), where
            assert scope.split(".")[0] in ("model", "lm_head", "step", ""), where
            assert scope or node.op_type in ("Cast", "Unsqueeze", "TensorScatter"), where
            assert node.domain == "", where
            assert node.op_type not in ("Constant", "Identity", "Dropout", "IsNaN", "If"), where
            if node.op_type == "Cast":
                assert types[node.input[0]] != types[node.output[0]], where
            if node.op_type == "Reshape" and node.input[1] in stored:
                assert len(stored[node.input[1]].dims) == 1, where
            if all(given in stored for given in node.input):
                assert node.op_type == "Cast", where
                assert ".cpu." in file, where


@pytest.mark.parametrize("entry", ["prefill", "decode"])
def test_nodes_are_named_after_the_checkpoint(entry: str, exported: Export) -> None:
    """A profile or an error names MatMul_1312: nobody finds the layer."""
    names = {node.name for node in graphs(exported("qwen2"))[f"{entry}.onnx"].graph.node}
    assert {
        "model.embed_tokens/Gather",
        "model.layers.0.self_attn/Attention",
        "model.layers.0.self_attn.q_proj/Gemm",
        "model.layers.2.mlp.down_proj/Gemm",
        "model.norm/RMSNormalization",
        "lm_head/Gemm",
    } <= names


def test_operators_of_a_decode_graph(exported: Export) -> None:
    graph = graphs(exported("qwen2"))["decode.onnx"].graph
    assert dict(collections.Counter(node.op_type for node in graph.node)) == QWEN2_DECODE


@pytest.mark.parametrize(("name", "dtype"), EVERY_EXPORT)
def test_weights_lie_once_in_one_file(name: str, dtype: str, exported: Export) -> None:
    """A tied or transposed matrix stored twice; prefill and decode with weights of their own."""
    model = exported(name, dtype)
    places = read_header(model.folder / contract.WEIGHTS_FILE)
    inside = []
    for graph in decoders(model).values():
        outside = {tensor.name: tensor for tensor in graph.graph.initializer if tensor.external_data}
        assert outside.keys() == places.keys()
        for weight, tensor in outside.items():
            said = {item.key: item.value for item in tensor.external_data}
            found = (said["location"], int(said["offset"]), int(said["length"]))
            assert found == (contract.WEIGHTS_FILE, places[weight].offset, places[weight].nbytes)
        inside.append(sum(len(t.raw_data) for t in graph.graph.initializer if t.name not in outside))
    assert max(inside) < 1000
    assert ("lm_head.weight" in places) is not model.config.tie_word_embeddings
    unique = sum(place.nbytes for place in places.values())
    header = min(place.offset for place in places.values())
    assert header % 4096 == 0
    assert header < 3 * 4096
    assert (model.folder / contract.WEIGHTS_FILE).stat().st_size - header <= 1.01 * unique


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_belong_together_are_adjacent(dtype: str, exported: Export) -> None:
    """One initializer over q, k and v is their packed matrix, as long as nothing lies between them."""
    model = exported("qwen3_bias", dtype)
    places = read_header(model.folder / contract.WEIGHTS_FILE)
    for layer in range(model.config.num_hidden_layers):
        for parts in (("self_attn.q", "self_attn.k", "self_attn.v"), ("mlp.gate", "mlp.up")):
            for kind in ("weight", "bias") if "self_attn.q" in parts else ("weight",):
                row = [places[f"model.layers.{layer}.{part}_proj.{kind}"] for part in parts]
                for left, right in itertools.pairwise(row):
                    assert left.offset + left.nbytes == right.offset
    large = [place for place in places.values() if place.nbytes >= 4096 and place.nbytes % 4096 == 0]
    assert len(large) > 5
    assert all(place.offset % 4096 == 0 for place in large)


def _wrong_element(graph: onnx.GraphProto) -> None:
    graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT16


def _wrong_shape(graph: onnx.GraphProto) -> None:
    graph.output[0].type.tensor_type.shape.dim[2].dim_value = 77


def _missing_value(graph: onnx.GraphProto) -> None:
    graph.node[5].input[0] = "nothing"


def _unknown_operator(graph: onnx.GraphProto) -> None:
    graph.node[5].op_type = "Nonsense"


def _mixed_types(graph: onnx.GraphProto) -> None:
    graph.node.append(helper.make_node("Add", ["input_ids", "logits"], ["sum"], "sum"))


@pytest.mark.parametrize(
    "spoil", [_wrong_element, _wrong_shape, _missing_value, _unknown_operator, _mixed_types]
)
def test_verify_refuses_a_broken_graph(spoil: Callable[[onnx.GraphProto], None], exported: Export) -> None:
    """Strict shape inference that is lenient, or looks at nothing."""
    proto = graphs(exported("qwen2"))["prefill.onnx"]
    verify(proto)
    spoil(proto.graph)
    with pytest.raises((onnx.checker.ValidationError, onnx.shape_inference.InferenceError)):
        verify(proto)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_f16_loads_and_agrees_at_every_optimization_level(name: str, exported: Export) -> None:
    """A runtime's fusion that has no f16 kernel, or changes the result; reuse of buffers of another shape."""
    model = exported(name, "f16")
    tokens, layers = 25, model.manifest.num_hidden_layers
    heads, size = model.manifest.num_key_value_heads, model.manifest.head_dim
    feeds = {
        contract.INPUT_IDS: IDS[:2, :tokens],
        contract.ATTENTION_MASK: np.ones((2, tokens), np.int64),
        contract.POSITION_IDS: np.tile(np.arange(tokens), (2, 1)),
        contract.WRITE_INDICES: np.zeros(2, np.int64),
    } | {name: np.zeros((2, heads, 32, size), np.float16) for name in contract.past_names(layers)}
    wanted = np.stack([model.wanted(IDS[row, :tokens])[-1] for row in range(2)])
    first = None
    for level in ("DISABLE_ALL", "ENABLE_BASIC", "ENABLE_EXTENDED", "ENABLE_ALL"):
        for reuse in (True, False):
            session = open_on_cpu(
                model.path("prefill"),
                graph_optimization_level=getattr(onnxruntime.GraphOptimizationLevel, f"ORT_{level}"),
                enable_mem_pattern=reuse,
            )
            for _ in range(2):  # the second run reuses what the first planned
                found = session.run([contract.LOGITS], feeds)[0][:, 0]
            assert_close(found, wanted, F16)
            first = found if first is None else first
            assert_close(found, first, F16_ORDER)
