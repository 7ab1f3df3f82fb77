"""The graphs of an export: inputs and outputs of each entry, and the checks that none is left half typed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
from onnxscript import GraphBuilder

from qwen_onnx import contract
from qwen_onnx.checkpoints.config import QwenConfig
from qwen_onnx.graphs import contrib_ops, nchwc_ops
from qwen_onnx.graphs.lowering import Lowering
from qwen_onnx.graphs.model import QwenForCausalLM
from qwen_onnx.graphs.packed import parts
from qwen_onnx.graphs.state import KeyValue, Precision, Step

# Where onnxscript leaves what went wrong in shape inference: it never raises.
_INFERENCE_ERROR = "pkg.onnxscript.shape_inference_error"
_IR_VERSIONS = {17: 8, 24: 11}
"""The first IR version of each operator set used here: readers of old ones refuse new files."""
_TYPED_BY_HAND = (contrib_ops.DOMAIN, nchwc_ops.DOMAIN)  # there is no schema of those
_LARGEST = 3e38  # near f32's end: beyond is infinity


class StoredParameter(NamedTuple):
    """Where an initializer's bytes lie, as a graph file has to say it."""

    file: str
    offset: int
    nbytes: int


def build_decoder(
    config: QwenConfig,
    precision: Precision,
    lowering: Lowering,
    *,
    positions: int,
    single: bool = False,
    greedy: bool = False,
    score: bool = False,
) -> ir.Model:
    """The decoder with its cache as inputs and outputs; weights declared, not loaded.

    Args:
        positions: rows of the rotary tables.
        single: one token a row (`decode`) instead of any number (`prefill`).
        greedy: choose the token too, and put out what the next step takes in (see `_choose`).
        score: `num_logits_to_keep`, an int64 scalar, says after how many of the last tokens logits are wanted; 0
            for all.

    Raises:
        ValueError: a node that shape inference refuses, or a value without a type: a fault in graphs/.
    """
    graph, builder = _empty_graph("decode" if single else "prefill", lowering.opsets)
    ids_BS = builder.input(
        contract.INPUT_IDS, ir.DataType.INT64, [contract.BATCH, 1 if single else contract.SEQUENCE]
    )
    # A Module belongs to the first graph it is called in, so the tree is made anew for each graph.
    model = QwenForCausalLM(config, precision, lowering, positions)
    step = lowering.begin(builder, config, precision, model.rotary, ids_BS, single=single)
    layers = config.num_hidden_layers
    past_shape, present_shape = (
        ir.Shape([contract.BATCH, config.num_key_value_heads, length, config.head_dim])
        for length in lowering.cache_lengths
    )
    past = [builder.input(name, precision.hidden, past_shape) for name in contract.past_names(layers)]
    cache = [KeyValue(past[i], past[i + 1]) for i in range(0, len(past), 2)]

    kept = None
    if score:
        count = builder.input(contract.NUM_LOGITS_TO_KEEP, ir.DataType.INT64, [])
        builder.push_module("last")
        kept = builder.op.Unsqueeze(count, [0])
        builder.pop_module()
    logits, present = model(builder.op, ids_BS, cache, step, kept)

    logits.shape = ir.Shape(
        [contract.BATCH, contract.KEPT if score else 1, config.vocab_size]
    )  # inference loses the batch in a Reshape
    chosen = _choose(builder, logits, lowering, step, config.vocab_size) if greedy else {}
    builder.add_output(logits, contract.LOGITS)
    for name, value in chosen.items():
        builder.add_output(value, contract.NEXT + name)
    for name, value in zip(contract.present_names(layers), [v for kv in present for v in kv], strict=True):
        value.shape = present_shape.copy()
        builder.add_output(value, name)
    return _finish(graph)


def _choose(
    builder: GraphBuilder, logits_B1V: ir.Value, lowering: Lowering, step: Step, vocab_size: int
) -> dict[str, ir.Value]:
    """The best token and the inputs of the step that takes it, by name.

    `logit_bias` f32 [V] is added first: -inf there keeps an id from being chosen. A token of -1 says that the
    logits are not numbers.
    """
    builder.push_module("choose")
    op = builder.op
    bias_V = builder.input(contract.LOGIT_BIAS, ir.DataType.FLOAT, [vocab_size])
    best_B1 = op.ArgMax(op.Add(logits_B1V, bias_V), axis=2, keepdims=0)
    # One logit that is no number makes the sum of squares none, and a comparison with that is false.
    squares_B11 = op.MatMul(logits_B1V, op.Reshape(logits_B1V, [0, -1, 1]))
    is_number_B1 = op.Squeeze(op.Less(squares_B11, _LARGEST), [2])
    # By this the next inputs depend on the choice, so that none is written over its own input too early.
    moved_B1 = op.Cast(is_number_B1, to=ir.DataType.INT64)
    chosen = {
        contract.INPUT_IDS: op.Where(is_number_B1, best_B1, -1),
        **lowering.advance(op, step, moved_B1),
    }
    builder.pop_module()
    for name, value in chosen.items():
        by_row = name in (contract.WRITE_INDICES, contract.SEQLENS_K)
        value.shape = ir.Shape([contract.BATCH] if by_row else [contract.BATCH, 1])
    return chosen


def build_grow(config: QwenConfig, dtype: ir.DataType) -> ir.Model:
    """Copies one cache buffer into the front of a larger one, on whatever device both are on."""
    graph, builder = _empty_graph("grow", {"": 24})
    heads, size = config.num_key_value_heads, config.head_dim
    small = builder.input(contract.GROW_FROM, dtype, [contract.BATCH, heads, contract.CAPACITY, size])
    large = builder.input(contract.GROW_INTO, dtype, [contract.BATCH, heads, contract.LARGER_CAPACITY, size])
    builder.add_output(builder.op.TensorScatter(large, small, axis=2), contract.GROW_RESULT)
    return _finish(graph)


def build_shrink(config: QwenConfig, dtype: ir.DataType) -> ir.Model:
    """Keeps the first `length` slots of one cache tensor, on whatever device it is on."""
    graph, builder = _empty_graph("shrink", {"": 17})
    heads, size = config.num_key_value_heads, config.head_dim
    cache = builder.input(contract.GROW_FROM, dtype, [contract.BATCH, heads, contract.PAST, size])
    length = builder.input(contract.SHRINK_LENGTH, ir.DataType.INT64, [1])
    shrunk = builder.op.Slice(cache, [0], length, [2])
    shrunk.shape = ir.Shape([contract.BATCH, heads, contract.SHRINK_LENGTH, size])
    builder.add_output(shrunk, contract.SHRINK_RESULT)
    return _finish(graph)


def build_probe() -> ir.Model:
    """A product with a matrix in panels, both of them inputs: tells how many rows a panel has on this processor."""
    graph, builder = _empty_graph("probe", {"": 24, nchwc_ops.DOMAIN: 1})
    size = contract.PROBE_SIZE
    x = builder.input(contract.PROBE_X, ir.DataType.FLOAT, [1, size, 1, 1])
    weight = builder.input(contract.PROBE_WEIGHT, ir.DataType.FLOAT, [size, size, 1, 1])
    builder.add_output(nchwc_ops.conv(builder.op, x, weight, None), contract.PROBE_Y)
    return _finish(graph)


def parameters(model: ir.Model) -> dict[str, ir.Value]:
    """The initializers that a weights file has to fill, by their checkpoint name."""
    return {name: value for name, value in model.graph.initializers.items() if value.const_value is None}


def save_graph(model: ir.Model, path: Path, stored: dict[str, StoredParameter]) -> None:
    """Verify and write the graph; its parameters point into the weights files, which lie in the same folder."""
    for name, value in parameters(model).items():
        place = _place(name, stored)
        if value.dtype is None or value.shape is None:
            raise ValueError(f"parameter {name} has no type")
        value.const_value = ir.ExternalTensor(
            Path(place.file).name, place.offset, place.nbytes, value.dtype, shape=value.shape, name=name,
            base_dir=path.parent,
        )  # fmt: skip
    proto = ir.to_proto(model)
    verify(proto)
    path.write_bytes(proto.SerializeToString())


def _place(name: str, stored: dict[str, StoredParameter]) -> StoredParameter:
    """Where a parameter lies; one that packs several tensors spans them, which lie side by side."""
    first, *others = (stored[part] for part in parts(name))
    end = first.offset + first.nbytes
    for other in others:
        if (other.file, other.offset) != (first.file, end):
            raise ValueError(f"{name}: what it packs does not lie side by side")
        end += other.nbytes
    return StoredParameter(first.file, first.offset, end - first.offset)


def verify(model: onnx.ModelProto) -> None:
    """The ONNX checker and strict shape inference, on a copy whose external weights are inputs: none is read.

    Raises:
        onnx.checker.ValidationError, onnx.shape_inference.InferenceError: the graph is not valid ONNX.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(model)
    inline = []
    for tensor in proto.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            proto.graph.input.append(value)
        else:
            inline.append(tensor)
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(inline)
    onnx.checker.check_model(proto)
    onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)


def _empty_graph(name: str, opsets: Mapping[str, int]) -> tuple[ir.Graph, GraphBuilder]:
    graph = ir.Graph([], [], nodes=[], name=f"qwen_{name}", opset_imports=dict(opsets))
    return graph, _Builder(graph)


class _Builder(GraphBuilder):
    """Takes arguments as they are told apart in graphs/: inputs by position, attributes by name.

    To tell them apart, GraphBuilder reads an operator's schema anew for each node: half of the time of building.
    """

    def _partition_inputs_attributes(
        self, schema: onnx.defs.OpSchema | None, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        return args, kwargs


def _finish(graph: ir.Graph) -> ir.Model:
    for node in graph:
        error = node.metadata_props.get(_INFERENCE_ERROR)
        if error and node.domain not in _TYPED_BY_HAND:
            raise ValueError(f"{node.name}: {error}")
        if node.domain not in graph.opset_imports:
            raise ValueError(f"{node.name}: domain {node.domain!r} is not imported")
        for value in _used(node):
            if value.dtype is None or value.shape is None:
                raise ValueError(f"{node.name}: the type of {value.name!r} is unknown")
    for value in graph.inputs:
        if not value.uses():
            raise ValueError(f"input {value.name} is never read")
    _name_by_scope(graph)
    model = ir.Model(graph, ir_version=_IR_VERSIONS[graph.opset_imports[""]], producer_name="qwen-onnx")
    common_passes.ClearMetadataAndDocStringPass()(model)
    return model


def _name_by_scope(graph: ir.Graph) -> None:
    """model/layers.0/mlp/Mul_node_51 becomes model.layers.0.mlp/Mul, and so does its first output."""
    seen: dict[str, int] = {}
    for node in graph:
        *scopes, _ = (node.name or "").split("/")
        name = f"{'.'.join(scopes)}/{node.op_type}" if scopes else node.op_type
        seen[name] = seen.get(name, -1) + 1
        node.name = f"{name}_{seen[name]}" if seen[name] else name
        for index, value in enumerate(_used(node)):
            if not value.is_graph_output():
                value.name = f"{node.name}.{index}" if index else node.name


def _used(node: ir.Node) -> list[ir.Value]:
    """A node's outputs but for those that it was told to leave out."""
    return [value for value in node.outputs if value.name != ""]
