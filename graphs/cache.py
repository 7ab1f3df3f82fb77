"""What travels through a graph beside the hidden states, and what a cache must say to the decoder.

Shape suffixes used throughout: B batch, S query tokens, T live tokens (cached and new), C cache capacity,
M = B x S tokens in a row, D hidden, F feed-forward, V vocabulary, N query heads, K key/value heads, H head size,
G = N / K query heads that share one key/value head, P positions. X is a projection's width.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import onnx_ir as ir
from onnxscript import GraphBuilder, OpBuilder

from qwen_onnx.checkpoints.config import QwenConfig
from qwen_onnx.contract import BATCH
from qwen_onnx.contract.cache_spec import CacheSpec, StateSpec
from qwen_onnx.contract.quant import QuantPlan

if TYPE_CHECKING:
    from qwen_onnx.graphs.model import Attention, QwenForCausalLM

END = 2**31 - 1
"""The end of a slice that goes to the end of its dimension."""
# Finite, so that a row that may look at nothing (padding) averages garbage instead of dividing 0 by 0, and
# far enough from f32's end that no score added to it becomes infinite.
MASKED = -1e30


@dataclasses.dataclass(frozen=True)
class Precision:
    """Number types of one graph. Norm statistics, scores, softmax and logits are f32 in all of them."""

    weights: ir.DataType
    """Of the initializers, as they lie in the weights file."""
    hidden: ir.DataType
    """Of the hidden states and the cache. Where it differs, weights are cast to it inside the graph."""
    quant: QuantPlan | None = None
    """How matrices in blocks are quantized."""
    panel_rows: int | None = None
    """Rows of a panel, of matrices in panels."""
    layer: int = 0
    """Whose matrices these are: not all need be quantized alike."""


LayerState = Sequence[ir.Value]
"""A layer's state tensors, in the order of the spec; of attention a KeyValue."""


class KeyValue(NamedTuple):
    """The state of a layer of attention."""

    key_BKCH: ir.Value
    value_BKCH: ir.Value


Step = Any
"""Where the query tokens are and what they may see. Each cache has its own kind: its `begin` makes one per graph, its
`attend` reads it, and the model between them only hands it on."""


class Cache(abc.ABC):
    """How a graph is told of its cache, and how heads attend over it."""

    name: str
    """As the manifest names the lowering."""
    slots: tuple[str, str]
    """Names of the dimension of slots, of the cache's inputs and outputs."""
    flat: bool = False
    """Hidden states are [M, D] between the layers, not [B, S, D]."""
    takes_packed: bool = False
    """`attend` takes queries, keys and values side by side too."""

    def spec(self, config: QwenConfig, precision: Precision) -> CacheSpec:
        """The state tensors of all layers."""
        shape = (BATCH, config.num_key_value_heads, self.slots[0], config.head_dim)
        dtype = precision.hidden.numpy().name
        return CacheSpec(
            tuple(
                StateSpec(layer, name, "full_attention", dtype, shape)
                for layer in range(config.num_hidden_layers)
                for name in ("key", "value")
            )
        )

    @abc.abstractmethod
    def begin(self, builder: GraphBuilder, model: QwenForCausalLM, ids_BS: ir.Value, *, single: bool) -> Step:
        """Declare the inputs beside ids and cache, and make of them the step that every layer reads.

        With `single` there is one token a row (S is 1).
        """

    @abc.abstractmethod
    def attend(
        self, op: OpBuilder, attn: Attention, qkv: list[ir.Value], past: KeyValue, step: Step
    ) -> tuple[ir.Value, KeyValue]:
        """Projected [..., heads x H] queries, keys and values -> [..., N x H] and the new cache."""

    @abc.abstractmethod
    def last(self, op: OpBuilder, x: ir.Value, step: Step) -> ir.Value:
        """Of the states after the last norm, each row's last real token: what the head reads."""

    def last_tokens(self, op: OpBuilder, x: ir.Value, count: ir.Value, step: Step) -> ir.Value:
        """The states of the last `count` (int64 [1]; 0 for all) of the S tokens of each row; rows end together."""
        raise NotImplementedError(f"{self.name} has no score graph")

    def advance(self, op: OpBuilder, step: Step, moved_B1: ir.Value) -> dict[str, ir.Value]:
        """For a graph that feeds its own next step: the inputs of `begin` that the next token needs, by name.

        `moved_B1` is int64, 1 where a row goes on; it is computed last of all.
        """
        raise NotImplementedError(f"{self.name} has no greedy graph")


def as_type(op: OpBuilder, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Cast where the type differs; no node where it does not."""
    return value if value.dtype == dtype else op.Cast(value, to=dtype)


def named(value: ir.Value, *sizes: int | ir.SymbolicDim | str) -> ir.Value:
    """The value, its sizes named where inference has lost them.

    ONNX Runtime plans memory by names: without, it reuses less, and takes three times as long to load.
    """
    value.shape = ir.Shape(sizes)
    return value


def size_of(value: ir.Value, axis: int) -> int | ir.SymbolicDim:
    """A dimension, by number or name."""
    if value.shape is None:
        raise ValueError(f"{value.name}: a value of unknown shape")
    return value.shape[axis]
