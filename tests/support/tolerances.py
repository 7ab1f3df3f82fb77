"""How near two computations of the same logits must come: the package's own table, and what tests add to it.

Logits of the random checkpoints are of order 10. A wrong formula (a transposed head, a late position, a missing
bias) moves them by 0.1 to 10.
"""

from __future__ import annotations

import numpy as np

from qwen_onnx.checks.tolerances import BF16, F16, F32, INT8_ACTIVATIONS, OF_TYPE, Tolerance

__all__ = ["BF16", "F16", "F32", "INT8_ACTIVATIONS", "OF_TYPE", "Tolerance"]

F32_ORDER = Tolerance(2e-5, "both sides f32, the same sums taken in another order or blocking; 7e-6 was seen")
F16_ORDER = Tolerance(0.02, "both sides f16, a rounding more or less where a runtime fused nodes; 0 was seen")
NARROW_ON_CPU = Tolerance(2e-4, "weights are rounded on both sides, and all that is computed is f32: as F32")
TRANSFORMERS_F32 = Tolerance(2e-4, "both sides f32, each as far from the truth as F32 says; 3e-5 was seen")
TRANSFORMERS_REAL = Tolerance(1e-3, "both sides f32, 30 layers, logits of order 20")
INT8_EDGE = Tolerance(
    0.25,
    "activations rounded to 8 bits on both sides, 5e-6 apart; but a value between two of them may fall to the other "
    "one, and all later positions see it: 0.11 was seen",
)
EXACT = Tolerance(0.0, "the same operations on the same numbers")


def difference(found: np.ndarray, wanted: np.ndarray) -> float:
    """Max |found - wanted| of finite arrays of one shape; a NaN on either side is a failure, not a small number."""
    assert found.shape == wanted.shape, f"{found.shape} found, {wanted.shape} wanted"
    found, wanted = found.astype(np.float64), wanted.astype(np.float64)
    assert np.isfinite(found).all(), "what was found is not finite"
    assert np.isfinite(wanted).all(), "what was wanted is not finite"
    return float(np.abs(found - wanted).max(initial=0.0))


def assert_close(found: np.ndarray, wanted: np.ndarray, tolerance: Tolerance) -> None:
    worst = difference(found, wanted)
    assert worst <= tolerance.bound, f"{worst:.2e} apart, {tolerance.bound:.0e} allowed: {tolerance.reason}"


OF_DTYPE = {"f32": F32, "f16": NARROW_ON_CPU, "bf16": NARROW_ON_CPU}
"""For an export that a runner runs on the CPU provider, against the reference on the exported weights."""
