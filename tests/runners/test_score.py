"""Log probabilities of given texts: against float64, whatever the chunk, the context and the graph that there is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import qwen_onnx
from qwen_onnx import UserError, export, load
from qwen_onnx.checkpoints.checkpoint import open_checkpoint
from qwen_onnx.checks.logits import exported_weights
from qwen_onnx.reference import reference_logits
from qwen_onnx.runners import generate
from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.options import SessionOptions
from support.chats import endless, endless_checkpoint, tiny
from support.command import command
from support.int8_products import assert_as_a_kernel, reference_in_int8
from support.tolerances import EXACT, F32, F32_ORDER, INT8_EDGE, OF_DTYPE, Tolerance, assert_close

TEXT = "What is the capital of France? The capital of France is Paris. 3 plus 4 is 7, naïve “quotes” too."
ONE_THREAD = SessionOptions(provider="cpu", threads=1)
FOLDERS: dict[str, tuple[Callable[[str], Path], Callable[[], Path]]] = {
    "tiny": (tiny, lambda: Path(qwen_onnx.__file__).parent / "tiny"),
    "endless": (endless, endless_checkpoint),
}


def wanted(checkpoint: Path, ids: list[int], chat: Chat) -> np.ndarray:
    """ln p of every id but the first in float64, over the ids that name a token."""
    opened = open_checkpoint(checkpoint)
    read = exported_weights(chat.runner.folder, chat.runner.manifest, opened)
    logits = reference_logits(opened.config, read, ids)
    named = np.arange(logits.shape[1]) < chat.tokenizer.size
    named[chat.tokenizer.holes] = False
    logits[:, ~named] = -np.inf
    best = logits.max(axis=-1, keepdims=True)
    logits -= best + np.log(np.exp(logits - best).sum(axis=-1, keepdims=True))
    return logits[np.arange(len(ids) - 1), ids[1:]]


def found(chat: Chat, prompt: Any = TEXT) -> np.ndarray:
    first, *others = chat.score(prompt).logprobs
    assert first is None
    return np.array(others)


def twice(tolerance: Tolerance) -> Tolerance:
    """A log probability is a logit less the logarithm of a sum of them."""
    return Tolerance(2 * tolerance.bound, tolerance.reason)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("name", FOLDERS)
def test_logprobs_are_those_of_float64(name: str, dtype: str) -> None:
    """Over the ids that name a token."""
    folder, checkpoint = FOLDERS[name]
    chat = Chat(Runner(folder(dtype), ONE_THREAD, for_scores=True))
    ids = chat.prompt_ids(TEXT)
    assert_close(found(chat), wanted(checkpoint(), ids, chat), twice(OF_DTYPE[dtype]))
    result = chat.score(TEXT)
    assert result.token_ids == tuple(ids)
    assert result.windows == 1
    assert result.logprob == pytest.approx(found(chat).sum(), rel=1e-12)
    assert result.perplexity == pytest.approx(np.exp(-found(chat).mean()), rel=1e-12)


@pytest.mark.parametrize("dtype", ["f32", "int8"])
def test_memory_is_bounded_and_numbers_are_the_same(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of few positions at a time, wherever the text is cut for it."""
    chat = Chat(Runner(tiny(dtype), ONE_THREAD, for_scores=True))
    whole, sizes = found(chat), []

    def noting(real: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def note(*arguments: Any) -> np.ndarray:
            logits = real(*arguments)
            sizes.append(logits.nbytes)
            return logits

        return note

    for name in ("prefill", "decode", "score"):
        monkeypatch.setattr(Runner, name, noting(getattr(Runner, name)))
    tolerance = twice(F32_ORDER if dtype == "f32" else INT8_EDGE)
    row = 4 * chat.runner.manifest.vocab_size
    for rows in (1, 7, 20):
        monkeypatch.setattr(generate, "SCORED_BYTES", rows * row + 5)
        sizes.clear()
        assert_close(found(chat), whole, tolerance)
        assert max(sizes) == rows * row
    small = Chat(Runner(tiny(dtype), ONE_THREAD, prefill_chunk=5, for_scores=True))
    assert_close(found(small), whole, tolerance)


def test_quantized_weights_score_as_the_kernels_are_to_compute() -> None:
    chat = load(tiny("int8"), provider="cpu", threads=1)
    ids = chat.prompt_ids(TEXT)
    checkpoint = FOLDERS["tiny"][1]()
    in_f32 = wanted(checkpoint, ids, chat)
    with reference_in_int8(128):
        in_int8 = wanted(checkpoint, ids, chat)
    assert_as_a_kernel(found(chat), in_int8, in_f32)


def test_a_text_longer_than_the_context_is_scored_in_windows() -> None:
    """Each token once, given at least half a context."""
    chat = Chat(Runner(endless(), dataclasses.replace(ONE_THREAD, max_context=16), for_scores=True))
    ids = np.random.default_rng(3).integers(0, 300, 52).tolist()
    parts = [wanted(endless_checkpoint(), ids[:17], chat)]
    parts += [wanted(endless_checkpoint(), ids[at : at + 17], chat)[7:] for at in (9, 18, 27, 36)]
    assert_close(found(chat, ids), np.concatenate(parts)[:51], twice(F32))
    assert chat.score(ids).windows == 5
    assert chat.score(ids[:17]).windows == 1
    assert_close(found(chat, ids[:17]), parts[0], twice(F32))
    for context in (1, 2, 3):
        assert len(found(load(endless(), provider="cpu", threads=1, max_context=context), ids)) == 51


def test_the_session_opens_on_first_use_and_the_conversation_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of what was scored is in the conversation's cache."""
    opened, real = [], onnxruntime.InferenceSession

    def count(path: str, *arguments: Any, **options: Any) -> Any:
        opened.append(Path(path).name)
        return real(path, *arguments, **options)

    monkeypatch.setattr(onnxruntime, "InferenceSession", count)
    chat, plain = (load(tiny(), provider="cpu", threads=1) for _ in range(2))
    prompt = chat.prompt_ids("What is the capital of France?")
    begun, plainly = (list(each.generate(prompt, max_new_tokens=5)) for each in (chat, plain))
    used = chat.context_used
    assert "score.onnx" not in opened
    assert_close(found(chat), found(chat), EXACT)
    assert opened.count("score.onnx") == 1
    assert chat.context_used == used
    prompt += [token.token_id for token in begun] + [5, 6]
    again, wanted_again = (list(each.generate(prompt, max_new_tokens=5)) for each in (chat, plain))
    assert begun[0].cached_tokens == plainly[0].cached_tokens == 0
    assert again[0].cached_tokens == wanted_again[0].cached_tokens == used
    assert [token.token_id for token in again] == [token.token_id for token in wanted_again]
    opened.clear()
    assert command("score", tiny(), "-", "--provider", "cpu", stdin=TEXT).code == 0
    assert sorted(opened) == ["grow.onnx", "score.onnx"]


@pytest.mark.parametrize("option", ["speculate", "greedy_on_device"])
def test_any_runner_scores(option: str) -> None:
    chat = load(tiny(), provider="cpu", threads=1, **{option: True})
    assert_close(found(chat), found(load(tiny(), provider="cpu", threads=1)), twice(F32_ORDER))


def test_without_a_score_graph_tokens_go_one_by_one(tmp_path: Path) -> None:
    """Portable exports and those for GPUs have none."""
    chat = load(export("tiny", tmp_path / "out", target="portable").folder, provider="cpu", threads=1)
    assert chat.runner.scorer() is chat.runner
    assert_close(found(chat), found(load(tiny(), provider="cpu", threads=1)), twice(F32))
    assert chat.context_used == 0


def test_a_conversation_ends_with_its_last_message() -> None:
    chat = load(tiny(), provider="cpu", threads=1)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    ids = chat.score(messages).token_ids
    asked = chat.prompt_ids(messages)
    assert list(ids) == asked[: len(ids)]
    assert len(ids) < len(asked)


@pytest.mark.parametrize("ids", [[], [5]])
def test_what_has_nothing_before_it_has_no_score(ids: list[int]) -> None:
    with pytest.raises(UserError, match=f"^{len(ids)} tokens? found, 2 or more wanted"):
        load(endless(), provider="cpu", threads=1).score(ids)


def test_ids_that_name_nothing_are_refused() -> None:
    """They have no probability."""
    chat = load(endless(), provider="cpu", threads=1)
    with pytest.raises(UserError, match="399 names no token"):
        chat.score([5, 399, 6])
    with pytest.raises(UserError, match="400 is outside the embedding"):
        chat.score([5, 400, 6])


def test_the_command_prints_what_the_api_says(tmp_path: Path) -> None:
    result = load(tiny(), provider="cpu", threads=1).score(TEXT)
    file = tmp_path / "text.txt"
    file.write_bytes(b"\xef\xbb\xbf" + TEXT.encode() + b"\r\n")
    ran = command("score", tiny(), file, "--provider", "cpu", "--threads", "1")
    assert ran.out == (
        f"log-probability  {result.logprob:.4f}\nperplexity       {result.perplexity:.4f}\n"
        f"tokens           {len(result.token_ids)}, all but the first scored\n"
    )
    assert ran.err == ""
    options = ("--provider", "cpu", "--threads", "1")
    told = json.loads(command("score", tiny(), "-", "--json", *options, stdin=TEXT + "\n").out)
    assert told["logprob"] == result.logprob
    assert told["perplexity"] == result.perplexity
    assert tuple(told["logprobs"]) == result.logprobs
    assert tuple(told["token_ids"]) == result.token_ids
    table = command("score", tiny(), file, "--tokens", *options).out.splitlines()
    assert len(table) == len(result.token_ids) + 3
    assert table[0].split() == [str(result.token_ids[0]), "-", "'What'"]
    assert table[1].split()[:2] == [str(result.token_ids[1]), f"{result.logprobs[1]:.4f}"]
    windows = command("score", tiny(), file, "--max-context", "16", *options)
    assert "longer than the context of 16 tokens: scored in " in windows.err
    assert "each token is given 8 tokens or more of those before it" in windows.err
    smallest = command("score", tiny(), file, "--max-context", "1", *options)
    assert "the context of 1 token: scored in " in smallest.err
    assert "each token is given 1 token or more" in smallest.err
    assert windows.code == 0


def test_files_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "latin1").write_bytes(b"caf\xe9")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "letter").write_bytes(b"a")
    for name, line in {
        "latin1": "not UTF-8 (byte 3)",
        "none": "no such file; wanted one of UTF-8 text, or - for stdin",
        ".": "Is a directory",
        "a\0b": "null",
        "empty": "0 tokens found",
        "letter": "1 token found",
    }.items():
        assert line in command("score", tiny(), tmp_path / name, "--provider", "cpu").error
    assert "not UTF-8 (byte 0)" in command("score", tiny(), "-", "--provider", "cpu", stdin=b"\xff").error
    assert "no such folder" in command("score", tmp_path / "none", tmp_path / "letter").error
