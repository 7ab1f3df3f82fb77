"""What `check` accepts: rounding of the computing type, near ties, and no perturbed layer; on numbers made here."""

from __future__ import annotations

import math

import numpy as np
import pytest

from qwen_onnx.checkpoints.config import parse_config
from qwen_onnx.checks.golden import compare_golden
from qwen_onnx.checks.logits import KL_BOUNDS, _kl, compare_logits
from qwen_onnx.checks.tolerances import OF_TYPE
from qwen_onnx.contract.manifest import Golden
from qwen_onnx.reference import reference_logits
from support.checkpoints import CONFIGS, random_tensors
from support.damage import perturbed

IDS = np.random.default_rng(3).integers(0, 320, 48)
ROUNDED = {"float32": np.float32, "float16": np.float16}


def golden(ids: list[int], margin: float) -> Golden:
    return Golden((1, 2), tuple(ids), (margin,) * len(ids))


@pytest.mark.parametrize("dtype", KL_BOUNDS)
def test_equal_ids_are_good_whatever_their_margins(dtype: str) -> None:
    found = compare_golden(golden([5, 6], 0.0), golden([5, 6], 0.0), OF_TYPE[dtype].bound, "cuda")
    assert found.ok
    assert found.text == "golden ids: 2 of 2 equal on cuda"


@pytest.mark.parametrize("dtype", KL_BOUNDS)
def test_other_ids_are_accepted_at_near_ties_only(dtype: str) -> None:
    """Two logits may each be off by the bound, towards each other."""
    reach = 2 * OF_TYPE[dtype].bound
    for margin, ok in ((0.99 * reach, True), (1.01 * reach, False)):
        found = compare_golden(golden([5, 7, 9], 0), golden([5, 6, 9], margin), OF_TYPE[dtype].bound, "cuda")
        assert found.ok == ok
        assert "2 of 3 equal on cuda" in found.text


def test_a_near_tie_for_f16_is_a_mismatch_in_f32() -> None:
    there, here = golden([5, 6], 0.1), golden([5, 7], 0.1)
    assert not compare_golden(here, there, OF_TYPE["float32"].bound, "cpu").ok
    assert compare_golden(here, there, OF_TYPE["float16"].bound, "cpu").ok


def test_the_margins_of_the_ids_that_differ_count() -> None:
    there = Golden((1,), (5, 6, 7), (1e-6, 3.0, 1e-6))
    assert not compare_golden(golden([5, 9, 7], 0), there, OF_TYPE["float16"].bound, "cpu").ok
    assert compare_golden(golden([9, 6, 7], 0), there, OF_TYPE["float16"].bound, "cpu").ok


def test_a_near_tie_hides_no_mismatch_after_it() -> None:
    there = Golden((1,), (5, 6, 7), (1e-6, 3.0, 3.0))
    assert not compare_golden(golden([9, 6, 8], 0), there, OF_TYPE["float16"].bound, "cpu").ok


def test_too_few_ids_are_a_mismatch() -> None:
    assert not compare_golden(golden([5], 9.0), golden([5, 6], 9.0), OF_TYPE["float32"].bound, "cpu").ok
    assert not compare_golden(golden([], 9.0), golden([5, 6], 9.0), OF_TYPE["float32"].bound, "cpu").ok


def test_kl_of_two_ids() -> None:
    """P = (1/4, 3/4), q = (1/2, 1/2): 1/4 ln(1/2) + 3/4 ln(3/2). And the other way round it is another number."""
    p, q = np.array([[0.0, math.log(3)]]), np.array([[7.0, 7.0]])
    assert _kl(p, q) == pytest.approx([0.25 * math.log(0.5) + 0.75 * math.log(1.5)])
    assert _kl(q, p) == pytest.approx([0.5 * math.log(2.0) + 0.5 * math.log(2 / 3)])
    assert _kl(p, p + 1000) == pytest.approx([0.0])


def test_kl_is_the_mean_over_positions_and_top_1_their_share() -> None:
    wanted = np.array([[0.0, math.log(3)]] * 4)
    found = wanted.astype(np.float32)
    found[3] = [0.0, -math.log(3)]
    text = compare_logits(found, wanted, "bfloat16", layers=3).text
    assert "over 4 positions, bfloat16: top-1 agrees on 75%" in text
    one = 0.5 * math.log(3)  # of (1/4, 3/4) from (3/4, 1/4)
    assert f"KL {one / 4:.1e} " in text
    assert f"largest difference {2 * math.log(3):.1e} " in text


@pytest.mark.parametrize("dtype", KL_BOUNDS)
def test_the_largest_difference_is_bounded_and_grows_with_the_logits(dtype: str) -> None:
    bound = OF_TYPE[dtype].bound
    for largest, allowed in ((1.0, bound), (10.0, bound), (40.0, 4 * bound)):
        wanted = np.zeros((3, 5000))
        wanted[:, 0] = largest
        for error, ok in ((0.98 * allowed, True), (1.02 * allowed, False)):
            found = wanted.astype(np.float32)
            found[1, 77] -= error  # one of many improbable ids: no divergence to speak of
            assert compare_logits(found, wanted, dtype, layers=3).ok == ok, (largest, error)


@pytest.mark.parametrize("dtype", KL_BOUNDS)
def test_many_small_differences_are_bounded_by_the_divergence(dtype: str) -> None:
    bound, kl_bound = OF_TYPE[dtype].bound, KL_BOUNDS[dtype]
    wanted = np.random.default_rng(0).normal(0, 3, (20, 300))
    noise = np.random.default_rng(1).choice([-0.9, 0.9], wanted.shape) * bound
    found = (wanted + noise).astype(np.float32)
    kl = float(np.mean(_kl(wanted, found.astype(np.float64))))
    assert compare_logits(found, wanted, dtype, layers=3).ok == (kl <= kl_bound)
    if dtype != "float32":
        assert kl > kl_bound


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_good(wrong: float) -> None:
    found = np.zeros((2, 5), np.float32)
    found[1, 3] = wrong
    assert not compare_logits(found, np.zeros((2, 5)), "bfloat16", layers=3).ok


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen2_untied"])
@pytest.mark.parametrize("dtype", ROUNDED)
def test_one_layer_perturbed_by_a_hundredth_is_found(name: str, dtype: str) -> None:
    """The bounds pass rounded logits and fail those of any one matrix that is off by a hundredth."""
    raw = CONFIGS[name]
    config, tensors = parse_config(raw), random_tensors(raw)

    def logits(changed: str = "") -> np.ndarray:
        def read(tensor: str) -> np.ndarray:
            return perturbed(tensors[tensor]) if tensor == changed else tensors[tensor]

        return reference_logits(config, read, IDS)

    wanted = logits()
    assert compare_logits(wanted.astype(ROUNDED[dtype]).astype(np.float32), wanted, dtype, layers=3).ok
    for layer in range(raw["num_hidden_layers"]):
        for matrix in ("self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
            found = logits(f"model.layers.{layer}.{matrix}.weight").astype(np.float32)
            finding = compare_logits(found, wanted, dtype, layers=3)
            assert not finding.ok, f"layer {layer}, {matrix}: {finding.text}"
