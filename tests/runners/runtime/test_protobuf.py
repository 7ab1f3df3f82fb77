"""Fields of protobuf messages, against messages that are written by protobuf's own rules."""

from __future__ import annotations

import struct

import pytest

from qwen_onnx.runners.runtime.protobuf import MalformedError, fields, varint

MESSAGE = [
    (1, b"\x08", b"\xac\x02"),  # 300, a number of two bytes
    (2, b"\x11", struct.pack("<d", 0.5)),
    (3, b"\x1a\x05", b"bytes"),
    (4, b"\x25", struct.pack("<f", 0.25)),
    (20, b"\xa2\x01\x81\x01", b"x" * 129),  # a tag of two bytes, and a length of two
    (5, b"\x2a\x00", b""),
    (6, b"\x30", b"\x00"),
]
"""Number, tag and length, and content of fields of every wire type that is in use."""
FIXED = (2, 4)


def test_fields_of_every_wire_type_follow_each_other() -> None:
    content = b"".join(head + body for _, head, body in MESSAGE)
    found = list(fields(b"??" + content + b"??", 2, 2 + len(content)))
    assert [number for number, _, _ in found] == [number for number, _, _ in MESSAGE]
    for (number, begin, end), (_, _, body) in zip(found, MESSAGE, strict=True):
        assert (b"??" + content)[begin:end] == (b"" if number in FIXED else body)
    assert list(fields(b"", 0, 0)) == []


@pytest.mark.parametrize("index", range(5))
def test_a_field_cut_off_is_no_field(index: int) -> None:
    _, head, body = MESSAGE[index]
    whole = head + body
    for length in range(1, len(whole)):
        with pytest.raises(MalformedError):
            list(fields(whole, 0, length))


@pytest.mark.parametrize("kind", [3, 4, 6, 7])
def test_other_wire_types_are_refused(kind: int) -> None:
    with pytest.raises(MalformedError, match=f"wire type {kind}"):
        list(fields(bytes([8 + kind]) + b"\0" * 20, 0, 21))


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 2**14 - 1, 2**14, 2**32, 2**63, 2**64 - 1])
def test_numbers_of_one_to_ten_bytes(number: int) -> None:
    content, left = b"", number
    while left >= 128:
        content, left = content + bytes([left % 128 + 128]), left // 128
    content += bytes([left])
    assert varint(b"?" + content, 1, 1 + len(content)) == (number, 1 + len(content))
    with pytest.raises(MalformedError, match="without an end"):
        varint(content, 0, len(content) - 1)


def test_a_number_that_never_ends_is_refused() -> None:
    with pytest.raises(MalformedError, match="without an end"):
        varint(b"\x80" * 11 + b"\0", 0, 12)
