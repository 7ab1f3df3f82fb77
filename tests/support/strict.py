"""Runs a graph node by node in NumPy, each value in the type that the graph declares for it and no wider.

ONNX Runtime's CPU provider computes f16 in f32 between the nodes and so hides overflow; a GPU does not. What happens
inside a node is as on a GPU: sums in f32, and for the operators of com.microsoft as in ONNX Runtime's CUDA kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

CONTRIB = "com.microsoft"


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b, summed in f32 and rounded to their type."""
    return np.asarray((a.astype(np.float32) @ b.astype(np.float32)).astype(a.dtype))


class Gemm(OpRun):
    """Rounds the product to the declared type, then the biased product again."""

    op_domain = ""

    def _run(self, a: Any, b: Any, c: Any = None, **attributes: Any) -> tuple[np.ndarray]:
        assert (attributes["transA"], attributes["transB"]) == (0, 1)
        assert attributes["alpha"] == attributes["beta"] == 1
        y = product(a, b.T)
        return (y if c is None else y + c,)


class RMSNormalization(OpRun):
    """As the operator's text has it: f32 up to the normalized value, which is rounded, then scaled.

    onnx's own implementation squares in the input's type whatever `stash_type` says.
    """

    op_domain = ""

    def _run(self, x: Any, scale: Any, axis: int, epsilon: float, stash_type: int) -> tuple[np.ndarray]:
        assert axis == -1
        stash = x.astype(onnx.helper.tensor_dtype_to_np_dtype(stash_type))
        return (normalized(stash, epsilon).astype(x.dtype) * scale,)


class FusedMatMul(OpRun):
    op_domain = CONTRIB

    def _run(self, a: Any, b: Any, transB: int) -> tuple[np.ndarray]:
        assert transB == 1
        return (product(a, b.T),)


class QuickGelu(OpRun):
    """x * sigmoid(alpha x); rounded once."""

    op_domain = CONTRIB

    def _run(self, x: Any, alpha: float) -> tuple[np.ndarray]:
        wide = x.astype(np.float32)
        return ((wide / (1 + np.exp(-np.float32(alpha) * wide))).astype(x.dtype),)


class SkipSimplifiedLayerNormalization(OpRun):
    """The sum is rounded to the type and summed up in f32; the normalized value is scaled before it is rounded."""

    op_domain = CONTRIB
    inner: ClassVar[type[np.generic]] = np.float32
    """What the statistics are taken in."""

    def _run(self, x: Any, skip: Any, gamma: Any, epsilon: float) -> tuple[np.ndarray, ...]:
        total = x + skip
        scaled = normalized(total.astype(self.inner), epsilon) * gamma.astype(self.inner)
        return scaled.astype(x.dtype), np.empty(0), np.empty(0), total


class GroupQueryAttention(OpRun):
    """Rotation, append to the cache and causal attention, as CUDA's flash kernel rounds them.

    Scores, softmax and sums in f32; the weights of a sum of values are rounded to the type before it is taken. What
    is asked of the inputs is asserted. Slots that are not live are copied and never computed with.
    """

    op_domain = CONTRIB
    inner: ClassVar[type[np.generic]] = np.float32
    """What scores and their softmax are held in."""

    def _run(
        self,
        query: Any,
        key: Any,
        value: Any,
        past_key: Any,
        past_value: Any,
        seqlens_k: Any,
        total_sequence_length: Any,
        cos: Any,
        sin: Any,
        num_heads: int,
        kv_num_heads: int,
        do_rotary: int,
    ) -> tuple[np.ndarray, ...]:
        assert do_rotary == 1
        assert cos.dtype == sin.dtype == query.dtype == past_key.dtype
        assert seqlens_k.dtype == total_sequence_length.dtype == np.int32
        batch, length, _ = query.shape
        _, _, capacity, size = past_key.shape
        if key is None:
            ends = [num_heads * size, (num_heads + kv_num_heads) * size]
            query, key, value = np.split(query, ends, axis=-1)
        live, total = seqlens_k.astype(int) + 1, int(total_sequence_length)
        first = total == length
        assert live.max() <= min(total, capacity)
        assert (live == length).all() if first else length == 1 or batch == 1
        present_key, present_value = past_key.copy(), past_value.copy()
        outputs = np.zeros((batch, length, num_heads * size), query.dtype)
        scores = np.zeros((batch, num_heads, length, live.max()), self.inner)
        for row in range(batch):
            slots = np.arange(live[row] - length, live[row])
            assert slots[0] >= 0
            q, k = (
                rotated(heads(x[row], count), cos[slots], sin[slots])
                for x, count in ((query, num_heads), (key, kv_num_heads))
            )
            present_key[row][:, slots], present_value[row][:, slots] = k, heads(value[row], kv_num_heads)
            group = num_heads // kv_num_heads
            keys, values = (
                np.repeat(cache[row][:, : live[row]], group, axis=0) for cache in (present_key, present_value)
            )
            dots = (q.astype(np.float32) @ keys.astype(np.float32).swapaxes(1, 2)).astype(self.inner)
            own = dots * self.inner(1 / math.sqrt(size))
            scores[row][:, :, : live[row]] = own
            own = np.where(np.arange(live[row]) <= slots[:, None], own, self.inner(-np.inf))
            weights = np.exp(own - own.max(axis=-1, keepdims=True))
            sums = weights.astype(np.float32).sum(axis=-1, keepdims=True)
            attended = weights.astype(query.dtype).astype(np.float32) @ values.astype(np.float32) / sums
            outputs[row] = attended.astype(query.dtype).swapaxes(0, 1).reshape(length, -1)
        return outputs, present_key, present_value, scores


def normalized(x: np.ndarray, epsilon: float) -> np.ndarray:
    """x over its root mean square, in its type throughout."""
    mean_square = np.mean(x * x, axis=-1, keepdims=True, dtype=x.dtype)
    return np.asarray(x / np.sqrt(mean_square + x.dtype.type(epsilon)))


def heads(x_SX: np.ndarray, count: int) -> np.ndarray:
    """[S, heads x H] -> [heads, S, H]."""
    return x_SX.reshape(len(x_SX), count, -1).swapaxes(0, 1)


def rotated(x_NSH: np.ndarray, cos_SR: np.ndarray, sin_SR: np.ndarray) -> np.ndarray:
    """In f32, and rounded once."""
    a, b = np.split(x_NSH.astype(np.float32), 2, axis=-1)
    cos, sin = cos_SR.astype(np.float32), sin_SR.astype(np.float32)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_NSH.dtype)


OPERATORS: tuple[type[OpRun], ...] = (
    Gemm,
    RMSNormalization,
    FusedMatMul,
    QuickGelu,
    SkipSimplifiedLayerNormalization,
    GroupQueryAttention,
)


class NotAsDeclaredError(Exception):
    """A node made another type than the graph declares: what was computed then says nothing about the graph."""


def evaluate(
    model: onnx.ModelProto, inputs: dict[str, np.ndarray], operators: Sequence[type[OpRun]] = OPERATORS
) -> dict[str, np.ndarray]:
    """Every value of the graph by name, the attention scores (before masking) among them.

    The model holds its weights; its attention nodes get the output of their scores here. `operators` are used in
    place of onnx's own.
    """
    declared = _declared_types(model)
    model, scores = _with_scores(model)
    names = [name for node in model.graph.node for name in node.output if name in declared or name in scores]
    del model.graph.output[:]
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names)
    with np.errstate(all="ignore"):  # an overflow is for the caller to find in the values
        values = ReferenceEvaluator(model, new_ops=list(operators)).run(names, inputs)
    found = dict(zip(names, (np.asarray(value) for value in values), strict=True))
    for name, element in declared.items():
        if found[name].dtype != onnx.helper.tensor_dtype_to_np_dtype(element):
            raise NotAsDeclaredError(f"{name}: {found[name].dtype}")
    return found


def not_finite(values: dict[str, np.ndarray]) -> list[str]:
    """The values with NaN or infinity in them, in the order of computation."""
    return [
        name
        for name, value in values.items()
        if value.dtype.kind not in "biu" and not np.isfinite(value.astype(np.float32)).all()
    ]


def _with_scores(model: onnx.ModelProto) -> tuple[onnx.ModelProto, set[str]]:
    """A copy whose attention nodes put out their scores, and the names of these."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    scores: set[str] = set()
    for node in copy.graph.node:
        if node.op_type == "Attention":
            node.output.extend(["", ""])
            node.attribute.append(onnx.helper.make_attribute("qk_matmul_output_mode", 0))
        if node.op_type in ("Attention", "GroupQueryAttention"):
            node.output.append(f"{node.name}.scores")
            scores.add(node.output[-1])
        elif node.domain == CONTRIB:  # else onnx takes the outputs without a name for inputs without one
            node.output[:] = [name or f"{node.name}.unused{i}" for i, name in enumerate(node.output)]
    return copy, scores


def _declared_types(model: onnx.ModelProto) -> dict[str, int]:
    """Of every node's outputs: inferred from the inputs on, and where onnx infers nothing what the graph says."""
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    del bare.graph.value_info[:]
    contrib = {name for node in bare.graph.node if node.domain == CONTRIB for name in node.output}
    bare.graph.value_info.extend(value for value in model.graph.value_info if value.name in contrib)
    inferred = onnx.shape_inference.infer_shapes(bare, strict_mode=True, check_type=True)
    values = [*inferred.graph.value_info, *inferred.graph.output]
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    return {name: types[name] for node in model.graph.node for name in node.output if name}
