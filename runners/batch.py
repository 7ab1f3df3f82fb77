"""Several prompts at once: one prefill, then one decode step for all rows; each ends by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.errors import UserError
from qwen_onnx.runners.generate import AnswerIds
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.stream import AnswerTokens, Token


class Row:
    """One answer of a batch, as it is made."""

    def __init__(
        self, prompt_ids: Sequence[int], ids: AnswerIds, tokens: AnswerTokens, *, ended: bool
    ) -> None:
        """`ended`: nothing of it is wanted."""
        self.held = list(prompt_ids)
        """Prompt and answer so far."""
        self.ended = ended
        self._ids, self._tokens = ids, tokens

    def take(self, logits: NDArray[np.float32]) -> Token:
        """The token after these logits, f32 [vocab]."""
        token = self._tokens.push(self._ids.take(*self._ids.choose(logits)))
        self.held.append(token.token_id)
        self.ended = token.finish_reason is not None
        return token


def verify_batches(runner: Runner, size: int) -> None:
    """Raises UserError where the runner was opened for what goes one sequence at a time, or not so many."""
    for name, opened in (("greedy_on_device", runner.chooses), ("speculate", runner.scores)):
        if opened:
            raise UserError(f"{name} is for one prompt at a time, not for batches: leave it out")
    if runner.engine is not None:
        runner.new_cache(batch_size=size)  # which refuses what the engine was not built for


def generate_rows(runner: Runner, rows: Sequence[Row]) -> Iterator[tuple[int, Token]]:
    """Pairs of a row's index and its next token, until all rows have ended; in the order of the rows within a step.

    Padding takes up slots beside tokens, so a short row's slots may be full before its context is. It then goes on
    in a cache of its own, or of those that are left: it ends where it would alone.

    Raises:
        UserError: an id outside the embedding, or no memory for a cache of so many rows; or a row has no token left
            to choose.
        NonFiniteLogitsError: the model computed NaN or infinity in some row.
    """
    while left := {index: row for index, row in enumerate(rows) if not row.ended}:
        yield from _until_full(runner, left)


def _until_full(runner: Runner, rows: dict[int, Row]) -> Iterator[tuple[int, Token]]:
    """The same, up to the last slot of one cache."""
    cache = runner.new_cache(batch_size=len(rows))
    padded = left_padded([row.held for row in rows.values()])
    logits = runner.prefill(cache, padded.ids, padded.mask)
    while True:
        for (index, row), of_row in zip(rows.items(), logits, strict=True):
            if not row.ended:
                yield index, row.take(of_row)
        if all(row.ended for row in rows.values()) or cache.length >= runner.context_length:
            return
        # A row that has ended repeats its last id: some valid one, whose logits nobody reads.
        logits = runner.decode(cache, np.array([[row.held[-1]] for row in rows.values()], np.int64))


class Padded(NamedTuple):
    """Prompts side by side, int64 [batch, S] both."""

    ids: NDArray[np.int64]
    mask: NDArray[np.int64] | None
    """0 for padding; None where nothing is."""


def left_padded(prompts: Sequence[Sequence[int]]) -> Padded:
    """Prompts that end together; padding is id 0, which any embedding has."""
    width = max(map(len, prompts))
    ids = np.array([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], np.int64)
    if all(len(prompt) == width for prompt in prompts):
        return Padded(ids, None)
    return Padded(ids, np.array([[0] * (width - len(p)) + [1] * len(p) for p in prompts], np.int64))
