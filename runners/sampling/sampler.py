"""The choice of each token of one answer: what was said so far, and a stream of random numbers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.errors import UserError
from qwen_onnx.runners.sampling import logits as sampling
from qwen_onnx.runners.sampling import penalties
from qwen_onnx.runners.sampling.grammar import Matcher
from qwen_onnx.runners.sampling.params import Sampling


class Chooser:
    """Chooses tokens from logits, one after the other."""

    def __init__(
        self,
        values: Sampling,
        prompt_ids: Sequence[int],
        *,
        size: int,
        eos_token_ids: Collection[int] = (),
        min_new_tokens: int = 0,
        matcher: Matcher | None = None,
    ) -> None:
        """For an answer to this prompt.

        Args:
            size: ids that name a token: the length of the logits.
            min_new_tokens: tokens before `eos_token_ids` can be chosen.
            matcher: of the ids that can come next; it has the last word.
        """
        self._values, self._eos, self._least = values, eos_token_ids, min_new_tokens
        self._matcher = matcher
        self._plain = values.plain and not min_new_tokens and matcher is None
        if self._plain:  # which keeps no books
            return
        self._made = 0
        self._counts: NDArray[np.int32] = np.zeros(size, np.int32)
        self._seen = np.zeros(size, np.bool_)
        prompt = np.asarray(prompt_ids, np.int64)
        self._seen[prompt[prompt < size]] = True
        # One number of it a token, whatever was cut off: the same seed is the same text.
        self._rng = np.random.default_rng(values.seed) if values.do_sample else None

    def choose(self, logits: NDArray[np.float32]) -> int:
        """The next id, of f32 [size]; -inf is never chosen.

        Raises:
            UserError: everything is at -inf.
        """
        if self._plain:
            return sampling.greedy(logits)
        scores = self.penalised(logits)
        if self._rng is None:
            token_id = sampling.greedy(scores)
            if scores[token_id] == -np.inf:
                raise UserError(sampling.NONE_LEFT)
        else:
            ids, weights = self.candidates(scores)
            index = sampling.draw(weights, self._rng.random())
            token_id = index if ids is None else int(ids[index])
        self.take(token_id)
        return token_id

    def take(self, token_id: int) -> None:
        """Count an id as chosen."""
        if self._plain:
            return
        if self._matcher is not None:
            self._matcher.take(token_id)
        self._made += 1
        self._counts[token_id] += 1
        self._seen[token_id] = True

    def penalised(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits, f32 [size], after bias, penalties, and the ids that are held off, in this order."""
        values, scores = self._values, logits
        if values.logit_bias:
            scores = penalties.with_bias(scores, values.logit_bias)
        if values.repetition_penalty != 1:
            seen = np.flatnonzero(self._seen)
            scores = penalties.with_repetition_penalty(scores, seen, values.repetition_penalty)
        if values.presence_penalty or values.frequency_penalty:
            scores = penalties.with_count_penalties(
                scores, self._counts, presence=values.presence_penalty, frequency=values.frequency_penalty
            )
        if self._matcher is not None:
            scores = self._matcher.masked(scores, hold_end=self._made < self._least)
        elif self._made < self._least:
            scores = penalties.without_ids(scores, self._eos)
        return scores

    def candidates(self, scores: NDArray[np.float32]) -> sampling.Candidates:
        """What of `penalised` is drawn from."""
        values, ids = self._values, None
        if (
            self._matcher is not None
        ):  # a few ids, mostly: a whole vocabulary at -inf takes milliseconds to part
            ids = np.flatnonzero(scores > -np.inf)
            scores = scores[ids]
        found = sampling.candidates(
            scores,
            temperature=values.temperature,
            top_k=values.top_k,
            top_p=values.top_p,
            min_p=values.min_p,
        )
        if ids is None:
            return found
        return sampling.Candidates(ids if found.ids is None else ids[found.ids], found.weights)
