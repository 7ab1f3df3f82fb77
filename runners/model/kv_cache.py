"""The KV cache of one batch of sequences: buffers on the device, and which of their slots are live."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.errors import OutOfMemoryError
from qwen_onnx.manifest import TensorSpec
from qwen_onnx.runners.runtime.session import first_line, import_onnxruntime

if TYPE_CHECKING:
    import onnxruntime

SMALLEST_CAPACITY = 256
BLOCK = 64
"""Slots that a cache grows by, where it grows tightly: products over them are fastest at round numbers."""
ELEMENT_TYPES = {"float32": 1, "float16": 10, "bfloat16": 16}
"""As onnx.TensorProto numbers them; numpy has no bfloat16."""

HOST_TYPES: dict[str, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
}
"""What a buffer's numbers are on the host: of bfloat16 the bits."""

Grow = Callable[["onnxruntime.OrtValue", "onnxruntime.OrtValue"], None]


@dataclasses.dataclass(eq=False)
class Buffers:
    """A cache's memory on the device, and what was bound to it: outlives the cache, for the next one of its batch."""

    batch_size: int
    capacity: int
    values: list[Any]
    """OrtValues, a key and a value for each layer."""
    binding: Any = None
    """Of a session to these values; its runner's, and None whenever the values are new."""


class KVCache:
    """Keys and values of every layer, [batch, kv heads, capacity, head_dim] each.

    The buffers are opaque OrtValues that never leave the device. Slots at or beyond `length` are never read for
    what they hold.
    """

    def __init__(
        self,
        spec: TensorSpec,
        count: int,
        device: str,
        *,
        batch_size: int,
        limit: int,
        idle: list[Buffers] | None = None,
        tight: bool = False,
    ) -> None:
        """An empty cache.

        Args:
            spec: one cache input of the graph, of `count`.
            limit: the most slots ever.
            tight: it grows by an eighth at a time, not to twice its size.
            idle: buffers of caches that are gone; taken from here, and given back when this one is gone too.

        Raises:
            UserError: it does not fit on the device.
        """
        self.batch_size, self.limit = batch_size, limit
        self.length = 0
        """Slots in use, padding included."""
        self._spec, self._count, self._device, self._idle, self._tight = spec, count, device, idle, tight
        self._held = _taken(idle or [], batch_size) or self._new_buffers()
        if idle is not None:
            weakref.finalize(self, _give_back, idle, self._held).atexit = False
        self._token_ids: NDArray[np.int64] = np.zeros((batch_size, self.capacity), np.int64)
        self._mask: NDArray[np.int64] = np.zeros((batch_size, self.capacity), np.int64)
        self._full_mask: NDArray[np.int64] | None = None
        self._padded = False
        self.logits: NDArray[np.float32] = np.empty((batch_size, 0), np.float32)
        """After the last step, [batch, vocab], of steps that put them out on the host."""

    @property
    def capacity(self) -> int:
        """Slots of the buffers."""
        return self._held.capacity

    @property
    def buffers(self) -> list[Any]:
        """OrtValues on the device, key before value, layer by layer."""
        return self._held.values

    @property
    def binding(self) -> Any:
        """What a runner bound to the buffers; None whenever they are new."""
        return self._held.binding

    @binding.setter
    def binding(self, binding: Any) -> None:
        self._held.binding = binding

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self.batch_size * self.capacity * self.slot_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of one row's slot, in all buffers together."""
        _, heads, _, size = self._spec.shape
        item = 4 if self._spec.dtype == "float32" else 2
        return self._count * int(heads) * int(size) * item

    @property
    def element_type(self) -> int:
        """Of the buffers, an onnx.TensorProto number."""
        return ELEMENT_TYPES[self._spec.dtype]

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
    def dtype(self) -> str:
        """Of the buffers: float32, float16 or bfloat16."""
        return self._spec.dtype

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """The ids in the slots of row 0, [length]."""
        return self._token_ids[0, : self.length].copy()

    def read(self) -> Iterator[NDArray[Any]]:
        """Copies of row 0's live slots, buffer after buffer, [kv heads, length, head_dim] of HOST_TYPES."""
        for value in self.buffers:
            host = np.empty(value.shape(), HOST_TYPES[self.dtype])
            if self.length:
                self._over(host).update_inplace(value)
            yield host[0, :, : self.length]

    def fill(self, token_ids: NDArray[np.int64], slots: Iterable[NDArray[Any]]) -> None:
        """Hold ids [length] in place of what row 0 holds, and for them what `read` gave.

        What `slots` raises, at its end too, leaves an empty cache.

        Raises:
            UserError: it does not fit on the device.
        """
        self.truncate(0)
        length = token_ids.size
        try:
            self._make_room(length)
            for live, value in zip(slots, self.buffers, strict=True):
                host = np.zeros(value.shape(), live.dtype)
                host[0, :, :length] = live
                if length:
                    value.update_inplace(self._over(host))
        except BaseException:  # there may be what is no number
            self._restart()
            raise
        self._token_ids[0, :length], self._mask[0, :length] = token_ids, 1
        self.length = length

    def shared_prefix(self, token_ids: Sequence[int]) -> int:
        """How many of these ids, from the first on, row 0 holds already."""
        count = min(self.length, len(token_ids))
        differ = np.flatnonzero(self._token_ids[0, :count] != np.asarray(token_ids[:count], np.int64))
        return int(differ[0]) if differ.size else count

    def append(self, token_ids: NDArray[np.int64], mask: NDArray[np.int64] | None, grow: Grow) -> None:
        """Take the next slots for these tokens, both [batch, S], growing the buffers where needed.

        Args:
            mask: 0 for padding; None where nothing is.
        """
        end = self.length + token_ids.shape[1]
        if not self.buffers:  # there was no memory for them
            self._restart()
        if end > self.capacity:
            self._grow(end, grow)
        self._token_ids[:, self.length : end] = token_ids
        self._mask[:, self.length : end] = 1 if mask is None else mask
        self.length = end
        if mask is not None and not mask.all():
            self._padded, self._full_mask = True, None

    def truncate(self, length: int) -> None:
        """Forget the slots from `length` on."""
        if length >= self.length:
            return
        self.length = length
        if self._padded:
            self._padded, self._full_mask = not self.mask.all(), None

    def renew(self) -> None:
        """Forget everything, and have zeros in all slots again: after a step that wrote what is no number."""
        self.truncate(0)
        self._restart()

    def _grow(self, wanted: int, grow: Grow) -> None:
        capacity = self._bucket(wanted)
        held = self._held
        held.binding = None
        try:
            # One at a time: only one old buffer is held beside the new.
            for index, small in enumerate(held.values):
                large = self._allocate(capacity)
                grow(small, large)
                held.values[index] = large
            self._widen(capacity)
        except BaseException:  # buffers of two sizes serve no graph: begin again, as small as at first
            self._restart()
            raise

    def _make_room(self, length: int) -> None:
        """Buffers of so many slots; what they hold does not matter."""
        if not self.buffers or length > self.capacity:
            self._held.values, self._held.binding = [], None  # before the new ones are made
            self._widen(self._bucket(length))
            self._held.values = [self._allocate(self.capacity) for _ in range(self._count)]

    def _bucket(self, wanted: int) -> int:
        capacity = self.capacity
        while capacity < wanted:
            capacity += -(-capacity // (8 * BLOCK)) * BLOCK if self._tight else capacity
        return min(capacity, self.limit)

    def _widen(self, capacity: int) -> None:
        wider = ((0, 0), (0, max(0, capacity - self.capacity)))
        self._token_ids, self._mask = np.pad(self._token_ids, wider), np.pad(self._mask, wider)
        self._held.capacity, self._full_mask = self._mask.shape[1], None

    def _restart(self) -> None:
        self.length, self._padded, self._full_mask = 0, False, None
        self._held.values, self._held.binding = [], None  # before the new ones are made
        fresh = self._new_buffers()
        self._held.capacity, self._held.values = fresh.capacity, fresh.values
        self._token_ids = np.zeros((self.batch_size, self.capacity), np.int64)
        self._mask = np.zeros((self.batch_size, self.capacity), np.int64)

    def _new_buffers(self) -> Buffers:
        capacity = min(SMALLEST_CAPACITY, self.limit)
        return Buffers(self.batch_size, capacity, [self._allocate(capacity) for _ in range(self._count)])

    def _allocate(self, capacity: int) -> Any:
        """A buffer of zeros: graphs that attend over the whole of it need a number in every slot."""
        _, heads, _, size = self._spec.shape
        shape = (self.batch_size, int(heads), capacity, int(size))
        ort_value = import_onnxruntime().OrtValue
        try:
            if self._spec.dtype != "bfloat16":
                return ort_value.ortvalue_from_numpy(np.zeros(shape, self._spec.dtype), self._device)
            buffer = ort_value.ortvalue_from_shape_and_type(shape, self.element_type, self._device)
            buffer.update_inplace(self._over(np.zeros(shape, np.uint16)))
            return buffer
        except Exception as error:  # ONNX Runtime's exceptions share no base class
            if self._idle:  # memory that nobody uses
                self._idle.clear()
                return self._allocate(capacity)
            raise OutOfMemoryError(
                f"a KV cache of {capacity} tokens x {self.batch_size} does not fit ({first_line(error)}); "
                "use a smaller --max-context"
            ) from None

    def _over(self, host: NDArray[Any]) -> Any:
        """A value on the CPU, of the buffers' type, over the array's own memory."""
        ort_value = import_onnxruntime().OrtValue
        if self.dtype == "bfloat16":
            return ort_value.ortvalue_from_numpy_with_onnx_type(host, self.element_type)
        return ort_value.ortvalue_from_numpy(host)


def _taken(idle: list[Buffers], batch_size: int) -> Buffers | None:
    """Idle buffers for such a batch, no longer in the list."""
    for held in list(idle):
        if held.batch_size == batch_size:
            with contextlib.suppress(ValueError):  # another thread was quicker
                idle.remove(held)
                return held
    return None


def _give_back(idle: list[Buffers], held: Buffers) -> None:
    if held.values:
        idle.append(held)
