"""Runs a graph node by node in NumPy, each value in the type that the graph declares for it and no wider.

ONNX Runtime's CPU provider computes f16 in f32 between the nodes and so hides overflow; a GPU does not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun


class Gemm(OpRun):
    """Sums in f32, as GPUs do; rounds the product to the declared type, then the biased product again."""

    op_domain = ""

    def _run(self, a: Any, b: Any, c: Any = None, **attributes: Any) -> tuple[np.ndarray]:
        assert (attributes["transA"], attributes["transB"]) == (0, 1)
        assert attributes["alpha"] == attributes["beta"] == 1
        product = (a.astype(np.float32) @ b.astype(np.float32).T).astype(a.dtype)
        return (product if c is None else product + c,)


class RMSNormalization(OpRun):
    """As the operator's text has it: f32 up to the normalised value, which is rounded, then scaled.

    onnx's own implementation squares in the input's type whatever `stash_type` says.
    """

    op_domain = ""

    def _run(self, x: Any, scale: Any, axis: int, epsilon: float, stash_type: int) -> tuple[np.ndarray]:
        assert axis == -1
        stash = x.astype(onnx.helper.tensor_dtype_to_np_dtype(stash_type))
        mean_square = np.mean(stash * stash, axis=-1, keepdims=True, dtype=stash.dtype)
        normalised = stash / np.sqrt(mean_square + stash.dtype.type(epsilon))
        return (normalised.astype(x.dtype) * scale,)


class NotAsDeclaredError(Exception):
    """A node made another type than the graph declares: what was computed then says nothing about the graph."""


def evaluate(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every value of the graph by name, the attention scores (before masking) among them.

    The model holds its weights; its attention nodes get the output of their scores here.
    """
    model = _with_scores(model)
    declared = _declared_types(model)
    names = [name for node in model.graph.node for name in node.output if name]
    del model.graph.output[:]
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names)
    with np.errstate(all="ignore"):  # an overflow is for the caller to find in the values
        values = ReferenceEvaluator(model, new_ops=[Gemm, RMSNormalization]).run(names, feeds)
    found = dict(zip(names, (np.asarray(value) for value in values), strict=True))
    for name, value in found.items():
        if value.dtype != onnx.helper.tensor_dtype_to_np_dtype(declared[name]):
            raise NotAsDeclaredError(f"{name}: {value.dtype}")
    return found


def not_finite(values: dict[str, np.ndarray]) -> list[str]:
    """The values with NaN or infinity in them, in the order of computation."""
    return [
        name
        for name, value in values.items()
        if value.dtype.kind not in "biu" and not np.isfinite(value.astype(np.float32)).all()
    ]


def _with_scores(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for node in copy.graph.node:
        if node.op_type == "Attention":
            node.output.extend(["", "", f"{node.name}.scores"])
            node.attribute.append(onnx.helper.make_attribute("qk_matmul_output_mode", 0))
    return copy


def _declared_types(model: onnx.ModelProto) -> dict[str, int]:
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    del bare.graph.value_info[:]
    inferred = onnx.shape_inference.infer_shapes(bare, strict_mode=True, check_type=True)
    values = [*inferred.graph.value_info, *inferred.graph.output]
    return {value.name: value.type.tensor_type.elem_type for value in values}
