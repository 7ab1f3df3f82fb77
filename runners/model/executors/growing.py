"""The `portable` graph: each step puts out new cache tensors, longer by the tokens it took in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen_onnx import contract
from qwen_onnx.contract.cache_spec import ResizeKey, StateSpec
from qwen_onnx.runners.model.binding import from_numpy, run_bound
from qwen_onnx.runners.model.buffers import CacheMemory
from qwen_onnx.runners.model.executors.executor import Executor
from qwen_onnx.runners.model.executors.inputs import positions
from qwen_onnx.runners.model.kv_cache import GrowingCache, KVCache


class Growing(Executor):
    """One session for any number of tokens, and those that drop the end of a state tensor."""

    def __init__(
        self,
        session: Any,
        memory: CacheMemory,
        shrink_sessions: Mapping[ResizeKey, Any],
        *,
        vocab_size: int,
    ) -> None:
        """`shrink_sessions`: by the fixed sizes of a state, a session that keeps its first slots."""
        super().__init__(memory)
        self.session, self._shrink_sessions, self._vocab_size = session, shrink_sessions, vocab_size

    def new_cache(self, *, batch_size: int, limit: int) -> GrowingCache:
        """See Executor.new_cache."""
        return GrowingCache(self.memory, batch_size=batch_size, limit=limit)

    def advance(self, cache: KVCache, input_ids: NDArray[np.int64], start: int) -> None:
        """See Executor.advance."""
        states = cache.spec.states
        for index, (state, value) in enumerate(zip(states, cache.buffers, strict=True)):
            if state.slot_axis is not None and value.shape()[state.slot_axis] > start:
                cache.buffers[index] = self._shrunk(state, value, start)
        inputs = {
            contract.INPUT_IDS: np.ascontiguousarray(input_ids),
            contract.ATTENTION_MASK: np.ascontiguousarray(cache.mask),
            contract.POSITION_IDS: positions(cache, start),
        }
        logits = np.empty((cache.batch_size, 1, self._vocab_size), np.float32)
        binding = self.session.io_binding()
        for name, array in inputs.items():
            binding.bind_ortvalue_input(name, from_numpy(array))
        for state, value in zip(states, cache.buffers, strict=True):
            binding.bind_ortvalue_input(state.past, value)
        binding.bind_ortvalue_output(contract.LOGITS, from_numpy(logits))
        for state in states:
            binding.bind_output(state.present, self.memory.device)
        run_bound(self.session, binding)
        cache.buffers[:] = binding.get_outputs()[1:]
        cache.logits = logits[:, 0]

    def _shrunk(self, state: StateSpec, value: Any, length: int) -> Any:
        session = self._shrink_sessions[state.resize_key]
        binding = session.io_binding()
        binding.bind_ortvalue_input(contract.GROW_FROM, value)
        binding.bind_ortvalue_input(contract.SHRINK_LENGTH, from_numpy(np.array([length], np.int64)))
        binding.bind_output(contract.SHRINK_RESULT, self.memory.device)
        run_bound(session, binding)
        return binding.get_outputs()[0]
