"""Faults in graphs/ that are found while a graph is built: none is written half typed, or with layers left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import onnx_ir as ir
import pytest
from onnxscript import GraphBuilder

from qwen_onnx.checkpoints.config import QwenConfig, parse_config
from qwen_onnx.contract.cache_spec import CacheSpec
from qwen_onnx.graphs.build import build_decoder
from qwen_onnx.graphs.cache import KeyValue, Precision
from qwen_onnx.graphs.contrib import group_query_attention
from qwen_onnx.graphs.layers import fused_matmul
from qwen_onnx.graphs.lowerings import CONTRIB, STATIC, Lowering
from qwen_onnx.graphs.panels import conv, reorder_input, reorder_output
from support.checkpoints import CONFIGS

FLOAT = ir.DataType.FLOAT
F32 = Precision(FLOAT, FLOAT)
CONFIG = parse_config(CONFIGS["qwen2"])


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("layers", [2, 4])
@pytest.mark.parametrize("lowering", [STATIC, CONTRIB])
def test_states_are_of_as_many_layers_as_the_model(lowering: Lowering, layers: int, single: bool) -> None:
    """A model of three would compute two, and nothing would look wrong."""

    class Other(type(lowering.cache)):  # type: ignore[misc]
        def spec(self, config: QwenConfig, precision: Precision) -> CacheSpec:
            return super().spec(dataclasses.replace(config, num_hidden_layers=layers), precision)

    assert CONFIG.num_hidden_layers == 3
    build_decoder(CONFIG, F32, lowering, positions=16, single=single)
    with pytest.raises(ValueError, match="zip"):
        build_decoder(CONFIG, F32, dataclasses.replace(lowering, cache=Other()), positions=16, single=single)


def value(*shape: int) -> ir.Value:
    return ir.Value(type=ir.TensorType(FLOAT), shape=ir.Shape(shape) if shape else None)


KNOWN, UNKNOWN = value(1, 2, 4), value()


def attention(query: ir.Value) -> Callable[[GraphBuilder], object]:
    states = KeyValue(value(1, 1, 8, 4), value(1, 1, 8, 4))
    return lambda builder: group_query_attention(
        builder.op, query, KNOWN, KNOWN, states, *[value(1)] * 4,
        num_heads=1, kv_num_heads=1, head_dim=4,
    )  # fmt: skip


@pytest.mark.parametrize(
    "build",
    [
        lambda builder: fused_matmul(builder.op, UNKNOWN, value(3, 4)),
        lambda builder: fused_matmul(builder.op, KNOWN, UNKNOWN),
        attention(UNKNOWN),
        lambda builder: reorder_input(builder.op, UNKNOWN),
        lambda builder: reorder_input(builder.op, KNOWN),
        lambda builder: conv(builder.op, KNOWN, value(8, 4, 1, 1), None),
        lambda builder: conv(builder.op, value(1, 4, 1, 2), value(8, 4), None),
        lambda builder: reorder_output(builder.op, value(1, 8, 1, 2, 1), channels=8),
    ],
)
def test_what_no_inference_knows_is_of_known_shapes(build: Callable[[GraphBuilder], object]) -> None:
    """Their outputs are typed by hand, of the shapes that go in."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 24})
    with pytest.raises(ValueError, match=r"unknown shapes|four dimensions"):
        build(GraphBuilder(graph))
    assert not list(graph)
