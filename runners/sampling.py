"""Choosing a token from logits: pure functions over f32 [vocab]."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def without_nameless(logits: NDArray[np.float32], size: int, holes: NDArray[np.int64]) -> NDArray[np.float32]:
    """The logits of ids that name a token: checkpoints pad the embedding beyond the tokenizer's ids."""
    logits = logits[:size]
    if holes.size:
        logits = logits.copy()
        logits[holes] = -np.inf
    return logits


def greedy(logits: NDArray[np.float32]) -> int:
    """The id of the largest logit, the lowest id of equals."""
    return int(np.argmax(logits))


def top(logits: NDArray[np.float32], k: int) -> list[tuple[int, float]]:
    """The k largest logits as (id, logit), best first; fewer where fewer ids name a token."""
    k = min(k, int(np.isfinite(logits).sum()))
    best = np.argpartition(-logits, k - 1)[:k] if k else np.empty(0, np.int64)
    order = sorted(best.tolist(), key=lambda token_id: (-float(logits[token_id]), token_id))
    return [(token_id, float(logits[token_id])) for token_id in order]
