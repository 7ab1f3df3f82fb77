"""The graphs of an export: inputs and outputs of each entry, and the checks that none is left half typed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
from onnxscript import GraphBuilder

from qwen_onnx import contract
from qwen_onnx.checkpoints.config import QwenConfig
from qwen_onnx.contract.cache_spec import StateSpec
from qwen_onnx.graphs.cache import Precision, Step
from qwen_onnx.graphs.layers import MICROSOFT
from qwen_onnx.graphs.lowerings import Lowering
from qwen_onnx.graphs.model import QwenForCausalLM
from qwen_onnx.graphs.panels import NCHWC, conv

# Where onnxscript leaves what went wrong in shape inference: it never raises.
_INFERENCE_ERROR = "pkg.onnxscript.shape_inference_error"
_DTYPES = {
    "float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16,
}  # fmt: skip
_IR_VERSIONS = {17: 8, 24: 11}
"""The first IR version of each operator set used here: readers of old ones refuse new files."""
_TYPED_BY_HAND = (MICROSOFT, NCHWC)  # there is no schema of those
_LARGEST = 3e38  # near f32's end: beyond is infinity


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
    tokens = 1 if single else contract.SEQUENCE
    ids_BS = builder.input(contract.INPUT_IDS, ir.DataType.INT64, [contract.BATCH, tokens])
    # A Module belongs to the first graph it is called in, so the tree is made anew for each graph.
    model, cache = QwenForCausalLM(config, precision, lowering, positions), lowering.cache
    step = cache.begin(builder, model, ids_BS, single=single)
    states = cache.spec(config, precision).states
    past: dict[int, list[ir.Value]] = {}
    for state in states:
        value = builder.input(state.past, _DTYPES[state.dtype], state.shape)
        past.setdefault(state.layer, []).append(value)

    kept = None
    if score:
        count = builder.input(contract.NUM_LOGITS_TO_KEEP, ir.DataType.INT64, [])
        builder.push_module("last")
        kept = builder.op.Unsqueeze(count, [0])
        builder.pop_module()
    logits, present = model(builder.op, ids_BS, [past[layer] for layer in sorted(past)], step, kept)

    # Inference loses the batch in a Reshape.
    logits.shape = ir.Shape([contract.BATCH, contract.KEPT if score else 1, config.vocab_size])
    chosen = _choose(builder, logits, lowering, step, config.vocab_size) if greedy else {}
    builder.add_output(logits, contract.LOGITS)
    for name, value in chosen.items():
        builder.add_output(value, contract.NEXT + name)
    of_layers = [iter(values) for values in present]
    for state in states:
        value = next(of_layers[state.layer])
        value.shape = ir.Shape([cache.slots[1] if size == cache.slots[0] else size for size in state.shape])
        builder.add_output(value, state.present)
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
        **lowering.cache.advance(op, step, moved_B1),
    }
    builder.pop_module()
    taken = {value.name: value.shape for value in builder.graph.inputs}
    for name, value in chosen.items():
        sizes = taken[name] or ()
        value.shape = ir.Shape([1 if size == contract.SEQUENCE else size for size in sizes])
    return chosen


def build_resize_cache(state: StateSpec) -> ir.Model:
    """Copies such a state tensor into the front of a larger one, on whatever device both are on."""
    graph, builder = _empty_graph("grow", {"": 24})
    dtype, axis = _DTYPES[state.dtype], _slot_axis(state)
    small = builder.input(contract.GROW_FROM, dtype, _with_slots(state, contract.CAPACITY))
    large = builder.input(contract.GROW_INTO, dtype, _with_slots(state, contract.LARGER_CAPACITY))
    builder.add_output(builder.op.TensorScatter(large, small, axis=axis), contract.GROW_RESULT)
    return _finish(graph)


def build_truncate_cache(state: StateSpec) -> ir.Model:
    """Keeps the first `length` slots of such a state tensor, on whatever device it is on."""
    graph, builder = _empty_graph("shrink", {"": 17})
    shape = _with_slots(state, contract.PAST)
    cache = builder.input(contract.GROW_FROM, _DTYPES[state.dtype], shape)
    length = builder.input(contract.SHRINK_LENGTH, ir.DataType.INT64, [1])
    shrunk = builder.op.Slice(cache, [0], length, [_slot_axis(state)])
    shrunk.shape = ir.Shape(_with_slots(state, contract.SHRINK_LENGTH))
    builder.add_output(shrunk, contract.SHRINK_RESULT)
    return _finish(graph)


def build_probe() -> ir.Model:
    """A product with a matrix in panels, both of them inputs: tells how many rows a panel has on this processor."""
    graph, builder = _empty_graph("probe", {"": 24, NCHWC: 1})
    size = contract.PROBE_SIZE
    x = builder.input(contract.PROBE_X, ir.DataType.FLOAT, [1, size, 1, 1])
    weight = builder.input(contract.PROBE_WEIGHT, ir.DataType.FLOAT, [size, size, 1, 1])
    builder.add_output(conv(builder.op, x, weight, None), contract.PROBE_Y)
    return _finish(graph)


def _slot_axis(state: StateSpec) -> int:
    if state.slot_axis is None:
        raise ValueError(f"{state.past} has no slots: it has one size")
    return state.slot_axis


def _with_slots(state: StateSpec, name: str) -> list[int | str]:
    """A state's shape with another name for its slots."""
    return [name if axis == state.slot_axis else size for axis, size in enumerate(state.shape)]


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
