"""Operators of ONNX Runtime's com.microsoft domain, each typed by hand: no inference knows them.

Semantics: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import OpBuilder

from qwen_onnx.contract import Blocks
from qwen_onnx.graphs.state import KeyValue

DOMAIN = "com.microsoft"


def fused_matmul(op: OpBuilder, x: ir.Value, weight_XD: ir.Value) -> ir.Value:
    """x @ weight.T, [B, S, D] -> [B, S, X]; the weight is read as it lies, [out, in]."""
    if x.shape is None or weight_XD.shape is None:
        raise ValueError("a product of unknown shapes")
    shape = ir.Shape([*x.shape[:-1], weight_XD.shape[0]])
    return op.FusedMatMul(x, weight_XD, transB=1, _domain=DOMAIN, _outputs=[_value(x, shape)])


def matmul_nbits(
    op: OpBuilder,
    x_MD: ir.Value,
    qweight: ir.Value,
    scales: ir.Value,
    bias_X: ir.Value | None,
    *,
    in_features: int,
    blocks: Blocks,
) -> ir.Value:
    """x @ weight.T + bias, [M, in] -> [M, X], over a weight in blocks; its zero point is half the codes' range.

    accuracy_level 4: activations are rounded to 8 bits, block by block, and products summed as integers.
    """
    if x_MD.shape is None or scales.shape is None:
        raise ValueError("a product of unknown shapes")
    out_features = int(scales.shape.numpy()[0])
    inputs = [x_MD, qweight, scales] + ([] if bias_X is None else [None, None, bias_X])
    return op.MatMulNBits(
        *inputs, K=in_features, N=out_features, bits=blocks.bits, block_size=blocks.block_size,
        accuracy_level=4, _domain=DOMAIN, _outputs=[_value(x_MD, ir.Shape([*x_MD.shape[:-1], out_features]))],
    )  # fmt: skip


def gather_block_quantized(
    op: OpBuilder, qweight_VE: ir.Value, ids_BS: ir.Value, scales: ir.Value, *, size: int, blocks: Blocks
) -> ir.Value:
    """Rows of a table in blocks, [B, S, size]; the bytes are those that matmul_nbits reads."""
    if ids_BS.shape is None:
        raise ValueError("ids of unknown shape")
    output = ir.Value(type=scales.type, shape=ir.Shape([*ids_BS.shape, size]))
    return op.GatherBlockQuantized(
        qweight_VE, ids_BS, scales, bits=blocks.bits, block_size=blocks.block_size, gather_axis=0, quantize_axis=1,
        _domain=DOMAIN, _outputs=[output],
    )  # fmt: skip


def quick_gelu(op: OpBuilder, x: ir.Value) -> ir.Value:
    """x * sigmoid(x), which is SiLU: QuickGelu with alpha 1."""
    return op.QuickGelu(x, alpha=1.0, _domain=DOMAIN, _outputs=[_value(x, x.shape)])


def skip_simplified_layer_normalization(
    op: OpBuilder, x: ir.Value, delta: ir.Value, weight: ir.Value, *, epsilon: float
) -> tuple[ir.Value, ir.Value]:
    """RMS norm of x + delta, and x + delta; statistics in f32 on CUDA whatever the type."""
    outputs = [_value(x, x.shape), ir.Value(name=""), ir.Value(name=""), _value(x, x.shape)]
    normed, _, _, total = op.SkipSimplifiedLayerNormalization(
        x, delta, weight, epsilon=epsilon, _domain=DOMAIN, _outputs=outputs
    )
    return normed, total


def rotary_embedding(
    op: OpBuilder, x_BSX: ir.Value, position_ids_BS: ir.Value, cos_PH2: ir.Value, sin_PH2: ir.Value
) -> ir.Value:
    """Each head of [B, S, heads x H] rotated by its token's position, its halves against each other."""
    return op.RotaryEmbedding(
        x_BSX, position_ids_BS, cos_PH2, sin_PH2, _domain=DOMAIN, _outputs=[_value(x_BSX, x_BSX.shape)]
    )


def group_query_attention(
    op: OpBuilder,
    query_BSX: ir.Value,
    key_BSX: ir.Value | None,
    value_BSX: ir.Value | None,
    past: KeyValue,
    seqlens_k_B: ir.Value,
    total_sequence_length: ir.Value,
    cos_PH2: ir.Value,
    sin_PH2: ir.Value,
    *,
    num_heads: int,
    kv_num_heads: int,
    head_dim: int,
) -> tuple[ir.Value, KeyValue]:
    """Rotation, cache append and causal attention: [B, S, N x H], and the cache.

    Args:
        query_BSX: queries, or queries, keys and values side by side with no `key_BSX` and `value_BSX`.
        seqlens_k_B: int32, each row's live length less one, the new tokens counted.
        total_sequence_length: int32 scalar in host memory: S for a first prompt; after one, at least the
            longest live length and not S.
    """
    if query_BSX.shape is None:
        raise ValueError("attention of unknown shapes")
    shape = ir.Shape([*query_BSX.shape[:-1], num_heads * head_dim])
    key, value = past.key_BKCH, past.value_BKCH
    attended, present_key, present_value = op.GroupQueryAttention(
        query_BSX, key_BSX, value_BSX, key, value, seqlens_k_B, total_sequence_length, cos_PH2, sin_PH2,
        num_heads=num_heads, kv_num_heads=kv_num_heads, do_rotary=1, _domain=DOMAIN,
        _outputs=[_value(query_BSX, shape), _value(key, key.shape), _value(value, value.shape)],
    )  # fmt: skip
    return attended, KeyValue(present_key, present_value)


def _value(like: ir.Value, shape: ir.Shape | None) -> ir.Value:
    return ir.Value(type=like.type, shape=shape)
