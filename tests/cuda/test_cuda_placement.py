"""Where the CUDA provider itself places the nodes of the graphs that are meant for it, and that it captures them."""

# ruff: noqa: F811 - a test's parameter has the name of the fixture that is imported

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.cuda.fixtures import stand_ins  # noqa: F401
from support.cuda.placement import place
from support.exports import Exported
from support.marks import but_first

MODELS = ["qwen2", "qwen3", "qwen2_14_2"]
"""The last has heads of 8, too small for GroupQueryAttention."""

SHAPE_ARITHMETIC = {"Squeeze", "Concat"}
"""What ONNX Runtime leaves to the CPU on purpose: numbers that say how large a tensor is, made of Shape."""


@pytest.mark.parametrize("name", but_first(MODELS))
@pytest.mark.parametrize("dtype", but_first(["f32", "f16", "int4", "bf16", "int8"], 3))
@pytest.mark.parametrize("entry", ["prefill", "decode", "greedy", "grow"])
def test_every_node_runs_on_the_device(
    name: str, dtype: str, entry: str, exported: Callable[..., Exported], stand_ins: Path
) -> None:
    """Only shape arithmetic is left to the CPU: nothing is copied to the host, and the graph can be captured."""
    model = exported(name, dtype)
    graph = model.manifest.graph(entry, "cuda")
    placed = place(stand_ins, model.folder / graph.file, capture=True)
    assert placed.memcpy == 0
    assert placed.capture_accepted
    assert {op for op, _ in placed.cpu} <= SHAPE_ARITHMETIC
    assert all(node.startswith("step/") for _, node in placed.cpu)
    if entry == "grow" or graph.lowering == "contrib":
        assert not placed.cpu
    if entry == "decode" and (dtype == "f32" or graph.lowering == "contrib"):
        assert placed.casts <= 2
    fused = "GroupQueryAttention" if graph.lowering == "contrib" else "Attention"
    assert placed.cuda[fused] == (0 if entry == "grow" else model.manifest.num_hidden_layers)


def test_small_heads_have_no_fused_attention(exported: Callable[..., Exported]) -> None:
    lowerings = {
        name: exported(name, "f16").manifest.graph("decode", "cuda").lowering
        for name in ("qwen2", "qwen2_14_2")
    }
    assert lowerings == {"qwen2": "contrib", "qwen2_14_2": "static-capture"}
