"""Processors and their order, against transformers' own: on random logits, and on what its `generate` reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qwen_onnx.runners.sampling.logits import (
    Candidates,
    candidates,
    log_normalizer,
    with_repetition_penalty,
    with_temperature,
    without_ids,
)
from qwen_onnx.runners.sampling.request import Request
from qwen_onnx.runners.sampling.sampler import Sampler

pytestmark = pytest.mark.transformers

VOCAB, EOS = 320, [5, 9]


def rows(*, ties: bool) -> list[np.ndarray]:
    """f32 logits, flat to peaked; with ties, rounded to quarters."""
    rng = np.random.default_rng(1)
    found = [scale * rng.standard_normal(VOCAB) for scale in (0.01, 0.5, 1, 3, 10) for _ in range(8)]
    return [(np.round(4 * row) / 4 if ties else row).astype(np.float32) for row in found]


def theirs(processor: Any, logits: np.ndarray, ids: Any = ()) -> np.ndarray:
    import torch

    prompt = torch.tensor([list(ids)], dtype=torch.int64)
    return processor(prompt, torch.from_numpy(logits.copy())[None])[0].numpy()


def assert_same(found: np.ndarray, wanted: np.ndarray) -> None:
    """The same ids left, in the same shares: a shift of all logits is no difference."""
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(wanted))
    found, wanted = (scores[np.isfinite(scores)] for scores in (found, wanted))
    np.testing.assert_allclose(
        found - log_normalizer(found), wanted - log_normalizer(wanted), rtol=1e-5, atol=1e-5
    )


def cut(logits: np.ndarray, **values: Any) -> np.ndarray:
    """What is left of the logits, and -inf elsewhere, as transformers has it."""
    return filled(candidates(logits, **values))


def shares(weights: np.ndarray) -> np.ndarray:
    return weights / weights.sum(dtype=np.float64)


def filled(left: Candidates) -> np.ndarray:
    scores = np.full(VOCAB, -np.inf, np.float32)
    with np.errstate(divide="ignore"):
        scores[slice(None) if left.ids is None else left.ids] = np.log(left.weights)
    return scores


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("k", [1, 2, 20, VOCAB - 1, VOCAB, 5000])
def test_top_k(k: int, ties: bool) -> None:
    from transformers import TopKLogitsWarper

    for logits in rows(ties=ties):
        assert_same(cut(logits, top_k=k), theirs(TopKLogitsWarper(k), logits))


@pytest.mark.parametrize("p", [0.0, 0.05, 0.5, 0.8, 0.95, 0.999])
def test_top_p(p: float) -> None:
    from transformers import TopPLogitsWarper

    for logits in rows(ties=False):
        assert_same(cut(logits, top_p=p), theirs(TopPLogitsWarper(p), logits))
    # Which of equals stay is theirs to choose: as many of each value, but for sums that end at the limit.
    for logits in rows(ties=True):
        found, wanted = (
            np.sort(scores[np.isfinite(scores)]) - scores.max()
            for scores in (cut(logits, top_p=p), theirs(TopPLogitsWarper(p), logits))
        )
        assert abs(found.size - wanted.size) <= 1
        least = min(found.size, wanted.size)
        np.testing.assert_allclose(found[-least:], wanted[-least:], atol=1e-4)


@pytest.mark.parametrize("min_p", [0.0, 0.01, 0.1, 0.5, 1.0])
def test_min_p(min_p: float) -> None:
    from transformers import MinPLogitsWarper

    for logits in rows(ties=False):
        assert_same(cut(logits, min_p=min_p), theirs(MinPLogitsWarper(min_p), logits))


@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.3, 100.0])
def test_temperature(temperature: float) -> None:
    from transformers import TemperatureLogitsWarper

    for logits in rows(ties=False):
        found = shares(with_temperature(logits, temperature))
        wanted = shares(with_temperature(theirs(TemperatureLogitsWarper(temperature), logits), 1.0))
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-30)


@pytest.mark.parametrize("penalty", [0.5, 1.05, 2.0])
def test_repetition_penalty(penalty: float) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    ids = [7, 7, 0, VOCAB - 1, 40]
    for logits in rows(ties=False):
        found = with_repetition_penalty(logits, np.unique(ids), penalty)
        wanted = theirs(RepetitionPenaltyLogitsProcessor(penalty), logits, ids)
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("made", [2, 3, 4])
def test_min_new_tokens(made: int) -> None:
    from transformers import MinNewTokensLengthLogitsProcessor

    (logits, *_), processor = rows(ties=False), MinNewTokensLengthLogitsProcessor(4, 3, EOS)
    wanted = theirs(processor, logits, [1] * (4 + made))
    np.testing.assert_array_equal(without_ids(logits, EOS) if made < 3 else logits, wanted)


@pytest.fixture(scope="module")
def generate() -> Callable[..., Any]:
    """`generate` of a random Qwen2 of transformers' own, with what it computed and what it drew from."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=1.0, eos_token_id=EOS, bos_token_id=None, pad_token_id=5,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()

    def run(prompt: list[int], **settings: Any) -> Any:
        ids = torch.tensor([prompt])
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, output_scores=True,
            output_logits=True, pad_token_id=5, eos_token_id=EOS, **settings,
        )  # fmt: skip

    return run


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.02},
        {"temperature": 5.0, "top_k": 0, "min_p": 0.1, "repetition_penalty": 1.5},
        {"temperature": 3.0, "top_k": 100, "top_p": 0.5, "min_p": 0.3, "repetition_penalty": 0.8},
        {"do_sample": False, "repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_what_generate_draws_from(settings: dict[str, Any], generate: Callable[..., Any]) -> None:
    """Our processors are theirs, in their order: penalties count the prompt, end tokens are held off as long."""
    settings = {"do_sample": True, **settings}
    prompt, least, most = [3, 17, 17, 250, 8], 6, 24
    made = generate(prompt, max_new_tokens=most, min_new_tokens=least, **settings)
    ids = made.sequences[0, len(prompt) :].tolist()
    request = Request(min_new_tokens=least, **settings)
    sampler = Sampler(request, prompt, size=VOCAB, eos_token_ids=frozenset(EOS))
    for token_id, logits, scores in zip(ids, made.logits, made.scores, strict=True):
        ours = sampler.penalized(logits[0].numpy())
        drawn_from = filled(sampler.candidates(ours)) if settings["do_sample"] else ours
        assert_same(drawn_from, scores[0].numpy())
        sampler.take(token_id)
    assert len(ids) > least
