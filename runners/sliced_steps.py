"""Steps of the `static` graphs on the CPU provider: attention reads the live part of the cache only."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen_onnx import contract
from qwen_onnx.runners.bindings import CacheNames, from_numpy, run_bound
from qwen_onnx.runners.feeds import positions
from qwen_onnx.runners.kv_cache import KVCache


class SlicedSteps:
    """One graph and session for any number of tokens; the mask is as long as the cache is full."""

    chooses = False

    def __init__(self, session: Any, names: CacheNames, *, vocab_size: int) -> None:
        self._session, self._names, self._vocab_size = session, names, vocab_size

    def advance(self, cache: KVCache, input_ids: NDArray[np.int64], start: int) -> None:
        """See Steps.advance."""
        feeds = {
            contract.INPUT_IDS: np.ascontiguousarray(input_ids),
            contract.ATTENTION_MASK: np.ascontiguousarray(cache.mask),
            contract.POSITION_IDS: positions(cache, start),
            contract.WRITE_INDICES: np.full(cache.batch_size, start, np.int64),
        }
        logits = np.empty((cache.batch_size, 1, self._vocab_size), np.float32)
        if cache.binding is None:
            cache.binding = self._session.io_binding()
            self._names.bind(cache.binding, cache)
        for name, array in feeds.items():
            cache.binding.bind_ortvalue_input(name, from_numpy(array))
        cache.binding.bind_ortvalue_output(contract.LOGITS, from_numpy(logits))
        run_bound(self._session, cache.binding)
        cache.logits = logits[:, 0]

    def logits(self, cache: KVCache) -> NDArray[np.float32]:
        """See Steps.logits."""
        return cache.logits
