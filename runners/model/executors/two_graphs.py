"""On a CPU, prompts and single tokens run on graphs of their own, over one cache."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.runners.model.executors.executor import Executor
from qwen_onnx.runners.model.executors.fixed_shape import FixedShape
from qwen_onnx.runners.model.executors.live_slice import LiveSlice
from qwen_onnx.runners.model.kv_cache import KVCache


class TwoGraphs(Executor):
    """Prefill reads the live part of the cache, decode the whole of it: what a CPU does fastest of each."""

    def __init__(self, prefill: LiveSlice, decode: FixedShape) -> None:
        """Both over the same kind of cache."""
        super().__init__(prefill.memory)
        self._prefill, self.decode, self.scores = prefill, decode, prefill.scores

    def advance(self, cache: KVCache, input_ids: NDArray[np.int64], start: int) -> None:
        """See Executor.advance."""
        if input_ids.shape[1] == 1:
            self.decode.advance(cache, input_ids, start)
            cache.logits = self.decode.logits(cache)
        else:
            self._prefill.advance(cache, input_ids, start)

    def score(
        self, cache: KVCache, input_ids: NDArray[np.int64], start: int, count: int
    ) -> NDArray[np.float32]:
        """See Executor.score."""
        return self._prefill.score(cache, input_ids, start, count)


LONG = 1024
"""Tokens in the cache from which on reading it once a group of heads makes up for more nodes."""


class LongContext(Executor):
    """A `contrib` graph, and for single tokens after many a graph that reads a long cache faster.

    Repacked weights are private to a session: the second one takes as much memory again. It is opened when a context
    becomes long, and not where memory is short.
    """

    def __init__(self, short: FixedShape, open_long: Callable[[], FixedShape | None]) -> None:
        """`open_long` gives None where there is no memory for it; it is asked once."""
        super().__init__(short.memory)
        self.short, self._open_long, self.scores = short, open_long, short.scores
        self._long: FixedShape | None = None
        self._asked, self._lock = False, threading.Lock()

    def advance(self, cache: KVCache, input_ids: NDArray[np.int64], start: int) -> None:
        """See Executor.advance."""
        alone = input_ids.shape == (1, 1) and cache.length > LONG
        of_long = self._for_long() if alone and not cache.padded else None
        (of_long or self.short).advance(cache, input_ids, start)

    def score(
        self, cache: KVCache, input_ids: NDArray[np.int64], start: int, count: int
    ) -> NDArray[np.float32]:
        """See Executor.score."""
        return self.short.score(cache, input_ids, start, count)

    def logits(self, cache: KVCache) -> NDArray[np.float32]:
        """See Executor.logits."""
        return self.short.logits(cache)  # of whichever graph is bound to the cache

    def _for_long(self) -> FixedShape | None:
        with self._lock:
            if not self._asked:
                self._long, self._asked = self._open_long(), True
        return self._long
