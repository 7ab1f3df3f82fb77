"""Steps of the `portable` graph: each puts out new cache tensors, longer by the tokens it took in."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen_onnx import contract
from qwen_onnx.runners.model.binding import CacheNames, from_numpy, run_bound
from qwen_onnx.runners.model.inputs import positions
from qwen_onnx.runners.model.kv_cache import Buffers, Grow, KVCache


class GrowingCache(KVCache):
    """A cache whose tensors are exactly as long as what they hold."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(int(value.tensor_size_in_bytes()) for value in self.buffers)

    @property
    def held_length(self) -> int:
        """Slots of the tensors."""
        return int(self.buffers[0].shape()[2])

    def _new_buffers(self) -> Buffers:
        buffers = super()._new_buffers()
        buffers.values = [self._allocate(0) for _ in buffers.values]
        return buffers

    def _make_room(self, length: int) -> None:
        self._widen(self._bucket(length))
        self._held.values = [self._allocate(length) for _ in range(self._count)]

    def _grow(self, wanted: int, grow: Grow) -> None:
        """The host's account of the tokens only: a step brings its own tensors."""
        self._widen(self._bucket(wanted))


class GrowingSteps:
    """One session for any number of tokens, and one that drops the end of a cache tensor."""

    chooses = False

    def __init__(
        self, session: Any, shrink_session: Any, names: CacheNames, *, device: str, vocab_size: int
    ) -> None:
        self.session, self._shrink_session, self._names = session, shrink_session, names
        self._device, self._vocab_size = device, vocab_size

    def advance(self, cache: KVCache, input_ids: NDArray[np.int64], start: int) -> None:
        """See Steps.advance."""
        if cache.buffers[0].shape()[2] > start:
            cache.buffers[:] = [self._shrunk(value, start) for value in cache.buffers]
        feeds = {
            contract.INPUT_IDS: np.ascontiguousarray(input_ids),
            contract.ATTENTION_MASK: np.ascontiguousarray(cache.mask),
            contract.POSITION_IDS: positions(cache, start),
        }
        logits = np.empty((cache.batch_size, 1, self._vocab_size), np.float32)
        binding = self.session.io_binding()
        for name, array in feeds.items():
            binding.bind_ortvalue_input(name, from_numpy(array))
        for name, value in zip(self._names.past, cache.buffers, strict=True):
            binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output(contract.LOGITS, from_numpy(logits))
        for name in self._names.present:
            binding.bind_output(name, self._device)
        run_bound(self.session, binding)
        cache.buffers[:] = binding.get_outputs()[1:]
        cache.logits = logits[:, 0]

    def logits(self, cache: KVCache) -> NDArray[np.float32]:
        """See Steps.logits."""
        return cache.logits

    def _shrunk(self, value: Any, length: int) -> Any:
        binding = self._shrink_session.io_binding()
        binding.bind_ortvalue_input(contract.GROW_FROM, value)
        binding.bind_ortvalue_input(contract.SHRINK_LENGTH, from_numpy(np.array([length], np.int64)))
        binding.bind_output(contract.SHRINK_RESULT, self._device)
        run_bound(self._shrink_session, binding)
        return binding.get_outputs()[0]
