"""Fields of protobuf messages, read from bytes: the onnx package takes longer to import than this.

An .onnx file is protobuf: fields of a number and a wire type, one behind the other, messages within messages.
"""

from __future__ import annotations

from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class MalformedError(Exception):
    """Not protobuf, or not as an export's graphs are."""


def fields(content: bytes, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Number, begin and end of each field of a message; those of a number of fixed size are empty.

    Raises:
        MalformedError: it is no message.
    """
    at = begin
    while at < end:
        tag = content[at]
        if tag < 0x80:  # as nearly all are: the call costs more than the rest
            at += 1
        else:
            tag, at = varint(content, at, end)
        kind, size = tag & 7, 0
        if kind == _BYTES:
            size, at = varint(content, at, end)
        elif kind == _VARINT:
            _, after = varint(content, at, end)
            size = after - at
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise MalformedError(f"wire type {kind}")
        if at + size > end:
            raise MalformedError("a field beyond the end of its message")
        yield tag >> 3, at, at + size
        at += size


def varint(content: bytes, at: int, end: int) -> tuple[int, int]:
    """A number, and where it ends.

    Raises:
        MalformedError: it has no end.
    """
    if at < end and (value := content[at]) < 0x80:
        return value, at + 1
    value = shift = 0
    while at < end and shift < 64:
        byte = content[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise MalformedError("a number without an end")
