"""GPTQ: what the products of a rounded matrix lose, and that the result is blocks as any other."""

from __future__ import annotations

import numpy as np
import pytest

from qwen_onnx.contract.quant import QuantConfig
from qwen_onnx.exports.quantization import gptq
from qwen_onnx.exports.quantization.blocks import Blocks, dequantize, quantize
from qwen_onnx.exports.quantization.gptq import Hessian, factors, round_matrix

QUANTS = [
    QuantConfig(4, 32, zero_points=True, scales="F16"),
    QuantConfig(4, 128, zero_points=True, scales="F16"),
    QuantConfig(4, 64),
    QuantConfig(8, 32, scales="F16"),
]
any_quant = pytest.mark.parametrize("quant", QUANTS, ids=str)


def inputs(columns: int, *, tokens: int = 2000) -> np.ndarray:
    """Of a model: far fewer directions than columns have most of the size."""
    rng, rank = np.random.default_rng(0), columns // 6
    x = rng.standard_normal((tokens, rank)) @ rng.standard_normal((rank, columns))
    return (x + 0.3 * rng.standard_normal((tokens, columns))).astype(np.float32)


def matrix(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((rows, columns)).astype(np.float32)


def rounded(weight: np.ndarray, x: np.ndarray, quant: QuantConfig) -> Blocks:
    seen = Hessian(x.shape[1])
    for part in np.array_split(x, 3):
        seen.add(part)
    return round_matrix(weight, factors(seen, quant.block_size), quant)


def lost(weight: np.ndarray, x: np.ndarray, blocks: Blocks, quant: QuantConfig) -> float:
    """||X (W - Q)^T|| / ||X W^T||, in f64."""
    left = weight.astype(np.float64) - dequantize(blocks, weight.shape[1], quant)
    return float(np.linalg.norm(x @ left.T) / np.linalg.norm(x.astype(np.float64) @ weight.T))


@any_quant
@pytest.mark.parametrize("columns", [256, 200, 40])
def test_products_lose_less_than_by_rounding_one_by_one(quant: QuantConfig, columns: int) -> None:
    """By a third at least; 0.4 to 0.6 of the loss was seen."""
    weight, x = matrix(96, columns), inputs(columns)
    assert lost(weight, x, rounded(weight, x, quant), quant) < 2 / 3 * lost(
        weight, x, quantize(weight, quant), quant
    )


@any_quant
def test_the_blocks_are_such_as_any(quant: QuantConfig) -> None:
    """Types, shapes, padding worth 0, scales of the type that is stored."""
    weight, x = matrix(5, 200), inputs(200)
    found, plain = rounded(weight, x, quant), quantize(weight, quant)
    for own, other in zip(found, plain, strict=True):
        assert (own is None) is (other is None)
        if own is not None and other is not None:
            assert (own.shape, own.dtype) == (other.shape, other.dtype)
    whole = dequantize(found, quant.blocks(200) * quant.block_size, quant)
    assert not whole[:, 200:].any()


@any_quant
def test_inputs_without_a_pattern_change_nothing(quant: QuantConfig) -> None:
    """Columns that have nothing to do with each other cannot make up for one another."""
    weight, x = matrix(16, 128), np.eye(128, dtype=np.float32)
    found, plain = rounded(weight, x, quant), quantize(weight, quant)
    np.testing.assert_array_equal(found.scales, plain.scales)
    assert (found.codes != plain.codes).mean() < 0.01  # where a weight lies between two


def test_rows_go_in_pieces_that_do_not_depend_on_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    quant = QUANTS[0]
    weight, x = matrix(50, 96), inputs(96)
    whole = rounded(weight, x, quant)
    monkeypatch.setattr(gptq, "_ROWS", 7)
    for some, all_of_it in zip(rounded(weight, x, quant), whole, strict=True):
        assert some is not None
        assert all_of_it is not None
        np.testing.assert_array_equal(some, all_of_it)


def test_many_columns_go_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than MOST_COLUMNS squared are in memory, and it is still better than rounding one by one."""
    quant = QUANTS[0]
    weight, x = matrix(40, 320), inputs(320)
    monkeypatch.setattr(gptq, "MOST_COLUMNS", 128)
    assert [part.stop - part.start for part in Hessian(320).slices] == [128, 128, 64]
    assert lost(weight, x, rounded(weight, x, quant), quant) < 0.8 * lost(
        weight, x, quantize(weight, quant), quant
    )


def test_inputs_that_are_never_there() -> None:
    """Columns that are always 0, and fewer tokens than columns, still have a factor."""
    quant = QUANTS[0]
    weight, x = matrix(8, 128), inputs(128, tokens=10)
    x[:, ::3] = 0
    assert np.isfinite(dequantize(rounded(weight, x, quant), 128, quant)).all()
    nothing = rounded(weight, np.zeros((4, 128), np.float32), quant)
    np.testing.assert_array_equal(nothing.codes, quantize(weight, quant).codes)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_no_number_is_refused(value: float) -> None:
    weight = matrix(8, 128)
    weight[3, 100] = value
    with pytest.raises(ValueError, match="NaN or an infinity"):
        rounded(weight, inputs(128), QUANTS[0])
