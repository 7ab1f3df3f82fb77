"""The choice of each token of one answer: what was said so far, and a stream of random numbers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.errors import UserError
from qwen_onnx.runners.sampling import logits as functions
from qwen_onnx.runners.sampling.grammar import Matcher
from qwen_onnx.runners.sampling.request import Request


class Sampler:
    """Chooses tokens from logits, one after the other."""

    def __init__(
        self,
        request: Request,
        prompt_ids: Sequence[int],
        *,
        size: int,
        eos_token_ids: Collection[int] = (),
        matcher: Matcher | None = None,
    ) -> None:
        """For an answer to this prompt.

        Args:
            size: ids that name a token: the length of the logits.
            eos_token_ids: cannot be chosen before `min_new_tokens` others.
            matcher: of the ids that can come next; it has the last word.
        """
        self._request, self._eos, self._matcher = request, eos_token_ids, matcher
        self._plain = request.plain and matcher is None
        if self._plain:  # which keeps no books
            return
        self._made = 0
        self._counts: NDArray[np.int32] = np.zeros(size, np.int32)
        self._seen = np.zeros(size, np.bool_)
        prompt = np.asarray(prompt_ids, np.int64)
        self._seen[prompt[prompt < size]] = True
        # One number of it a token, whatever was cut off: the same seed is the same text.
        self._rng = np.random.default_rng(request.seed) if request.do_sample else None

    def choose(self, logits: NDArray[np.float32]) -> int:
        """The next id, of f32 [size]; -inf is never chosen.

        Raises:
            UserError: everything is at -inf.
        """
        if self._plain:
            return functions.greedy(logits)
        scores = self.penalized(logits)
        if self._rng is None:
            token_id = functions.greedy(scores)
            if scores[token_id] == -np.inf:
                raise UserError(functions.NONE_LEFT)
        else:
            ids, weights = self.candidates(scores)
            index = functions.draw(weights, self._rng.random())
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

    def penalized(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits, f32 [size], after bias, penalties, and the ids that are held off, in this order."""
        request, scores = self._request, logits
        if request.logit_bias:
            scores = functions.with_bias(scores, request.logit_bias)
        if request.repetition_penalty != 1:
            seen = np.flatnonzero(self._seen)
            scores = functions.with_repetition_penalty(scores, seen, request.repetition_penalty)
        if request.presence_penalty or request.frequency_penalty:
            scores = functions.with_count_penalties(
                scores, self._counts, presence=request.presence_penalty, frequency=request.frequency_penalty
            )
        if self._matcher is not None:
            scores = self._matcher.masked(scores, hold_end=self._made < request.min_new_tokens)
        elif self._made < request.min_new_tokens:
            scores = functions.without_ids(scores, self._eos)
        return scores

    def candidates(self, scores: NDArray[np.float32]) -> functions.Candidates:
        """What of `penalized` is drawn from."""
        request, ids = self._request, None
        if (
            self._matcher is not None
        ):  # a few ids, mostly: a whole vocabulary at -inf takes milliseconds to part
            ids = np.flatnonzero(scores > -np.inf)
            scores = scores[ids]
        found = functions.candidates(
            scores,
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            min_p=request.min_p,
        )
        if ids is None:
            return found
        return functions.Candidates(ids if found.ids is None else ids[found.ids], found.weights)
