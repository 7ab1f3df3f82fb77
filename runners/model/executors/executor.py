"""What computes: a graph of an export, opened, that takes tokens in over a cache and puts logits out."""

from __future__ import annotations

import abc

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.runners.model.buffers import CacheMemory
from qwen_onnx.runners.model.kv_cache import KVCache


class Executor(abc.ABC):
    """One way of running graphs; what only some can do is refused by the others."""

    capture = False
    """Steps of one token a row are captured as CUDA graphs."""
    chooses = False
    """The graph ends in the choice of the token: `chosen` works."""
    scores = False
    """The graph puts out logits after several tokens: `score` works."""

    def __init__(self, memory: CacheMemory) -> None:
        """`memory` of its caches."""
        self.memory = memory

    def new_cache(self, *, batch_size: int, limit: int) -> KVCache:
        """An empty cache for its graphs, of at most `limit` slots.

        Raises:
            UserError: it does not fit on the device.
        """
        return KVCache(self.memory, batch_size=batch_size, limit=limit)

    @abc.abstractmethod
    def advance(self, cache: KVCache, input_ids: NDArray[np.int64], start: int) -> None:
        """Compute tokens [batch, S], which the cache counts from slot `start` on."""

    def logits(self, cache: KVCache) -> NDArray[np.float32]:
        """The f32 logits [batch, vocab] after the step just made with this cache."""
        return cache.logits

    def score(
        self, cache: KVCache, input_ids: NDArray[np.int64], start: int, count: int
    ) -> NDArray[np.float32]:
        """As `advance`, for tokens without padding; the logits after the last `count`, [batch, count, vocab]."""
        raise ValueError("not opened with speculate or for_scores")

    def chosen(self, cache: KVCache) -> NDArray[np.int64]:
        """The best ids [batch] after the last step, chosen on the device; -1 where the logits are not numbers."""
        raise ValueError("not opened with greedy_on_device")

    def exclude(self, token_ids: NDArray[np.bool_]) -> None:  # noqa: B027 - where the host chooses, that is all
        """Never choose the ids that are True here, [vocab]; without effect where the host chooses."""
