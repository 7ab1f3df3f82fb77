"""What a decoder carries from step to step: state tensors, as graphs declare and runners allocate them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Literal, get_args

from qwen_onnx.contract import BATCH, CAPACITY, PAST

Kind = Literal["full_attention", "sliding_window", "recurrent", "paged"]
KINDS: tuple[str, ...] = get_args(Kind)
"""A slot for each token; for each of the last tokens; none, it has one size whatever was said; in pages."""
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Of a number of a state tensor."""
LENGTHS = (CAPACITY, PAST)
"""Names of the dimension that has a slot for each token."""


ResizeKey = tuple[str, tuple[int | None, ...]]
"""The type and fixed sizes of state tensors: those of one key are resized by one graph."""


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """One tensor of one layer, an input `past_key_values.N.NAME` and an output `present.N.NAME` of each graph."""

    layer: int
    name: str
    """`key` or `value`, of attention."""
    kind: Kind
    dtype: str
    """float32, float16 or bfloat16."""
    shape: tuple[int | str, ...]
    """`batch_size`, and one of LENGTHS where it has slots, by name; all else by number."""

    def __post_init__(self) -> None:
        if self.layer < 0 or not self.name.isidentifier() or self.dtype not in ITEM_BYTES:
            raise ValueError(f"no state tensor: layer {self.layer}, {self.name!r}, {self.dtype!r}")
        sizes = [size for size in self.shape[1:] if size not in LENGTHS]
        sound = all(isinstance(size, int) and 0 < size < 2**31 for size in sizes)
        if self.shape[:1] != (BATCH,) or not sound or len(self.shape) - len(sizes) > 2:
            raise ValueError(f"no shape of a state tensor: {[*self.shape]}")
        slotted = self.slot_axis is not None
        if slotted is not {"full_attention": True, "recurrent": False}.get(self.kind, slotted):
            raise ValueError(f"a {self.kind} state {'with' if slotted else 'without'} slots")

    @property
    def past(self) -> str:
        """The graph's input."""
        return f"past_key_values.{self.layer}.{self.name}"

    @property
    def present(self) -> str:
        """The graph's output: the state after the new tokens."""
        return f"present.{self.layer}.{self.name}"

    @functools.cached_property
    def slot_axis(self) -> int | None:
        """The dimension that has a slot for each token; None where none has."""
        return next((axis for axis, size in enumerate(self.shape) if size in LENGTHS), None)

    def sizes(self, *, batch_size: int, slots: int) -> tuple[int, ...]:
        """The shape for so many rows and slots."""
        named: Mapping[str, int] = {BATCH: batch_size, **dict.fromkeys(LENGTHS, slots)}
        return tuple(size if isinstance(size, int) else named[size] for size in self.shape)

    def nbytes(self, *, batch_size: int, slots: int) -> int:
        """Bytes of so many rows and slots."""
        return math.prod(self.sizes(batch_size=batch_size, slots=slots)) * ITEM_BYTES[self.dtype]

    @property
    def fixed_sizes(self) -> tuple[int | None, ...]:
        """The shape, with None for what differs from cache to cache."""
        return tuple(size if isinstance(size, int) else None for size in self.shape)

    @property
    def resize_key(self) -> ResizeKey:
        """Of the graph that resizes it."""
        return self.dtype, self.fixed_sizes


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """All state tensors of a graph, layer by layer; graphs of one spec share buffers."""

    states: tuple[StateSpec, ...]

    def __post_init__(self) -> None:
        if not self.states or len({state.past for state in self.states}) < len(self.states):
            raise ValueError("a cache without state tensors, or with two of one name")

    @functools.cached_property
    def dtype(self) -> str:
        """Of the first tensor, as hidden states are: what the graph computes in."""
        return self.states[0].dtype

    @functools.cached_property
    def rewinds(self) -> bool:
        """It can go back to any number of its tokens: every state has slots for all of them."""
        return all(state.kind in ("full_attention", "paged") for state in self.states)

    @functools.cached_property
    def slot_bytes(self) -> int:
        """Bytes that each token of a row takes."""
        slotted = (state for state in self.states if state.slot_axis is not None)
        return sum(state.nbytes(batch_size=1, slots=1) for state in slotted)

    def nbytes(self, *, batch_size: int, slots: int) -> int:
        """Bytes of all tensors, for so many rows and slots."""
        return sum(state.nbytes(batch_size=batch_size, slots=slots) for state in self.states)

    @property
    def name(self) -> str:
        """What a manifest calls it, by type and slots."""
        slots = next((str(state.shape[state.slot_axis]) for state in self.states if state.slot_axis), "fixed")
        return f"{self.dtype}, {slots}"
