"""`from qwen_onnx import export, load`: what the package promises to programs, and to strangers' programs."""

from __future__ import annotations

import inspect
import itertools
import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import qwen_onnx
import static_loop
from qwen_onnx import UserError, load
from qwen_onnx.runners.chat import Chat, Token
from qwen_onnx.runners.model.buffers import CacheMemory
from qwen_onnx.runners.runtime.machine import physical_cores
from qwen_onnx.runners.sampling.logits import greedy, top
from qwen_onnx.runners.text.vocabulary import Vocabulary
from support.chats import copy_export, endless, tiny
from support.damage import forge
from support.refusals import refused

HI = [{"role": "user", "content": "Hi"}]


def ids(tokens: list[Token]) -> list[int]:
    return [token.token_id for token in tokens]


def say(chat: Chat, prompt: Any, count: int | None = 12, **options: Any) -> list[Token]:
    return list(chat.generate(prompt, max_new_tokens=count, **options))


def test_the_example_of_the_package_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert qwen_onnx.__doc__ is not None
    lines = inspect.cleandoc(qwen_onnx.__doc__).splitlines()
    example = textwrap.dedent("\n".join(line for line in lines if line.startswith("    ") or not line))
    assert "Qwen/Qwen2.5-0.5B-Instruct" in example
    exec(example.replace("Qwen/Qwen2.5-0.5B-Instruct", "tiny"), {})
    assert capsys.readouterr().out == "Hello! How can I help you?"


@pytest.mark.parametrize("name", ["export", "load"])
def test_every_argument_is_typed_and_documented(name: str) -> None:
    function = getattr(qwen_onnx, name)
    signature, doc = inspect.signature(function), inspect.getdoc(function)
    arguments = doc.split("Args:")[1].split("Raises:")[0]
    options = doc.split("Options:")[1]
    for parameter in signature.parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty
        of_options = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert f"    {parameter.name}: " in (options if of_options else arguments)
    assert signature.return_annotation is not inspect.Signature.empty
    assert (Path(qwen_onnx.__file__).parent / "py.typed").exists()


def test_importing_the_package_imports_nothing_heavy() -> None:
    """So that `--help` is quick, and nothing needs torch."""
    code = "import qwen_onnx.cli.main, sys; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    heavy = {"numpy", "onnx", "onnxruntime", "onnxscript", "huggingface_hub", "torch", "transformers"}
    assert not heavy & set(modules.split())


def test_errors_are_the_users_and_one_line(tmp_path: Path) -> None:
    refused(load, tmp_path / "nothing", mentions=("no such folder",))
    refused(load, str(endless()), max_context=0, mentions=("max_context 0", "1 or more wanted"))
    refused(load, endless(), max_context=4097, mentions=("max_context=4097", "4096"))
    refused(load, endless(), provider="metal", mentions=("'metal'",))
    refused(qwen_onnx.export, tmp_path / "nothing", mentions=("no such folder",))
    refused(qwen_onnx.export, "tiny", endless().parent / "x", dtype="int2", mentions=("'int2'",))
    assert issubclass(qwen_onnx.NonFiniteLogitsError, UserError)


def test_messages_text_and_ids_are_the_same_prompt() -> None:
    chat, another = load(endless()), load(endless())
    text = chat.template.render(HI)
    by_messages = say(chat, HI)
    prompt = chat.prompt_ids(HI)
    for other in (text, prompt, tuple(prompt), np.array(prompt), np.array(prompt, np.int32)):
        assert ids(say(another, other)) == ids(by_messages)


@pytest.mark.parametrize("prompt", [[1, HI[0]], [HI[0], 2], [1, "a"], ["a"], [None], [1.0]])
def test_mixtures_of_messages_and_ids_are_refused(prompt: list[Any]) -> None:
    refused(say, load(endless()), prompt, mentions=("not a mixture",))


@pytest.mark.parametrize("prompt", ["", [], ()])
def test_an_empty_prompt_is_refused(prompt: Any) -> None:
    refused(say, load(endless()), prompt, mentions=("empty",))


def test_ids_that_name_no_token_are_never_chosen() -> None:
    """An embedding may have more rows than the tokenizer has ids; those are not among the best either."""
    chat = load(endless())
    assert chat.tokenizer.size < chat.runner.manifest.vocab_size
    best = [token.top_logits for token in say(chat, HI, 100, ignore_eos=True, top_logits=1000)]
    assert max(token_id for step in best for token_id, _ in step) < chat.tokenizer.size


def test_the_best_are_fewer_where_fewer_have_names() -> None:
    """`top` gives finite logits of named ids only, so that they can be JSON."""
    logits = np.array([1.0, 9.0, 3.0, 9.0], np.float32)
    named = Vocabulary(3, np.array([1])).named(logits)
    assert top(named, 3) == [(2, 3.0), (0, 1.0)]
    assert greedy(named) == 2
    assert top(logits, 2) == [(1, 9.0), (3, 9.0)]


def test_metrics_are_consistent() -> None:
    """The prompt's time counts for the first token alone; each token has the same time to first token."""
    chat = load(endless())
    started = time.perf_counter()
    tokens = say(chat, HI, 6)
    passed = time.perf_counter() - started
    assert {token.prompt_tokens for token in tokens} == {len(chat.prompt_ids(HI))}
    assert {token.cached_tokens for token in tokens} == {0}
    [ttft] = {token.ttft_ms for token in tokens}
    assert 0 < ttft < 1e3 * passed
    assert tokens[0].tokens_per_s is None
    for made, token in enumerate(tokens[1:], start=1):
        assert made / token.tokens_per_s < passed - ttft / 1e3
    assert [token.finish_reason for token in tokens] == [None] * 5 + ["length"]
    assert {token.top_logits for token in tokens} == {()}
    assert chat.context_used == len(chat.prompt_ids(HI)) + 5


def test_streamed_text_is_the_decoded_text() -> None:
    """Characters of several tokens too, and where an answer ends within one."""
    chat = load(endless())
    long = say(chat, HI, 60, ignore_eos=True)

    def streamed(tokens: list[Token]) -> str:
        return "".join(token.text for token in tokens)

    cuts = [n for n in range(1, 60) if streamed(long[:n]) != chat.tokenizer.decode(ids(long[:n]))]
    assert cuts, "no answer that ends within a character"
    for count in (1, *cuts, 60):
        tokens = say(chat, HI, count, ignore_eos=True)
        assert ids(tokens) == ids(long[:count])
        assert streamed(tokens) == chat.tokenizer.decode(ids(tokens))


def test_a_turn_computes_only_what_is_new() -> None:
    """The history is reused as far as it is what it was."""
    chat = load(endless())
    first = say(chat, HI)
    reply = {"role": "assistant", "content": "".join(token.text for token in first)}
    longer = [*HI, reply, {"role": "user", "content": "And?"}]
    second = say(chat, longer)
    assert second[0].cached_tokens >= len(chat.prompt_ids(HI))
    assert second[0].cached_tokens < second[0].prompt_tokens
    assert ids(second) == ids(say(load(endless()), longer))

    edited = [{"role": "user", "content": "Ho"}, *longer[1:]]
    third = say(chat, edited)
    shared = third[0].cached_tokens
    assert chat.prompt_ids(edited)[:shared] == chat.prompt_ids(longer)[:shared]
    assert 0 < shared < len(chat.prompt_ids(HI))
    assert ids(third) == ids(say(load(endless()), edited))
    again = say(chat, edited)
    assert again[0].cached_tokens == again[0].prompt_tokens - 1
    assert ids(again) == ids(third)


def interrupt(monkeypatch: pytest.MonkeyPatch, owner: object, stage: str, call: int) -> None:
    """Ctrl-C in the given call of one of the owner's methods, counted from 1; never again after that."""
    whole, calls = getattr(owner, stage), itertools.count(1)

    def struck(*arguments: Any) -> Any:
        if next(calls) == call:
            raise KeyboardInterrupt
        return whole(*arguments)

    monkeypatch.setattr(owner, stage, struck)


def test_an_interrupted_step_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache counts no token whose keys and values were not computed."""
    chat = load(endless())
    interrupt(monkeypatch, chat.runner.executor, "advance", call=3)
    with pytest.raises(KeyboardInterrupt):
        say(chat, HI)
    made = ids(say(load(endless()), HI, 2))
    longer = [*chat.prompt_ids(HI), *made, 5, 6]
    assert ids(say(chat, longer)) == ids(say(load(endless()), longer))


def test_an_interrupted_growth_leaves_a_cache_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though some layers' buffers have grown by then and others have not."""
    chat, prompt = load(endless()), [5] * 250
    say(chat, prompt, 1)
    interrupt(monkeypatch, CacheMemory, "_copy", call=2)
    with pytest.raises(KeyboardInterrupt):
        say(chat, prompt + [6] * 500)
    after = say(chat, prompt + [7] * 100)
    assert ids(after) == ids(say(load(endless()), prompt + [7] * 100))


def test_threads_reach_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, int] = {}
    real = onnxruntime.InferenceSession

    def note(path: str, settings: Any, **options: Any) -> Any:
        found[Path(path).name] = settings.intra_op_num_threads
        return real(path, settings, **options)

    monkeypatch.setattr(onnxruntime, "InferenceSession", note)
    for given, wanted in ((1, 1), (3, 3), (None, physical_cores())):
        load(endless(), threads=given, provider="cpu")
        assert found == {"prefill.onnx": wanted, "decode.grouped.onnx": wanted, "grow.onnx": 1}


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_a_foreign_loop_gets_the_same_ids(dtype: str) -> None:
    """With onnxruntime, tokenizers and numpy alone, by what export.json says."""
    source = Path(static_loop.__file__)
    assert "qwen" not in source.read_text(encoding="utf-8")
    question = {"role": "user", "content": "Repeat after me: cloud river"}
    chat = load(tiny(dtype), provider="cpu")
    prompt = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\n{question['content']}<|im_end|>\n<|im_start|>assistant\n"
    )
    run = [sys.executable, "-I", str(source), str(tiny(dtype)), prompt, "40"]
    found = json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
    assert found == ids(say(chat, [question], 40))
    assert chat.tokenizer.decode(found) == "cloud river"


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_a_foreign_loop_on_random_weights(dtype: str) -> None:
    """Whose answers no rule gives, and no end token ends."""
    chat = load(endless(dtype), provider="cpu")
    found = static_loop.generate(endless(dtype), chat.template.render(HI), 100)
    assert found == ids(say(chat, HI, 100))


def test_an_end_token_that_is_not_flagged_special_is_not_printed(tmp_path: Path) -> None:
    """Some fine-tunes ship such a tokenizer.json; <|im_end|> is part of no text there either."""
    folder = copy_export(tiny(), tmp_path / "export")
    raw = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    for token in raw["added_tokens"]:
        token["special"] = False
    (folder / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    forge(folder)
    tokens = say(load(folder, provider="cpu"), [{"role": "user", "content": "What is 3 plus 4?"}], 40)
    assert tokens[-1].finish_reason == "eos"
    assert "".join(token.text for token in tokens) == "3 plus 4 is 7."


def test_two_answers_of_one_chat_do_not_mix(tmp_path: Path) -> None:
    """They share one cache: once the second is begun, the first is refused."""
    chat = load(endless(), provider="cpu")
    first = chat.generate(HI, max_new_tokens=8)
    next(first)
    alone = ids(say(load(endless(), provider="cpu"), "Another", 8))
    second = chat.generate("Another", max_new_tokens=8)
    begun = next(second)
    with pytest.raises(UserError, match="another answer was begun"):
        next(first)
    assert [begun.token_id, *ids(list(second))] == alone


@pytest.mark.parametrize("count", [2.5, -1, True, "3"])
def test_a_wrong_number_of_tokens_is_refused(count: Any) -> None:
    with pytest.raises(UserError, match="max_new_tokens"):
        say(load(endless(), provider="cpu"), HI, count)


def test_messages_as_openai_has_them() -> None:
    """Lists of text parts are texts; content that is no text is refused, never spelled out as Python would."""
    chat = load(tiny(), provider="cpu", threads=1)
    whole = [{"role": "user", "content": "What is 3 plus 4?"}]
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "3 plus 4?"}]
    assert chat.prompt_ids([{"role": "user", "content": parts}]) == chat.prompt_ids(whole)
    for message in (
        {"role": "user", "content": None}, {"role": "user"}, {"content": "x"}, {"role": 5, "content": "x"},
        {"role": "user", "content": [{"type": "image_url"}]}, {"role": "user", "content": []},
    ):  # fmt: skip
        with pytest.raises(UserError, match="message 1: "):
            chat.prompt_ids([message])
    for prompt in (None, 5, object()):
        with pytest.raises(UserError, match="a prompt is a text"):
            chat.prompt_ids(prompt)
    with pytest.raises(UserError, match="2 prompts and options of 1"):
        list(chat.generate_each(["a", "b"], [{}]))
    for wrong in ({"tools": 5}, {"tools": ["x"]}, {"enable_thinking": 1}, {"tools": "x"}):
        with pytest.raises(UserError, match=f"{next(iter(wrong))} .* wanted"):
            list(chat.generate(whole, **wrong))
