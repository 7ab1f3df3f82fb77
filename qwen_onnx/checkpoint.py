"""A checkpoint folder: its config.json and where each tensor lies in its .safetensors files.

Headers are read and verified in full before anything is believed; tensor bytes are read when asked for.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import reprlib
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from qwen_onnx.config import QwenConfig, parse_config
from qwen_onnx.errors import UserError
from qwen_onnx.jsonfile import read_json

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_MAX_HEADER = 100_000_000  # the safetensors library's own limit, in bytes
_MAX_RANK = 64  # numpy's limit; the product of a million sizes takes minutes
_SHARD_NAME = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")

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
        mapped = np.memmap(self.file, FLOAT_DTYPES[self.dtype], "r", self.offset, math.prod(self.shape))
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


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A local checkpoint folder whose headers have been verified."""

    folder: Path
    config: QwenConfig
    tensors: dict[str, StoredTensor]
    notes: tuple[str, ...] = ()
    """What was found odd but harmless, one line each."""

    def read(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """The tensor `name` as a read-only memory map; KeyError when the checkpoint has none."""
        return self.tensors[name].numpy()


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read and verify config.json, the index and every header of a checkpoint folder.

    Raises:
        UserError: what is missing, truncated, inconsistent or unsupported, naming the file and tensor.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: not a folder; wanted a checkpoint (config.json and *.safetensors)")
    if (adapter := folder / "adapter_config.json").exists():
        raise UserError(f"{adapter} found: adapters are not supported; merge it into its base model first")
    config = parse_config(read_json(folder / "config.json"))
    tensors, notes = _find_tensors(folder)
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    config, notes = _decide_head(config, kept, notes)
    return Checkpoint(folder, config, kept, tuple(notes))


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
    _refuse_unprintable(path, header)
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


def _refuse_unprintable(path: Path, names: Iterable[str]) -> None:
    """An error naming a tensor has to stay one line, on any terminal."""
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


def _find_tensors(folder: Path) -> tuple[dict[str, StoredTensor], list[str]]:
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if (index := folder / INDEX_FILE).exists():
        return _follow_index(index, found)
    if SINGLE_FILE in found:
        files, strays = [SINGLE_FILE], [name for name in found if name != SINGLE_FILE]
    else:
        files, strays = _complete_set(folder, found)
    tensors: dict[str, StoredTensor] = {}
    for name in files:
        header = read_header(folder / name)
        if twice := sorted(header.keys() & tensors.keys()):
            raise UserError(f"{folder / name}: tensor {twice[0]} is also in {tensors[twice[0]].file.name}")
        tensors |= header
    return tensors, _stray_notes(strays)


def _complete_set(folder: Path, found: list[str]) -> tuple[list[str], list[str]]:
    """The shards of a folder without an index; their own names say how many there must be."""
    shards = {name: match for name in found if (match := _SHARD_NAME.fullmatch(name))}
    if not shards:
        torch_file = next(iter(sorted(folder.glob("*.bin")) + sorted(folder.glob("*.gguf"))), None)
        hint = f", found {torch_file.name}: convert it to safetensors" if torch_file else ""
        raise UserError(f"{folder}: wanted {SINGLE_FILE} or {INDEX_FILE}{hint}")
    totals = sorted({int(match[2]) for match in shards.values()})
    if len(totals) > 1:
        raise UserError(f"{folder}: wanted one set of shards, found sets of {totals}; remove all but one")
    files = [f"model-{k:05}-of-{totals[0]:05}.safetensors" for k in range(1, totals[0] + 1)]
    if missing := next((name for name in files if name not in shards), None):
        raise UserError(f"{folder}: wanted {missing}; incomplete download?")
    return files, [name for name in found if name not in files]


def _follow_index(index: Path, found: list[str]) -> tuple[dict[str, StoredTensor], list[str]]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: weight_map is missing or empty")
    _refuse_unprintable(index, weight_map)
    headers: dict[str, dict[str, StoredTensor]] = {}
    tensors = {}
    for name, file in weight_map.items():
        if not _is_safetensors_name(file):
            raise UserError(
                f"{index}: tensor {name} lies in {reprlib.repr(file)}? wanted the name of a .safetensors file"
            )
        if file not in headers:
            if not (index.parent / file).exists():
                raise UserError(
                    f"{index.parent / file}: no such file, {index.name} names it; incomplete download?"
                )
            headers[file] = read_header(index.parent / file)
        if name not in headers[file]:
            raise UserError(f"{index.parent / file}: has no tensor {name}, {index.name} says it does")
        tensors[name] = headers[file][name]
    notes = _stray_notes([name for name in found if name not in headers])
    for file, header in headers.items():
        if unnamed := sorted(header.keys() - tensors.keys()):
            notes.append(
                f"{file}: ignored {len(unnamed)} tensors that {index.name} does not name: {unnamed[0]}"
            )
    return tensors, notes


def _is_safetensors_name(file: Any) -> TypeGuard[str]:
    """A plain name, no path; and by its ending none that an export gives to a graph or a manifest."""
    if not isinstance(file, str) or not file.isprintable() or "\\" in file:
        return False
    return Path(file).name == file and file.endswith(".safetensors")


def _stray_notes(strays: list[str]) -> list[str]:
    return [f"ignored {', '.join(strays)}: not part of this checkpoint"] if strays else []


def _decide_head(
    config: QwenConfig, tensors: dict[str, StoredTensor], notes: list[str]
) -> tuple[QwenConfig, list[str]]:
    """Tied or own head: what the tensors are decides, not what the flag says."""
    head, embedding = tensors.get("lm_head.weight"), tensors.get("model.embed_tokens.weight")
    if head is None:
        if not config.tie_word_embeddings:
            raise UserError(
                "lm_head.weight is missing and config.json does not say tie_word_embeddings; incomplete download?"
            )
        return config, notes
    if embedding is not None and _equal(head, embedding):
        del tensors["lm_head.weight"]
        return dataclasses.replace(config, tie_word_embeddings=True), notes
    if config.tie_word_embeddings:
        notes = [*notes, "config.json says tie_word_embeddings, but lm_head.weight differs: it is used"]
    return dataclasses.replace(config, tie_word_embeddings=False), notes


def _equal(a: StoredTensor, b: StoredTensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    size = 16 << 20
    return all(left == right for left, right in zip(a.chunks(size), b.chunks(size), strict=True))
