"""Reading .safetensors files: headers verified in full before anything is believed, bytes when asked for."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import reprlib
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from qwen_onnx.errors import UserError

_MAX_HEADER = 100_000_000  # the safetensors library's own limit, in bytes
_COMPARED = 8 << 20  # bytes of each side at a time
_FEW = 64 << 10  # bytes, in which two numbers of a trained tensor differ
_MAX_RANK = 64  # numpy's limit; the product of a million sizes takes minutes

FLOAT_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_ITEM_SIZES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2,
    "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor's place in a .safetensors file."""

    name: str
    file: Path
    dtype: str
    """As the header spells it: F32, F16, BF16, ..."""
    shape: tuple[int, ...]
    offset: int
    """From the start of the file, in bytes."""
    nbytes: int

    def numpy(self) -> np.ndarray[Any, np.dtype[Any]]:
        """The tensor as a read-only memory map of its file."""
        dtype = np.dtype(np.uint8) if self.dtype == "U8" else FLOAT_DTYPES[self.dtype]
        mapped = np.memmap(self.file, dtype, "r", self.offset, math.prod(self.shape))
        return mapped.reshape(self.shape)

    def chunks(self, size: int) -> Iterator[bytes]:
        """The raw bytes, `size` at a time.

        Raises:
            UserError: the file became shorter than its header said.
        """
        with self.file.open("rb") as file:
            file.seek(self.offset)
            left = self.nbytes
            while left:
                chunk = file.read(wanted := min(size, left))
                if len(chunk) < wanted:  # a part may end inside a number
                    raise UserError(
                        f"{self.file}: ended inside tensor {self.name}; was it changed meanwhile?"
                    )
                left -= len(chunk)
                yield chunk

    def only_number(self) -> float | None:
        """The number that all of it is; None where two differ. Of other types than float, the bytes are its numbers.

        Raises:
            UserError: as `chunks`.
        """
        first = None
        for chunk in self.chunks(_FEW):
            numbers = np.frombuffer(chunk, FLOAT_DTYPES.get(self.dtype, np.dtype(np.uint8)))
            first = numbers[0] if first is None else first
            if not (numbers == first).all():
                return None
        return None if first is None else float(first)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Parse and verify the header of one .safetensors file.

    The offsets must tile the data section exactly: no overlap, no hole, nothing left over.

    Raises:
        UserError: naming the file, and the tensor where one is at fault.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise UserError(
                    f"{path}: {size} bytes is too short for a safetensors file; incomplete download?"
                )
            (length,) = struct.unpack("<Q", prefix)
            if length > min(_MAX_HEADER, size - 8):
                raise UserError(
                    f"{path}: header says it has {length} bytes, the file {size}; incomplete download?"
                )
            header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=_no_duplicates)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; incomplete download?") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: header is not valid JSON ({error})") from None
    if not isinstance(header, dict):
        raise UserError(f"{path}: header is not a JSON object")
    header.pop("__metadata__", None)
    refuse_unprintable(path, header)
    data_start = 8 + length
    tensors = [_stored_tensor(path, name, entry, data_start) for name, entry in header.items()]
    end = data_start
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset != end:
            fault = "overlaps the one before" if tensor.offset < end else "leaves a hole before it"
            raise UserError(f"{path}: tensor {tensor.name} {fault}: the header is wrong")
        end += tensor.nbytes
    if end != size:
        raise UserError(f"{path}: {size} bytes found, the header wants {end}; incomplete download?")
    return {tensor.name: tensor for tensor in tensors}


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"{name!r} stands twice")
        result[name] = value
    return result


def refuse_unprintable(path: Path, names: Iterable[str]) -> None:
    """An error naming a tensor has to stay one line, on any terminal.

    Raises:
        UserError: a name that would not.
    """
    if other := next((name for name in names if not name.isprintable()), None):
        raise UserError(f"{path}: {other!r} is not a tensor name")


def _stored_tensor(path: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    where = f"{path}: tensor {name}"
    if not isinstance(entry, dict):
        raise UserError(f"{where}: wanted an object, found {reprlib.repr(entry)}")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _ITEM_SIZES:
        raise UserError(f"{where}: unknown dtype {reprlib.repr(dtype)}")
    if not _are_sizes(shape):
        raise UserError(f"{where}: shape {reprlib.repr(shape)} is not a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise UserError(f"{where}: data_offsets {reprlib.repr(offsets)} are not a begin and an end")
    nbytes = offsets[1] - offsets[0]
    if math.prod(shape) * _ITEM_SIZES[dtype] != nbytes:
        raise UserError(f"{where}: {dtype} {shape} does not fill its {nbytes} bytes")
    return StoredTensor(name, path, dtype, tuple(shape), data_start + offsets[0], nbytes)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    if not isinstance(value, list) or len(value) > _MAX_RANK:
        return False
    return all(type(size) is int and 0 <= size < 2**63 for size in value)


def same_tensor(left: StoredTensor, right: StoredTensor) -> bool:
    """Whether two stored tensors have one type, one shape and the same bytes."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return same_bytes(left.chunks(_COMPARED), right.chunks(_COMPARED))


def same_bytes(left: Iterator[bytes], right: Iterator[bytes | memoryview]) -> bool:
    """Whether two streams of bytes are equal, however each is cut into pieces."""
    held, other = b"", b""
    for a, b in itertools.zip_longest(left, right, fillvalue=b""):
        held, other = held + a, other + bytes(b)
        common = min(len(held), len(other))
        if held[:common] != other[:common]:
            return False
        held, other = held[common:], other[common:]
    return not held and not other
