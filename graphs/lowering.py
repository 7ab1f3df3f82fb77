"""What a way of building attention and cache must say; each is one class of its own (see static)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import onnx_ir as ir
from onnxscript import GraphBuilder

from qwen_onnx.config import QwenConfig
from qwen_onnx.graphs.attention import Attention
from qwen_onnx.graphs.rotary import RotaryTables
from qwen_onnx.graphs.state import Step


class Lowering:
    """One choice of operators for attention and cache."""

    name: ClassVar[str]
    opsets: ClassVar[Mapping[str, int]]
    """Operator domains and their versions."""
    attention: ClassVar[type[Attention]]
    cache_length: ClassVar[str]
    """Name of the cache inputs' third dimension."""

    def begin(
        self,
        builder: GraphBuilder,
        config: QwenConfig,
        rotary: RotaryTables,
        ids_BS: ir.Value,
        *,
        single: bool,
    ) -> tuple[Step, ir.Value | None]:
        """Declare the inputs beside ids and cache, and make of them the step that every layer reads.

        The second value says which of the S tokens is each row's last, int64 [B]; None with `single`, where
        there is one token a row and nothing to choose.
        """
        raise NotImplementedError
