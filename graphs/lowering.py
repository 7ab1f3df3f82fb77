"""What a way of building the decoder must say; each is one class of its own (static, contrib, portable)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import onnx_ir as ir
from onnxscript import GraphBuilder, OpBuilder

from qwen_onnx.checkpoints.config import QwenConfig
from qwen_onnx.graphs.attention import Attention
from qwen_onnx.graphs.layers import MLP, Embedding, Linear, RMSNorm
from qwen_onnx.graphs.rotary import RotaryTables
from qwen_onnx.graphs.state import Precision, Step


class Lowering:
    """One choice of operators: for the layers, for attention and cache, and for what stands around them."""

    name: ClassVar[str]
    opsets: ClassVar[Mapping[str, int]]
    """Operator domains and their versions."""
    cache_lengths: ClassVar[tuple[str, str]]
    """Names of the third dimension of the cache's inputs and outputs."""
    flat: ClassVar[bool] = False
    """Hidden states are [M, D] between the layers, not [B, S, D]."""
    linear: ClassVar[type[Linear]] = Linear
    norm: ClassVar[type[RMSNorm]] = RMSNorm
    embedding: ClassVar[type[Embedding]] = Embedding
    head: ClassVar[type[Linear] | None] = None
    """None: as `linear`."""
    attention: type[Attention]
    mlp: type[MLP] = MLP

    def begin(
        self,
        builder: GraphBuilder,
        config: QwenConfig,
        precision: Precision,
        rotary: RotaryTables,
        ids_BS: ir.Value,
        *,
        single: bool,
    ) -> Step:
        """Declare the inputs beside ids and cache, and make of them the step that every layer reads.

        With `single` there is one token a row (S is 1).
        """
        raise NotImplementedError

    def last(self, op: OpBuilder, x: ir.Value, step: Step) -> ir.Value:
        """Of the states after the last norm, each row's last real token: what the head reads."""
        raise NotImplementedError

    def last_tokens(self, op: OpBuilder, x: ir.Value, count: ir.Value, step: Step) -> ir.Value:
        """The states of the last `count` (int64 [1]; 0 for all) of the S tokens of each row: what the head reads.

        Rows must end together.
        """
        raise NotImplementedError

    def advance(self, op: OpBuilder, step: Step, moved_B1: ir.Value) -> dict[str, ir.Value]:
        """For a graph that feeds its own next step: the inputs of `begin` that the next token needs, by name.

        `moved_B1` is int64, 1 where a row goes on; it is computed last of all.
        """
        raise NotImplementedError
