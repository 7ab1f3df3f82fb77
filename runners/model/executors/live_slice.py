"""The `static` graphs on the CPU provider: attention reads the live part of the cache only."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen_onnx import contract
from qwen_onnx.runners.model.binding import bind_cache, from_numpy, run_bound
from qwen_onnx.runners.model.buffers import CacheMemory
from qwen_onnx.runners.model.executors.executor import Executor
from qwen_onnx.runners.model.executors.inputs import positions
from qwen_onnx.runners.model.kv_cache import KVCache


class LiveSlice(Executor):
    """One graph and session for any number of tokens; the mask is as long as the cache is full."""

    def __init__(
        self, session: Any, memory: CacheMemory, *, vocab_size: int, keeps_binding: bool = True
    ) -> None:
        """`keeps_binding`: no other graph is bound to the same cache, whose binding is for this one then."""
        super().__init__(memory)
        self._session, self._vocab_size, self._keeps_binding = session, vocab_size, keeps_binding
        self.scores = any(value.name == contract.NUM_LOGITS_TO_KEEP for value in session.get_inputs())

    def advance(self, cache: KVCache, input_ids: NDArray[np.int64], start: int) -> None:
        """See Executor.advance."""
        cache.logits = self._run(cache, input_ids, start, 1)[:, 0]

    def score(
        self, cache: KVCache, input_ids: NDArray[np.int64], start: int, count: int
    ) -> NDArray[np.float32]:
        """See Executor.score."""
        if not self.scores:
            return super().score(cache, input_ids, start, count)
        return self._run(cache, input_ids, start, count)

    def _run(
        self, cache: KVCache, input_ids: NDArray[np.int64], start: int, count: int
    ) -> NDArray[np.float32]:
        inputs: dict[str, NDArray[np.int64]] = {
            contract.INPUT_IDS: np.ascontiguousarray(input_ids),
            contract.ATTENTION_MASK: np.ascontiguousarray(cache.mask),
            contract.POSITION_IDS: positions(cache, start),
            contract.WRITE_INDICES: np.full(cache.batch_size, start, np.int64),
        }
        if self.scores:
            inputs[contract.NUM_LOGITS_TO_KEEP] = np.array(count, np.int64)
        logits = np.empty((cache.batch_size, count, self._vocab_size), np.float32)
        binding = cache.binding if self._keeps_binding else None
        if binding is None:
            binding = self._session.io_binding()
            bind_cache(binding, cache)
        if self._keeps_binding:
            cache.binding = binding
        for name, array in inputs.items():
            binding.bind_ortvalue_input(name, from_numpy(array))
        binding.bind_ortvalue_output(contract.LOGITS, from_numpy(logits))
        run_bound(self._session, binding)
        return logits
