"""The memory of a KV cache on the device: allocated after a CacheSpec, grown, and kept for the next cache."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen_onnx import contract
from qwen_onnx.contract.cache_spec import CacheSpec, ResizeKey, StateSpec
from qwen_onnx.errors import OutOfMemoryError, option
from qwen_onnx.runners.model.binding import run_bound
from qwen_onnx.runners.runtime.session import first_line, import_onnxruntime

SMALLEST_CAPACITY = 256
ELEMENT_TYPES = {"float32": 1, "float16": 10, "bfloat16": 16}
"""As onnx.TensorProto numbers them; numpy has no bfloat16."""
HOST_TYPES: dict[str, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
}
"""What a buffer's numbers are on the host: of bfloat16 the bits."""


@dataclasses.dataclass(eq=False)
class Buffers:
    """A cache's tensors on the device, and what was bound to them: they may serve the next cache of its batch."""

    batch_size: int
    capacity: int
    """Slots, as far as the host counts them."""
    values: list[Any]
    """OrtValues, one for each state of the spec."""
    binding: Any = None
    """Of a session to these values; its executor's, and None whenever the values are new."""


class CacheMemory:
    """Makes the buffers of all caches of an executor."""

    def __init__(
        self,
        spec: CacheSpec,
        device: str,
        resize_sessions: Mapping[ResizeKey, Any],
        *,
        keep: bool = False,
        tight: bool = False,
        starts_empty: bool = False,
    ) -> None:
        """Nothing is allocated yet.

        Args:
            resize_sessions: by the resize_key of a state, a session that copies one into the front of a larger one.
            keep: buffers of caches that are gone serve again.
            tight: buffers grow by an eighth at a time, not to twice their size.
            starts_empty: tensors have no slots at first, whatever the host counts: each step brings its own.
        """
        self.spec, self.device, self.tight, self._starts_empty = spec, device, tight, starts_empty
        self._resize_sessions = resize_sessions
        self.idle: list[Buffers] | None = [] if keep else None
        """Of caches that are gone: ONNX Runtime releases no captured graph, so buffers and graph serve again."""

    def first(self, batch_size: int, limit: int) -> Buffers:
        """Idle buffers for such a batch, or new ones.

        Raises:
            UserError: they do not fit on the device.
        """
        for held in list(self.idle or ()):
            if held.batch_size == batch_size:
                with contextlib.suppress(ValueError):  # another thread was quicker
                    self.idle.remove(held)  # type: ignore[union-attr]
                    return held
        return self.new(batch_size, limit)

    def new(self, batch_size: int, limit: int) -> Buffers:
        """Buffers of zeros, as small as they are made.

        Raises:
            UserError: they do not fit on the device.
        """
        capacity = min(SMALLEST_CAPACITY, limit)
        return Buffers(batch_size, capacity, self.values(batch_size, 0 if self._starts_empty else capacity))

    def values(self, batch_size: int, slots: int) -> list[Any]:
        """A tensor of zeros for each state."""
        return [self._allocate(state, batch_size, slots) for state in self.spec.states]

    def resize(self, held: Buffers, capacity: int) -> None:
        """Larger tensors that begin as these do; one at a time, so that one old buffer is held beside the new."""
        held.binding = None
        for index, (state, small) in enumerate(zip(self.spec.states, held.values, strict=True)):
            if state.slot_axis is None:
                continue
            large = self._allocate(state, held.batch_size, capacity)
            self._copy(state, small, large)
            held.values[index] = large

    def give_back(self, held: Buffers) -> None:
        """For the next cache of such a batch."""
        if self.idle is not None and held.values:
            self.idle.append(held)

    def read(self, state: StateSpec, value: Any, slots: int) -> NDArray[Any]:
        """A copy of row 0 on the host, of HOST_TYPES, up to so many slots."""
        host = np.empty(value.shape(), HOST_TYPES[state.dtype])
        if host.size:
            _over(state, host).update_inplace(value)
        row: NDArray[Any] = host[0]
        return row if state.slot_axis is None else row.take(np.arange(slots), state.slot_axis - 1)

    def write(self, state: StateSpec, value: Any, row: NDArray[Any]) -> None:
        """What `read` gave, into row 0; zeros elsewhere."""
        host = np.zeros(value.shape(), HOST_TYPES[state.dtype])
        if not host.size:
            return
        host[0][tuple(map(slice, row.shape))] = row
        value.update_inplace(_over(state, host))

    def _allocate(self, state: StateSpec, batch_size: int, slots: int) -> Any:
        """Zeros: graphs that attend over the whole of a buffer need a number in every slot."""
        shape = state.sizes(batch_size=batch_size, slots=slots)
        ort_value = import_onnxruntime().OrtValue
        try:
            if state.dtype != "bfloat16":
                return ort_value.ortvalue_from_numpy(np.zeros(shape, state.dtype), self.device)
            buffer = ort_value.ortvalue_from_shape_and_type(shape, ELEMENT_TYPES[state.dtype], self.device)
            buffer.update_inplace(_over(state, np.zeros(shape, np.uint16)))
            return buffer
        except Exception as error:  # ONNX Runtime's exceptions share no base class
            if self.idle:  # memory that nobody uses
                self.idle.clear()
                return self._allocate(state, batch_size, slots)
            raise OutOfMemoryError(
                f"a KV cache of {slots} tokens x {batch_size} does not fit ({first_line(error)}); "
                f"use a smaller {option('max_context')}"
            ) from None

    def _copy(self, state: StateSpec, small: Any, large: Any) -> None:
        session = self._resize_sessions[state.resize_key]
        binding = session.io_binding()
        binding.bind_ortvalue_input(contract.GROW_FROM, small)
        binding.bind_ortvalue_input(contract.GROW_INTO, large)
        binding.bind_ortvalue_output(contract.GROW_RESULT, large)
        run_bound(session, binding)


def _over(state: StateSpec, host: NDArray[Any]) -> Any:
    """A value on the CPU, of the state's type, over the array's own memory."""
    ort_value = import_onnxruntime().OrtValue
    if state.dtype == "bfloat16":
        return ort_value.ortvalue_from_numpy_with_onnx_type(host, ELEMENT_TYPES[state.dtype])
    return ort_value.ortvalue_from_numpy(host)
