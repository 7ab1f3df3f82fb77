"""Batched generation: rows of unequal length, each with its own options, as if each were alone."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_onnx import NonFiniteLogitsError, export, load
from qwen_onnx.runners.chat import Chat, Token
from qwen_onnx.runners.generate import left_padded
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.options import SessionOptions
from support.chats import endless, poisoned, tiny
from support.refusals import refused

ON_CPU = SessionOptions(provider="cpu", threads=1)
HI = [{"role": "user", "content": "Hi"}]
NUMBERS = np.random.default_rng(5).integers(0, 300, 200).tolist()

Options = dict[str, Any]


@functools.cache
def opened(folder: Path, **options: Any) -> Chat:
    return load(folder, provider="cpu", threads=1, **options)


def together(chat: Chat, prompts: Sequence[Any], options: Sequence[Options]) -> list[list[Token]]:
    answers: list[list[Token]] = [[] for _ in prompts]
    for row, token in chat.generate_each(prompts, options):
        answers[row].append(token)
    return answers


def alone(chat: Chat, prompt: Any, options: Options) -> list[Token]:
    # Nothing of the prompt before is kept: what is computed in other pieces rounds otherwise.
    return list(chat.generate(prompt, **options, reuse_cache=False))


def said(tokens: list[Token]) -> list[tuple[Any, ...]]:
    return [(token.token_id, token.text, token.finish_reason, token.prompt_tokens) for token in tokens]


def assert_as_alone(chat: Chat, prompts: Sequence[Any], options: Sequence[Options]) -> None:
    for found, prompt, own in zip(together(chat, prompts, options), prompts, options, strict=True):
        wanted = alone(chat, prompt, own)
        assert said(found) == said(wanted)
        for a, b in zip(found, wanted, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            for pairs in ("top_logits", "top_logprobs"):
                for (id_a, value_a), (id_b, value_b) in zip(
                    getattr(a, pairs), getattr(b, pairs), strict=True
                ):
                    assert (id_a, value_a) == (id_b, pytest.approx(value_b, abs=1e-4))


ROWS: list[tuple[Any, Options]] = [
    (NUMBERS[:40], {"max_new_tokens": 25, "temperature": 1, "seed": 3}),
    (HI, {"max_new_tokens": 3, "top_logits": 3}),
    (
        "One, two",
        {
            "max_new_tokens": 30,
            "logprobs": 2,
            "repetition_penalty": 1.3,
            "frequency_penalty": 0.5,
            "logit_bias": {9: 2.0},
        },
    ),
    ([7], {"max_new_tokens": 20, "stop": ["a", "e"], "min_new_tokens": 4}),
    (NUMBERS[50:67], {"max_new_tokens": 12, "ignore_eos": True, "logprobs": 0}),
]


@pytest.mark.parametrize("count", range(1, 6))
def test_each_row_is_as_alone(count: int) -> None:
    """Whatever its padding: rows share no positions, random numbers, penalties or stops."""
    prompts, options = zip(*ROWS[:count], strict=True)
    assert_as_alone(opened(endless()), prompts, options)
    assert_as_alone(opened(endless()), prompts[::-1], options[::-1])


def test_rows_end_by_themselves() -> None:
    """Each way to end, beside the others."""
    chat = opened(tiny())
    asked: list[tuple[str, Options]] = [
        ("What is the capital of France?", {}),
        ("What is the capital of France?", {"stop": [" France"]}),
        ("What is 3 plus 4?", {"max_new_tokens": 2}),
        ("Hello!", {"min_new_tokens": 15, "max_new_tokens": 40}),
        ("Hello!", {"max_new_tokens": 0}),
    ]
    prompts = [[{"role": "user", "content": text}] for text, _ in asked]
    options = [own for _, own in asked]
    assert_as_alone(chat, prompts, options)
    answers = together(chat, prompts, options)
    assert [tokens[-1].finish_reason if tokens else None for tokens in answers] == [
        "eos", "stop", "length", answers[3][-1].finish_reason, None,
    ]  # fmt: skip
    assert "".join(token.text for token in answers[0]) == "The capital of France is Paris."
    assert "".join(token.text for token in answers[1]) == "The capital of"


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "portable"])
@pytest.mark.parametrize("longest", [9, 30])
def test_padding_of_every_length(dtype: str, longest: int, tmp_path: Path) -> None:
    """A chunk may be all padding for a row, or half of it: no number comes from slots that hold no token."""
    portable = dtype == "portable"
    folder = export("tiny", tmp_path / "out", target="portable").folder if portable else tiny(dtype)
    chat = Chat(Runner(folder, ON_CPU, prefill_chunk=7))
    lengths = range(1, longest + 1, 1 if longest < 10 else 6)
    prompts = [NUMBERS[length : 2 * length] for length in lengths]
    assert_as_alone(chat, prompts, [{"max_new_tokens": 4, "ignore_eos": True}] * len(prompts))


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_integers_begin_as_alone_and_go_on_nearly_so(dtype: str) -> None:
    """Rows do not see each other; but several rows at once round activations otherwise than one."""
    chat = opened(tiny(dtype))
    prompts = [NUMBERS[:21], NUMBERS[30:33], NUMBERS[60:72]]
    options = {"max_new_tokens": 8, "ignore_eos": True, "top_logits": 400}
    answers = together(chat, prompts, [options] * 3)
    for prompt, found in zip(prompts, answers, strict=True):
        assert found[0].top_logits == alone(chat, prompt, options)[0].top_logits
        forced = [*prompt, *(token.token_id for token in found[:4])]
        wanted = dict(alone(chat, forced, {"max_new_tokens": 1, "top_logits": 400})[0].top_logits)
        apart = [
            abs(wanted[token_id] - logit) for token_id, logit in found[4].top_logits if token_id in wanted
        ]
        assert len(apart) > 300
        assert max(apart) < 1.0


def test_the_context_of_each_row_is_full_where_it_would_be_alone() -> None:
    """Padding takes none of a row's last slots away."""
    chat = load(endless(), provider="cpu", threads=1, max_context=32)
    prompts = [NUMBERS[:31], NUMBERS[40:43], NUMBERS[50:70], NUMBERS[80:100], NUMBERS[100:101]]
    options = [
        {"max_new_tokens": most, "ignore_eos": True, "seed": 1, "temperature": 1}
        for most in (None, None, None, 5, 13)
    ]
    assert_as_alone(chat, prompts, options)
    answers = together(chat, prompts, options)
    assert [(len(tokens), tokens[-1].finish_reason) for tokens in answers] == [
        (2, "context"), (30, "context"), (13, "context"), (5, "length"), (13, "length"),
    ]  # fmt: skip


def test_nothing_is_computed_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step comes after the last row's end."""
    chat, steps = opened(endless()), itertools.count()
    real = Runner.decode
    monkeypatch.setattr(Runner, "decode", lambda *arguments: (next(steps), real(*arguments))[1])
    options = [{"max_new_tokens": count, "ignore_eos": True} for count in (3, 6, 1)]
    together(chat, [NUMBERS[:3], NUMBERS[:5], NUMBERS[:1]], options)
    assert next(steps) == 5
    assert together(chat, [], []) == []
    assert together(chat, [[1], [2]], [{"max_new_tokens": 0}] * 2) == [[], []]
    assert next(steps) == 6


def test_a_batch_leaves_the_conversation_alone() -> None:
    """Even one that is not read to its end: the next turn finds its own cache as it was."""
    chat = load(tiny(), provider="cpu", threads=1)
    first = list(chat.generate(HI, max_new_tokens=20))
    used = chat.context_used
    rows = chat.generate_batch([HI, "Hello"], max_new_tokens=9, stop=["zz"], logprobs=1)
    assert [row for row, _ in itertools.islice(rows, 5)] == [0, 1, 0, 1, 0]
    rows.close()
    assert chat.context_used == used
    longer = [*HI, {"role": "assistant", "content": "".join(token.text for token in first)}, *HI]
    assert next(chat.generate(longer)).cached_tokens > 10


def test_the_same_options_go_to_each_prompt() -> None:
    chat = opened(endless())
    options: Options = {
        "max_new_tokens": 9, "temperature": 1, "seed": 5, "min_new_tokens": 2, "top_logits": 1
    }  # fmt: skip
    for row, token in chat.generate_batch([NUMBERS[:4], NUMBERS[:4]], **options):
        if not row:
            wanted = token
        else:
            assert token.token_id == wanted.token_id
    assert wanted.finish_reason is not None


@pytest.mark.parametrize(
    ("prompt", "options", "mentions"),
    [
        ([], {}, "prompts[1]: the prompt is empty"),
        ([1] * 5000, {}, "prompts[1]: the prompt has 5,000 tokens, the context holds 4096"),
        ([1, 400], {}, "prompts[1]: token id 400"),
        ([1, "x"], {}, "prompts[1]: a prompt is"),
        ("x", {"logit_bias": {399: 1}}, "prompts[1]: logit_bias of 399"),
    ],
)
def test_a_wrong_row_is_named_before_any_compute(
    prompt: Any, options: Options, mentions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = opened(endless())
    monkeypatch.setattr(Runner, "prefill", lambda *_: pytest.fail("computed"))
    refused(together, chat, [[1], prompt, [2]], [{}, options, {}], mentions=(mentions,))


def test_each_prompt_has_options() -> None:
    line = refused(together, opened(endless()), [[1], [2]], [{}])
    assert line == "2 prompts and options of 1: one for each wanted"


@pytest.mark.parametrize("name", ["speculate", "greedy_on_device"])
def test_what_goes_one_at_a_time_is_refused(name: str) -> None:
    chat = opened(tiny(), **{name: True})
    refused(list, chat.generate_batch([HI]), mentions=(f"{name} is for one prompt at a time",))


def test_an_engine_of_one_row_refuses_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """In our words, before anything is computed."""
    chat = load(tiny(), provider="cpu", threads=1)
    monkeypatch.setattr(chat.runner, "engine", object())
    monkeypatch.setattr(Runner, "prefill", lambda *_: pytest.fail("computed"))
    mentions = ("a batch of 2", "built for 1; use provider='cuda'")
    refused(list, chat.generate_batch([HI, HI]), mentions=mentions)


def test_numbers_that_are_none_in_one_row(tmp_path: Path) -> None:
    """The error says so, whichever row it is; nothing of it is left for the next batch."""
    chat = opened(poisoned(tmp_path))
    good = [NUMBERS[:5], NUMBERS[5:7]]
    assert 77 not in NUMBERS[:7]
    never = {"logit_bias": {77: -100}}
    options = [{"max_new_tokens": 3, "ignore_eos": True, **never}] * 3
    with pytest.raises(NonFiniteLogitsError, match="not finite"):
        together(chat, [good[0], [1, 77, 2], good[1]], options)
    assert_as_alone(chat, good, options[:2])


def test_left_padding() -> None:
    found = left_padded([[1, 2, 3], [4]])
    assert found.ids.tolist() == [[1, 2, 3], [0, 0, 4]]
    assert found.mask is not None
    assert found.mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert left_padded([[1], [2]]).mask is None
