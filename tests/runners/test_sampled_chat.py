"""Sampling, stop strings and log probabilities, from `Chat.generate` to the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_onnx import UserError
from qwen_onnx.checks.golden import check_golden, record_golden
from qwen_onnx.contract.manifest import read_manifest
from qwen_onnx.runners import speculate
from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.output import FinishReason
from qwen_onnx.runners.sampling.params import GREEDY
from support.answers import HI, PARIS, ids, opened, say, text, with_config
from support.chats import endless, tiny
from support.command import command

QWEN = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def trained() -> Chat:
    """The bundled model."""
    return opened(tiny())


@pytest.fixture(scope="module")
def chat() -> Chat:
    """Random weights, whose answers end by chance only."""
    return opened(endless())


def test_the_same_seed_is_the_same_text(chat: Chat) -> None:
    """Whatever the cache holds; without a seed each answer is another."""
    drawn = [ids(say(chat, temperature=1, seed=seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    fresh = opened(endless())
    assert ids(say(fresh, temperature=1, seed=1)) == drawn[0]
    unseeded = {tuple(ids(say(chat, temperature=1))) for _ in range(3)}
    assert len(unseeded) == 3


def test_nothing_drawn_is_greedy(chat: Chat) -> None:
    greedy = ids(say(chat))
    for options in ({"temperature": 0}, {"temperature": 1, "top_k": 1}, {"top_p": 0.0}, {"min_p": 1}):
        assert ids(say(chat, **options)) == greedy


def test_the_defaults_are_those_of_the_file(tmp_path: Path) -> None:
    folder = with_config(endless(), tmp_path / "export", {**QWEN, "max_new_tokens": 9})
    theirs = opened(folder)
    seeded = say(theirs, count=None, seed=4)
    assert len(seeded) == 9
    asked = {"seed": 4, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}
    plain = opened(endless())
    assert ids(seeded) == ids(say(plain, count=9, **asked))
    assert ids(say(theirs, **GREEDY)) == ids(say(plain))
    assert ids(say(theirs, temperature=0)) == ids(say(plain, repetition_penalty=1.1))


def test_golden_ids_are_greedy_whatever_the_file_says(tmp_path: Path) -> None:
    """Neither a temperature nor a stop string of the file changes them."""
    values = {**QWEN, "min_new_tokens": 30, "stop_strings": ["a", "e", " "]}
    other = opened(with_config(tiny(), tmp_path / "export", values))
    assert record_golden(other, [5, 6, 7], 8) == record_golden(opened(tiny()), [5, 6, 7], 8)
    assert check_golden(other, read_manifest(other.runner.folder)).ok


def test_bias_and_penalties_reach_the_choice(chat: Chat) -> None:
    first, *_ = greedy = ids(say(chat))
    assert set(ids(say(chat, logit_bias={40: 100}))) == {40}
    assert first not in ids(say(chat, logit_bias={first: -100}))
    once = ids(say(chat, count=40, repetition_penalty=1e9))
    assert len(set(once)) == 40
    assert ids(say(chat)) == greedy


def test_ids_without_a_name_are_never_drawn(chat: Chat) -> None:
    """Logits so flat that every id is drawn: none beyond the tokenizer's ids is among them."""
    size = chat.tokenizer.size
    assert size < chat.runner.manifest.vocab_size
    flat = {"temperature": 1e6, "seed": 0}
    drawn = ids(say(chat, count=300, **flat, ignore_eos=True))
    assert max(drawn) < size
    assert len(set(drawn)) > size / 3


def test_a_stop_string_ends_and_is_not_shown(trained: Chat) -> None:
    """Across tokens, cut exactly; several at once."""
    tokens = say(trained, PARIS, 40, stop=["nothing", "of Fr", "is Paris"])
    assert text(tokens) == "The capital "
    assert tokens[-1].finish_reason is FinishReason.STOP
    assert {token.finish_reason for token in tokens[:-1]} == {None}
    assert trained.tokenizer.decode(ids(tokens)).startswith("The capital of Fr")
    assert text(say(trained, PARIS, 40, stop="The")) == ""


@pytest.mark.parametrize("stop", ["Paris!", "Paris.!", "France is Paris. "])
def test_what_only_began_like_a_stop_string_is_all_shown(trained: Chat, stop: str) -> None:
    """Text that was held back comes at the end."""
    tokens = say(trained, PARIS, 40, stop=stop)
    assert text(tokens) == "The capital of France is Paris."
    assert tokens[-1].finish_reason is FinishReason.EOS


def test_end_tokens_still_end_beside_stop_strings(trained: Chat) -> None:
    assert say(trained, PARIS, 40, stop=["xyz"])[-1].finish_reason is FinishReason.EOS


def test_a_stop_at_the_last_token_is_a_stop(trained: Chat) -> None:
    """Not a cut by length: the answer is complete."""
    count = len(say(trained, PARIS, 40, stop=["France"]))
    tokens = say(trained, PARIS, count, stop=["France"])
    assert (len(tokens), tokens[-1].finish_reason) == (count, FinishReason.STOP)


@pytest.mark.parametrize("speculate", [False, True])
def test_the_turn_after_a_stop_is_computed_right(speculate: bool) -> None:
    """The cache holds nothing after what was said, guesses least of all."""
    chat, plain = opened(tiny(), speculate=speculate), opened(tiny())
    prompt = [{"role": "user", "content": "Repeat after me: cloud river cloud river cloud river cloud"}]
    whole = text(say(plain, prompt, 40))
    for stop in ([whole[4:7]], [whole[-9:-5]]):
        tokens = say(chat, prompt, 40, stop=stop)
        assert ids(tokens) == ids(say(plain, prompt, 40, stop=stop))
        assert tokens[-1].finish_reason is FinishReason.STOP
        assert chat.context_used == plain.context_used == len(chat.prompt_ids(prompt)) + len(tokens) - 1
        longer = [*prompt, {"role": "assistant", "content": text(tokens)}, *PARIS]
        following = say(chat, longer, 40)
        assert following[0].cached_tokens > 10
        assert ids(following) == ids(say(opened(tiny()), longer, 40))


def test_a_stop_among_guesses_leaves_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses that were right, beyond the end, leave the cache."""
    monkeypatch.setattr(speculate, "is_near", lambda logits: False)
    chat, prompt = opened(tiny(), speculate=True), [7, 8, 9, 10] * 8
    tokens = say(chat, prompt, 40, ignore_eos=True)
    assert all(token.text for token in tokens)
    for count in range(16, 30):
        stopped = say(chat, prompt, 40, ignore_eos=True, stop=text(tokens[:count]))
        assert (len(stopped), text(stopped)) == (count, "")
        assert chat.context_used == len(prompt) + count - 1


def test_stop_strings_of_the_file_hold_until_others_are_given(tmp_path: Path) -> None:
    chat = opened(with_config(tiny(), tmp_path / "export", {"stop_strings": [" France"]}))
    assert text(say(chat, PARIS, 40)) == "The capital of"
    assert text(say(chat, PARIS, 40, stop=[" of"])) == "The capital"
    assert text(say(chat, PARIS, 40, stop=[])) == "The capital of France is Paris."


def test_min_new_tokens_holds_off_every_end(trained: Chat) -> None:
    """End tokens and stop strings."""
    usual = len(say(trained, PARIS, 60))
    longer = say(trained, PARIS, 60, min_new_tokens=usual + 5)
    assert not trained.eos_token_ids & set(ids(longer[: usual + 5]))
    assert len(longer) > usual + 5
    tokens = say(trained, PARIS, 40, stop=["The", "France"], min_new_tokens=2)
    assert text(tokens) == "The capital of "
    assert len(say(trained, PARIS, 3, min_new_tokens=30)) == 3
    count = len(say(trained, PARIS, 40, stop=["capital"]))
    assert len(say(trained, PARIS, 40, stop=["capital"], min_new_tokens=count - 1)) == count
    assert len(say(trained, PARIS, 40, stop=["capital"], min_new_tokens=count)) > count


def test_logprobs_are_the_log_softmax_of_the_models_own_logits(chat: Chat) -> None:
    """Neither penalties nor temperature change them."""
    options = {"temperature": 3, "seed": 1, "top_k": 5, "repetition_penalty": 2.0, "logit_bias": {9: 5.0}}
    tokens = say(chat, **options, logprobs=4, top_logits=4)
    runner, size = chat.runner, chat.tokenizer.size
    cache, given = runner.new_cache(), chat.prompt_ids(HI)
    for token in tokens:
        raw = runner.prefill(cache, np.array([given]))[0, :size].astype(np.float64)
        raw[chat.tokenizer.holes] = -np.inf
        wanted = raw - raw.max() - np.log(np.exp(raw - raw.max()).sum())
        assert token.logprob == pytest.approx(wanted[token.token_id], abs=1e-4)
        assert [token_id for token_id, _ in token.top_logprobs] == [best for best, _ in token.top_logits]
        for token_id, logprob in token.top_logprobs:
            assert logprob == pytest.approx(wanted[token_id], abs=1e-4)
        given = [token.token_id]
    assert any(token.token_id != token.top_logprobs[0][0] for token in tokens)
    alone = say(chat, logprobs=0)
    assert all(token.logprob is not None and token.top_logprobs == () for token in alone)
    assert all(token.logprob is None for token in say(chat))


@pytest.mark.parametrize(
    ("options", "mentions"),
    [
        ({"sampling": {"temperature": 1}}, "'sampling' is no option.*the options are .*temperature"),
        ({"temperature": "1"}, "temperature '1'"),
        ({"logit_bias": {399: 1.0}}, "logit_bias of 399: the id names no token"),
        ({"stop": [""]}, r"stop \[''\]: .*none empty"),
        ({"stop": 5}, "stop 5"),
        ({"min_new_tokens": -1}, "min_new_tokens -1"),
        ({"min_new_tokens": 1.0}, "min_new_tokens 1.0"),
        ({"logprobs": True}, "logprobs True"),
    ],
)
def test_wrong_options_are_refused_before_any_compute(chat: Chat, options: Any, mentions: str) -> None:
    say(chat, count=1)
    used = chat.context_used
    with pytest.raises(UserError, match=mentions):
        say(chat, "Other", **options)
    assert chat.context_used == used


def test_speculation_is_greedy(tmp_path: Path) -> None:
    """It is refused where ids are to be drawn, penalized or held off."""
    chat = opened(with_config(tiny(), tmp_path / "export", QWEN), speculate=True)
    asked: list[dict[str, Any]] = [
        {},
        {"temperature": 0},  # the file's penalty is left
        {**GREEDY, "min_new_tokens": 2},
    ]
    for options in asked:
        with pytest.raises(UserError, match=r"^speculate is greedy.*params\.GREEDY leaves out"):
            say(chat, PARIS, **options)
    tokens = say(chat, PARIS, 40, **GREEDY, logprobs=1)
    assert text(tokens) == "The capital of France is Paris."
    assert all(token.top_logprobs == ((token.token_id, token.logprob),) for token in tokens)


# On the command line.


def run_json(*arguments: object) -> dict[str, Any]:
    ran = command("run", *arguments, "--json", "--provider", "cpu")
    assert (ran.code, ran.err) == (0, "")
    found: dict[str, Any] = json.loads(ran.out, parse_constant=pytest.fail)
    return found


def test_every_option_reaches_the_generation() -> None:
    """Each of them changes what is said."""
    arguments = (endless(), "-p", "Hi", "--max-new-tokens", 16, "--seed", 3, "--temperature", 2)
    base = run_json(*arguments)["token_ids"]
    assert run_json(*arguments)["token_ids"] == base
    for more in (
        ("--seed", 4), ("--temperature", 0), ("--top-k", 2), ("--top-p", 0.3), ("--min-p", 0.9),
        ("--repetition-penalty", 5), ("--presence-penalty", 2), ("--frequency-penalty", 2),
        ("--logit-bias", "5=100,6=99.5"),
    ):  # fmt: skip
        assert run_json(*arguments, *more)["token_ids"] != base, more
    greedy = run_json(endless(), "-p", "Hi", "--max-new-tokens", 16, "--greedy", "--seed", 3)
    assert greedy["token_ids"] == run_json(*arguments, "--temperature", 0)["token_ids"]


def test_greedy_leaves_out_sampling_and_penalties_only(tmp_path: Path) -> None:
    """Lengths and stop strings of generation_config.json hold, as the help and docs/chat.md say."""
    file = {
        **QWEN,
        "repetition_penalty": 5.0,
        "max_new_tokens": 5,
        "min_new_tokens": 2,
        "stop_strings": [" of"],
    }
    folder = with_config(tiny(), tmp_path / "export", file)
    ran = command("run", folder, "-p", PARIS[0]["content"], "--greedy", "-v", "--provider", "cpu")
    assert ran.out == "The capital\n"
    assert "greedy, repetition_penalty 1, " in ran.err
    assert "max_new_tokens 5, min_new_tokens 2, stop ' of'" in ran.err


def test_json_carries_the_reason_and_the_log_probabilities() -> None:
    arguments = (tiny(), "-p", PARIS[0]["content"])
    found = run_json(*arguments, "--stop", "nowhere", "--stop", " France", "--logprobs", 2)
    assert (found["text"], found["finish_reason"]) == ("The capital of", "stop")
    assert [one["token_id"] for one in found["logprobs"]] == found["token_ids"]
    for one in found["logprobs"]:
        assert one.keys() == {"token_id", "text", "logprob", "top_logprobs"}
        assert one["top_logprobs"][0] == {name: one[name] for name in ("token_id", "text", "logprob")}
        assert len(one["top_logprobs"]) == 2
        assert one["top_logprobs"][1]["logprob"] < one["logprob"] <= 0
    plain = run_json(*arguments, "--min-new-tokens", 20)
    assert "logprobs" not in plain
    assert len(plain["token_ids"]) > 20


def test_logprobs_are_shown_on_stderr() -> None:
    ran = command("run", tiny(), "-p", PARIS[0]["content"], "--logprobs", 1, "--provider", "cpu")
    assert ran.out == "The capital of France is Paris.\n"
    lines = ran.err.splitlines()
    assert lines[0].startswith("logprob ")
    assert lines[0].count("'The'") == 2


def test_the_length_of_the_file_is_the_default(tmp_path: Path) -> None:
    folder = with_config(endless(), tmp_path / "export", {"max_new_tokens": 5})
    assert len(run_json(folder, "-p", "Hi", "--ignore-eos")["token_ids"]) == 5
    assert len(run_json(folder, "-p", "Hi", "--ignore-eos", "--max-new-tokens", 7)["token_ids"]) == 7


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        (("--temperature", "-1"), "temperature -1.0: a number of 0 or more wanted"),
        (("--temperature", "nan"), "temperature nan"),
        (("--top-p", "1.5"), "--top-p 1.5"),
        (("--top-k", "-1"), "--top-k -1"),
        (("--repetition-penalty", "0"), "--repetition-penalty 0.0"),
        (("--presence-penalty", "3"), "--presence-penalty 3.0"),
        (("--seed", "-1"), "seed -1"),
        (("--stop", ""), "--stop '': a string or a list of them, none empty, wanted"),
        (("--logit-bias", "5"), "--logit-bias '5'"),
        (("--logit-bias", "a=1"), "--logit-bias 'a=1'"),
        (("--logit-bias", "5=1,"), "5=-1,7=2.5"),
        (("--logit-bias", "5=1000"), "--logit-bias 1000.0 of 5: a number from -100 to 100 wanted"),
        (("--logit-bias", "390=1"), "--logit-bias of 390"),
        (("--greedy", "--top-p", "0.5"), "--top-p"),
        (("--speculate", "--temperature", "1"), "speculate is greedy"),
        (("--speculate", "--repetition-penalty", "1.1"), "speculate is greedy"),
        (("--speculate", "--min-new-tokens", "3"), "speculate is greedy"),
    ],
)
def test_wrong_options_are_one_line(arguments: tuple[str, ...], mentions: str) -> None:
    line = command("run", endless(), "-p", "Hi", "--provider", "cpu", *arguments).error
    assert mentions in line


def test_a_chat_that_cannot_answer_does_not_begin() -> None:
    """It is refused before the first line is typed."""
    ran = command("run", endless(), "--speculate", "--top-k", 5, terminal=True, stdin="Hi\n")
    assert "speculate is greedy" in ran.error


def test_params_show_what_is_in_force(tmp_path: Path) -> None:
    """What the command line and the file say, and what of the file is not supported."""
    values = {**QWEN, "max_new_tokens": 77, "num_beams": 4}
    folder = with_config(tiny(), tmp_path / "export", values)
    arguments = ("--top-k", 5, "--stop", "END", "--seed", 8, "--provider", "cpu")
    ran = command("run", folder, *arguments, terminal=True, stdin="/params\n")
    assert ran.out == ""
    assert (
        "sampling, temperature 0.7, top_k 5, top_p 0.8, min_p 0, repetition_penalty 1.1, presence_penalty 0, "
        "frequency_penalty 0, logit_bias none, seed 8\nmax_new_tokens 77, min_new_tokens 0, stop 'END'\n"
        "not supported, of generation_config.json: num_beams 4\n"
    ) in ran.err
    greedy = command("run", folder, "--greedy", terminal=True, stdin="/params\n").err
    assert "greedy, repetition_penalty 1, presence" in greedy
