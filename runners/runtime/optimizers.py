"""ONNX Runtime's graph optimizers by name: it passes over a name that it does not have, without a word."""

from __future__ import annotations

import difflib
import mmap
from collections.abc import Sequence
from pathlib import Path

from qwen_onnx.errors import UserError, option
from qwen_onnx.runners.runtime.session import import_onnxruntime

_NAMES = (
    "Avx2WeightS8ToU8Transformer BiasDropoutFusion BiasGeluFusion BiasSkipLayerNormFusion BiasSoftmaxFusion "
    "CastChainElimination CastElimination CastFloat16Transformer CommonSubexpressionElimination ConstantFolding "
    "ConstantSharing ConvAddActivationFusion ConvAddFusion ConvBNFusion ConvMulFusion DivMulFusion "
    "DoubleQDQPairsRemover DQMatMulNBitsFusion DynamicQuantizeMatMulFusion EliminateDropout EliminateIdentity "
    "EliminateSlice EmbedLayerNormFusion ExpandElimination FastGeluFusion FreeDimensionOverrideTransformer "
    "GatherToSliceFusion GatherToSplitFusion GeluApproximation GeluFusion GemmActivationFusion GemmSumFusion "
    "GemmTransposeFusion GqaValueLayoutTransformer GroupQueryAttentionFusion GroupQueryAttentionPreNormFusion "
    "IdenticalChildrenConsolidation LabelEncoderFusion LayerNormFusion MatMulActivationFusion MatMulAddFusion "
    "MatMulIntegerToFloatFusion MatMulNBitsFusion MatMulNBitsMlpFusion MatMulNBitsQkvFusion MatMulScaleFusion "
    "MatMul_BatchNormalization_Fusion MatmulTransposeFusion NchwcTransformer NhwcTransformer NoopElimination "
    "NotWhereFusion PadFusion PreShapeNodeElimination QDQFinalCleanupTransformer QDQPropagationTransformer "
    "QDQS8ToU8Transformer QDQSelectorActionTransformer QuickGeluFusion ReshapeFusion SimplifiedLayerNormFusion "
    "SkipLayerNormFusion SliceConcatToSpaceToDepthFusion TransposeOptimizer UnsqueezeElimination "
    "WeightBiasQuantization"
)
KNOWN = _NAMES.split()
"""Those of its releases that we know of; a name of another one is looked for in its library."""
_LEAST = 12
"""Characters of a name that is looked for there: shorter ones end many a string, or are in none."""


def verify_optimizers(names: Sequence[str]) -> None:
    """Say which name is none: to leave it out would change nothing.

    Raises:
        UserError: naming it, and what is near.
    """
    for name in names:
        if name in KNOWN or (len(name) >= _LEAST and _in_library(name)):
            continue
        near = difflib.get_close_matches(name, KNOWN, n=3, cutoff=0.5) or [
            "SkipLayerNormFusion",
            "ConstantFolding",
        ]
        raise UserError(
            f"{option('disabled_optimizers')} {name!r}: no optimizer of ONNX Runtime, as {', '.join(near)} are"
        )


def _in_library(name: str) -> bool:
    """Whether ONNX Runtime's library has a string that ends in this."""
    folder = Path(import_onnxruntime().__file__).parent / "capi"
    for path in folder.glob("onnxruntime_pybind11_state*"):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(name.encode("utf-8", "replace") + b"\0") >= 0:
                return True
    return False
