"""Operators of ONNX Runtime's com.microsoft.nchwc domain, typed by hand: no inference knows them.

Its own optimizer writes these operators into graphs of convolutions. A tensor [1, C, 1, M] lies in memory as
[C / P, M, P], P channels side by side: as many as the processor's vectors hold, 8 or 16. A filter [F, C, 1, 1] lies
as [F / P, C, P].
"""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import OpBuilder

DOMAIN = "com.microsoft.nchwc"


def reorder_input(op: OpBuilder, x_11MC: ir.Value) -> ir.Value:
    """Rows of channels, [1, 1, M, C] -> [1, C, 1, M] of this domain."""
    one, _, tokens, channels = _shape(x_11MC)
    return op.ReorderInput(
        x_11MC, channels_last=1, _domain=DOMAIN, _outputs=[_value([one, channels, 1, tokens])]
    )


def conv(op: OpBuilder, x_1C1M: ir.Value, filter_FC11: ir.Value, bias_F: ir.Value | None) -> ir.Value:
    """A product with a matrix: each of M pixels by itself, [1, C, 1, M] -> [1, F, 1, M]."""
    one, _, _, tokens = _shape(x_1C1M)
    inputs = [x_1C1M, filter_FC11] + ([] if bias_F is None else [bias_F])
    return op.Conv(
        *inputs, kernel_shape=[1, 1], strides=[1, 1], dilations=[1, 1], pads=[0, 0, 0, 0], group=1,
        _domain=DOMAIN, _outputs=[_value([one, _shape(filter_FC11)[0], 1, tokens])],
    )  # fmt: skip


def reorder_output(op: OpBuilder, x_1C1M: ir.Value, *, channels: int) -> ir.Value:
    """The first `channels` as rows again, [1, C, 1, M] -> [1, 1, M, channels]."""
    one, _, _, tokens = _shape(x_1C1M)
    return op.ReorderOutput(
        x_1C1M,
        channels=channels,
        channels_last=1,
        _domain=DOMAIN,
        _outputs=[_value([one, 1, tokens, channels])],
    )


def _shape(x: ir.Value) -> list[int | ir.SymbolicDim]:
    if x.shape is None or len(x.shape) != 4:
        raise ValueError(f"{x.name}: four dimensions wanted")
    return list(x.shape)


def _value(shape: list[int | ir.SymbolicDim]) -> ir.Value:
    return ir.Value(type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
