"""What lies in the graph files: types, names, operators, shapes, and where the weights are."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from qwen_onnx import contract
from qwen_onnx.checkpoints.safetensors_file import read_header
from qwen_onnx.contract.manifest import GraphSpec
from qwen_onnx.exports.graph_file import verify
from support.checkpoints import CONFIGS
from support.exports import IDS, Exported, open_on_cpu, past_names, present_names
from support.tolerances import F16, F16_ORDER, assert_close

Export = Callable[..., Exported]

ELEMENT = {"f32": TensorProto.FLOAT, "f16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
DTYPES = list(ELEMENT)
ENTRIES = ("prefill", "decode", "greedy", "grow")
EVERY_EXPORT = [
    *((name, "f32") for name in CONFIGS),
    *((name, dtype) for name in ("qwen2", "qwen3_bias") for dtype in ("f16", "bf16")),
    ("qwen2_14_2", "f16"),
]
CONTRIB_OPERATORS = {
    "FusedMatMul", "GroupQueryAttention", "QuickGelu", "SkipSimplifiedLayerNormalization",
}  # fmt: skip
STATIC_DECODE = {
    "Add": 6, "And": 1, "Attention": 3, "Cast": 1, "Gather": 1, "Gemm": 22, "LessOrEqual": 1, "Mul": 6,
    "RMSNormalization": 7, "Range": 1, "Reshape": 13, "RotaryEmbedding": 6, "Shape": 1, "Sigmoid": 3,
    "Squeeze": 1, "TensorScatter": 6, "Transpose": 12, "Unsqueeze": 5, "Where": 1,
}  # fmt: skip
QWEN2_DECODE = {
    "static": STATIC_DECODE | {"Slice": 6},
    "static-capture": STATIC_DECODE,
    "contrib": {
        "Add": 3, "Cast": 3, "FusedMatMul": 13, "Gather": 1, "GroupQueryAttention": 3, "Mul": 3, "QuickGelu": 3,
        "RMSNormalization": 1, "SkipSimplifiedLayerNormalization": 6, "Split": 3,
    },
}  # fmt: skip
"""Operators of three layers. A change here is a change of every exported graph: make it on purpose."""
SCOPELESS = ("Cast", "Gather", "GatherND", "Reshape", "TensorScatter", "Unsqueeze")
"""Of the step between the last norm and the head, and of `grow`."""
OURS = ("static", "static-capture", "contrib")
"""The lowerings that are looked at here."""


def graphs(model: Exported, *entries: str) -> list[tuple[GraphSpec, onnx.ModelProto]]:
    """The graph files of OURS, of these entries or all of them, their weights left where they are."""
    return [
        (spec, onnx.load(model.folder / spec.file, load_external_data=False))
        for spec in model.manifest.graphs
        if spec.lowering in OURS and spec.entry in (entries or ENTRIES)
    ]


def decoders(model: Exported) -> list[tuple[GraphSpec, onnx.ModelProto]]:
    return graphs(model, "prefill", "decode", "greedy")


def one(model: Exported, entry: str, lowering: str) -> onnx.ModelProto:
    return onnx.load(model.path(entry, lowering), load_external_data=False)


def interface(graph: onnx.ModelProto) -> dict[str, tuple[int, list[int | str]]]:
    """Element type and shape of each input and output."""
    return {
        value.name: (
            value.type.tensor_type.elem_type,
            [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim],
        )
        for value in (*graph.graph.input, *graph.graph.output)
    }


def hidden_type(spec: GraphSpec, dtype: str) -> int:
    """What a graph computes in: those for the CPU in f32."""
    return TensorProto.FLOAT if spec.providers == ("cpu",) else ELEMENT[dtype]


def test_which_lowering_serves_which_provider(exported: Export) -> None:
    """Fused attention only for heads that its operator rotates; each provider has every entry."""
    for name, dtype, of_cuda in (
        ("qwen2", "f32", "static-capture"),
        ("qwen2", "f16", "contrib"),
        ("qwen3_head_dim_48", "bf16", "contrib"),
        ("qwen2_14_2", "f16", "static-capture"),  # heads of 8
        ("qwen2_head_dim_2", "bf16", "static-capture"),
    ):
        manifest = exported(name, dtype).manifest
        for entry in ("prefill", "decode", "greedy"):
            assert manifest.graph(entry, "cuda").lowering == of_cuda
            of_cpu = "static-capture" if entry == "greedy" else "static"
            assert manifest.graph(entry, "cpu").lowering == of_cpu
        for provider in ("cpu", "cuda"):
            assert manifest.graph("grow", provider).lowering == "static"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["qwen2", "qwen3_bias"])
def test_types_are_those_that_were_asked_for(name: str, dtype: str, exported: Export) -> None:
    """Weights, states and cache are; rotary tables, logits and their bias are f32."""
    for spec, graph in decoders(exported(name, dtype)):
        hidden = hidden_type(spec, dtype)
        for value, (element, _) in interface(graph).items():
            if value.startswith(("past_key_values.", "present.")):
                wanted = hidden
            elif value in (contract.LOGITS, contract.LOGIT_BIAS):
                wanted = TensorProto.FLOAT
            elif value.removeprefix(contract.NEXT) in (contract.SEQLENS_K, contract.TOTAL_SEQUENCE_LENGTH):
                wanted = TensorProto.INT32
            else:
                wanted = TensorProto.INT64
            assert element == wanted, (spec.file, value)
        for tensor in graph.graph.initializer:
            if tensor.external_data:
                wanted = TensorProto.FLOAT if tensor.name.startswith("rotary.") else ELEMENT[dtype]
                assert tensor.data_type == wanted, (spec.file, tensor.name)
        # The embedding is read in the weights' type, the states after it are in the export's.
        types = {v.name: v.type.tensor_type.elem_type for v in graph.graph.value_info}
        if spec.lowering == "contrib":
            states = ["norm/SkipSimplifiedLayerNormalization", "layers.1.self_attn/GroupQueryAttention"]
        else:
            states = ["norm/RMSNormalization", "layers.0.post_attention_layernorm/Add", "norm/Add"]
        assert {types[f"model.{state}"] for state in states} == {hidden}


@pytest.mark.parametrize(("name", "dtype"), EVERY_EXPORT)
def test_shapes_of_inputs_and_outputs(name: str, dtype: str, exported: Export) -> None:
    """The cache has key/value heads of head_dim, logits are of one position, and every free dimension has a name."""
    model = exported(name, dtype)
    config = model.config
    cache = ["batch_size", config.num_key_value_heads, "cache_capacity", config.head_dim]
    masked = {"static": "total_sequence_length", "static-capture": "cache_capacity"}
    for spec, graph in decoders(model):
        sequence = 1 if spec.entry == "decode" else "sequence_length"
        shapes = {value: shape for value, (_, shape) in interface(graph).items()}
        assert shapes.pop("input_ids") == ["batch_size", sequence]
        advanced = {"next_input_ids": ["batch_size", 1]}
        if spec.lowering == "contrib":
            assert shapes.pop("seqlens_k") == ["batch_size"]
            assert shapes.pop("total_sequence_length") == []
            advanced |= {"next_seqlens_k": ["batch_size"]}
        else:
            assert shapes.pop("position_ids") == ["batch_size", sequence]
            assert shapes.pop("attention_mask") == ["batch_size", masked[spec.lowering]]
            assert shapes.pop("write_indices") == ["batch_size"]
            advanced |= {"next_position_ids": ["batch_size", 1], "next_write_indices": ["batch_size"]}
        assert shapes.pop("logits") == ["batch_size", 1, config.vocab_size]
        if spec.entry == "greedy":
            assert shapes.pop("logit_bias") == [config.vocab_size]
            assert {value: shapes.pop(value) for value in advanced} == advanced
        layers = config.num_hidden_layers
        assert list(shapes) == past_names(layers) + present_names(layers)
        assert all(shape == cache for shape in shapes.values())
        assert {value.name: list(value.shape) for value in spec.outputs}["logits"] == ["batch_size", 1, 320]


@pytest.mark.parametrize(("name", "dtype"), EVERY_EXPORT)
def test_graphs_are_plain_and_small(name: str, dtype: str, exported: Export) -> None:
    """No guards, Constant nodes or copies of weights, and operators of com.microsoft in `contrib` only."""
    for spec, proto in graphs(exported(name, dtype)):
        contrib = {"com.microsoft": 1} if spec.lowering == "contrib" else {}
        assert {opset.domain: opset.version for opset in proto.opset_import} == {"": 24, **contrib}
        assert proto.ByteSize() < 1_000_000
        assert not proto.functions
        graph = proto.graph
        verify(proto)
        names = [node.name for node in graph.node]
        assert len(set(names)) == len(names)
        # Neither where in our code a node was made, nor what of it was in the memory of this machine.
        for part in (
            proto,
            graph,
            *graph.node,
            *graph.value_info,
            *graph.input,
            *graph.output,
            *graph.initializer,
        ):
            assert (part.doc_string, list(part.metadata_props)) == ("", [])
        stored = {tensor.name: tensor for tensor in graph.initializer}
        types = {tensor.name: tensor.data_type for tensor in graph.initializer}
        for value in (*graph.value_info, *graph.input, *graph.output):
            types[value.name] = value.type.tensor_type.elem_type
        for node in graph.node:
            where = (spec.file, node.name)
            scope, _, kind = node.name.rpartition("/")
            assert kind.startswith(node.op_type), where
            assert scope.split(".")[0] in ("model", "lm_head", "step", "last", "choose", ""), where
            assert scope != "choose" or spec.entry == "greedy", where
            assert scope or node.op_type in SCOPELESS, where
            assert (node.domain == "com.microsoft") is (node.op_type in CONTRIB_OPERATORS), where
            assert node.domain == "" or contrib, where
            assert node.op_type not in ("Constant", "Identity", "Dropout", "IsNaN", "If"), where
            if node.op_type == "Cast":
                assert types[node.input[0]] != types[node.output[0]], where
            if node.op_type == "Reshape" and node.input[1] in stored:
                assert len(stored[node.input[1]].dims) == 1, where
            if all(given in stored for given in node.input):
                # Of weights in graphs for the CPU, and of the rotary tables: folded when a session starts.
                assert node.op_type == "Cast", where
                assert ".cpu." in spec.file or node.input[0].startswith("rotary."), where


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("qwen2", "f32"), ("qwen3_bias", "f32"), ("qwen3", "f16"), ("qwen2_14_2", "bf16"), ("qwen2", "int4")],
)
def test_every_size_has_a_number_or_a_name(name: str, dtype: str, exported: Export) -> None:
    """ONNX Runtime plans memory by them: without, a graph takes three times as long to load."""
    model = exported(name, dtype)
    for spec in model.manifest.graphs:
        if spec.lowering == "portable":
            continue
        graph = onnx.load(model.folder / spec.file, load_external_data=False).graph
        shapes = {value.name: value.type.tensor_type.shape.dim for value in graph.value_info}
        made = {output for node in graph.node for output in node.output if output}
        assert made <= shapes.keys() | {value.name for value in graph.output}
        unknown = [
            name for name, dims in shapes.items() for dim in dims if not (dim.dim_param or dim.dim_value)
        ]
        assert unknown == [], spec.file


@pytest.mark.parametrize(
    ("dtype", "lowering"), [("f32", "static"), ("f32", "static-capture"), ("f16", "contrib")]
)
def test_nodes_are_named_after_the_checkpoint(dtype: str, lowering: str, exported: Export) -> None:
    """So that a profile or an error names the layer."""
    if lowering == "contrib":
        attention, linear, norm, qkv = (
            "GroupQueryAttention", "FusedMatMul", "SkipSimplifiedLayerNormalization", "qkv",
        )  # fmt: skip
    else:
        attention, linear, norm, qkv = "Attention", "Gemm", "RMSNormalization", "q"
    for entry in ("prefill", "decode"):
        names = {node.name for node in one(exported("qwen2", dtype), entry, lowering).graph.node}
        assert {
            "model.embed_tokens/Gather",
            f"model.layers.0.self_attn/{attention}",
            f"model.layers.0.self_attn.{qkv}_proj/{linear}",
            f"model.layers.2.mlp.down_proj/{linear}",
            f"model.layers.2.post_attention_layernorm/{norm}",
            f"model.norm/{norm}",
            f"lm_head/{linear}",
        } <= names


@pytest.mark.parametrize(
    ("dtype", "lowering"), [("f32", "static"), ("f32", "static-capture"), ("f16", "contrib")]
)
def test_operators_of_a_decode_graph(dtype: str, lowering: str, exported: Export) -> None:
    graph = one(exported("qwen2", dtype), "decode", lowering).graph
    assert dict(collections.Counter(node.op_type for node in graph.node)) == QWEN2_DECODE[lowering]


@pytest.mark.parametrize(("name", "dtype"), EVERY_EXPORT)
def test_weights_lie_once_in_one_file(name: str, dtype: str, exported: Export) -> None:
    """Tied matrices too; prefill and decode read the same bytes.

    What `contrib` graphs read as one matrix is looked at in test_contrib_graphs.
    """
    model = exported(name, dtype)
    places = read_header(model.folder / contract.WEIGHTS_FILE)
    inside = []
    for spec, graph in decoders(model):
        outside = {tensor.name: tensor for tensor in graph.graph.initializer if tensor.external_data}
        assert outside.keys() == places.keys() or spec.lowering == "contrib"
        for weight, tensor in outside.items():
            said = {item.key: item.value for item in tensor.external_data}
            assert said["location"] == contract.WEIGHTS_FILE
            if weight in places:
                found = (int(said["offset"]), int(said["length"]))
                assert found == (places[weight].offset, places[weight].nbytes)
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
    """So that one initializer spans q, k and v as their packed matrix."""
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
    """Each of them is found by the checker or by strict shape inference."""
    proto = one(exported("qwen2"), "prefill", "static")
    verify(proto)
    spoil(proto.graph)
    with pytest.raises((onnx.checker.ValidationError, onnx.shape_inference.InferenceError)):
        verify(proto)


@pytest.mark.parametrize(
    ("name", "lowering"), [("qwen2", "contrib"), ("qwen3", "contrib"), ("qwen2_14_2", "static-capture")]
)
def test_f16_loads_and_agrees_at_every_optimization_level(name: str, lowering: str, exported: Export) -> None:
    """Fusions have f16 kernels and change nothing, nor does the reuse of buffers."""
    model, tokens = exported(name, "f16"), 25
    layers, spec = model.manifest.num_hidden_layers, model.cache_spec("prefill", lowering)
    shape = (2, int(spec.shape[1]), 32, int(spec.shape[3]))
    inputs = {contract.INPUT_IDS: IDS[:2, :tokens]}
    inputs |= {name: np.zeros(shape, np.float16) for name in past_names(layers)}
    if lowering == "contrib":  # a first prompt: rows of one length may go together
        inputs[contract.SEQLENS_K] = np.full(2, tokens - 1, np.int32)
        inputs[contract.TOTAL_SEQUENCE_LENGTH] = np.array(tokens, np.int32)
    else:
        inputs[contract.ATTENTION_MASK] = np.ones((2, 32), np.int64)
        inputs[contract.POSITION_IDS] = np.tile(np.arange(tokens), (2, 1))
        inputs[contract.WRITE_INDICES] = np.zeros(2, np.int64)
    wanted = np.stack([model.wanted(IDS[row, :tokens])[-1] for row in range(2)])
    first = None
    for level in ("DISABLE_ALL", "ENABLE_BASIC", "ENABLE_EXTENDED", "ENABLE_ALL"):
        for reuse in (True, False):
            session = open_on_cpu(
                model.path("prefill", lowering),
                graph_optimization_level=getattr(onnxruntime.GraphOptimizationLevel, f"ORT_{level}"),
                enable_mem_pattern=reuse,
            )
            for _ in range(2):  # the second run reuses what the first planned
                found = session.run([contract.LOGITS], inputs)[0][:, 0]
            assert_close(found, wanted, F16)
            first = found if first is None else first
            assert_close(found, first, F16_ORDER)


def test_a_grouped_decode_graph(exported: Export) -> None:
    """It has the inputs and outputs of `static-capture`: the runner gives both the same."""
    model = exported("qwen2")
    graph, captured = one(model, "decode", "static-grouped"), one(model, "decode", "static-capture")
    verify(graph)
    assert interface(graph) == interface(captured)
    assert dict(collections.Counter(node.op_type for node in graph.graph.node)) == {
        "Add": 3, "And": 1, "Cast": 1, "Gather": 1, "Gemm": 22, "LessOrEqual": 1, "MatMul": 6, "Mul": 9,
        "RMSNormalization": 1, "Range": 1, "Reshape": 19, "RotaryEmbedding": 6, "Shape": 1, "Sigmoid": 3,
        "SkipSimplifiedLayerNormalization": 6, "Softmax": 3, "Squeeze": 1, "TensorScatter": 6, "Transpose": 6,
        "Unsqueeze": 5, "Where": 1,
    }  # fmt: skip
    assert {node.op_type for node in graph.graph.node if node.domain} == {
        "RotaryEmbedding", "SkipSimplifiedLayerNormalization"
    }  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), [("qwen2", "f32"), ("qwen3", "bf16"), ("qwen2_untied", "f16")])
def test_a_score_graph_is_prefill_with_more_logits(name: str, dtype: str, exported: Export) -> None:
    model = exported(name, dtype)
    spec = model.manifest.graph("score", "cpu")
    graph = onnx.load(model.folder / spec.file, load_external_data=False)
    verify(graph)
    plain = onnx.load(model.folder / model.manifest.graph("prefill", "cpu").file, load_external_data=False)
    score, prefill = interface(graph), interface(plain)
    assert score.pop("num_logits_to_keep") == (TensorProto.INT64, [])
    assert score.pop("logits")[1] == ["batch_size", "num_logits", model.config.vocab_size]
    prefill.pop("logits")
    assert score == prefill
    assert {node.name for node in graph.graph.node if node.name.startswith("model.")} == {
        node.name for node in plain.graph.node if node.name.startswith("model.")
    }
