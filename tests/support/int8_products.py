"""What MatMulNBits computes on a CPU with accuracy_level 4: inputs of a product rounded to 8 bits, block by block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np

from qwen_onnx import reference
from qwen_onnx.contract.quant import QuantConfig
from support.tolerances import INT8_EDGE, assert_close, difference


def rounded(x_SI: np.ndarray, block_size: int) -> np.ndarray:
    """Each block of a row as whole multiples, -127 to 127, of its largest size over 127; float64 [S, I]."""
    size = x_SI.shape[1]
    blocks = np.pad(x_SI, ((0, 0), (0, -size % block_size))).reshape(len(x_SI), -1, block_size)
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / 127
    multiples = np.round(np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale > 0))
    rows: np.ndarray = (multiples * scale).reshape(len(x_SI), -1)[:, :size]
    return rows


def assert_as_a_kernel(found: np.ndarray, in_int8: np.ndarray, in_f32: np.ndarray) -> None:
    """As the kernel of one processor or another: not all have one that rounds its inputs."""
    nearer = min((in_int8, in_f32), key=lambda wanted: difference(found, wanted))
    assert_close(found, nearer, INT8_EDGE)


@contextlib.contextmanager
def reference_in_int8(block_size: int) -> Iterator[None]:
    """The reference's products take their inputs in 8 bits, of blocks of so many, or as many fewer as fill a row."""
    real = reference.linear

    def linear(x_SI: np.ndarray, *weights: Any) -> np.ndarray:
        size = QuantConfig(8, block_size).fitting(x_SI.shape[1]).block_size
        return real(rounded(x_SI, size), *weights)

    with mock.patch.object(reference, "linear", linear):
        yield
