"""Steps on a CPU whose prompts and single tokens run on graphs of their own, over one cache."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.runners.model.fixed_shape import FixedSteps
from qwen_onnx.runners.model.kv_cache import KVCache
from qwen_onnx.runners.model.live_slice import SlicedSteps


class PhasedSteps:
    """Prefill reads the live part of the cache, decode the whole of it: what a CPU does fastest of each."""

    chooses = False

    def __init__(self, prefill: SlicedSteps, decode: FixedSteps) -> None:
        self._prefill, self.decode = prefill, decode

    def advance(self, cache: KVCache, input_ids: NDArray[np.int64], start: int) -> None:
        """See Steps.advance."""
        if input_ids.shape[1] == 1:
            self.decode.advance(cache, input_ids, start)
            cache.logits = self.decode.logits(cache)
        else:
            self._prefill.advance(cache, input_ids, start)

    def score(
        self, cache: KVCache, input_ids: NDArray[np.int64], start: int, count: int
    ) -> NDArray[np.float32]:
        """See Scorer.score."""
        return self._prefill.score(cache, input_ids, start, count)

    def logits(self, cache: KVCache) -> NDArray[np.float32]:
        """See Steps.logits."""
        return cache.logits


LONG = 1024
"""Tokens in the cache from which on reading it once a group of heads makes up for more nodes."""


class LongSteps:
    """Steps of a `contrib` graph, and single tokens on a graph that reads a long cache faster.

    Repacked weights are private to a session: the second one takes as much memory again. It is opened when a context
    becomes long, and not where memory is short.
    """

    chooses = False

    def __init__(self, short: FixedSteps, open_long: Callable[[], FixedSteps | None]) -> None:
        """`open_long` gives None where there is no memory for it; it is asked once."""
        self._short, self._open_long = short, open_long
        self._long: FixedSteps | None = None
        self._asked, self._lock = False, threading.Lock()

    @property
    def session(self) -> object:
        """Of prompts and short contexts."""
        return self._short.session

    def advance(self, cache: KVCache, input_ids: NDArray[np.int64], start: int) -> None:
        """See Steps.advance."""
        alone = input_ids.shape == (1, 1) and cache.length > LONG
        steps = self._for_long() if alone and not cache.padded else None
        (steps or self._short).advance(cache, input_ids, start)

    def score(
        self, cache: KVCache, input_ids: NDArray[np.int64], start: int, count: int
    ) -> NDArray[np.float32]:
        """See Scorer.score."""
        return self._short.score(cache, input_ids, start, count)

    def logits(self, cache: KVCache) -> NDArray[np.float32]:
        """See Steps.logits."""
        return self._short.logits(cache)  # of whichever graph is bound to the cache

    def _for_long(self) -> FixedSteps | None:
        with self._lock:
            if not self._asked:
                self._long, self._asked = self._open_long(), True
        return self._long
