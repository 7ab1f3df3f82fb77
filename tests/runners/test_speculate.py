"""Greedy decoding with guesses: the same ids, in fewer steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qwen_onnx import UserError, load
from qwen_onnx.runners import sequence
from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.options import SessionOptions
from qwen_onnx.runners.speculate import PAUSE, PromptLookup, is_near
from support.chats import tiny
from support.command import command
from support.exports import IDS, Exported
from support.tolerances import F32, assert_close

SPECULATING = SessionOptions(provider="cpu", threads=1, speculate=True)
REPEATING = "Repeat: the cat sat on the mat, the cat sat on the mat, the cat sat on the"


def generated(chat: Chat, prompt: str | list[int], **options: int | str) -> list[tuple[int, str | None]]:
    return [(token.token_id, token.finish_reason) for token in chat.generate(prompt, **options)]


def count_scores(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each step of several verified, from now on."""
    counts: list[int] = []
    real = chat.runner.score

    def score(*args: object) -> np.ndarray:
        logits = real(*args)
        counts.append(logits.shape[1])
        return logits

    monkeypatch.setattr(chat.runner, "score", score)
    return counts


@pytest.fixture(scope="module", params=["f32", "bf16"])
def pair(request: pytest.FixtureRequest) -> tuple[Chat, Chat]:
    """Plain and speculating."""
    folder = tiny(request.param)
    return tuple(
        load(folder, provider="cpu", threads=1, speculate=speculates) for speculates in (False, True)
    )


def test_ids_are_those_of_plain_greedy(pair: tuple[Chat, Chat], monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of the guesses are wrong; what the cache holds at the end is the same too."""
    plain, speculating = pair
    counts = count_scores(speculating, monkeypatch)
    rng = np.random.default_rng(5)
    prompts: list[str | list[int]] = [REPEATING, "one two one two one two one"]
    prompts += [rng.integers(0, 2000, int(n)).tolist() for n in rng.integers(1, 40, 12)]
    prompts += [rng.integers(0, 2000, 4).tolist() * 6 for _ in range(6)]
    for prompt in prompts:
        for options in (
            {"max_new_tokens": 50, "ignore_eos": True},
            {"max_new_tokens": 9},
            {"max_new_tokens": 1},
        ):
            assert generated(speculating, prompt, **options) == generated(plain, prompt, **options)
            assert speculating.context_used == plain.context_used
    assert sum(counts) > 2 * len(counts) > 100


def test_right_guesses_after_the_end_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next turn goes on after the end, as where nothing was guessed; wherever among the guesses the end is."""
    monkeypatch.setattr(sequence, "is_near", lambda logits: False)
    plain, guessing = (load(tiny(), provider="cpu", threads=1, speculate=each) for each in (False, True))
    prompt = [7, 8, 9, 10] * 8
    tokens = list(plain.generate(prompt, max_new_tokens=40, ignore_eos=True))
    ids = [token.token_id for token in tokens]
    verified, choose, beyond = sequence.Sequence.verified, sequence.Sequence.choose, 0
    for at in range(12, 30):  # where the answer says something twice
        stop = "".join(token.text for token in tokens[at - 7 : at + 1])
        chosen: list[int] = []

        def noted(self: Any, *arguments: Any, chosen: list[int] = chosen) -> Any:
            found = verified(self, *arguments)
            chosen.append(len(found))
            return found

        def one(self: Any, *arguments: Any, chosen: list[int] = chosen) -> Any:
            chosen.append(1)
            return choose(self, *arguments)

        monkeypatch.setattr(sequence.Sequence, "verified", noted)
        monkeypatch.setattr(sequence.Sequence, "choose", one)
        made = generated(guessing, prompt, stop=stop, max_new_tokens=40, ignore_eos=True)
        beyond += sum(chosen) > len(made)
        assert made == generated(plain, prompt, stop=stop, max_new_tokens=40, ignore_eos=True)
        assert made[-1][1] == "stop"
        assert guessing.context_used == plain.context_used == len(prompt) + len(made) - 1
        told = [
            *prompt,
            *ids[: len(made)],
            ids[len(made)],
            40,
        ]  # goes on as it would have, and then otherwise
        follows = [list(chat.generate(told, max_new_tokens=3, ignore_eos=True)) for chat in (plain, guessing)]
        assert follows[0][0].cached_tokens == follows[1][0].cached_tokens
        assert [token.token_id for token in follows[0]] == [token.token_id for token in follows[1]]
    assert beyond, "no guess was right beyond an end"


def test_a_near_tie_is_computed_again_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where everything is near to something, each token is that of a step of its own, as without guesses."""
    chat = load(tiny(), provider="cpu", threads=1, speculate=True)
    counts = count_scores(chat, monkeypatch)
    monkeypatch.setattr(sequence, "is_near", lambda logits: True)
    ids = [7, 8, 9, 10] * 8
    wanted = generated(load(tiny(), provider="cpu", threads=1), ids, max_new_tokens=24, ignore_eos=True)
    real, asked = chat.runner.decode, []

    def decode(*arguments: Any) -> np.ndarray:
        asked.append(arguments[1].shape)
        return real(*arguments)

    monkeypatch.setattr(chat.runner, "decode", decode)
    assert generated(chat, ids, max_new_tokens=24, ignore_eos=True) == wanted
    assert counts, "nothing was guessed"
    assert len(asked) == 23, "each token after the first in a step of its own"


def test_a_quote_takes_few_steps(pair: tuple[Chat, Chat], monkeypatch: pytest.MonkeyPatch) -> None:
    _, speculating = pair
    ids = [7, 8, 9, 10]
    monkeypatch.setattr(sequence, "is_near", lambda logits: False)
    counts = count_scores(speculating, monkeypatch)
    made = generated(speculating, ids * 8, max_new_tokens=64, ignore_eos=True)
    assert len(made) == 64
    assert len(counts) < 32, "as many steps as tokens"


def test_the_context_fills_to_its_last_slot() -> None:
    ids = [5, 6, 7] * 5
    made = [
        generated(
            load(tiny(), provider="cpu", threads=1, max_context=40, speculate=speculates),
            ids,
            ignore_eos=True,
        )
        for speculates in (False, True)
    ]
    assert made[0] == made[1]
    assert len(made[0]) == 26
    assert made[0][-1][1] == "context"


def test_top_logits_come_along(pair: tuple[Chat, Chat]) -> None:
    plain, speculating = (
        [token.top_logits for token in chat.generate(REPEATING, max_new_tokens=20, top_logits=3)]
        for chat in pair
    )
    for wanted, found in zip(plain, speculating, strict=True):
        assert [token_id for token_id, _ in wanted] == [token_id for token_id, _ in found]
        np.testing.assert_allclose([x for _, x in wanted], [x for _, x in found], atol=1e-3)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen2_untied"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_scores_are_the_logits_after_each_token(
    name: str, batch_size: int, exported: Callable[..., Exported]
) -> None:
    """Of the last tokens, row by row."""
    model = exported(name)
    runner = Runner(model.folder, SPECULATING)
    cache = runner.new_cache(batch_size=batch_size)
    rows = IDS[:batch_size]
    runner.prefill(cache, rows[:, :10])
    for start, stop, count in ((10, 14, 4), (14, 15, 1), (15, 24, 3)):
        logits = runner.score(cache, rows[:, start:stop], count)
        assert logits.shape[:2] == (batch_size, count)
        for row in range(batch_size):
            assert_close(logits[row], model.wanted(rows[row, :stop])[stop - count :], F32)
    with pytest.raises(ValueError, match="at most a chunk"):
        runner.score(cache, rows[:, :2], 3)
    with pytest.raises(ValueError, match="not opened with speculate"):
        Runner(model.folder, SessionOptions(provider="cpu")).score(cache, rows[:, :2], 1)


def test_lookup_takes_the_latest_longest_match() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 9, 2, 3, 5, 8, 1, 2, 3])
    assert lookup.draft(3) == [4, 9, 2]  # after 1 2 3, though 2 3 came again later
    lookup.extend([5])
    assert lookup.draft(2) == [8, 1]
    assert lookup.draft(0) == []
    lookup.extend([77])
    assert lookup.draft(8) == []
    assert PromptLookup([1]).draft(8) == []


def test_lookup_pauses_when_it_is_wrong() -> None:
    lookup = PromptLookup([1, 2, 3, 1, 2])
    lookup.learn(0)
    assert lookup.draft(1) == [3]
    lookup.learn(1)
    lookup.learn(0)
    lookup.learn(0)
    assert [lookup.draft(1) for _ in range(PAUSE)] == [[]] * PAUSE
    assert lookup.draft(1) == [3]


def test_near_is_relative_to_the_size() -> None:
    assert is_near(np.array([1.0, 1.0005, -3.0], np.float32))
    assert not is_near(np.array([1.0, 1.002, -3.0], np.float32))
    assert is_near(np.array([100.0, 100.005, -3.0], np.float32))
    assert is_near(np.array([-np.inf, 4.0, 4.0], np.float32))


def test_where_it_cannot_be_exact_it_is_refused() -> None:
    run = command("run", tiny("int4"), "-p", "Hi", "--provider", "cpu", "--speculate")
    assert "use an export in f32, f16 or bf16" in run.error
    assert (
        "choose one"
        in command(
            "run", tiny("f32"), "-p", "Hi", "--provider", "cpu", "--speculate", "--greedy-on-device"
        ).error
    )
    ran = command(
        "run", tiny("f32"), "-p", "What is the capital of France?", "--speculate", "--provider", "cpu"
    )
    assert ran.out == "The capital of France is Paris.\n"
    with pytest.raises(UserError, match="True or False"):
        SessionOptions(provider="cpu", speculate=None)  # type: ignore[arg-type]
