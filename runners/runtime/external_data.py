"""Which files a graph reads its weights from, asked of its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from qwen_onnx.contract.manifest import Manifest, is_weights
from qwen_onnx.errors import UserError
from qwen_onnx.runners.runtime.protobuf import MalformedError, fields

_LOCATION = b"location"
# ModelProto.graph, GraphProto.initializer, TensorProto.external_data: where an export's graphs have locations.
_PATH = (7, 5, 13)
_KEY, _VALUE = 1, 2  # of StringStringEntryProto


def refuse_foreign_data(path: Path, content: bytes, name: str, manifest: Manifest) -> None:
    """Every location of external data in a graph's bytes is a weights file of the manifest.

    Args:
        name: the graph's, as the manifest has it; locations count from its folder.

    Raises:
        UserError: not protobuf, or a location that is absolute, leaves the folder, or is not an export's.
    """
    if _LOCATION not in content:
        return
    weights = {file for file in manifest.files if is_weights(file)}
    folder = PurePosixPath(name).parent
    try:
        for location in _locations(content, 0, len(content), 0):
            text = location.decode(errors="replace")
            if str(folder / text) not in weights:
                raise UserError(
                    f"{path}: reads weights from {text[:200]!r}, which is no weights file of this export; "
                    "copy or export it again"
                )
    except MalformedError as error:
        raise UserError(f"{path}: not a graph of an export ({error}); copy or export it again") from None


def _locations(content: bytes, begin: int, end: int, depth: int) -> Iterator[bytes]:
    """The locations below a message; only what holds that word at all is looked into."""
    if depth == len(_PATH):
        yield from _entry(content, begin, end)
        return
    at = content.find(_LOCATION, begin, end)
    for number, first, last in fields(content, begin, end):
        if last <= at or first == last:
            continue
        at = content.find(_LOCATION, first, end)
        if at < 0:
            return
        if at + len(_LOCATION) > last:
            continue
        if number != _PATH[depth]:
            raise MalformedError(f"external data in field {number}, {depth} messages deep")
        yield from _locations(content, first, last, depth + 1)


def _entry(content: bytes, begin: int, end: int) -> Iterator[bytes]:
    held = {_KEY: b"", _VALUE: b""}
    for number, first, last in fields(content, begin, end):  # of a field that stands twice, the last counts
        held[number] = content[first:last]
    if held[_KEY] == _LOCATION:
        yield held[_VALUE]
