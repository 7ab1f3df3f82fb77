"""What travels through a graph beside the hidden states, and in which number types.

Shape suffixes used throughout: B batch, S query tokens, T live tokens (cached and new), C cache capacity,
M = B x S tokens in a row, D hidden, F feed-forward, V vocabulary, N query heads, K key/value heads, H head size,
G = N / K query heads that share one key/value head. X is a projection's width.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import onnx_ir as ir

from qwen_onnx.contract import BlockPlan

END = 2**31 - 1
"""The end of a slice that goes to the end of its dimension."""


@dataclasses.dataclass(frozen=True)
class Precision:
    """Number types of one graph. Norm statistics, scores, softmax and logits are f32 in all of them."""

    weights: ir.DataType
    """Of the initializers, as they lie in the weights file."""
    hidden: ir.DataType
    """Of the hidden states and the cache. Where it differs, weights are cast to it inside the graph."""
    blocks: BlockPlan | None = None
    """How the matrices are quantised."""
    panel_rows: int | None = None
    """Matrices lie in panels of so many rows; see graphs/panels.py."""


class KeyValue(NamedTuple):
    """One layer's cache."""

    key_BKCH: ir.Value
    value_BKCH: ir.Value


Step = Any
"""Where the query tokens are and what they may see. Each lowering has its own kind: its `begin` makes one per
graph, its attention reads it, and the model between them only hands it on."""
