"""The one table of how far logits may lie from float64 over the same weights, and why not nearer.

For logits of order 10 after 3 layers, by the type that hidden states and cache are held in.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Tolerance(NamedTuple):
    """The largest |difference| of two logits, and where it comes from."""

    bound: float
    reason: str


F32 = Tolerance(2e-4, "f32 rounds by 6e-8 of a value at each node, 60 times in 3 layers; 3e-5 was seen")
F16 = Tolerance(0.1, "f16 rounds by 5e-4 of a value, 60 times: 5e-4 x 10 x sqrt(60) = 0.04; 0.042 was seen")
BF16 = Tolerance(0.4, "bf16 rounds by 4e-3 of a value, 8 times as coarsely as f16: 0.3; 0.17 was seen")

INT8_ACTIVATIONS = Tolerance(
    1.5,
    "activations rounded to 8 bits by block: 0.4 to 0.8 % of a value at each of 22 products; 0.73 was seen",
)

OF_TYPE = {"float32": F32, "float16": F16, "bfloat16": BF16, "int8": INT8_ACTIVATIONS}
_LAYERS = 3
_SIZE = 10.0


def logit_bound(dtype: str, *, layers: int, largest: float) -> float:
    """The table's bound for a deeper model and larger logits: roundings add up like a random walk.

    Args:
        dtype: float32, float16 or bfloat16; int8 for products over quantized weights.
        layers: of the model.
        largest: the largest |logit|.
    """
    return OF_TYPE[dtype].bound * max(1.0, math.sqrt(layers / _LAYERS)) * max(1.0, largest / _SIZE)
