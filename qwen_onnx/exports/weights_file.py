"""Writes weights files: safetensors, tensor by tensor, in an order that lets graphs read them as they lie.

Memory stays at a few pieces whatever the model's size, and the sha256 is taken from the bytes as they pass.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import itertools
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from qwen_onnx.checkpoints.safetensors_file import StoredTensor
from qwen_onnx.contract.manifest import FileSpec
from qwen_onnx.exports.graph_file import PACKED, StoredParameter
from qwen_onnx.exports.weights import OutputTensor

PAGE = 4096
_HEADER = 1 << 20  # bytes left for a header where files have a limit; those of published models take a tenth


def arrange(tensors: Sequence[OutputTensor]) -> list[OutputTensor]:
    """Order of the file: what is packed together stays together, and all that can begin on a page does.

    Groups made of whole pages come first; since the data section begins on a page, each of them does.
    """
    groups: dict[str, list[OutputTensor]] = {}
    for tensor in tensors:
        groups.setdefault(_place(tensor.name)[0], []).append(tensor)
    for group in groups.values():
        group.sort(key=lambda tensor: _place(tensor.name))
    whole = [group for group in groups.values() if all(tensor.nbytes % PAGE == 0 for tensor in group)]
    rest = [group for group in groups.values() if any(tensor.nbytes % PAGE for tensor in group)]
    return list(itertools.chain(*whole, *rest))


def places_in(file: str, tensors: Sequence[OutputTensor]) -> dict[str, StoredParameter]:
    """Where each tensor will lie in a file of this name, once `write_safetensors` has written it."""
    places, offset = {}, len(_header(tensors))
    for tensor in tensors:
        places[tensor.name] = StoredParameter(file, offset, tensor.nbytes)
        offset += tensor.nbytes
    return places


def write_safetensors(
    path: Path, tensors: Sequence[OutputTensor], *, progress: Callable[[int], None] = lambda _: None
) -> FileSpec:
    """Write the file in the given order; its header is padded so that the data begins on a page.

    Args:
        progress: called with the number of bytes just written.

    Returns:
        size and hash.

    Raises:
        UserError: a value that the new type cannot hold, or a source that changed meanwhile.
        OSError: from the file system.
    """
    header = _header(tensors)
    sha256 = hashlib.sha256(header)
    # "x": where a checkpoint's file is linked under that name, opening it would empty the checkpoint.
    pieces = itertools.chain.from_iterable(tensor.pieces() for tensor in tensors)
    with path.open("xb") as file, concurrent.futures.ThreadPoolExecutor(2) as beside:
        file.write(header)
        # While a piece is written, it is hashed and the next one is converted.
        hashed, converted_next = beside.submit(sha256.update, b""), beside.submit(next, pieces, None)
        while (piece := converted_next.result()) is not None:
            converted_next = beside.submit(next, pieces, None)
            hashed.result()
            hashed = beside.submit(sha256.update, piece)
            file.write(piece)
            progress(len(piece))
        hashed.result()
        size = file.tell()
    return FileSpec(size, sha256.hexdigest())


def in_files(tensors: Sequence[OutputTensor], largest: int | None) -> list[list[OutputTensor]]:
    """Cut into files of at most `largest` bytes each, as far as one tensor and the header allow it."""
    files: list[list[OutputTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if largest is not None and files[-1] and size + tensor.nbytes > largest - _HEADER:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.nbytes
    return files


def stored_parameters(
    tensors: Mapping[str, StoredTensor], names: Mapping[Path, str]
) -> dict[str, StoredParameter]:
    """Where linked tensors lie: in the checkpoint's own files, which the export has under these names."""
    return {
        name: StoredParameter(names[tensor.file], tensor.offset, tensor.nbytes)
        for name, tensor in tensors.items()
    }


def _header(tensors: Sequence[OutputTensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in tensors:
        end = begin + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = -(-(8 + len(text)) // PAGE) * PAGE
    return struct.pack("<Q", padded - 8) + text.ljust(padded - 8)


def _place(name: str) -> tuple[str, int]:
    """The group that a tensor belongs to, and where it stands in it."""
    parts = name.split(".")
    for packed, modules in PACKED.items():
        for rank, module in enumerate(modules):
            if module in parts:
                return ".".join(packed if part == module else part for part in parts), rank
    return name, 0
