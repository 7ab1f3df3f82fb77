"""Steps of the `static` graphs on the CPU provider: attention reads the live part of the cache only."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen_onnx import contract
from qwen_onnx.runners.model.binding import CacheNames, from_numpy, run_bound
from qwen_onnx.runners.model.inputs import positions
from qwen_onnx.runners.model.kv_cache import KVCache


class SlicedSteps:
    """One graph and session for any number of tokens; the mask is as long as the cache is full."""

    chooses = False

    def __init__(
        self, session: Any, names: CacheNames, *, vocab_size: int, keeps_binding: bool = True
    ) -> None:
        """`keeps_binding`: no other graph is bound to the same cache, whose binding is for this one then."""
        self._session, self._names, self._vocab_size = session, names, vocab_size
        self._keeps_binding = keeps_binding
        self._scores = any(value.name == contract.NUM_LOGITS_TO_KEEP for value in session.get_inputs())

    def advance(self, cache: KVCache, input_ids: NDArray[np.int64], start: int) -> None:
        """See Steps.advance."""
        cache.logits = self.score(cache, input_ids, start, 1)[:, 0]

    def score(
        self, cache: KVCache, input_ids: NDArray[np.int64], start: int, count: int
    ) -> NDArray[np.float32]:
        """See Scorer.score."""
        feeds: dict[str, NDArray[np.int64]] = {
            contract.INPUT_IDS: np.ascontiguousarray(input_ids),
            contract.ATTENTION_MASK: np.ascontiguousarray(cache.mask),
            contract.POSITION_IDS: positions(cache, start),
            contract.WRITE_INDICES: np.full(cache.batch_size, start, np.int64),
        }
        if self._scores:
            feeds[contract.NUM_LOGITS_TO_KEEP] = np.array(count, np.int64)
        logits = np.empty((cache.batch_size, count, self._vocab_size), np.float32)
        binding = cache.binding if self._keeps_binding else None
        if binding is None:
            binding = self._session.io_binding()
            self._names.bind(binding, cache)
        if self._keeps_binding:
            cache.binding = binding
        for name, array in feeds.items():
            binding.bind_ortvalue_input(name, from_numpy(array))
        binding.bind_ortvalue_output(contract.LOGITS, from_numpy(logits))
        run_bound(self._session, binding)
        return logits

    def logits(self, cache: KVCache) -> NDArray[np.float32]:
        """See Steps.logits."""
        return cache.logits
