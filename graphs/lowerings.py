"""Every lowering that exports are made of: a cache, a weight format, a norm, and what is one product.

A lowering is a row here and no class: what it combines is known to nothing but this table.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

import onnx_ir as ir
from onnxscript import OpBuilder

from qwen_onnx.graphs.blocks import BlocksEmbedding, BlocksLinear
from qwen_onnx.graphs.cache import Cache
from qwen_onnx.graphs.contrib import ContribCache
from qwen_onnx.graphs.layers import (
    MICROSOFT,
    Embedding,
    FusedRMSNorm,
    Linear,
    PortableRMSNorm,
    RMSNorm,
    fused_matmul_add,
    matmul_add,
    quick_gelu,
    silu,
)  # fmt: skip
from qwen_onnx.graphs.panels import NCHWC, PanelsEmbedding, PanelsLinear
from qwen_onnx.graphs.portable import PortableCache
from qwen_onnx.graphs.static import StaticCache


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """How matrices multiply, and how the embedding is read."""

    linear: Callable[..., Linear] = Linear
    embedding: type[Embedding] = Embedding


@dataclasses.dataclass(frozen=True)
class Lowering:
    """One choice of operators."""

    cache: Cache
    weights: WeightFormat = WeightFormat()
    norm: type[RMSNorm] = RMSNorm
    silu: Callable[[OpBuilder, ir.Value], ir.Value] = silu
    packed_qkv: bool = False
    """Queries, keys and values are one product, over tensors that lie side by side in the weights file."""
    packed_gate_up: bool = False
    """Gate and up are."""
    opsets: Mapping[str, int] = dataclasses.field(default_factory=lambda: MappingProxyType({"": 24}))
    """Operator domains and their versions."""

    @property
    def name(self) -> str:
        """As the manifest has it."""
        return self.cache.name


LIVE, ALL = StaticCache(), StaticCache("static-capture", reads_all=True)
BY_GROUP = StaticCache("static-grouped", reads_all=True, grouped=True)
FUSED_MATMUL = WeightFormat(functools.partial(Linear, product=fused_matmul_add))
MATMUL = WeightFormat(functools.partial(Linear, product=matmul_add))
_FUSED = MappingProxyType({"": 24, MICROSOFT: 1})
_CONVOLVED = MappingProxyType({**_FUSED, NCHWC: 1})

_contrib = functools.partial(Lowering, ContribCache(), norm=FusedRMSNorm, silu=quick_gelu, opsets=_FUSED)
_blocks = functools.partial(
    Lowering, weights=WeightFormat(BlocksLinear, BlocksEmbedding),
    packed_qkv=True, packed_gate_up=True, opsets=_FUSED,
)  # fmt: skip
# Gate and up are two products: to split the channels of one takes longer.
_panels = functools.partial(
    Lowering, weights=WeightFormat(PanelsLinear, PanelsEmbedding), norm=FusedRMSNorm,
    packed_qkv=True, opsets=_CONVOLVED,
)  # fmt: skip

STATIC = Lowering(LIVE)
CAPTURE = Lowering(ALL)
GROUPED = Lowering(BY_GROUP, norm=FusedRMSNorm, opsets=_FUSED)
CONTRIB = _contrib(weights=FUSED_MATMUL, packed_qkv=True, packed_gate_up=True)
CONTRIB_LINKED = _contrib(weights=FUSED_MATMUL)  # where the weights files are the checkpoint's own
PORTABLE = Lowering(PortableCache(), MATMUL, norm=PortableRMSNorm, opsets=MappingProxyType({"": 17}))

BLOCKS_STATIC = _blocks(LIVE)
BLOCKS_CAPTURE = _blocks(ALL)
BLOCKS_GROUPED = _blocks(BY_GROUP, norm=FusedRMSNorm)
BLOCKS_CONTRIB = _blocks(ContribCache(), norm=FusedRMSNorm, silu=quick_gelu)

PANELS_STATIC = _panels(LIVE)
PANELS_CAPTURE = _panels(ALL)
PANELS_GROUPED = _panels(BY_GROUP)
