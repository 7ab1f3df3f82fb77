"""How likely a model finds a text: the log probability of each of its tokens, given those before it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.errors import UserError
from qwen_onnx.runners.model.kv_cache import KVCache
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.sampling.logits import log_normaliser
from qwen_onnx.runners.text.vocabulary import Vocabulary

LOGIT_BYTES = 64 << 20
"""Most bytes of logits at a time."""


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
        UserError: fewer than two ids, or one that names no token; before any compute.
        NonFiniteLogitsError: the model computed NaN or infinity.
    """
    ids = np.asarray(token_ids, np.int64)
    if ids.size < 2:
        raise UserError(
            f"{ids.size} tokens found, 2 or more wanted: each is scored given those before it, the first has none"
        )
    nameless = ids[vocabulary.nameless(ids)]
    if nameless.size:
        raise UserError(f"token id {nameless[0]} names no token, so that it has no probability")
    scorer = runner.scorer()
    cache, context = scorer.new_cache(), runner.context_length
    logprobs: list[float | None] = [None]
    windows = 0
    while len(logprobs) < ids.size:
        # The last id a window scores is after those it holds, and is not computed itself.
        first = len(logprobs) - max(1, context // 2) if windows else 0
        window = ids[first : first + context + 1]
        done, windows = len(logprobs) - first, windows + 1
        cache.truncate(0)
        if done > 1:
            scorer.prefill(cache, window[None, : done - 1])
        rows = (row for rows in _logits(scorer, cache, window[done - 1 : -1]) for row in rows)
        for token_id, row in zip(window[done:], rows, strict=True):
            named = vocabulary.named(row)
            logprobs.append(float(named[token_id]) - log_normaliser(named))
    return Score(tuple(ids.tolist()), tuple(logprobs), windows)


def _logits(runner: Runner, cache: KVCache, ids: NDArray[np.int64]) -> Iterator[NDArray[np.float32]]:
    """Append ids [S]; the logits after each, [n, vocab] at a time."""
    most = max(1, LOGIT_BYTES // (4 * runner.manifest.vocab_size))
    done = 0
    while done < ids.size:
        count = min(most, runner.chunk(cache), ids.size - done) if runner.scores else 1
        new_ids = ids[None, done : done + count]
        yield runner.score(cache, new_ids, count)[0] if runner.scores else runner.decode(cache, new_ids)
        done += count
