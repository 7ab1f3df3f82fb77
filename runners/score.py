"""How likely a model finds a text: the log probability of each of its tokens, given those before it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from qwen_onnx.errors import UserError, counted
from qwen_onnx.runners.generate import generate
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.sequence import GivenSequence
from qwen_onnx.runners.text.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True)
class Score:
    """A text as the model sees it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    """ln of each token's probability given those before it, in float64 of the f32 logits of all ids that name a
    token; None for the first, which has none before it."""
    windows: int
    """1: each token was given all those before it. Else how many windows, of as many tokens as the context holds."""

    @property
    def logprob(self) -> float:
        """ln of the probability of all tokens after the first."""
        return math.fsum(logprob for logprob in self.logprobs if logprob is not None)

    @property
    def perplexity(self) -> float:
        """e^-(mean log probability of the tokens after the first); infinite beyond float64."""
        mean = self.logprob / (len(self.token_ids) - 1)
        return math.exp(-mean) if mean > -700 else math.inf


def score_ids(runner: Runner, token_ids: Sequence[int], vocabulary: Vocabulary) -> Score:
    """The score of two or more ids, over a cache of its own.

    Each id is scored once. Where there are more than the context holds, a window of it moves on by half its length:
    the ids after the first window are given at least half a context of those before them.

    Raises:
        UserError: as `verify_scored`; before any compute.
        NonFiniteLogitsError: the model computed NaN or infinity.
    """
    ids = list(token_ids)
    verify_scored(ids, vocabulary)
    scorer = runner.scorer()
    cache, context = scorer.new_cache(), runner.context_length
    logprobs: list[float | None] = [None]
    windows = 0
    while len(logprobs) < len(ids):
        # The last id a window scores is after those it holds, and is not computed itself.
        first = len(logprobs) - max(1, context // 2) if windows else 0
        done, windows = len(logprobs) - first, windows + 1
        window = ids[first : first + context + 1]
        sequence = GivenSequence(window[:done], window[done:], vocabulary, context_length=context)
        cache.truncate(0)
        logprobs += [token.logprob for _, token in generate(scorer, [sequence], cache)]
    return Score(tuple(ids), tuple(logprobs), windows)


def verify_scored(ids: Sequence[int], vocabulary: Vocabulary) -> None:
    """Raises UserError for fewer than two ids, and for one that names no token."""
    if len(ids) < 2:
        raise UserError(
            f"{counted(len(ids), 'token')} found, 2 or more wanted: each is scored given those before it, the "
            "first has none"
        )
    numbers = np.asarray(ids, np.int64)
    nameless = numbers[vocabulary.nameless(numbers)]
    if nameless.size:
        raise UserError(f"token id {nameless[0]} names no token, so that it has no probability")
