"""The greedy loop around one step of a runtime: json and numpy only, for it runs in each one's own environment.

python run_X.py CASES.json RESULT.json
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]
Step = Callable[[Tensors], Sequence[np.ndarray]]
"""One run of the graph; inputs and outputs are in its order."""
Cases = dict[str, Any]
"""CASES.json as matrix.py writes it."""


class Rows:
    """Sequences that grow together over one cache, which is empty at first."""

    def __init__(self, step: Step, cases: Cases, rows: int = 1) -> None:
        self._step = step
        self._mask = np.zeros((rows, 0), np.int64)
        shape = (rows, cases["kv_heads"], 0, cases["head_dim"])
        self._cache = {name: np.zeros(shape, cases["dtype"]) for name in past_names(cases)}

    def feed(self, ids: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        """Append ids [rows, S], padding where `mask` is 0; f32 logits [rows, vocab] after the last one."""
        new = np.ones_like(ids) if mask is None else mask
        self._mask = np.concatenate([self._mask, new], axis=1)
        positions = np.maximum(self._mask.cumsum(axis=1) - 1, 0)[:, -ids.shape[1] :]
        new_tokens = {"input_ids": ids, "attention_mask": self._mask, "position_ids": positions}
        inputs = {name: np.ascontiguousarray(value) for name, value in new_tokens.items()} | self._cache
        logits, *present = self._step(inputs)
        self._cache = dict(zip(self._cache, present, strict=True))
        return logits[:, -1].astype(np.float32)

    def generate(self, logits: np.ndarray, steps: int) -> tuple[list[list[int]], np.ndarray]:
        """The best ids from these logits on, each fed back, the last one too; ids [rows][steps], their logits."""
        chosen, seen = [], []
        for _ in range(steps):
            seen.append(logits)
            chosen.append(logits.argmax(axis=-1))
            logits = self.feed(chosen[-1][:, None])
        return np.stack(chosen, axis=1).tolist(), np.stack(seen)


def past_names(cases: Cases) -> list[str]:
    """The cache's inputs; its outputs are `present` in place of `past_key_values`."""
    return [
        f"past_key_values.{layer}.{part}" for layer in range(cases["layers"]) for part in ("key", "value")
    ]


def left_padded(cases: Cases) -> tuple[np.ndarray, np.ndarray]:
    """The batch's prompts as ids [rows, longest], and 0 where they are padding."""
    longest = max(map(len, cases["batch"]))
    ids = [[cases["pad"]] * (longest - len(row)) + row for row in cases["batch"]]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in cases["batch"]]
    return np.array(ids, np.int64), np.array(mask, np.int64)


def run_steps(runtime: str, version: str, load: Callable[[Path], Step]) -> None:
    """Every case on one runtime, of which only one step is known."""
    cases = read_cases()
    step = load(Path(cases["folder"], cases["model"]))
    if cases.get("only_load"):
        write_result(runtime, version, [])
        return

    def row(ids: list[int]) -> np.ndarray:
        return np.array([ids], np.int64)

    def prompt() -> dict[str, Any]:
        rows = Rows(step, cases)
        first, logits = rows.generate(rows.feed(row(cases["prompt"])), cases["steps"])
        second, _ = rows.generate(rows.feed(row(cases["turn"])), cases["turn_steps"])
        return {"prompt": first[0], "turn": second[0], "logits": logits[:, 0]}

    def batch() -> dict[str, Any]:
        ids, mask = left_padded(cases)
        rows = Rows(step, cases, len(ids))
        return {"batch": rows.generate(rows.feed(ids, mask), cases["batch_steps"])[0]}

    def chunked() -> dict[str, Any]:
        rows, middle = Rows(step, cases), len(cases["prompt"]) // 2
        rows.feed(row(cases["prompt"][:middle]))
        logits = rows.feed(row(cases["prompt"][middle:]))
        return {"chunked": rows.generate(logits, cases["steps"])[0][0]}

    write_result(runtime, version, [prompt, batch, chunked])


def read_cases() -> Cases:
    """What the command line names first."""
    return json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))


def write_result(runtime: str, version: str, parts: list[Callable[[], dict[str, Any]]]) -> None:
    """Run each part and write what they found, to what the command line names second.

    A part that fails is a line in `errors`, under its name, and leaves the others alone.
    """
    result: dict[str, Any] = {"runtime": runtime, "version": version, "errors": {}}
    result |= dict.fromkeys(("prompt", "turn", "batch", "chunked", "logits"))
    out = Path(sys.argv[2])
    for part in parts:
        try:
            result |= part()
        except Exception as error:  # whatever a runtime throws
            traceback.print_exc()
            result["errors"][part.__name__] = f"{type(error).__name__}: {error}"
    if result["logits"] is not None:
        out.with_suffix(".f32").write_bytes(result["logits"].astype("<f4").tobytes())
        result["logits"] = out.with_suffix(".f32").name
    out.write_text(json.dumps(result), encoding="utf-8")
