"""Block quantization: the bytes as ONNX Runtime's own kernels read them, the error per block, and what is refused."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from qwen_onnx.contract.quant import BLOCK_SIZES, QuantConfig
from qwen_onnx.errors import UserError
from qwen_onnx.exports.quantization.blocks import Blocks, dequantize, quantize, unpack

QUANTS = [
    QuantConfig(bits, size, zero_points)
    for bits in (4, 8)
    for size in BLOCK_SIZES
    for zero_points in (False, True)
]
SYMMETRIC = [quant for quant in QUANTS if not quant.zero_points]
ROWS = 24


def _named(quant: QuantConfig) -> str:
    return f"{quant.bits}x{quant.block_size}{'z' if quant.zero_points else ''}"


any_quant = pytest.mark.parametrize("quant", QUANTS, ids=_named)
any_symmetric = pytest.mark.parametrize("quant", SYMMETRIC, ids=_named)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def heavy(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(4, shape).astype(np.float32)


def codes_of(blocks: Blocks, quant: QuantConfig) -> np.ndarray:
    """Code by code, as the operators' documentation says it: less the zero point, [n, padded columns]."""
    codes = by_hand(blocks.codes, quant)
    if blocks.zero_points is None:
        return codes - quant.zero_point
    zeros = by_hand(blocks.zero_points, quant)[:, : blocks.scales.shape[1]]
    return codes - np.repeat(zeros, quant.block_size, axis=1)


def by_hand(packed: np.ndarray, quant: QuantConfig) -> np.ndarray:
    """Integers of two to a byte, or one."""
    if quant.bits == 8:
        return packed.astype(int)
    return np.array(
        [[half for byte in row for half in (byte % 16, byte // 16)] for row in packed.astype(int)]
    )


def in_blocks(rows: np.ndarray, quant: QuantConfig) -> np.ndarray:
    """f64 [n, blocks, block_size], zeros appended."""
    n, columns = rows.shape
    padded = np.zeros((n, quant.blocks(columns) * quant.block_size))
    padded[:, :columns] = rows
    return padded.reshape(n, -1, quant.block_size)


def plain_errors(rows: np.ndarray, quant: QuantConfig) -> list[np.ndarray]:
    """Norms of the errors, [n, blocks], of rounding by max|x| and by the extreme on the lowest code."""
    blocks = in_blocks(rows, quant)
    if quant.zero_points:
        low, high = np.minimum(blocks.min(-1, keepdims=True), 0), np.maximum(blocks.max(-1, keepdims=True), 0)
        scale = np.where(high > low, high - low, 1) / quant.levels
        zero = np.rint(-low / scale)
        rounded = np.clip(np.rint(blocks / scale) + zero, 0, quant.levels) - zero
        return [np.linalg.norm(blocks - rounded * scale, axis=-1)]
    extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., np.newaxis], -1)
    errors = []
    for reach in (quant.zero_point - 1, -quant.zero_point):
        scale = np.where(extreme, extreme, 1) / reach
        rounded = np.clip(np.rint(blocks / scale), -quant.zero_point, quant.zero_point - 1)
        errors.append(np.linalg.norm(blocks - rounded * scale, axis=-1))
    return errors


def error_of(rows: np.ndarray, quant: QuantConfig) -> np.ndarray:
    """Norm of the error of each block, [n, blocks]."""
    read = dequantize(quantize(rows, quant), rows.shape[1], quant)
    return np.linalg.norm(in_blocks(rows, quant) - in_blocks(read, quant), axis=-1)


def run(
    folder: Path,
    nodes: list[onnx.NodeProto],
    inputs: dict[str, np.ndarray],
    stored: dict[str, tuple[Any, ...]],
) -> list[np.ndarray]:
    """All of the nodes' outputs. `stored`: initializers in a file, as (array, dims); an array is written once."""
    places: dict[int, tuple[int, int]] = {}
    initializers = []
    with (folder / "weights").open("wb") as file:
        for name, (array, dims) in stored.items():
            if id(array) not in places:
                file.write(bytes(-file.tell() % 4096))
                places[id(array)] = file.tell(), array.nbytes
                file.write(array.tobytes())
            offset, length = places[id(array)]
            tensor = TensorProto(
                name=name, dims=dims, data_type=helper.np_dtype_to_tensor_dtype(array.dtype),
                data_location=TensorProto.EXTERNAL,
            )  # fmt: skip
            for key, value in (("location", "weights"), ("offset", offset), ("length", length)):
                tensor.external_data.add(key=key, value=str(value))
            initializers.append(tensor)
    declared = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in inputs.items()
    ]
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for node in nodes for name in node.output
    ]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "quantized", declared, outputs, initializers)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), str(folder / "model.onnx"))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"]
    )
    results: list[np.ndarray] = session.run(None, inputs)
    return results


def stored_as_inputs(blocks: Blocks) -> dict[str, tuple[Any, ...]]:
    """What MatMulNBits reads, with the dims that it wants: codes as [n, blocks, bytes of a block]."""
    n, count = blocks.scales.shape
    stored: dict[str, tuple[Any, ...]] = {
        "B": (blocks.codes, (n, count, blocks.codes.shape[1] // count)),
        "scales": (blocks.scales, blocks.scales.shape),
    }
    if blocks.zero_points is not None:
        stored["zero_points"] = (blocks.zero_points, blocks.zero_points.shape)
    return stored


def matmul(quant: QuantConfig, columns: int, accuracy_level: int) -> onnx.NodeProto:
    zero_points = ["zero_points"] if quant.zero_points else []
    return helper.make_node(
        "MatMulNBits", ["A", "B", "scales", *zero_points], ["Y"], domain="com.microsoft",
        K=columns, N=ROWS, bits=quant.bits, block_size=quant.block_size, accuracy_level=accuracy_level,
    )  # fmt: skip


def multiplied(
    folder: Path, quant: QuantConfig, rows: np.ndarray, activations: np.ndarray, accuracy_level: int
) -> tuple[np.ndarray, np.ndarray]:
    """activations @ rows.T by MatMulNBits, and the rows that are in its initializers."""
    columns = rows.shape[1]
    blocks = quantize(rows, quant)
    node = matmul(quant, columns, accuracy_level)
    [result] = run(folder, [node], {"A": activations}, stored_as_inputs(blocks))
    return result, dequantize(blocks, columns, quant)


@any_quant
@pytest.mark.parametrize("columns", [256, 200, 7])
def test_matmulnbits_reads_what_dequantize_reads(quant: QuantConfig, columns: int, tmp_path: Path) -> None:
    """The order of halves, blocks and scales, the zero point and padding are the same on both sides."""
    result, read = multiplied(tmp_path, quant, normal(ROWS, columns), np.eye(columns, dtype=np.float32), 0)
    np.testing.assert_array_equal(result.T, read)


@any_quant
@pytest.mark.parametrize("columns", [256, 200])
@pytest.mark.parametrize("tokens", [1, 5])
def test_fast_matmulnbits_differs_by_its_rounding_of_activations(
    quant: QuantConfig, columns: int, tokens: int, tmp_path: Path
) -> None:
    """Accuracy level 4 has kernels of its own, which multiply integers: they read the same bytes."""
    activations = normal(tokens, columns, seed=1)
    result, read = multiplied(tmp_path, quant, normal(ROWS, columns), activations, 4)
    wanted = activations.astype(np.float64) @ read.astype(np.float64).T
    # Each block of activations is rounded to a 127th of its largest; 0.8 % was seen.
    assert np.linalg.norm(result - wanted) < 0.02 * np.linalg.norm(wanted)
    # Activations of 0 and 1 are not rounded at all.
    result, read = multiplied(tmp_path, quant, normal(ROWS, columns), np.eye(columns, dtype=np.float32), 4)
    np.testing.assert_allclose(result.T, read, rtol=1e-6, atol=1e-6 * np.abs(read).max())


@any_quant
def test_largest_codes_do_not_saturate_the_fast_kernels(quant: QuantConfig, tmp_path: Path) -> None:
    """Sums are right for large codes and activations too, where pairs of products are added in 16 bits."""
    rows = np.where(normal(ROWS, 256) < -1.5, -1, 1).astype(np.float32)
    activations = np.ones((4, 256), np.float32)
    result, read = multiplied(tmp_path, quant, rows, activations, 4)
    np.testing.assert_allclose(result, activations @ read.T, rtol=1e-5)


@any_quant
def test_embedding_and_head_share_the_bytes(quant: QuantConfig, tmp_path: Path) -> None:
    """Tied weights are stored once: the gather reads from the file's bytes what the product reads."""
    blocks = quantize(heavy(ROWS, 256), quant)
    read = dequantize(blocks, 256, quant)
    zero_points = ["zero_points"] if quant.zero_points else []
    gather = helper.make_node(
        "GatherBlockQuantized", ["data", "ids", "scales", *zero_points], ["E"], domain="com.microsoft",
        gather_axis=0, quantize_axis=1, bits=quant.bits, block_size=quant.block_size,
    )  # fmt: skip
    stored = stored_as_inputs(blocks) | {"data": (blocks.codes, blocks.codes.shape)}
    ids = np.array([[3, 0, ROWS - 1], [3, 7, 1]])
    inputs = {"A": np.eye(256, dtype=np.float32), "ids": ids}
    product, gathered = run(tmp_path, [matmul(quant, 256, 0), gather], inputs, stored)
    np.testing.assert_array_equal(gathered, read[ids])
    np.testing.assert_array_equal(product.T, read)
    assert (tmp_path / "weights").stat().st_size < sum(
        array.nbytes for array, _ in stored_as_inputs(blocks).values()
    ) + 12288


@any_quant
@pytest.mark.parametrize("columns", [1, 7, 128, 200, 333])
def test_codes_and_padding(quant: QuantConfig, columns: int) -> None:
    """Shapes are those of the operators, no code wraps around, and padding is worth 0."""
    rows = heavy(5, columns)
    made = quantize(rows, quant)
    packed, scales, zero_points = made
    blocks = -(-columns // quant.block_size)
    assert (packed.dtype, scales.dtype) == (np.uint8, np.float32)
    assert packed.shape == (5, quant.row_bytes(columns)) == (5, blocks * quant.block_size * quant.bits // 8)
    assert scales.shape == (5, blocks)
    assert (zero_points is not None) is quant.zero_points
    if zero_points is not None:
        assert zero_points.shape == (5, -(-blocks * quant.bits // 8)) == (5, quant.zero_bytes(columns))
        assert unpack(zero_points, blocks, quant).shape == (5, blocks)
    codes = codes_of(made, quant)
    assert not codes[:, columns:].any()
    worth = (codes * np.repeat(scales.astype(np.float64), quant.block_size, axis=1))[:, :columns]
    np.testing.assert_allclose(dequantize(made, columns, quant), worth, rtol=1e-6)
    assert (rows * worth >= 0).all()  # a code that wraps around changes its sign


def magnitudes() -> st.SearchStrategy[float]:
    """Weights of any size at which an f32 scale still has all its digits, and 0."""
    sizes = st.floats(2.0**-100, 2.0**100, width=32)
    return st.one_of(st.just(0.0), sizes, sizes.map(lambda size: -size), st.floats(-1, 1, width=16))


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_no_block_is_worse_than_rounded_plainly(data: st.DataObject) -> None:
    """Whatever the sizes of its numbers, the scale that is found is no worse than the two plain ones."""
    quant = data.draw(st.sampled_from(QUANTS))
    columns = data.draw(st.integers(1, 2 * quant.block_size + 1))
    values = data.draw(st.lists(magnitudes(), min_size=1, max_size=40))
    seed = data.draw(st.integers(0, 2**32 - 1))
    rows = np.random.default_rng(seed).choice(np.array(values, np.float32), (3, columns))
    # A scale and a product are f32 numbers: the slack is their last digit.
    slack = 2e-7 * np.linalg.norm(in_blocks(rows, quant), axis=-1)
    error = error_of(rows, quant)
    for plain in plain_errors(rows, quant):
        assert (error <= plain * (1 + 1e-5) + slack).all()


@pytest.mark.parametrize("draw", [normal, heavy])
@any_quant
def test_no_block_of_many_is_worse(quant: QuantConfig, draw: Any) -> None:
    """The same for numbers as weights are, where with 8 bits the errors compared are closer than f32 sums of them."""
    rows = draw(64, 1024)
    for plain in plain_errors(rows, quant):
        assert (error_of(rows, quant) <= plain * (1 + 1e-4)).all()


@pytest.mark.parametrize(
    ("bits", "size", "draw", "gain"),
    [(4, 32, normal, 0.28), (4, 128, normal, 0.28), (4, 32, heavy, 0.26), (4, 128, heavy, 0.28),
     (8, 32, normal, 0.11), (8, 128, normal, 0.05)],
)  # fmt: skip
def test_squared_error_is_well_below_plain_rounding(bits: int, size: int, draw: Any, gain: float) -> None:
    """The search gains what its time costs."""
    quant, rows = QuantConfig(bits, size), draw(256, 1024)
    by_maximum = plain_errors(rows, quant)[0]
    assert (error_of(rows, quant) ** 2).sum() < (1 - gain) * (by_maximum**2).sum()


@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_squared_error_is_near_the_least_of_any_scale(size: int) -> None:
    """The few scales that are tried come near to the best of many."""
    quant, rows = QuantConfig(4, size), normal(32, 1024)
    blocks = in_blocks(rows, quant)
    extreme = np.abs(blocks).max(-1, keepdims=True)
    least = np.full(blocks.shape[:2], np.inf)
    for reach in np.concatenate([np.arange(5, 14, 0.1), -np.arange(5, 14, 0.1)]):
        codes = np.clip(np.rint(blocks / extreme * reach), -8, 7)
        scale = (blocks * codes).sum(-1, keepdims=True) / (codes**2).sum(-1, keepdims=True)
        least = np.minimum(least, ((blocks - codes * scale) ** 2).sum(-1))
    assert (error_of(rows, quant) ** 2).sum() < 1.03 * least.sum()


@any_quant
def test_scales_are_the_best_for_their_codes(quant: QuantConfig) -> None:
    """Each scale is the least-squares fit to the codes that are stored with it."""
    rows = heavy(64, 1024)
    blocks = quantize(rows, quant)
    scales, codes = blocks.scales, codes_of(blocks, quant).reshape(64, -1, quant.block_size)
    best = (in_blocks(rows, quant) * codes).sum(-1) / (codes**2).sum(-1)
    np.testing.assert_allclose(scales, best, rtol=3e-6)


@any_quant
@pytest.mark.parametrize("sign", [1, -1])
def test_blocks_that_have_an_exact_scale(quant: QuantConfig, sign: int) -> None:
    """Blocks of zeros, of one number and of codes are read back as they were."""
    size = quant.block_size
    rows = np.zeros((4, 3 * size), np.float32)
    rows[1] = 0.3  # constant
    rows[2, [5, size + 1, 3 * size - 1]] = 1.7, 3e-30, 2e30  # one outlier a block
    ramp = np.arange(-quant.zero_point, quant.zero_point)
    rows[3] = (
        0.011 * ramp[:: len(ramp) // 16].repeat(3 * size // 16).reshape(16, -1).T.ravel()
    )  # every block on codes
    rows *= np.float32(sign)
    blocks = quantize(rows, quant)
    assert np.isfinite(blocks.scales).all()
    assert not blocks.scales[0].any()
    assert not codes_of(blocks, quant)[0].any()
    read = dequantize(blocks, rows.shape[1], quant)
    np.testing.assert_allclose(read[:3], rows[:3], rtol=3e-7 if quant.zero_points else 0)
    np.testing.assert_allclose(read[3], rows[3], rtol=3e-7)


@any_quant
def test_weights_once_quantized_stay_as_they_are(quant: QuantConfig) -> None:
    """Weights that were trained or quantized in such blocks lose nothing more."""
    codes = np.random.default_rng(0).integers(-quant.zero_point, quant.zero_point, (8, 4, quant.block_size))
    codes[..., 0] = -quant.zero_point
    if quant.zero_points:
        codes[..., 1] = quant.zero_point - 1  # the span says where both ends are
    scale = np.exp(normal(8, 4, 1))
    rows = (codes * scale).astype(np.float32).reshape(8, -1)
    blocks = quantize(rows, quant)
    np.testing.assert_array_equal(codes_of(blocks, quant), codes.reshape(8, -1))
    np.testing.assert_allclose(blocks.scales, scale[..., 0], rtol=3e-7)


@any_quant
def test_rows_do_not_depend_on_the_rows_beside_them(quant: QuantConfig) -> None:
    """The bytes, and so the sha256, do not depend on slices, on memory order or on the run."""
    rows = heavy(1000, 333)
    kept = rows.copy()
    blocks = quantize(rows, quant)
    np.testing.assert_array_equal(rows, kept)
    for again in (rows, np.asfortranarray(rows), np.repeat(rows, 2, axis=1)[:, ::2]):
        np.testing.assert_array_equal(quantize(again, quant).codes, blocks.codes)
    for part in (slice(0, 1), slice(1, 4), slice(500, 1000)):
        for some, whole in zip(quantize(rows[part], quant), blocks, strict=True):
            assert (some is None) is (whole is None)
            if some is not None and whole is not None:
                np.testing.assert_array_equal(some, whole[part])


@pytest.mark.parametrize("shape", [(0, 64), (3, 0)])
def test_nothing_to_quantize(shape: tuple[int, int]) -> None:
    """An empty slice, or rows without columns, give nothing."""
    quant = QuantConfig(4, 32)
    packed, scales, _ = quantize(np.zeros(shape, np.float32), quant)
    assert (len(packed), packed.size, scales.size) == (shape[0], 0, 0)


@pytest.mark.parametrize("quant", [QuantConfig(4, 32), QuantConfig(8, 128)])
def test_memory_does_not_grow_with_the_rows(quant: QuantConfig) -> None:
    """No copy of a whole tensor is made, which would be gigabytes for the embedding of a large model."""

    def temporary(n: int) -> int:
        rows = np.ones((n, 896), np.float32)
        tracemalloc.start()
        results = quantize(rows, quant)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak - sum(array.nbytes for array in results if array is not None)

    assert temporary(20_000) < 1.1 * temporary(2_000) < 16e6


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [(0, 0), (700, 199), (1499, 70)])
@pytest.mark.filterwarnings("error")
def test_refuses_what_has_no_scale(value: float, place: tuple[int, int]) -> None:
    """NaN and infinities are refused wherever they are, in the last piece and in a padded block too."""
    rows = normal(1500, 200)
    rows[place] = value
    with pytest.raises(ValueError, match="NaN or an infinity"):
        quantize(rows, QuantConfig(4, 64))


@pytest.mark.parametrize(
    ("bits", "size"), [(3, 32), (2, 32), (16, 32), (4, 8), (4, 24), (4, 0), (8, 256), (4, -16)]
)
def test_refuses_other_sizes(bits: int, size: int) -> None:
    """Bits and block sizes without an operator are refused where they are asked for."""
    with pytest.raises(UserError, match="are supported"):
        QuantConfig(bits, size)
