"""Steps on a CPU whose prompts and single tokens run on graphs of their own, over one cache and mapped weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.runners.fixed_steps import FixedSteps
from qwen_onnx.runners.kv_cache import KVCache
from qwen_onnx.runners.sliced_steps import SlicedSteps


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
        """See Steps.score."""
        return self._prefill.score(cache, input_ids, start, count)

    def logits(self, cache: KVCache) -> NDArray[np.float32]:
        """See Steps.logits."""
        return cache.logits
