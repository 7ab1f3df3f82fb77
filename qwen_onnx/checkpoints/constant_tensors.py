"""Tensors that hold one number where training never leaves one: weights that were not saved, or were zeroed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from qwen_onnx.checkpoints.safetensors_file import FLOAT_DTYPES, StoredTensor

_ESSENTIAL = ("model.embed_tokens.", "model.norm.", "lm_head.")
_MADE = ("rotary.", ".scales")  # tables and block scales may well be one number


@dataclasses.dataclass(frozen=True)
class ConstantTensor:
    """A tensor of one number."""

    tensor: StoredTensor
    number: float | None
    """None of packed integers."""

    @property
    def is_essential(self) -> bool:
        """Without it every prompt has the same answer, or every token is as likely."""
        return self.tensor.name.startswith(_ESSENTIAL)

    def describe(self) -> str:
        """Its name, and what it holds."""
        return f"{self.tensor.name} {'of one number' if self.number is None else f'all {self.number:g}'}"


def constant_tensors(tensors: Iterable[StoredTensor]) -> list[ConstantTensor]:
    """Matrices of one number, and norms of zeros; biases of zeros and norms of ones are as models begin.

    It reads the first bytes of a tensor, and more only while they are the same.

    Raises:
        UserError: a file that became shorter.
    """
    found = []
    for tensor in tensors:
        is_matrix, is_norm = len(tensor.shape) > 1, tensor.name.endswith("norm.weight")
        made = tensor.name.startswith(_MADE[0]) or tensor.name.endswith(_MADE[1])
        if made or not (is_matrix or is_norm) or max(tensor.shape) < 2:
            continue
        number = tensor.only_number()
        if number is not None and (is_matrix or number == 0):
            found.append(ConstantTensor(tensor, number if tensor.dtype in FLOAT_DTYPES else None))
    return found


def some(constants: list[ConstantTensor]) -> str:
    """The first of them in words, and that there are more."""
    return ", ".join(each.describe() for each in constants[:3]) + (", ..." if len(constants) > 3 else "")
