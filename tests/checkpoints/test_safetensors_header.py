"""read_header against damaged and hostile .safetensors files, and against what the safetensors library writes."""

from __future__ import annotations

import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_onnx.checkpoints.safetensors_file import FLOAT_DTYPES, read_header
from support.refusals import refused

Header = dict[str, Any] | bytes


def shard(header: Header, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(begin: Any = 0, end: Any = 8, *, dtype: Any = "F32", shape: Any = (2,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in entry().items() if name != key}


FILES = {
    "empty": b"",
    "shorter than the length": b"\x02\0\0\0\0\0\0",
    "length and nothing else": struct.pack("<Q", 2),
    "length -1": struct.pack("<q", -1) + b"{}",
    "length one beyond the end": struct.pack("<Q", 3) + b"{}",
    "length 2**40": struct.pack("<Q", 1 << 40) + b"{}",
    "length 0": struct.pack("<Q", 0) + b"{}",
    "not JSON": shard(b"{"),
    "text after the JSON": shard(b"{}x"),
    "not UTF-8": shard(b'{"\xff":1}'),
    "byte order mark": shard(b"\xef\xbb\xbf{}"),
    "an array": shard(b"[]"),
    "null": shard(b"null"),
    "nested arrays": shard(b"[" * 100_000),
    "nested objects": shard(b'{"a":' * 100_000),
    "a number of 5,000 digits": shard(b'{"a":' + b"9" * 5_000 + b"}"),
    "a name twice": shard(b'{"a":' + json.dumps(entry()).encode() + b',"a":1}', bytes(8)),
    "a key twice": shard(b'{"a":{"dtype":"F32","dtype":"F16"}}'),
    "bytes after the last tensor": shard({"a": entry()}, bytes(9)),
    "bytes and no tensor": shard({}, bytes(1)),
    "truncated": shard({"a": entry()}, bytes(7)),
    "a line break in a name": shard({"a\nb": entry()}, bytes(8)),
    "a terminal's escape in a name": shard({"a\x1b[2J": entry()}, bytes(8)),
    "half a surrogate pair in a name": shard(b'{"\\ud800":' + json.dumps(entry()).encode() + b"}", bytes(8)),
}

# The tensor at fault is called "bad" in each.
TENSORS: dict[str, Header] = {
    "overlaps the one before": {"a": entry(0, 8), "bad": entry(4, 12)},
    "lies where another lies": {"a": entry(0, 8), "bad": entry(0, 8)},
    "leaves a hole": {"a": entry(0, 8), "bad": entry(9, 17)},
    "leaves a hole at the start": {"bad": entry(1, 9)},
    "ends before it begins": {"bad": entry(8, 0)},
    "has less than its shape": {"bad": entry(0, 4)},
    "has more than its shape": {"bad": entry(0, 16)},
    "has a negative size": {"bad": entry(0, 8, shape=[-2])},
    "has two negative sizes": {"bad": entry(0, 8, shape=[-1, -2])},
    "has true for a size": {"bad": entry(0, 4, shape=[True])},
    "has a float for a size": {"bad": entry(0, 8, shape=[2.0])},
    "has a text for a size": {"bad": entry(0, 8, shape=["2"])},
    "has a huge size": {"bad": entry(0, 8, shape=[2**63])},
    "has sizes that wrap round to 0": {"bad": entry(0, 0, shape=[2**32, 2**32])},
    "has sizes that wrap round to 2": {"bad": entry(0, 8, shape=[2**62 + 2, 4])},
    "has a million dimensions": {"bad": entry(0, 8, shape=[2**62] * 1_000_000)},
    "has no shape": {"bad": without("shape")},
    "has a number for a shape": {"bad": entry(shape=2)},
    "has an object for a shape": {"bad": entry(shape={"0": 2})},
    "has an unknown dtype": {"bad": entry(dtype="F31")},
    "has a dtype in lower case": {"bad": entry(dtype="f32")},
    "has no dtype": {"bad": without("dtype")},
    "has a list for a dtype": {"bad": entry(dtype=["F32"])},
    "has null for a dtype": {"bad": entry(dtype=None)},
    "has no offsets": {"bad": without("data_offsets")},
    "has one offset": {"bad": {**entry(), "data_offsets": [0]}},
    "has three offsets": {"bad": {**entry(), "data_offsets": [0, 4, 8]}},
    "has a negative offset": {"bad": entry(-8, 0)},
    "has false for an offset": {"bad": entry(False, 8)},
    "has a float for an offset": {"bad": entry(0, 8.0)},
    "has null for offsets": {"bad": {**entry(), "data_offsets": None}},
    "is a list": {"bad": []},
    "is null": {"bad": None},
}


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_damaged_file_is_one_line_that_names_it(tmp_path: Path, content: bytes) -> None:
    """No tensor is read from a file whose header is wrong."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    refused(read_header, path, mentions=(path,))


@pytest.mark.parametrize("header", TENSORS.values(), ids=TENSORS)
def test_damaged_entry_is_one_line_that_names_its_tensor(tmp_path: Path, header: Header) -> None:
    """No tensor reaches into another's bytes or beyond the file."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(shard(header, bytes(17)))
    refused(read_header, path, mentions=(path, "tensor bad"))


def test_tensor_beyond_the_end_of_the_file_is_refused(tmp_path: Path) -> None:
    """Reading a memory map beyond the end would kill the process."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(shard({"a": entry(0, 8), "b": entry(8, 8 + 4 * 2**40, shape=[2**40])}, bytes(8)))
    refused(read_header, path, mentions=(path, "incomplete download"))


def test_oversized_header_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """However many gigabytes its length claims."""
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 10**9))
        file.truncate(2 * 10**9)  # sparse: takes no room
    refused(read_header, path, mentions=(path, 10**9))


def test_missing_file_and_folder_in_its_place(tmp_path: Path) -> None:
    refused(read_header, tmp_path / "none.safetensors", mentions=("none.safetensors", "no such file"))
    refused(read_header, tmp_path, mentions=(tmp_path,))


def test_library_refuses_what_we_refuse(tmp_path: Path) -> None:
    """So that no valid file is among the damaged ones above."""
    stricter = {  # by intent: names that would break a line, and what JSON leaves open
        "a line break in a name", "a terminal's escape in a name", "a name twice", "a key twice",
        "has a million dimensions",
    }  # fmt: skip
    contents = FILES | {name: shard(header, bytes(17)) for name, header in TENSORS.items()}
    path = tmp_path / "model.safetensors"
    for name, content in contents.items():
        path.write_bytes(content)
        if name not in stricter:
            with pytest.raises((safetensors.SafetensorError, OSError)):
                safetensors.safe_open(path, "np").__enter__()


DTYPES = [
    np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.uint8, np.bool_)
]
NAMES = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=12)


@st.composite
def tensor_sets(draw: st.DrawFn) -> dict[str, np.ndarray]:
    """Any names, dtypes and shapes, empty tensors and scalars among them."""
    tensors = {}
    for name in draw(st.lists(NAMES.filter(lambda name: name != "__metadata__"), unique=True, max_size=5)):
        shape = draw(st.lists(st.integers(0, 5), max_size=4))
        dtype = draw(st.sampled_from(DTYPES))
        values = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 2, shape)
        tensors[name] = values.astype(dtype)
    return tensors


@settings(max_examples=60, deadline=None)
@given(tensor_sets(), st.booleans())
def test_reads_every_file_that_the_library_writes(tensors: dict[str, np.ndarray], metadata: bool) -> None:
    """With the library's own offsets, shapes and names."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        safetensors.numpy.save_file(tensors, path, {"format": "pt"} if metadata else None)
        found = read_header(path)
        with safetensors.safe_open(path, "np") as library:
            assert found.keys() == set(library.keys()) == tensors.keys()
            for name, tensor in tensors.items():
                part = library.get_slice(name)
                assert list(found[name].shape) == part.get_shape()
                assert found[name].dtype == part.get_dtype()
                assert b"".join(found[name].chunks(7)) == tensor.tobytes()
                if found[name].dtype in FLOAT_DTYPES:
                    np.testing.assert_array_equal(found[name].numpy(), tensor)
