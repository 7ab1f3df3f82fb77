"""From logits to a token: pure functions over f32 [n]. -inf is an id that cannot be chosen.

Names and formulas are those of transformers' logits processors (repetition: the CTRL paper, arXiv:1909.05858, section
4.1); presence, frequency and bias as in OpenAI's API, counted over the answer as vLLM does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.errors import UserError

Scores = NDArray[np.float32]
Ids = NDArray[np.int64]
Weights = NDArray[np.float32]
"""Probabilities as shares of the best one's, e^(x - max): 1 for the best id, 0 for one that cannot be chosen."""

NONE_LEFT = "no token is left to choose: all were excluded"

_BLOCK = 512
_LARGEST = float(np.finfo(np.float32).max)


class Candidates(NamedTuple):
    """What a token is drawn from."""

    ids: Ids | None
    """[n], ascending; None: all, each at its index."""
    weights: Weights
    """Their probabilities up to a common factor, [n]."""


def greedy(logits: Scores) -> int:
    """The id of the largest logit, the lowest id of equals."""
    return int(np.argmax(logits))


def top(logits: Scores, k: int) -> list[tuple[int, float]]:
    """The k largest logits as (id, logit), best first, the lower id of equals; fewer where fewer ids name a token."""
    if k:
        k = min(k, int(np.isfinite(logits).sum()))
    if not k:
        return []
    ids = top_k_ids(logits, k)
    ids = ids[np.lexsort((ids, -logits[ids]))][:k]
    return list(zip(ids.tolist(), logits[ids].tolist(), strict=True))


def log_normalizer(logits: Scores) -> float:
    """ln sum e^x in float64: less it, a logit is the log softmax, ln p."""
    best = float(logits.max())
    shifted = logits.astype(np.float64)
    shifted -= best
    return best + float(np.log(np.exp(shifted, out=shifted).sum()))


def with_bias(scores: Scores, bias: Mapping[int, float]) -> Scores:
    """x + bias, for the ids that have one."""
    changed = scores.copy()
    changed[list(bias)] += np.array(list(bias.values()), np.float32)
    return changed


def with_repetition_penalty(scores: Scores, seen: Ids, penalty: float) -> Scores:
    """x / penalty where x is 0 or more, else x * penalty, once for each id that was seen.

    Args:
        seen: ids of prompt and answer, each once.
    """
    changed, held = scores.copy(), scores[seen].astype(np.float64)
    with np.errstate(over="ignore"):  # an id at -inf is out; one at infinity would be NaN later
        penalized = np.minimum(np.where(held < 0, held * penalty, held / penalty), _LARGEST)
        changed[seen] = penalized.astype(np.float32)
    return changed


def with_count_penalties(
    scores: Scores, counts: NDArray[np.int32], *, presence: float, frequency: float
) -> Scores:
    """x - frequency * count - presence * (count > 0).

    Args:
        counts: [vocab], how often each id is in the answer so far.
    """
    said = np.flatnonzero(counts)
    changed = scores.copy()
    changed[said] -= (frequency * counts[said] + presence).astype(np.float32)
    return changed


def without_ids(scores: Scores, token_ids: Collection[int]) -> Scores:
    """-inf for these ids."""
    changed = scores.copy()
    changed[[token_id for token_id in token_ids if token_id < scores.size]] = -np.inf
    return changed


def candidates(
    scores: Scores, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Candidates:
    """What is left of f32 [vocab] after temperature, top_k, top_p and min_p, in this order.

    Raises:
        UserError: every id is at -inf.
    """
    ids: Ids | None = None
    if 0 < top_k < scores.size:  # before the temperature, which changes no order: so much less to compute on
        ids = top_k_ids(scores, top_k)
        scores = scores[ids]
    weights = with_temperature(scores, temperature)
    if top_p < 1:
        kept = top_p_ids(weights, top_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    if min_p > 0:
        kept = min_p_ids(weights, min_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    return Candidates(ids, weights)


def with_temperature(scores: Scores, temperature: float) -> Weights:
    """e^((x - max) / temperature), for a temperature above 0: softmax(x / temperature) up to a common factor.

    Raises:
        UserError: every id is at -inf.
    """
    best = scores.max()
    if best == -np.inf:
        raise UserError(NONE_LEFT)
    # Beyond these it is greedy, or flat, for all logits there are; f32 holds them.
    divisor = np.float32(min(max(temperature, 1e-30), 1e30))
    # One array, changed in place: fresh memory costs as much as all the arithmetic. What overflows is -inf.
    with np.errstate(over="ignore", under="ignore"):
        weights: Weights = scores - best
        weights /= divisor
        return np.exp(weights, out=weights)


def top_k_ids(scores: Scores, k: int) -> Ids:
    """Ids of the k best and of those equal to the last of them, ascending; all where there are no more than k."""
    if k >= scores.size:
        return np.arange(scores.size)
    return np.flatnonzero(scores >= np.partition(scores, scores.size - k)[scores.size - k])


def top_p_ids(weights: Weights, p: float) -> Ids:
    """The fewest best ids whose probabilities reach p together, ascending, at least one.

    An id stays where the ids better than it sum to less than p. Of equals at the limit the lowest ids stay.
    """
    total = float(weights.sum(dtype=np.float64))
    # All those of less than (1 - p) / n together are less than 1 - p: they are cut off in any case.
    large = weights[np.flatnonzero(weights >= total * (1 - p) / weights.size * (1 - 1e-6))]
    count, least = _reach(large, p * total)
    ids = np.flatnonzero(weights >= least)
    if ids.size > count:
        equals = np.flatnonzero(weights[ids] == least)
        ids = np.delete(ids, equals[equals.size - (ids.size - count) :])
    return ids


def _reach(weights: Weights, target: float) -> tuple[int, np.float32]:
    """How many of the largest weights reach `target` together, at least one, and the least of these."""
    count, rest = 0, weights
    while rest.size > 2 * _BLOCK:  # halved where the limit is not, before anything is sorted
        middle = rest.size // 2
        parts = np.partition(rest, middle)
        upper = float(parts[middle:].sum(dtype=np.float64))
        if upper < target:
            count, target, rest = count + parts.size - middle, target - upper, parts[:middle]
        else:
            rest = parts[middle:]
    rest = np.sort(rest)[::-1]
    more = 1 + _sums_before(rest[:-1], target, side="left")
    return count + more, rest[more - 1]


def min_p_ids(weights: Weights, min_p: float) -> Ids:
    """The ids of at least min_p times the best one's probability, ascending."""
    return np.flatnonzero(weights >= min_p)


def draw(weights: Weights, uniform: float) -> int:
    """The index at `uniform`, 0 to below 1, of the distribution that these weights are, in their order."""
    total = float(_block_sums(weights).sum())
    # Rounding may find none below it; the last that can be drawn is then nearest.
    index = _sums_before(weights, uniform * total, side="right")
    return index if index < weights.size and weights[index] else int(np.flatnonzero(weights)[-1])


def _sums_before(weights: Weights, target: float, *, side: Literal["left", "right"]) -> int:
    """How many running sums of these weights are less than `target` (left), or not more (right).

    Block by block, in float64: running sums of a whole vocabulary take several times as long.
    """
    if not weights.size:
        return 0
    sums = _block_sums(weights)
    reached = np.cumsum(sums)
    block = min(int(np.searchsorted(reached, target, side)), sums.size - 1)
    before = reached[block] - sums[block]
    within = before + np.cumsum(weights[block * _BLOCK : (block + 1) * _BLOCK], dtype=np.float64)
    return block * _BLOCK + int(np.searchsorted(within, target, side))


def _block_sums(weights: Weights) -> NDArray[np.float64]:
    return np.add.reduceat(weights, np.arange(0, weights.size, _BLOCK), dtype=np.float64)
