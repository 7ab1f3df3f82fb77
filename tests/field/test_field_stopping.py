"""docs/faults.md, chapter E: where an answer ends, and how its text comes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qwen_onnx.contract.manifest import read_manifest
from qwen_onnx.runners.chat import Chat, Token
from qwen_onnx.runners.sampling.params import GREEDY
from qwen_onnx.runners.text.tokenizer import Tokenizer
from support.chats import endless, tiny, write_chat_checkpoint
from support.checkpoints import QWEN2, write_checkpoint
from support.command import command
from support.field_runs import exported_as, opened, say
from support.text_fixtures import QWEN25_LIKE, byte_level_tokenizer, write_folder

END_OF_TEXT, START, END_OF_TURN = (
    byte_level_tokenizer().token_to_id(text) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
)
HELLO = [{"role": "user", "content": "Hello!"}]
DOG = byte_level_tokenizer().encode("The dog").ids


@pytest.fixture
def chat() -> Chat:
    return opened(endless())


def answered(chat: Chat, prompt: Any = HELLO, **options: Any) -> list[Token]:
    return list(chat.generate(prompt, **options))


def text_of(tokens: list[Token]) -> str:
    return "".join(token.text for token in tokens)


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ({"eos_token_id": [END_OF_TURN, END_OF_TEXT]}, END_OF_TEXT, {END_OF_TURN, END_OF_TEXT}),
        ({"eos_token_id": END_OF_TEXT}, None, {END_OF_TURN, END_OF_TEXT}),  # the template's own is added
        (None, END_OF_TEXT, {END_OF_TURN, END_OF_TEXT}),
        ({"eos_token_id": [END_OF_TURN]}, 7, {END_OF_TURN, 7}),  # all that are named
        ({"eos_token_id": [7]}, None, {END_OF_TURN, 7}),  # an end that is a token like any other
    ],
    ids=["list", "int", "no file", "config differs", "not special"],
)
def test_e1_every_end_ends_and_no_other(
    generation: Any, config: Any, ends: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is made to say each id that might end; those that do are never part of the text."""
    write_checkpoint(
        tmp_path / "m", {**QWEN2, "vocab_size": 400, "num_hidden_layers": 1, "eos_token_id": config}
    )
    files = {
        "chat_template.jinja": QWEN25_LIKE,
        "generation_config.json": generation,
        "tokenizer_config.json": {},
    }
    folder = exported_as(write_folder(tmp_path / "m", files), tmp_path / "out")
    assert set(read_manifest(folder).eos_token_ids) == ends
    for end in (END_OF_TEXT, END_OF_TURN, 7):
        with monkeypatch.context() as patch:
            chat = opened(folder)
            say(patch, chat, [*DOG, end, *DOG, *DOG])
            tokens = answered(chat, max_new_tokens=2 * len(DOG))
        stops = end in ends
        assert len(tokens) == (len(DOG) + 1 if stops else 2 * len(DOG))
        assert tokens[-1].finish_reason == ("eos" if stops else "length")
        before = text_of(tokens[: len(DOG) + 1])
        assert before == "The dog" if stops else before.startswith("The dog")
        assert "<|" not in text_of(tokens)


@pytest.mark.parametrize(
    ("count", "reason"), [(0, None), (1, "length"), (2, "length"), (3, "eos"), (9, "eos")]
)
def test_e3_the_count_is_exact_and_the_reason_is_told(
    count: int, reason: str | None, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A, B and the end: each comes once, the end has no text, and the last token has the reason."""
    a, b = (byte_level_tokenizer().token_to_id(letter) for letter in "AB")
    left = say(monkeypatch, chat, [a, b, END_OF_TURN, a, b])
    tokens = answered(chat, max_new_tokens=count)
    assert [token.token_id for token in tokens] == [a, b, END_OF_TURN][:count]
    assert [token.finish_reason for token in tokens][-1:] == ([reason] if reason else [])
    assert all(token.finish_reason is None for token in tokens[:-1])
    assert text_of(tokens) == "AB"[:count]
    assert len(left) == 5 - min(count, 3)  # no step computed whose token nobody gets


def test_e3_a_full_context_and_an_interruption_have_reasons_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chat = opened(endless(), max_context=40)
    tokens = answered(chat, list(range(1, 31)), ignore_eos=True)
    assert (len(tokens), tokens[-1].finish_reason) == (11, "context")
    ran = command("run", endless(), "-p", "Hi", "--max-new-tokens", 0, "--json", "--provider", "cpu")
    assert json.loads(ran.out)["finish_reason"] == "length"
    real = Chat.generate

    def interrupted(*given: Any, **options: Any) -> Any:
        for count, token in enumerate(real(*given, **options)):
            if count == 2:
                raise KeyboardInterrupt
            yield token

    monkeypatch.setattr(Chat, "generate", interrupted)
    ran = command("run", endless(), "-p", "Hi", "--max-new-tokens", 9, "--json", "--provider", "cpu")
    found = json.loads(ran.out)
    assert (ran.code, found["finish_reason"], len(found["token_ids"])) == (130, "interrupted", 2)


@pytest.mark.parametrize("text", ["é🔥好👩‍👩‍👧", "Привет🇩🇪 ไทย한", "\u0301e\U0010ffff"])
def test_e4_characters_of_several_tokens_come_whole_wherever_they_are_cut(
    text: str, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is no whole character is held back, and comes out at the end; the next answer has nothing of it."""
    tokenizer = Tokenizer(byte_level_tokenizer())
    ids = tokenizer.encode(text)
    assert len(ids) > len(text)
    for cut in range(1, len(ids) + 1):
        with monkeypatch.context() as patch:
            say(patch, chat, ids)
            pieces = [token.text for token in answered(chat, max_new_tokens=cut)]
        assert "".join(pieces) == tokenizer.decode(ids[:cut])
        assert not any("\ufffd" in piece for piece in pieces[:-1])  # what is held back comes out at the end
        if cut == len(ids):
            assert "".join(pieces) == text


def test_e6_an_empty_answer_is_an_answer(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that ends at once gives one token without text."""
    say(monkeypatch, chat, [END_OF_TURN, *DOG, END_OF_TURN])
    (token,) = answered(chat)
    assert (token.text, token.finish_reason, token.tokens_per_s) == ("", "eos", None)
    assert text_of(answered(chat)) == "The dog"


@pytest.mark.parametrize("split", [["E", "ND!"], ["E", "N", "D", "!"], ["xE", "N", "D!"], ["EN", "END!"]])
def test_e6_a_stop_string_is_cut_exactly_and_adds_to_the_ends_of_the_model(
    split: list[str], chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A beginning of it is held back, and comes out where it came to nothing; the model's own ends still end."""
    encode = byte_level_tokenizer().encode
    ids = [token_id for piece in split for token_id in encode(piece).ids]
    written = "".join(split)
    with monkeypatch.context() as patch:
        say(patch, chat, [*DOG, *ids, *DOG])
        tokens = answered(chat, stop="END", ignore_eos=True)
    assert text_of(tokens) == "The dog" + written[: written.index("END")]
    assert tokens[-1].finish_reason == "stop"
    with monkeypatch.context() as patch:
        say(patch, chat, [*ids[:1], END_OF_TURN, *DOG])
        tokens = answered(chat, stop=["END", "unheard of"])
    assert (text_of(tokens), tokens[-1].finish_reason) == (byte_level_tokenizer().decode(ids[:1]), "eos")


def test_e6_ignore_eos_is_for_benchmarks() -> None:
    ran = command(
        "run", tiny(), "-p", "Hello!", "--ignore-eos", "--max-new-tokens", 40, "--json", "--provider", "cpu"
    )
    found = json.loads(ran.out)
    assert (found["finish_reason"], len(found["token_ids"])) == ("length", 40)
    assert set(found["token_ids"]) & set(read_manifest(tiny()).eos_token_ids)
    assert "<|" not in found["text"]


QWEN = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}


@pytest.fixture
def sampled(tmp_path: Path) -> Path:
    """The values that Qwen2.5's generation_config.json has."""
    write_chat_checkpoint(tmp_path / "m", max_position_embeddings=4096)  # as `endless` but for this file
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps(QWEN))
    return exported_as(tmp_path / "m", tmp_path / "out")


def test_e7_the_same_seed_says_the_same_and_none_does_not(sampled: Path) -> None:
    """What generation_config.json says of sampling holds, and a seed makes it repeatable."""

    def said(seed: int | None, temperature: float | None = None) -> list[int]:
        options = {"seed": seed, "temperature": temperature}
        return [token.token_id for token in answered(opened(sampled), max_new_tokens=24, **options)]

    assert said(7) == said(7) == said(7)
    assert said(8) != said(7)
    assert (
        len({tuple(said(None, 5.0)) for _ in range(3)}) == 3
    )  # all but flat, so that no two agree by chance


def test_e7_what_is_in_force_is_shown(sampled: Path) -> None:
    """/params shows the values of generation_config.json and those asked for."""
    ran = command(
        "run", sampled, "--provider", "cpu", "--top-p", 0.5, stdin="/params\n/exit\n", terminal=True
    )
    for said in ("temperature 0.7", "top_k 20", "top_p 0.5", "repetition_penalty 1.05"):
        assert said in ran.err


def test_e7_what_is_in_force_is_shown_before_an_answer_too(sampled: Path) -> None:
    ran = command("run", sampled, "--provider", "cpu", "--seed", 3, "-p", "Hi", "-v", "--max-new-tokens", 2)
    for said in ("temperature 0.7", "top_k 20", "repetition_penalty 1.05", "seed 3", "max_new_tokens 2"):
        assert said in ran.err


def test_e7_greedy_is_greedy(sampled: Path) -> None:
    """Each id is the best of its step, whatever penalty generation_config.json has."""
    options: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
    tokens = answered(opened(sampled), **GREEDY, top_logits=1, **options)
    assert all(token.token_id == token.top_logits[0][0] for token in tokens)
    plain = answered(opened(endless()), **options)
    assert [token.token_id for token in tokens] == [token.token_id for token in plain]
    ran = command(
        "run", sampled, "-p", "Hello!", "--greedy", "--max-new-tokens", 8, "--json", "--provider", "cpu"
    )
    found = json.loads(ran.out)["token_ids"]
    assert found == [token.token_id for token in answered(opened(endless()), max_new_tokens=8)]


def test_e1_the_end_of_a_turn_is_known_without_any_config(tmp_path: Path) -> None:
    """Of a fine-tune saved without generation_config.json and eos_token_id, the chat template says it."""
    write_chat_checkpoint(tmp_path / "m", num_hidden_layers=1)
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps({"chat_template": QWEN25_LIKE}))
    assert read_manifest(exported_as(tmp_path / "m", tmp_path / "out")).eos_token_ids == (END_OF_TURN,)
