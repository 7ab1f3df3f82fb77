"""What travels through a graph beside the hidden states, and in which number types.

Shape suffixes used throughout: B batch, S query tokens, T live tokens (cached and new), C cache capacity,
M = B x S tokens in a row, D hidden, F feed-forward, V vocabulary, N query heads, K key/value heads, H head size.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import onnx_ir as ir


@dataclasses.dataclass(frozen=True)
class Precision:
    """Number types of one graph. Norm statistics, scores, softmax and logits are f32 in all of them."""

    weights: ir.DataType
    """Of the initializers, as they lie in the weights file."""
    hidden: ir.DataType
    """Of the hidden states and the cache. Where it differs, weights are cast to it inside the graph."""


class KeyValue(NamedTuple):
    """One layer's cache."""

    key_BKCH: ir.Value
    value_BKCH: ir.Value


class Step(NamedTuple):
    """Where the query tokens are and what they may see: made once per graph, read by every layer."""

    position_ids_BS: ir.Value
    """int64: the row of the rotary tables, counted per sequence without its padding."""
    write_indices_B: ir.Value
    """int64: the cache slot of each row's first query token."""
    live_length: ir.Value
    """int64 [1]: T, the slots that attention reads."""
    mask_B1ST: ir.Value
    """f32, added to the scores: 0 where a query may look, a large negative number where not."""
    query_shape: ir.Value | list[int]
    """int64 [4]: B, S, N, H."""
    key_shape: ir.Value | list[int]
    """int64 [4]: B, S, K, H."""
    cos_PH2: ir.Value
    """f32 [positions, H/2]."""
    sin_PH2: ir.Value
