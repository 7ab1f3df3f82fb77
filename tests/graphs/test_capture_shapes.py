"""Graphs that are captured: no value's shape follows how much of the cache is live."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import onnx
import pytest

from qwen_onnx import contract
from support.exports import Exported
from support.strict import evaluate

CAPACITY, BATCH = 24, 2
NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def shapes(model: Exported, entry: str, live: int) -> dict[str, tuple[int, ...]]:
    """Of every value of a step of one token a row, which has slot `live`."""
    graph = model.manifest.graph(entry, "cuda")
    rows = np.full(BATCH, live)
    small = {
        contract.INPUT_IDS: np.ones((BATCH, 1), np.int64),
        contract.ATTENTION_MASK: np.ones((BATCH, CAPACITY), np.int64),
        contract.POSITION_IDS: rows[:, None],
        contract.WRITE_INDICES: rows,
        contract.SEQLENS_K: rows.astype(np.int32),
        contract.TOTAL_SEQUENCE_LENGTH: np.array(CAPACITY, np.int32),
        contract.LOGIT_BIAS: np.zeros(model.config.vocab_size, np.float32),
    }
    inputs = {}
    for spec in graph.inputs:
        if spec.name.startswith("past_key_values."):
            inputs[spec.name] = np.zeros(
                (BATCH, int(spec.shape[1]), CAPACITY, int(spec.shape[3])), NUMPY[spec.dtype]
            )
        else:
            inputs[spec.name] = small[spec.name]
    values = evaluate(onnx.load(model.folder / graph.file), inputs)
    return {name: value.shape for name, value in values.items() if not name.endswith(".scores")}


@pytest.mark.parametrize("entry", ["decode", "greedy"])
@pytest.mark.parametrize(
    ("name", "dtype"), [("qwen2", "f32"), ("qwen2", "f16"), ("qwen3", "bf16"), ("qwen2_14_2", "f16")]
)
def test_shapes_follow_batch_and_capacity_alone(
    name: str, dtype: str, entry: str, exported: Callable[..., Exported]
) -> None:
    """A captured graph keeps the shapes of the step that it was captured at."""
    model = exported(name, dtype)
    first = shapes(model, entry, 0)
    assert len(first) > 30
    assert first == shapes(model, entry, 13) == shapes(model, entry, CAPACITY - 1)


def test_only_graphs_that_are_not_captured_slice(exported: Callable[..., Exported]) -> None:
    """The CPU's graph does, whose mask is as long as the cache is full; so the test above would catch one."""
    graph = onnx.load(exported("qwen2").path("decode", "static"), load_external_data=False).graph
    assert "Slice" in {node.op_type for node in graph.node}
    assert all(
        "Slice" not in {node.op_type for node in onnx.load(path, load_external_data=False).graph.node}
        for path in (
            exported("qwen2").path(entry, "static-capture") for entry in ("prefill", "decode", "greedy")
        )
    )
