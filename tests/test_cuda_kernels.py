"""Every node of the graphs that are meant for CUDA has a kernel there for its types: known without a GPU."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import cuda_kernel_table
import onnx
import pytest
from exports import Exported
from onnx import TensorProto, helper
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from qwen_onnx.graphs.contrib_ops import DOMAIN

MODELS = ["qwen2", "qwen3", "qwen3_bias", "qwen2_14_2"]

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


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_every_node_has_a_kernel(name: str, dtype: str, exported: Callable[..., Exported]) -> None:
    """One node without: ONNX Runtime runs it on the CPU, with copies before and after, and refuses to capture."""
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
    """Squeeze 13 without an end says nothing of Squeeze 24."""
    node, types = helper.make_node("Squeeze", ["x"], ["y"]), {"x": TensorProto.FLOAT, "y": TensorProto.FLOAT}
    for until, found in ((None, False), (23, False), (24, True)):
        monkeypatch.setitem(TABLE["ai.onnx"], "Squeeze", [[13, until, {"T": "float"}]])
        assert has_kernel(node, 24, types) is found


def test_the_table_is_small() -> None:
    assert cuda_kernel_table.TABLE.stat().st_size < 120_000
    assert TABLE["onnxruntime"].startswith("1.31")
