"""The KV cache of one batch of sequences: which tokens are in which slots of the buffers on the device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.contract.cache_spec import CacheSpec
from qwen_onnx.runners.model.buffers import CacheMemory

BLOCK = 64
"""Slots that a cache grows by, where it grows tightly: products over them are fastest at round numbers."""


class KVCache:
    """The state tensors of every layer, and the host's account of the tokens in them.

    The buffers are opaque OrtValues that never leave the device. Slots at or beyond `length` are never read for
    what they hold.
    """

    def __init__(self, memory: CacheMemory, *, batch_size: int, limit: int) -> None:
        """An empty cache of at most `limit` slots.

        Raises:
            UserError: it does not fit on the device.
        """
        self.batch_size, self.limit = batch_size, limit
        self.length = 0
        """Slots in use, padding included."""
        self.memory = memory
        self._held = memory.first(batch_size, limit)
        weakref.finalize(self, memory.give_back, self._held).atexit = False
        self._token_ids: NDArray[np.int64] = np.zeros((batch_size, self.capacity), np.int64)
        self._mask: NDArray[np.int64] = np.zeros((batch_size, self.capacity), np.int64)
        self._full_mask: NDArray[np.int64] | None = None
        self._padded = False
        self.logits: NDArray[np.float32] = np.empty((batch_size, 0), np.float32)
        """After the last step, [batch, vocab], of executors that put them out on the host."""

    @property
    def spec(self) -> CacheSpec:
        """Of the state tensors."""
        return self.memory.spec

    @property
    def capacity(self) -> int:
        """Slots of the buffers."""
        return self._held.capacity

    @property
    def buffers(self) -> list[Any]:
        """OrtValues on the device, in the order of `spec`."""
        return self._held.values

    @property
    def binding(self) -> Any:
        """What an executor bound to the buffers; None whenever they are new."""
        return self._held.binding

    @binding.setter
    def binding(self, binding: Any) -> None:
        self._held.binding = binding

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(int(value.tensor_size_in_bytes()) for value in self.buffers)

    @property
    def mask(self) -> NDArray[np.int64]:
        """[batch, length]: 1 for a token, 0 for padding."""
        return self._mask[:, : self.length]

    @property
    def padded(self) -> bool:
        """Some slot in use is padding."""
        return self._padded

    @property
    def full_mask(self) -> NDArray[np.int64]:
        """[batch, capacity]: 0 for padding, 1 elsewhere. The same array until padding or capacity change."""
        if self._full_mask is None:
            self._full_mask = np.ones_like(self._mask)
            self._full_mask[:, : self.length] = self.mask
        return self._full_mask

    def counts(self, end: int) -> NDArray[np.int64]:
        """[batch]: of the slots before `end`, how many hold tokens and not padding."""
        if not self._padded:
            return np.full(self.batch_size, end, np.int64)
        counts: NDArray[np.int64] = self._mask[:, :end].sum(axis=1)
        return counts

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """The ids in the slots of row 0, [length]."""
        return self._token_ids[0, : self.length].copy()

    def read(self) -> Iterator[NDArray[Any]]:
        """Copies of row 0 on the host, state after state, its live slots only; see CacheMemory.read."""
        for state, value in zip(self.spec.states, self.buffers, strict=True):
            yield self.memory.read(state, value, self.length)

    def fill(self, token_ids: NDArray[np.int64], rows: Iterable[NDArray[Any]]) -> None:
        """Hold ids [length] in place of what row 0 holds, and for them what `read` gave.

        What `rows` raises, at its end too, leaves an empty cache.

        Raises:
            UserError: it does not fit on the device.
        """
        self.truncate(0)
        length = token_ids.size
        try:
            self._make_room(length)
            for state, row, value in zip(self.spec.states, rows, self.buffers, strict=True):
                self.memory.write(state, value, row)
        except BaseException:  # there may be what is no number
            self._restart()
            raise
        self._token_ids[0, :length], self._mask[0, :length] = token_ids, 1
        self.length = length

    def shared_prefix(self, token_ids: Sequence[int]) -> int:
        """How many of these ids, from the first on, row 0 holds already, and can go on from."""
        count = min(self.length, len(token_ids))
        differ = np.flatnonzero(self._token_ids[0, :count] != np.asarray(token_ids[:count], np.int64))
        shared = int(differ[0]) if differ.size else count
        return shared if self.spec.rewinds or shared == self.length else 0

    def append(self, token_ids: NDArray[np.int64], mask: NDArray[np.int64] | None) -> None:
        """Count tokens [batch, S] in, before they are computed; buffers grow where needed.

        Args:
            mask: int64 [batch, S], 0 for padding; None where nothing is.

        Raises:
            UserError: no memory for larger buffers.
        """
        end = self.length + token_ids.shape[1]
        if not self.buffers:  # there was no memory for them
            self._restart()
        if end > self.capacity:
            self._resize(end)
        self._token_ids[:, self.length : end] = token_ids
        self._mask[:, self.length : end] = 1 if mask is None else mask
        self.length = end
        if mask is not None and not mask.all():
            self._padded, self._full_mask = True, None

    def truncate(self, length: int) -> None:
        """Forget the slots from `length` on; all of them where some state has none, which cannot go back."""
        if length >= self.length:
            return
        if not self.spec.rewinds:
            self._restart()
            return
        self.length = length
        if self._padded:
            self._padded, self._full_mask = not self.mask.all(), None

    def renew(self) -> None:
        """Forget everything, and have zeros in all slots again: after a step that wrote what is no number."""
        self.truncate(0)
        self._restart()

    def _resize(self, wanted: int) -> None:
        capacity = self._bucket(wanted)
        try:
            self.memory.resize(self._held, capacity)
            self._widen(capacity)
        except BaseException:  # buffers of two sizes serve no graph: begin again, as small as at first
            self._restart()
            raise

    def _make_room(self, length: int) -> None:
        """Buffers of so many slots; what they hold does not matter."""
        if not self.buffers or length > self.capacity:
            self._held.values, self._held.binding = [], None  # before the new ones are made
            self._widen(self._bucket(length))
            self._held.values = self.memory.values(self.batch_size, self.capacity)

    def _bucket(self, wanted: int) -> int:
        capacity = self.capacity
        while capacity < wanted:
            capacity += -(-capacity // (8 * BLOCK)) * BLOCK if self.memory.tight else capacity
        return min(capacity, self.limit)

    def _widen(self, capacity: int) -> None:
        """The host's account, for so many slots."""
        wider = ((0, 0), (0, max(0, capacity - self.capacity)))
        self._token_ids, self._mask = np.pad(self._token_ids, wider), np.pad(self._mask, wider)
        self._held.capacity, self._full_mask = self._mask.shape[1], None

    def _restart(self) -> None:
        self.length, self._padded, self._full_mask = 0, False, None
        self._held.values, self._held.binding = [], None  # before the new ones are made
        fresh = self.memory.new(self.batch_size, self.limit)
        self._held.capacity, self._held.values = fresh.capacity, fresh.values
        self._token_ids = np.zeros((self.batch_size, self.capacity), np.int64)
        self._mask = np.zeros((self.batch_size, self.capacity), np.int64)


class GrowingCache(KVCache):
    """A cache whose tensors are exactly as long as what they hold: each step brings its own."""

    def _make_room(self, length: int) -> None:
        self._widen(self._bucket(length))
        self._held.values = self.memory.values(self.batch_size, length)

    def _resize(self, wanted: int) -> None:
        self._widen(self._bucket(wanted))
