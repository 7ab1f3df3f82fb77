"""The choice of a token: numbers worked out by hand, ill-formed logits, and counts of what is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from qwen_onnx import UserError
from qwen_onnx.runners.sampling.logits import (
    Candidates,
    candidates,
    draw,
    log_normalizer,
    top,
    top_k_ids,
    top_p_ids,
    with_bias,
    with_count_penalties,
    with_repetition_penalty,
    with_temperature,
    without_ids,
)
from qwen_onnx.runners.sampling.request import Request
from qwen_onnx.runners.sampling.sampler import Sampler

NEVER = -math.inf
PROBABILITIES = [0.1, 0.5, 0.15, 0.25]
LOGITS = np.log(np.array(PROBABILITIES, np.float32)) + np.float32(3)
LARGEST = float(np.finfo(np.float32).max)

pytestmark = pytest.mark.filterwarnings("error")  # an overflow that NumPy only warns of


def array(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def left(sampler: Sampler, logits: np.ndarray) -> list[int]:
    """Ids that can be drawn."""
    return ids_of(sampler.candidates(sampler.penalized(logits)))


def ids_of(left: Candidates) -> list[int]:
    ids = np.arange(left.weights.size) if left.ids is None else left.ids
    return ids[left.weights > 0].tolist()


def shares(weights: np.ndarray) -> np.ndarray:
    return weights / weights.sum(dtype=np.float64)


def test_temperature_divides_the_logits() -> None:
    """0.5 doubles the differences, and so squares the shares."""
    squares = np.square(PROBABILITIES)
    np.testing.assert_allclose(shares(with_temperature(LOGITS, 0.5)), squares / squares.sum(), rtol=1e-5)
    roots = np.sqrt(PROBABILITIES)
    np.testing.assert_allclose(shares(with_temperature(LOGITS, 2.0)), roots / roots.sum(), rtol=1e-5)


@pytest.mark.parametrize(
    ("k", "wanted"),
    [(0, [0, 1, 2, 3]), (1, [1]), (2, [1, 3]), (3, [1, 2, 3]), (4, [0, 1, 2, 3]), (99, [0, 1, 2, 3])],
)
def test_top_k_keeps_the_best(k: int, wanted: list[int]) -> None:
    """0, and k of the vocabulary's size or beyond it, keep all."""
    assert ids_of(candidates(LOGITS, top_k=k)) == wanted


def test_top_k_keeps_equals_of_the_last() -> None:
    """As in transformers: no rule says which of two equals would go."""
    assert top_k_ids(array(2, 1, 3, 2, 0), 2).tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    ("p", "wanted"),
    [
        (0, [1]),
        (0.49, [1]),
        (0.51, [1, 3]),
        (0.74, [1, 3]),
        (0.76, [1, 2, 3]),
        (0.91, [0, 1, 2, 3]),
        (1, [0, 1, 2, 3]),
    ],
)
def test_top_p_keeps_the_fewest_that_reach_it(p: float, wanted: list[int]) -> None:
    """The token that crosses the limit stays; p = 0 keeps the best one."""
    assert ids_of(candidates(LOGITS, top_p=p)) == wanted


def test_top_p_that_is_reached_exactly_needs_no_more() -> None:
    """Sums that meet the limit to the last bit have reached it."""
    assert top_p_ids(array(0.5, 0.25, 1, 0.25), 0.5).tolist() == [2]
    assert top_p_ids(array(0.5, 0.25, 1, 0.25), 0.75).tolist() == [0, 2]


def test_top_p_of_equals_keeps_as_many_as_it_takes_lowest_ids_first() -> None:
    """top_p cuts flat logits too, the same ids each time."""
    assert top_p_ids(np.ones(10, np.float32), 0.35).tolist() == [0, 1, 2, 3]
    assert top_p_ids(array(0.02, 1, 0.02, 0.02), 0.98).tolist() == [0, 1, 2]


@pytest.mark.parametrize(("min_p", "wanted"), [(0, [0, 1, 2, 3]), (0.25, [1, 2, 3]), (0.4, [1, 3]), (1, [1])])
def test_min_p_is_a_share_of_the_best(min_p: float, wanted: list[int]) -> None:
    """As a probability, 0.25 would keep two."""
    assert ids_of(candidates(LOGITS, min_p=min_p)) == wanted


@pytest.mark.parametrize(
    ("uniform", "wanted"), [(0.0, 0), (0.09, 0), (0.11, 1), (0.59, 1), (0.61, 2), (0.76, 3)]
)
def test_draw_goes_through_the_ids_in_their_order(uniform: float, wanted: int) -> None:
    assert draw(array(*PROBABILITIES), uniform) == wanted
    assert draw(array(*PROBABILITIES) * 7, uniform) == wanted


def test_draw_never_takes_what_is_cut_off() -> None:
    """Not even at 0, and at the last number below 1."""
    weights = array(0, 1, 0, 1, 0)
    assert [draw(weights, uniform) for uniform in (0.0, 0.49, 0.51, math.nextafter(1, 0))] == [1, 1, 3, 3]
    assert draw(array(1, 1e-45, 0), math.nextafter(1, 0)) == 0


@pytest.mark.parametrize("size", [511, 512, 513, 3000])
def test_a_draw_over_a_large_vocabulary_is_that_of_plain_running_sums(size: int) -> None:
    """Sums go block by block; the id is right in each block and at the seams."""
    rng = np.random.default_rng(size)
    weights = rng.exponential(size=size).astype(np.float32)
    weights[rng.integers(0, size, size // 2)] = 0
    reached = np.cumsum(shares(weights))
    for uniform in rng.random(200):
        found = draw(weights, uniform)
        assert reached[found] > uniform - 1e-6
        assert found == 0 or reached[found - 1] <= uniform + 1e-6
        assert weights[found] > 0


def test_repetition_penalty() -> None:
    """Positive logits are divided, negative ones multiplied, which makes both less likely."""
    found = with_repetition_penalty(array(2, -2, 0, 3), np.array([0, 1, 2]), 2.0)
    assert found.tolist() == [1, -4, 0, 3]


def test_presence_and_frequency_penalty() -> None:
    """Frequency counts how often, presence only whether."""
    found = with_count_penalties(array(3, 1, 0), np.array([2, 1, 0]), presence=0.5, frequency=0.25)
    assert found.tolist() == [2, 0.25, 0]


def test_bias_and_exclusion() -> None:
    """The logits that are given stay what they are: log probabilities are made of them later."""
    logits = array(1, 2, 3)
    assert with_bias(logits, {2: -4, 0: 1.5}).tolist() == [2.5, 2, -1]
    assert without_ids(logits, {1, 7}).tolist() == [1, NEVER, 3]
    assert logits.tolist() == [1, 2, 3]


def test_log_probabilities_are_those_of_float64() -> None:
    """Sums of f32 would be off in the seventh digit, and positive for an id that is all but certain."""
    np.testing.assert_allclose(np.exp(LOGITS - log_normalizer(LOGITS)), PROBABILITIES, rtol=1e-6)
    assert 30 - log_normalizer(array(30, 0, NEVER)) == pytest.approx(-math.exp(-30), rel=0.05)
    assert log_normalizer(array(LARGEST, -LARGEST)) == LARGEST


def test_the_best_logits_are_sorted_the_lower_id_of_equals_first() -> None:
    assert top(array(1, 3, 1, NEVER, 2, 1), 3) == [(1, 3.0), (4, 2.0), (0, 1.0)]
    assert top(array(1, NEVER), 9) == [(0, 1.0)]
    assert top(array(NEVER), 1) == top(array(1), 0) == []


def sampler_of(size: int, prompt: Sequence[int] = (), **values: Any) -> Sampler:
    return Sampler(Request(**values), prompt, size=size, eos_token_ids={0})


def test_every_processor_in_its_order() -> None:
    """Bias, penalties, temperature, then the cuts: top_p is over what top_k left."""
    sampler = sampler_of(
        6, [1, 9], min_new_tokens=1, do_sample=True, temperature=0.5, top_k=3, logit_bias={1: -3.0},
        repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5,
    )  # fmt: skip
    sampler.take(2)
    sampler.take(2)
    # Id 1: (1 - 3) * 2 = -4; id 2: 6 / 2 - 0.25 - 2 * 0.5 = 1.75.
    scores = sampler.penalized(array(9, 1, 6, 1.5, 2, 1))
    assert scores.tolist() == [9, -4, 1.75, 1.5, 2, 1]
    ids, weights = sampler.candidates(scores)
    assert ids.tolist() == [0, 2, 4]
    np.testing.assert_allclose(np.log(weights), [0, (1.75 - 9) / 0.5, (2 - 9) / 0.5], rtol=1e-6)
    # top_p is over what top_k left: alone, 0.6 would keep id 3 too.
    both = sampler_of(4, do_sample=True, top_k=2, top_p=0.6)
    assert left(both, LOGITS) == [1]
    assert left(sampler_of(4, do_sample=True, top_p=0.6), LOGITS) == [1, 3]


def test_penalties_hold_for_greedy_too() -> None:
    """As in transformers, whose processors run without do_sample; temperature and cuts change nothing there."""
    sampler = sampler_of(3, repetition_penalty=2.0, temperature=0.1, top_k=1)
    assert [sampler.choose(array(5, 4, 3)) for _ in range(4)] == [0, 1, 2, 0]
    assert [sampler_of(3).choose(array(5, 4, 3)) for _ in range(2)] == [0, 0]


def test_an_end_token_is_held_off() -> None:
    """For exactly `min_new_tokens` tokens."""
    sampler = sampler_of(3, min_new_tokens=2)
    assert [sampler.choose(array(5, 4, 3)) for _ in range(4)] == [1, 1, 0, 0]


@pytest.mark.parametrize(
    "logits",
    [
        np.zeros(50, np.float32),
        np.where(np.arange(50) == 7, np.float32(7), np.float32(NEVER)),
        array(LARGEST, -LARGEST, 0, NEVER),
        array(1, 1, NEVER, 1),
        array(5),
    ],
    ids=["equal", "one", "extreme", "ties", "single"],
)
@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 5e-324},
        {"temperature": 1e308},
        {"top_k": 1},
        {"top_k": 10**9},
        {"top_p": 0.0},
        {"top_p": 1.0},
        {"top_p": 1 - 1e-16},
        {"min_p": 1.0},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
        {"temperature": 1e-9, "top_k": 2, "top_p": 1e-9, "min_p": 0.5, "presence_penalty": -2.0},
    ],
    ids=str,
)
def test_ill_formed_logits(logits: np.ndarray, values: dict[str, Any]) -> None:
    """Infinity less infinity makes no NaN: no id that was excluded is drawn, and one is always left."""
    sampler = sampler_of(logits.size, [0], do_sample=True, seed=1, **values)
    for _ in range(20):
        _, weights = sampler.candidates(sampler.penalized(logits))
        assert weights.max() == 1
        assert weights.min() >= 0
        assert logits[sampler.choose(logits)] > NEVER


def test_a_tiny_temperature_is_greedy_and_a_huge_one_is_flat() -> None:
    assert {sampler_of(4, do_sample=True, temperature=1e-30).choose(LOGITS) for _ in range(20)} == {1}
    np.testing.assert_allclose(with_temperature(LOGITS, 1e300), [1] * 4, rtol=1e-6)


@pytest.mark.parametrize(
    "values", [{"do_sample": True}, {"repetition_penalty": 2.0}], ids=["drawn", "greedy"]
)
def test_nothing_left_to_choose_is_said(values: dict[str, Any]) -> None:
    """It is an error, not token 0, which was excluded as all others."""
    with pytest.raises(UserError, match="no token is left"):
        sampler_of(3, **values).choose(np.full(3, NEVER, np.float32))


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({}, PROBABILITIES),
        ({"temperature": 0.5}, np.square(PROBABILITIES) / np.square(PROBABILITIES).sum()),
        ({"top_k": 2}, [0, 2 / 3, 0, 1 / 3]),
        ({"top_p": 0.8}, [0, 0.5 / 0.9, 0.15 / 0.9, 0.25 / 0.9]),
        ({"min_p": 0.25}, [0, 0.5 / 0.9, 0.15 / 0.9, 0.25 / 0.9]),
        ({"logit_bias": {1: -100.0}}, [0.2, 0, 0.3, 0.5]),
    ],
    ids=["all", "temperature", "top_k", "top_p", "min_p", "bias"],
)
def test_what_is_drawn_is_distributed_as_it_should_be(
    values: dict[str, Any], wanted: Sequence[float]
) -> None:
    """Within five sigma, of a fixed seed."""
    count = 4000
    sampler = sampler_of(4, do_sample=True, seed=3, **values)
    found = np.bincount([sampler.choose(LOGITS) for _ in range(count)], minlength=4)
    sigma = np.sqrt(count * np.multiply(wanted, np.subtract(1, wanted)))
    assert (np.abs(found - count * np.array(wanted)) <= 5 * sigma).all(), found


def test_the_same_seed_draws_the_same_and_none_another() -> None:
    """Each answer has a generator of its own."""
    drawn = [
        [sampler.choose(LOGITS) for _ in range(60)]
        for sampler in (sampler_of(4, do_sample=True, seed=seed) for seed in (5, 5, 6, None, None))
    ]
    assert drawn[0] == drawn[1]
    assert len({tuple(ids) for ids in drawn}) == 4


def test_a_cut_does_not_shift_the_random_numbers() -> None:
    """One number a token: what is drawn after a step does not depend on what was cut in it."""
    free, cut = (sampler_of(4, do_sample=True, seed=9) for _ in range(2))
    free.choose(LOGITS)
    cut.choose(array(NEVER, NEVER, 0, NEVER))
    assert [cut.choose(LOGITS) for _ in range(30)] == [free.choose(LOGITS) for _ in range(30)]


def test_a_large_vocabulary_is_cut_as_a_small_one() -> None:
    """Ids are left out before the rest is sorted; the same ids stay as when all are sorted."""
    rng = np.random.default_rng(0)
    for spread in (0.01, 1, 5):
        weights = with_temperature((spread * rng.standard_normal(30_000)).astype(np.float32), 1.0)
        order = np.argsort(-weights, kind="stable")
        ascending = np.cumsum(shares(weights)[order])
        for p in (0.001, 0.3, 0.9, 0.999):
            count = 1 + int(np.searchsorted(ascending[:-1], p))
            found = top_p_ids(weights, p).tolist()
            assert abs(len(found) - count) <= 1 + count // 5000  # sums in another order
            assert found == sorted(order[: len(found)].tolist())
