"""How far the predictions of one model are from another's over a text: perplexity, KL divergence, top-1."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.errors import UserError
from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.generate import SCORED_BYTES
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.processor import Processor

_WORST = 5

Logprobs = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Position:
    """One token of the text, and what was expected in its place."""

    index: int
    """Of the token in the text."""
    kl: float
    """In nats."""
    best: int
    """The likeliest id of this model."""
    other_best: int
    """Of the other one."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One model against another, both given the same text."""

    token_ids: tuple[int, ...]
    perplexity: float
    """e^-(mean log probability of the tokens after the first)."""
    other_perplexity: float
    kl: float
    """Mean of KL(other || this) = sum p_other ln(p_other / p_this) over the positions, in nats."""
    top1: float
    """Share of positions at which both have the same likeliest id."""
    worst: tuple[Position, ...]
    """Those of the largest divergence, the largest first."""

    @property
    def positions(self) -> int:
        """At which next tokens were predicted."""
        return len(self.token_ids) - 1


def compare_models(chat: Chat, other: Chat, token_ids: Sequence[int]) -> Comparison:
    """Both models over the same ids; of ids beyond the smaller context, windows of it, each moved on by half.

    Args:
        token_ids: two or more.

    Raises:
        UserError: fewer ids, or the models' tokens are not the same.
        NonFiniteLogitsError: a model computed NaN or infinity.
    """
    ids = np.asarray(token_ids, np.int64)
    if len(ids) < 2:
        raise UserError(f"{len(ids)} tokens found, 2 or more wanted")
    verify_same_tokens(chat.processor, other.processor)
    named = ~_nameless(chat.processor)
    size = min(chat.runner.context_length, other.runner.context_length)
    both = zip(*(_logprobs(each.runner, ids, size, named) for each in (chat, other)), strict=True)
    kl, same, own, others, positions = [], [], [], [], list[Position]()
    for index, (mine, theirs) in enumerate(both, start=1):
        divergence = float(np.sum(np.exp(theirs) * (theirs - mine)))
        best, other_best = int(mine.argmax()), int(theirs.argmax())
        kl.append(divergence)
        same.append(best == other_best)
        token = int(np.count_nonzero(named[: ids[index]]))  # columns are named ids only
        own.append(float(mine[token]))
        others.append(float(theirs[token]))
        positions.append(Position(index, divergence, best, other_best))
    columns = np.flatnonzero(named)
    worst = [
        dataclasses.replace(each, best=int(columns[each.best]), other_best=int(columns[each.other_best]))
        for each in sorted(positions, key=lambda each: -each.kl)[:_WORST]
    ]
    return Comparison(
        tuple(map(int, ids)), _perplexity(own), _perplexity(others), math.fsum(kl) / len(kl),
        sum(same) / len(same), tuple(worst),
    )  # fmt: skip


def verify_same_tokens(one: Processor, other: Processor) -> None:
    """Raises UserError where an id is not the same token in both."""
    texts = [
        None if each.tokenizer is None else each.tokenizer.backend.get_vocab(with_added_tokens=True)
        for each in (one, other)
    ]
    if texts[0] != texts[1] or not np.array_equal(_nameless(one), _nameless(other)):
        raise UserError(
            f"{one.folder} and {other.folder}: their tokens are not the same, so that their predictions cannot be "
            "compared"
        )


def _nameless(processor: Processor) -> NDArray[np.bool_]:
    return processor.vocabulary.nameless(np.arange(processor.manifest.vocab_size))


def _logprobs(
    runner: Runner, ids: NDArray[np.int64], size: int, named: NDArray[np.bool_]
) -> Iterator[Logprobs]:
    """ln of the probabilities [named ids] after each id but the last."""
    scorer = runner.scorer()
    cache, at = scorer.new_cache(), 0
    while at < len(ids) - 1:
        # As score_ids moves on: what a later window predicts first has half a window before it.
        first = at + 1 - max(1, size // 2) if at else 0
        cache.truncate(0)
        if at > first:
            scorer.prefill(cache, ids[np.newaxis, first:at])
        end = min(first + size, len(ids) - 1)
        while at < end:
            most = SCORED_BYTES // (8 * scorer.vocab_size) if scorer.scores else 1
            count = max(1, min(end - at, scorer.chunk(cache), most))
            new_ids = ids[np.newaxis, at : at + count]
            logits = (
                scorer.score(cache, new_ids, count)[0] if scorer.scores else scorer.prefill(cache, new_ids)
            )
            yield from _log_softmax(logits[:, named].astype(np.float64))
            at += count


def _log_softmax(logits: Logprobs) -> Logprobs:
    logits -= logits.max(axis=-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return logits


def _perplexity(logprobs: Sequence[float]) -> float:
    mean = math.fsum(logprobs) / len(logprobs)
    return math.exp(-mean) if mean > -700 else math.inf
