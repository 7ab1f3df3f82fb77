"""Which nodes of a graph the CUDA provider has a kernel for."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import onnx
from onnx import TensorProto
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from qwen_onnx.graphs.layers import MICROSOFT as DOMAIN
from support.cuda import kernel_table as cuda_kernel_table

Types = Mapping[str, int]
TABLE = json.loads(cuda_kernel_table.TABLE.read_text(encoding="utf-8"))
NAMES: Mapping[int, str] = {
    TensorProto.FLOAT: "float",
    TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "bfloat16",
    TensorProto.INT32: "int32",
    TensorProto.INT64: "int64",
    TensorProto.BOOL: "bool",
}


class Schema(NamedTuple):
    """Of an operator: since when it is as it is, and the type parameter (or type) of each input and output."""

    since: int
    inputs: list[str]
    outputs: list[str]


@functools.cache
def _contrib_schemas() -> dict[str, Any]:
    return {schema.name: schema for schema in get_all_operator_schema() if schema.domain == DOMAIN}


def schema_of(node: onnx.NodeProto, opset: int) -> Schema:
    if node.domain == DOMAIN:
        schema = _contrib_schemas()[node.op_type]
        kinds = [[value.typeStr for value in values] for values in (schema.inputs, schema.outputs)]
    else:
        schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
        kinds = [[value.type_str for value in values] for values in (schema.inputs, schema.outputs)]
    return Schema(schema.since_version, *kinds)


def types_of(model: onnx.ModelProto) -> Types:
    graph = model.graph
    values = (*graph.input, *graph.value_info, *graph.output)
    return {tensor.name: tensor.data_type for tensor in graph.initializer} | {
        value.name: value.type.tensor_type.elem_type for value in values
    }


def bound(node: onnx.NodeProto, schema: Schema, types: Types) -> Iterator[tuple[str, str]]:
    """Each type parameter of the schema and what this node has for it."""
    for names, kinds in ((node.input, schema.inputs), (node.output, schema.outputs)):
        for index, name in enumerate(names):
            if name:
                yield kinds[min(index, len(kinds) - 1)], NAMES[types[name]]  # the last one may be variadic


def has_kernel(node: onnx.NodeProto, opset: int, types: Types) -> bool:
    """By ONNX Runtime's rule: a kernel without an end is of its own version of the operator only."""
    schema = schema_of(node, opset)
    wanted = list(bound(node, schema, types))
    for since, until, kernel in TABLE[node.domain or "ai.onnx"].get(node.op_type, []):
        in_time = since == schema.since or (until is not None and since <= schema.since <= until)
        if in_time and all(kind in kernel[name].split() for name, kind in wanted if name in kernel):
            return True
    return False


def lacking(model: onnx.ModelProto, types: Types) -> set[str]:
    """The operators of nodes that no kernel serves."""
    opset = next(entry.version for entry in model.opset_import if not entry.domain)
    return {node.op_type for node in model.graph.node if not has_kernel(node, opset, types)}
