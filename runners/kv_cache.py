"""The KV cache of one batch of sequences: buffers on the device, and which of their slots are live."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.contract import TensorSpec
from qwen_onnx.runners.session import import_onnxruntime

if TYPE_CHECKING:
    import onnxruntime

SMALLEST_CAPACITY = 256
_BFLOAT16 = 16  # onnx.TensorProto.BFLOAT16; numpy has no such type

Grow = Callable[["onnxruntime.OrtValue", "onnxruntime.OrtValue"], None]


class KVCache:
    """Keys and values of every layer, [batch, kv heads, capacity, head_dim] each.

    The buffers are opaque OrtValues that never leave the device. Slots at or beyond `length` are never read.
    """

    def __init__(self, spec: TensorSpec, count: int, device: str, *, batch_size: int, limit: int) -> None:
        """`spec` is one cache input of the graph, `count` how many there are, `limit` the most slots ever."""
        self.batch_size, self.limit = batch_size, limit
        self.length = 0
        """Slots in use, padding included."""
        self.capacity = min(SMALLEST_CAPACITY, limit)
        self._spec, self._count, self._device = spec, count, device
        self._token_ids: NDArray[np.int64] = np.zeros((batch_size, self.capacity), np.int64)
        self._mask: NDArray[np.int64] = np.zeros((batch_size, self.capacity), np.int64)
        self.buffers = [self._allocate(self.capacity) for _ in range(count)]
        self.binding: Any = None
        """Of a session to these buffers; its runner's, and None whenever the buffers are new."""

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        _, heads, _, size = self._spec.shape
        item = 4 if self._spec.dtype == "float32" else 2
        return self._count * self.batch_size * int(heads) * self.capacity * int(size) * item

    @property
    def mask(self) -> NDArray[np.int64]:
        """[batch, length]: 1 for a token, 0 for padding."""
        return self._mask[:, : self.length]

    def shared_prefix(self, token_ids: Sequence[int]) -> int:
        """How many of these ids, from the first on, row 0 holds already."""
        count = min(self.length, len(token_ids))
        differ = np.flatnonzero(self._token_ids[0, :count] != np.asarray(token_ids[:count], np.int64))
        return int(differ[0]) if differ.size else count

    def append(self, token_ids: NDArray[np.int64], mask: NDArray[np.int64], grow: Grow) -> None:
        """Take the next slots for these tokens, both [batch, S], growing the buffers where needed."""
        end = self.length + mask.shape[1]
        if end > self.capacity:
            self._grow(end, grow)
        self._token_ids[:, self.length : end] = token_ids
        self._mask[:, self.length : end] = mask
        self.length = end

    def truncate(self, length: int) -> None:
        """Forget the slots from `length` on."""
        self.length = min(self.length, length)

    def _grow(self, wanted: int, grow: Grow) -> None:
        capacity = self.capacity
        while capacity < wanted:
            capacity *= 2
        capacity = min(capacity, self.limit)
        self.binding = None
        try:
            # One at a time: only one old buffer is held beside the new.
            for index, small in enumerate(self.buffers):
                large = self._allocate(capacity)
                grow(small, large)
                self.buffers[index] = large
        except BaseException:  # buffers of two sizes serve no graph: begin again, as small as at first
            self.length, self.buffers, self.capacity = 0, [], min(SMALLEST_CAPACITY, self.limit)
            self.buffers = [self._allocate(self.capacity) for _ in range(self._count)]
            self._token_ids = self._token_ids[:, : self.capacity].copy()
            self._mask = self._mask[:, : self.capacity].copy()
            raise
        wider = ((0, 0), (0, capacity - self.capacity))
        self._token_ids, self._mask = np.pad(self._token_ids, wider), np.pad(self._mask, wider)
        self.capacity = capacity

    def _allocate(self, capacity: int) -> Any:
        _, heads, _, size = self._spec.shape
        shape = (self.batch_size, int(heads), capacity, int(size))
        ort_value = import_onnxruntime().OrtValue
        if self._spec.dtype == "bfloat16":
            return ort_value.ortvalue_from_shape_and_type(shape, _BFLOAT16, self._device)
        # Zeros, so that a slot that was never written holds a number.
        return ort_value.ortvalue_from_numpy(np.zeros(shape, self._spec.dtype), self._device)
