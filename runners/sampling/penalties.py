"""What changes logits before a token is chosen: pure functions over f32 [vocab], each returning an array of its own.

Repetition is defined as in transformers (RepetitionPenaltyLogitsProcessor; the CTRL paper, arXiv:1909.05858, section
4.1); presence, frequency and bias as in OpenAI's API, counted over the answer as vLLM does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float32]

_LARGEST = float(np.finfo(np.float32).max)


def with_bias(scores: Scores, bias: Mapping[int, float]) -> Scores:
    """x + bias, for the ids that have one."""
    changed = scores.copy()
    changed[list(bias)] += np.array(list(bias.values()), np.float32)
    return changed


def with_repetition_penalty(scores: Scores, seen: NDArray[np.int64], penalty: float) -> Scores:
    """x / penalty where x is 0 or more, else x * penalty, once for each id that was seen.

    Args:
        seen: ids of prompt and answer, each once.
    """
    changed, held = scores.copy(), scores[seen].astype(np.float64)
    with np.errstate(over="ignore"):  # an id at -inf is out; one at infinity would be NaN later
        penalised = np.minimum(np.where(held < 0, held * penalty, held / penalty), _LARGEST)
        changed[seen] = penalised.astype(np.float32)
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
