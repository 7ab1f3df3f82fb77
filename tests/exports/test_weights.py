"""The weights file: conversions bit by bit, the order of tensors, the layout and the hash."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from qwen_onnx.checkpoints.safetensors_file import FLOAT_DTYPES, StoredTensor, read_header
from qwen_onnx.exports import weights
from qwen_onnx.exports.weights import OutputTensor, converted
from qwen_onnx.exports.weights_file import PAGE, arrange, places_in, write_safetensors
from support.refusals import refused

PAIRS = list(itertools.permutations(FLOAT_DTYPES, 2))
UNSIGNED: dict[int, Any] = {2: np.uint16, 4: np.uint32}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tensors of some thousand numbers are converted in many pieces, the last one shorter."""
    monkeypatch.setattr(weights, "PIECE", 10_000)


def bits(values: np.ndarray) -> np.ndarray:
    return values.view(UNSIGNED[values.itemsize])


def samples(dtype: str) -> np.ndarray:
    """All values of a 16-bit type. Of f32: those around each 16-bit value, and any bits at all."""
    every = np.arange(2**16, dtype=np.uint16)
    if dtype != "F32":
        return every.view(FLOAT_DTYPES[dtype])
    near = np.concatenate(
        [bits(every.view(FLOAT_DTYPES[kind]).astype(np.float32)) for kind in ("F16", "BF16")]
    )
    # Exact, halfway (0x1000 is half of an f16's last bit, 0x8000 of a bf16's), and one to each side.
    offsets = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    random = np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32)
    return np.concatenate([np.add.outer(offsets, near).ravel(), random]).view(np.float32)


def stored(folder: Path, values: np.ndarray) -> StoredTensor:
    path = folder / "source.safetensors"
    safetensors.numpy.save_file({"w": values}, path)
    return read_header(path)["w"]


def convert(folder: Path, values: np.ndarray, dtype: str) -> np.ndarray:
    tensor = converted(stored(folder, values), dtype)
    return np.frombuffer(b"".join(tensor.pieces()), FLOAT_DTYPES[dtype])


def cast(values: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return values.astype(FLOAT_DTYPES[dtype])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_conversion_is_bit_exact(tmp_path: Path, source: str, target: str) -> None:
    """Numbers round to nearest even; subnormals, -0 and infinities are kept, at the end of a piece too.

    NaN stays NaN, and its payload is not promised where the type becomes narrower.
    """
    values = samples(source)
    wanted = cast(values, target)
    holds = ~np.isinf(wanted) | np.isinf(cast(values, "F32"))
    values, wanted = values[holds], wanted[holds]
    number = ~np.isnan(wanted)
    assert np.isposinf(wanted).any()
    assert np.isneginf(wanted).any()
    assert (values.size * values.itemsize) % (weights.PIECE // 4 * values.itemsize), "ends with a whole piece"
    found = convert(tmp_path, values, target)
    np.testing.assert_array_equal(bits(found)[number], bits(wanted)[number])
    assert np.isnan(found[~number]).all()
    if target == "F32":
        assert (np.signbit(found) == np.signbit(values)).all(), "a NaN's sign"


def test_bf16_becomes_f32_with_its_nan_payloads(tmp_path: Path) -> None:
    """The sixteen bits are the upper half, all of them, of signalling NaNs too."""
    values = samples("BF16")
    found = convert(tmp_path, values, "F32")
    np.testing.assert_array_equal(bits(found), bits(values).astype(np.uint32) << 16)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_equal_types_leave_the_bytes_untouched(tmp_path: Path, dtype: str) -> None:
    """NaNs keep their payload, and negative zeros their sign."""
    values = samples(dtype)
    assert b"".join(converted(stored(tmp_path, values), dtype).pieces()) == values.tobytes()


@pytest.mark.parametrize("size", [1, 2499, 2500, 2501, 5000, 7499])
def test_sizes_around_a_piece(tmp_path: Path, size: int) -> None:
    """The last piece is whole, whether or not the size is a multiple of a piece."""
    values = np.arange(size, dtype=np.float32)
    for dtype in FLOAT_DTYPES:
        np.testing.assert_array_equal(convert(tmp_path, values, dtype), cast(values, dtype))


@pytest.mark.parametrize(
    ("source", "target", "value"),
    [
        ("F32", "F16", 65520.0),  # the least that rounds to infinity
        ("F32", "F16", -1e5),
        ("BF16", "F16", 65536.0),
        ("BF16", "F16", 98304.0),  # with the exponent of f16's infinity, its bits are those of a NaN
        ("BF16", "F16", float(ml_dtypes.finfo(ml_dtypes.bfloat16).min)),
        ("F32", "BF16", float(np.finfo(np.float32).max)),
    ],
)
def test_overflow_is_an_error_that_names_file_tensor_and_value(
    tmp_path: Path, source: str, target: str, value: float
) -> None:
    """No finite weight becomes an infinity."""
    values = np.ones(9_000, FLOAT_DTYPES[source])
    values[8_000] = value
    line = refused(convert, tmp_path, values, target, mentions=("source.safetensors", "tensor w"))
    assert f"{abs(value):.3g}" in line


def test_largest_value_below_the_overflow_is_kept(tmp_path: Path) -> None:
    """A value that rounds to the largest finite one is no overflow."""
    largest = np.nextafter(np.float32(65520), np.float32(0))
    assert convert(tmp_path, np.array([largest, -largest], np.float32), "F16").tolist() == [65504, -65504]


@pytest.mark.parametrize("left", [20_001, 20_000, 1, 0])
def test_source_that_shrank_is_an_error(tmp_path: Path, left: int) -> None:
    """Also where the file now ends inside a number."""
    tensor = stored(tmp_path, np.ones(30_000, np.float32))
    os.truncate(tensor.file, tensor.offset + left)
    for dtype in ("F32", "F16"):
        write = write_safetensors
        refused(write, tmp_path / dtype, [converted(tensor, dtype)], mentions=(tensor.file, "tensor w"))


def test_written_file_is_what_the_library_reads(tmp_path: Path) -> None:
    """Header, places, size and sha256 are those of the file; its data begins on a page, without holes."""
    rng = np.random.default_rng(0)
    shapes = {"a": (64, 32), "b": (3,), "c.ü": (5, 7, 2), "d": (), "e": (4096,)}
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    safetensors.numpy.save_file(arrays, tmp_path / "source.safetensors")
    header = read_header(tmp_path / "source.safetensors")
    tensors = arrange([converted(header[name], "F16") for name in arrays])
    path, seen = tmp_path / "weights.safetensors", []
    places = places_in(path.name, tensors)
    spec = write_safetensors(path, tensors, progress=seen.append)

    content = path.read_bytes()
    assert spec.size == len(content)
    assert spec.sha256 == hashlib.sha256(content).hexdigest()
    length = int.from_bytes(content[:8], "little")
    assert (8 + length) % PAGE == 0, "the data does not begin on a page"
    assert list(json.loads(content[8 : 8 + length]))[1:] == [tensor.name for tensor in tensors]
    assert sum(seen) == len(content) - 8 - length
    with safetensors.safe_open(path, "np") as library:  # which refuses holes
        assert library.metadata() == {"format": "pt"}  # without it transformers refuses the file
        for name, array in arrays.items():
            np.testing.assert_array_equal(library.get_tensor(name), array.astype(np.float16))
            place = places[name]
            assert place.file == path.name
            assert content[place.offset : place.offset + place.nbytes] == array.astype(np.float16).tobytes()


def test_existing_file_is_never_emptied(tmp_path: Path) -> None:
    """A checkpoint's own file may be hard-linked under the name of the one to be written."""
    tensor = stored(tmp_path, np.ones(9, np.float32))
    before = tensor.file.read_bytes()
    with pytest.raises(FileExistsError):
        write_safetensors(tensor.file, [converted(tensor, "F16")])
    assert tensor.file.read_bytes() == before


def test_order_keeps_pages_and_packed_projections() -> None:
    """Tensors of whole pages come first, so that a small norm moves none off its page; q, k and v stay together."""
    layer = "model.layers.{}.{}"
    names = [
        layer.format(i, part)
        for i in (0, 1, 10)
        for part in (
            "mlp.up_proj.weight", "input_layernorm.weight", "self_attn.v_proj.weight", "mlp.gate_proj.weight",
            "self_attn.v_proj.bias", "self_attn.q_proj.bias", "self_attn.o_proj.weight", "self_attn.k_proj.bias",
            "self_attn.k_proj.weight", "self_attn.q_proj.weight", "mlp.down_proj.weight",
        )
    ]  # fmt: skip
    names += ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "rotary.cos", "rotary.sin"]

    def is_whole(name: str) -> bool:
        return (
            "norm" not in name and "bias" not in name and name != layer.format(10, "self_attn.k_proj.weight")
        )

    def nothing() -> Iterator[bytes]:
        yield from ()

    sizes = {name: PAGE // 2 if is_whole(name) else PAGE // 4 + 1 for name in names}  # of four bytes
    order = [tensor.name for tensor in arrange([OutputTensor(n, "F32", (sizes[n],), nothing) for n in names])]
    assert sorted(order) == sorted(names)
    for i, kind in itertools.product((0, 1, 10), ("weight", "bias")):
        groups = [[f"self_attn.{part}_proj.{kind}" for part in "qkv"]]
        groups += [["mlp.gate_proj.weight", "mlp.up_proj.weight"]]
        for group in groups:
            start = order.index(layer.format(i, group[0]))
            assert order[start : start + len(group)] == [layer.format(i, name) for name in group]
    with_a_neighbour_that_is_not = {layer.format(10, f"self_attn.{part}_proj.weight") for part in "qv"}
    first = {name for name in names if is_whole(name)} - with_a_neighbour_that_is_not
    assert set(order[: len(first)]) == first
