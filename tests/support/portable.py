"""The portable graph, run node by node."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx.reference.op_run import OpRun

from qwen_onnx import contract
from support.exports import IDS, Exported, past_names, present_names
from support.strict import OPERATORS, evaluate, product

NUMPY = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
PADS = np.array([0, 4])


class MatMul(OpRun):
    """Sums in f32 and rounds to the type, as a GPU does."""

    op_domain = ""

    def _run(self, a: Any, b: Any) -> tuple[np.ndarray]:
        return (product(a, b),)


def run(model: Exported) -> list[tuple[dict[str, np.ndarray], np.ndarray]]:
    """Two left-padded rows, 9 tokens and then one: every value, and the logits wanted [B, V]."""
    layers, spec = model.manifest.num_hidden_layers, model.cache_spec("prefill", "portable")
    empty = np.zeros((2, int(spec.shape[1]), 0, int(spec.shape[3])), NUMPY[model.dtype])
    cache = dict.fromkeys(past_names(layers), empty)
    graph, ran = onnx.load(model.path("prefill", "portable")), []
    for start, stop in ((0, 9), (9, 10)):
        slots = np.arange(stop)
        inputs = {
            contract.INPUT_IDS: np.stack(
                [np.roll(IDS[row], pad)[start:stop] for row, pad in enumerate(PADS)]
            ),
            contract.ATTENTION_MASK: (slots >= PADS[:, None]).astype(np.int64),
            contract.POSITION_IDS: np.maximum(slots - PADS[:, None], 0)[:, start:],
        }
        values = evaluate(graph, inputs | cache, [*OPERATORS, MatMul])
        present = zip(past_names(layers), present_names(layers), strict=True)
        cache = {past: values[name] for past, name in present}
        wanted = [model.wanted(IDS[row, :10])[stop - pad - 1] for row, pad in enumerate(PADS)]
        ran.append((values, np.stack(wanted)))
    return ran
