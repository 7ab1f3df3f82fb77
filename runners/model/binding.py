"""I/O binding: the cache as past and present of a session, and running it with errors in one line."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from numpy.typing import NDArray

from qwen_onnx import contract
from qwen_onnx.runners.model.kv_cache import KVCache
from qwen_onnx.runners.runtime.session import failed, import_onnxruntime

EAGER = -1
"""As `gpu_graph_id`: neither capture nor replay this run."""


class CacheNames(NamedTuple):
    """A graph's cache inputs and outputs, in the order of a cache's buffers."""

    past: list[str]
    present: list[str]

    @classmethod
    def of(cls, layers: int) -> CacheNames:
        """The names of a model of so many layers."""
        return cls(contract.past_names(layers), contract.present_names(layers))

    def bind(self, binding: Any, cache: KVCache) -> None:
        """All rows; past and present are the same buffer, which is written in place."""
        for past, present, buffer in zip(*self, cache.buffers, strict=True):
            binding.bind_ortvalue_input(past, buffer)
            binding.bind_ortvalue_output(present, buffer)

    def bind_row(self, binding: Any, cache: KVCache, row: int) -> None:
        """One row of a batch, as a batch of its own."""
        for past, present, buffer in zip(*self, cache.buffers, strict=True):
            place = row_of(buffer, row, cache.element_type)
            binding.bind_input(past, *place)
            binding.bind_output(present, *place)


def row_of(value: Any, row: int, element_type: Any) -> tuple[str, int, Any, list[int], int]:
    """Row `row` of an OrtValue, as bind_input and bind_output take it: device, type, shape [1, ...], address."""
    shape = value.shape()
    nbytes = value.tensor_size_in_bytes() // shape[0] if math.prod(shape) else 0
    return value.device_name(), 0, element_type, [1, *shape[1:]], value.data_ptr() + row * nbytes


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
