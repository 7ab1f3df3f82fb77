"""I/O binding: the cache as past and present of a session, and running it with errors in one line."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from qwen_onnx.runners.runtime.session import failed, import_onnxruntime

if TYPE_CHECKING:
    from qwen_onnx.runners.model.kv_cache import KVCache

EAGER = -1
"""As `gpu_graph_id`: neither capture nor replay this run."""


def bind_cache(binding: Any, cache: KVCache) -> None:
    """All rows; past and present are the same buffer, which is written in place."""
    for state, buffer in zip(cache.spec.states, cache.buffers, strict=True):
        binding.bind_ortvalue_input(state.past, buffer)
        binding.bind_ortvalue_output(state.present, buffer)


def bind_cache_row(binding: Any, cache: KVCache, row: int) -> None:
    """One row of a batch, as a batch of its own."""
    for state, buffer in zip(cache.spec.states, cache.buffers, strict=True):
        place = row_of(buffer, row)
        binding.bind_input(state.past, *place)
        binding.bind_output(state.present, *place)


def row_of(value: Any, row: int) -> tuple[str, int, Any, list[int], int]:
    """Row `row` of an OrtValue, as bind_input and bind_output take it: device, type, shape [1, ...], address."""
    shape = value.shape()
    nbytes = value.tensor_size_in_bytes() // shape[0] if math.prod(shape) else 0
    address = value.data_ptr() + row * nbytes
    return value.device_name(), 0, value.element_type(), [1, *shape[1:]], address


def from_numpy(array: NDArray[Any], device: str = "cpu") -> Any:
    """An OrtValue over the array's own memory on the CPU, and over a copy elsewhere."""
    return import_onnxruntime().OrtValue.ortvalue_from_numpy(array, device)


def run_bound(session: Any, binding: Any, graph_id: int | None = None) -> None:
    """Run with everything bound.

    Args:
        graph_id: of the CUDA graph to capture, or to replay once it is; EAGER for neither. None where the session
            captures nothing.

    Raises:
        UserError: what ONNX Runtime failed with.
    """
    options = None
    if graph_id is not None:
        options = import_onnxruntime().RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(graph_id))
    try:
        session.run_with_iobinding(binding, options)
    except Exception as error:  # ONNX Runtime's exceptions share no base class
        raise failed("ONNX Runtime failed", error) from None
