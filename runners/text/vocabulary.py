"""Which ids name a token, and which of them end an answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Self

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.runners.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class Vocabulary:
    """Of one model and its tokenizer."""

    size: int
    """Ids from here on name no token: checkpoints pad the embedding beyond the tokenizer's ids."""
    holes: NDArray[np.int64] = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    """Ids below `size` that name none, ascending."""
    eos_token_ids: Collection[int] = ()

    @classmethod
    def of(cls, rows: int, eos_token_ids: Collection[int], tokenizer: Tokenizer | None) -> Self:
        """Of an embedding with so many rows."""
        if tokenizer is None:
            return cls(rows, eos_token_ids=eos_token_ids)
        size = min(rows, tokenizer.size)
        return cls(size, tokenizer.holes[tokenizer.holes < size], eos_token_ids)

    def named(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Of f32 [vocab] those of ids below `size`, -inf for those that name no token."""
        logits = logits[: self.size]
        if self.holes.size:
            logits = logits.copy()
            logits[self.holes] = -np.inf
        return logits

    def nameless(self, token_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these ids name no token."""
        return (token_ids >= self.size) | np.isin(token_ids, self.holes)
