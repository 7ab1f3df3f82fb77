"""The graphs of an export: inputs and outputs of each entry, and the checks that none is left half typed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
from onnxscript import GraphBuilder

from qwen_onnx import contract
from qwen_onnx.config import QwenConfig
from qwen_onnx.graphs.lowering import Lowering
from qwen_onnx.graphs.model import QwenForCausalLM
from qwen_onnx.graphs.state import KeyValue, Precision

# Where onnxscript leaves what went wrong in shape inference: it never raises.
_INFERENCE_ERROR = "pkg.onnxscript.shape_inference_error"
_IR_VERSION = 11


class StoredParameter(NamedTuple):
    """Where an initializer's bytes lie, as a graph file has to say it."""

    file: str
    offset: int
    nbytes: int


def build_decoder(
    config: QwenConfig, precision: Precision, lowering: Lowering, *, positions: int, single: bool
) -> ir.Model:
    """The decoder with its cache as inputs and outputs; weights declared, not loaded.

    Args:
        positions: rows of the rotary tables.
        single: one token a row (`decode`) instead of any number (`prefill`).

    Raises:
        ValueError: a node that shape inference refuses, or a value without a type: a fault in graphs/.
    """
    graph, builder = _empty_graph("decode" if single else "prefill", lowering.opsets)
    ids_BS = builder.input(
        contract.INPUT_IDS, ir.DataType.INT64, [contract.BATCH, 1 if single else contract.SEQUENCE]
    )
    # A Module belongs to the first graph it is called in, so the tree is made anew for each graph.
    model = QwenForCausalLM(config, precision, lowering.attention, positions)
    step, last_B = lowering.begin(builder, config, model.rotary, ids_BS, single=single)
    layers = config.num_hidden_layers
    shape: list[int | str] = [
        contract.BATCH,
        config.num_key_value_heads,
        lowering.cache_length,
        config.head_dim,
    ]
    past = [builder.input(name, precision.hidden, shape) for name in contract.past_names(layers)]
    cache = [KeyValue(past[i], past[i + 1]) for i in range(0, len(past), 2)]

    logits, present = model(builder.op, ids_BS, cache, step, last_B)

    logits.shape = ir.Shape([contract.BATCH, 1, config.vocab_size])  # inference loses the batch in a Reshape
    builder.add_output(logits, contract.LOGITS)
    for name, value in zip(contract.present_names(layers), [v for kv in present for v in kv], strict=True):
        builder.add_output(value, name)
    return _finish(graph)


def build_grow(config: QwenConfig, dtype: ir.DataType, lowering: Lowering) -> ir.Model:
    """Copies one cache buffer into the front of a larger one, on whatever device both are on."""
    graph, builder = _empty_graph("grow", lowering.opsets)
    heads, size = config.num_key_value_heads, config.head_dim
    small = builder.input(contract.GROW_FROM, dtype, [contract.BATCH, heads, contract.CAPACITY, size])
    large = builder.input(contract.GROW_INTO, dtype, [contract.BATCH, heads, contract.LARGER_CAPACITY, size])
    builder.add_output(builder.op.TensorScatter(large, small, axis=2), contract.GROW_RESULT)
    return _finish(graph)


def parameters(model: ir.Model) -> dict[str, ir.Value]:
    """The initializers that a weights file has to fill, by their checkpoint name."""
    return {name: value for name, value in model.graph.initializers.items() if value.const_value is None}


def save_graph(model: ir.Model, path: Path, stored: dict[str, StoredParameter]) -> None:
    """Verify and write the graph; its parameters point into the weights files beside it."""
    for name, value in parameters(model).items():
        place = stored[name]
        if value.dtype is None or value.shape is None:
            raise ValueError(f"parameter {name} has no type")
        value.const_value = ir.ExternalTensor(
            place.file, place.offset, place.nbytes, value.dtype, shape=value.shape, name=name,
            base_dir=path.parent,
        )  # fmt: skip
    proto = ir.to_proto(model)
    verify(proto)
    path.write_bytes(proto.SerializeToString())


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
    return graph, GraphBuilder(graph)


def _finish(graph: ir.Graph) -> ir.Model:
    for node in graph:
        if error := node.metadata_props.get(_INFERENCE_ERROR):
            raise ValueError(f"{node.name}: {error}")
        if node.domain not in graph.opset_imports:
            raise ValueError(f"{node.name}: domain {node.domain!r} is not imported")
        for value in node.outputs:
            if value.dtype is None or value.shape is None:
                raise ValueError(f"{node.name}: the type of {value.name!r} is unknown")
    for value in graph.inputs:
        if not value.uses():
            raise ValueError(f"input {value.name} is never read")
    _name_by_scope(graph)
    model = ir.Model(graph, ir_version=_IR_VERSION, producer_name="qwen-onnx")
    common_passes.ClearMetadataAndDocStringPass()(model)
    return model


def _name_by_scope(graph: ir.Graph) -> None:
    """model/layers.0/mlp/Mul_node_51 becomes model.layers.0.mlp/Mul, and so does its output."""
    seen: dict[str, int] = {}
    for node in graph:
        *scopes, _ = (node.name or "").split("/")
        name = f"{'.'.join(scopes)}/{node.op_type}" if scopes else node.op_type
        seen[name] = seen.get(name, -1) + 1
        node.name = f"{name}_{seen[name]}" if seen[name] else name
        for value in node.outputs:
            if not value.is_graph_output():
                value.name = node.name
