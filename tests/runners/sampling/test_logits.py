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
    log_normaliser,
    top,
    top_k_ids,
    top_p_ids,
    with_temperature,
)
from qwen_onnx.runners.sampling.params import Sampling
from qwen_onnx.runners.sampling.penalties import (
    with_bias,
    with_count_penalties,
    with_repetition_penalty,
    without_ids,
)
from qwen_onnx.runners.sampling.sampler import Chooser

NEVER = -math.inf
PROBABILITIES = [0.1, 0.5, 0.15, 0.25]
LOGITS = np.log(np.array(PROBABILITIES, np.float32)) + np.float32(3)
LARGEST = float(np.finfo(np.float32).max)

pytestmark = pytest.mark.filterwarnings("error")  # an overflow that NumPy only warns of


def array(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def left(choosing: Chooser, logits: np.ndarray) -> list[int]:
    """Ids that can be drawn."""
    return ids_of(choosing.candidates(choosing.penalised(logits)))


def ids_of(left: Candidates) -> list[int]:
    ids = np.arange(left.weights.size) if left.ids is None else left.ids
    return ids[left.weights > 0].tolist()


def shares(weights: np.ndarray) -> np.ndarray:
    return weights / weights.sum(dtype=np.float64)


def test_temperature_divides_the_logits() -> None:
    """A temperature applied to probabilities, or multiplied: 0.5 doubles the differences, squares the shares."""
    squares = np.square(PROBABILITIES)
    np.testing.assert_allclose(shares(with_temperature(LOGITS, 0.5)), squares / squares.sum(), rtol=1e-5)
    roots = np.sqrt(PROBABILITIES)
    np.testing.assert_allclose(shares(with_temperature(LOGITS, 2.0)), roots / roots.sum(), rtol=1e-5)


@pytest.mark.parametrize(
    ("k", "wanted"),
    [(0, [0, 1, 2, 3]), (1, [1]), (2, [1, 3]), (3, [1, 2, 3]), (4, [0, 1, 2, 3]), (99, [0, 1, 2, 3])],
)
def test_top_k_keeps_the_best(k: int, wanted: list[int]) -> None:
    """One too many or too few; k beyond the vocabulary is an error of NumPy's."""
    assert ids_of(candidates(LOGITS, top_k=k)) == wanted


def test_top_k_keeps_equals_of_the_last() -> None:
    """As in transformers: which of two equals would be cut is nobody's to say."""
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
    """The token that crosses the limit is cut; p = 0 leaves nothing to draw from."""
    assert ids_of(candidates(LOGITS, top_p=p)) == wanted


def test_top_p_that_is_reached_exactly_needs_no_more() -> None:
    """One more than the fewest, where sums meet the limit to the last bit."""
    assert top_p_ids(array(0.5, 0.25, 1, 0.25), 0.5).tolist() == [2]
    assert top_p_ids(array(0.5, 0.25, 1, 0.25), 0.75).tolist() == [0, 2]


def test_top_p_of_equals_keeps_as_many_as_it_takes_lowest_ids_first() -> None:
    """All equals kept, and top_p does nothing over flat logits; or others each time."""
    assert top_p_ids(np.ones(10, np.float32), 0.35).tolist() == [0, 1, 2, 3]
    assert top_p_ids(array(0.02, 1, 0.02, 0.02), 0.98).tolist() == [0, 1, 2]


@pytest.mark.parametrize(("min_p", "wanted"), [(0, [0, 1, 2, 3]), (0.25, [1, 2, 3]), (0.4, [1, 3]), (1, [1])])
def test_min_p_is_a_share_of_the_best(min_p: float, wanted: list[int]) -> None:
    """Taken as a probability: 0.25 would then keep two."""
    assert ids_of(candidates(LOGITS, min_p=min_p)) == wanted


@pytest.mark.parametrize(
    ("uniform", "wanted"), [(0.0, 0), (0.09, 0), (0.11, 1), (0.59, 1), (0.61, 2), (0.76, 3)]
)
def test_draw_goes_through_the_ids_in_their_order(uniform: float, wanted: int) -> None:
    """The next id instead of this one."""
    assert draw(array(*PROBABILITIES), uniform) == wanted
    assert draw(array(*PROBABILITIES) * 7, uniform) == wanted


def test_draw_never_takes_what_is_cut_off() -> None:
    """At 0 the first id of all, at the end the last one of all, whatever their weight."""
    weights = array(0, 1, 0, 1, 0)
    assert [draw(weights, uniform) for uniform in (0.0, 0.49, 0.51, math.nextafter(1, 0))] == [1, 1, 3, 3]
    assert draw(array(1, 1e-45, 0), math.nextafter(1, 0)) == 0


@pytest.mark.parametrize("size", [511, 512, 513, 3000])
def test_a_draw_over_a_large_vocabulary_is_that_of_plain_running_sums(size: int) -> None:
    """Sums block by block: an index in the wrong block, or at the seam of two."""
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
    """Negative logits divided too, which makes them likelier; an id seen twice penalised twice."""
    found = with_repetition_penalty(array(2, -2, 0, 3), np.array([0, 1, 2]), 2.0)
    assert found.tolist() == [1, -4, 0, 3]


def test_presence_and_frequency_penalty() -> None:
    """Frequency that does not count; presence that does."""
    found = with_count_penalties(array(3, 1, 0), np.array([2, 1, 0]), presence=0.5, frequency=0.25)
    assert found.tolist() == [2, 0.25, 0]


def test_bias_and_exclusion() -> None:
    """Given logits that are changed in place: log probabilities of them are wrong after that."""
    logits = array(1, 2, 3)
    assert with_bias(logits, {2: -4, 0: 1.5}).tolist() == [2.5, 2, -1]
    assert without_ids(logits, {1, 7}).tolist() == [1, NEVER, 3]
    assert logits.tolist() == [1, 2, 3]


def test_log_probabilities_are_those_of_float64() -> None:
    """f32 sums: off in the seventh digit, and positive for an id that is all but certain."""
    np.testing.assert_allclose(np.exp(LOGITS - log_normaliser(LOGITS)), PROBABILITIES, rtol=1e-6)
    assert 30 - log_normaliser(array(30, 0, NEVER)) == pytest.approx(-math.exp(-30), rel=0.05)
    assert log_normaliser(array(LARGEST, -LARGEST)) == LARGEST


def test_the_best_logits_are_sorted_the_lower_id_of_equals_first() -> None:
    """Equals at the limit that are cut by chance."""
    assert top(array(1, 3, 1, NEVER, 2, 1), 3) == [(1, 3.0), (4, 2.0), (0, 1.0)]
    assert top(array(1, NEVER), 9) == [(0, 1.0)]
    assert top(array(NEVER), 1) == top(array(1), 0) == []


def chooser(size: int, prompt: Sequence[int] = (), *, least: int = 0, **values: Any) -> Chooser:
    return Chooser(Sampling(**values), prompt, size=size, eos_token_ids={0}, min_new_tokens=least)


def test_every_processor_in_its_order() -> None:
    """Bias after the penalty, penalties after the temperature, a share taken before the cut before it."""
    choosing = chooser(
        6, [1, 9], least=1, do_sample=True, temperature=0.5, top_k=3, logit_bias={1: -3.0},
        repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5,
    )  # fmt: skip
    choosing.take(2)
    choosing.take(2)
    # Id 1: (1 - 3) * 2 = -4; id 2: 6 / 2 - 0.25 - 2 * 0.5 = 1.75.
    scores = choosing.penalised(array(9, 1, 6, 1.5, 2, 1))
    assert scores.tolist() == [9, -4, 1.75, 1.5, 2, 1]
    ids, weights = choosing.candidates(scores)
    assert ids.tolist() == [0, 2, 4]
    np.testing.assert_allclose(np.log(weights), [0, (1.75 - 9) / 0.5, (2 - 9) / 0.5], rtol=1e-6)
    # top_p is over what top_k left: alone, 0.6 would keep id 3 too.
    both = chooser(4, do_sample=True, top_k=2, top_p=0.6)
    assert left(both, LOGITS) == [1]
    assert left(chooser(4, do_sample=True, top_p=0.6), LOGITS) == [1, 3]


def test_penalties_hold_for_greedy_too() -> None:
    """As in transformers, whose processors run without do_sample; temperature and cuts change nothing there."""
    choosing = chooser(3, repetition_penalty=2.0, temperature=0.1, top_k=1)
    assert [choosing.choose(array(5, 4, 3)) for _ in range(4)] == [0, 1, 2, 0]
    assert [chooser(3).choose(array(5, 4, 3)) for _ in range(2)] == [0, 0]


def test_an_end_token_is_held_off() -> None:
    """One token too early or too late."""
    choosing = chooser(3, least=2)
    assert [choosing.choose(array(5, 4, 3)) for _ in range(4)] == [1, 1, 0, 0]


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
    """NaN out of infinity less infinity: an id that was excluded, or the same one for ever."""
    choosing = chooser(logits.size, [0], do_sample=True, seed=1, **values)
    for _ in range(20):
        _, weights = choosing.candidates(choosing.penalised(logits))
        assert weights.max() == 1
        assert weights.min() >= 0
        assert logits[choosing.choose(logits)] > NEVER


def test_a_tiny_temperature_is_greedy_and_a_huge_one_is_flat() -> None:
    assert {chooser(4, do_sample=True, temperature=1e-30).choose(LOGITS) for _ in range(20)} == {1}
    np.testing.assert_allclose(with_temperature(LOGITS, 1e300), [1] * 4, rtol=1e-6)


@pytest.mark.parametrize(
    "values", [{"do_sample": True}, {"repetition_penalty": 2.0}], ids=["drawn", "greedy"]
)
def test_nothing_left_to_choose_is_said(values: dict[str, Any]) -> None:
    """Token 0, which was excluded as all others."""
    with pytest.raises(UserError, match="no token is left"):
        chooser(3, **values).choose(np.full(3, NEVER, np.float32))


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
    """A draw that is none: skewed to one side, or from the shares before the cut. Five sigma, and a fixed seed."""
    count = 4000
    choosing = chooser(4, do_sample=True, seed=3, **values)
    found = np.bincount([choosing.choose(LOGITS) for _ in range(count)], minlength=4)
    sigma = np.sqrt(count * np.multiply(wanted, np.subtract(1, wanted)))
    assert (np.abs(found - count * np.array(wanted)) <= 5 * sigma).all(), found


def test_the_same_seed_draws_the_same_and_none_another() -> None:
    """A global generator that others draw from; a seed that is ignored."""
    drawn = [
        [choosing.choose(LOGITS) for _ in range(60)]
        for choosing in (chooser(4, do_sample=True, seed=seed) for seed in (5, 5, 6, None, None))
    ]
    assert drawn[0] == drawn[1]
    assert len({tuple(ids) for ids in drawn}) == 4


def test_a_cut_does_not_shift_the_random_numbers() -> None:
    """One number a token: what is drawn after a step does not hang on what was cut in it."""
    free, cut = (chooser(4, do_sample=True, seed=9) for _ in range(2))
    free.choose(LOGITS)
    cut.choose(array(NEVER, NEVER, 0, NEVER))
    assert [cut.choose(LOGITS) for _ in range(30)] == [free.choose(LOGITS) for _ in range(30)]


def test_a_large_vocabulary_is_cut_as_a_small_one() -> None:
    """Ids left out before they are sorted, that belonged to the best: checked against sorting all."""
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
