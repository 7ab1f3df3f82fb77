"""One model's predictions against another's: the numbers by formula, whatever the windows and graphs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from qwen_onnx import export, load
from qwen_onnx.checkpoints.hub import resolve_model
from qwen_onnx.checks.comparison import compare_models
from qwen_onnx.runners.chat import Chat
from support.chats import endless, tiny
from support.command import command
from support.refusals import refused

TEXT = "What is the capital of France? The capital of France is Paris. " * 4


def opened(folder: Path, **options: object) -> Chat:
    return load(folder, provider="cpu", threads=1, **options)


def logprobs(chat: Chat, ids: list[int]) -> np.ndarray:
    """[len(ids) - 1, named ids], a token at a time."""
    cache, rows = chat.runner.new_cache(), []
    for token_id in ids[:-1]:
        logits = chat.runner.prefill(cache, np.array([[token_id]]))[0].astype(np.float64)
        logits[chat.processor.vocabulary.nameless(np.arange(len(logits)))] = -np.inf
        rows.append(logits - np.logaddexp.reduce(logits))
    return np.array(rows)


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export("tiny", tmp_path_factory.mktemp("portable") / "tiny", target="portable").folder


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny, its matrices a hundredth of their size off."""
    folder = tmp_path_factory.mktemp("moved")
    shutil.copytree(resolve_model("tiny").folder, folder / "model")
    file, rng = folder / "model/model.safetensors", np.random.default_rng(0)
    tensors = {name: value.astype(np.float32) for name, value in safetensors.numpy.load_file(file).items()}
    for value in tensors.values():
        value += 0.01 * np.abs(value).mean() * rng.standard_normal(value.shape, np.float32)
    safetensors.numpy.save_file(tensors, file)
    return export(folder / "model", folder / "export").folder


def test_the_numbers_are_those_of_the_formulas(moved: Path) -> None:
    chat, other = opened(moved), opened(tiny())
    ids = chat.prompt_ids(TEXT)
    found = compare_models(chat, other, ids)
    mine, theirs = logprobs(chat, ids), logprobs(other, ids)
    named = np.isfinite(theirs[0])
    kl = (np.exp(theirs[:, named]) * (theirs[:, named] - mine[:, named])).sum(-1)
    at = np.arange(len(ids) - 1)
    assert found.positions == len(ids) - 1
    np.testing.assert_allclose(found.kl, kl.mean(), rtol=1e-3)
    np.testing.assert_allclose(found.perplexity, np.exp(-mine[at, ids[1:]].mean()), rtol=1e-4)
    np.testing.assert_allclose(found.other_perplexity, np.exp(-theirs[at, ids[1:]].mean()), rtol=1e-4)
    np.testing.assert_allclose(found.other_perplexity, other.score(ids).perplexity, rtol=1e-4)
    assert abs(found.top1 - (mine.argmax(-1) == theirs.argmax(-1)).mean()) <= 1 / found.positions
    worst = found.worst[0]
    assert worst.kl == max(each.kl for each in found.worst)
    np.testing.assert_allclose(worst.kl, kl[worst.index - 1], rtol=1e-3)
    assert worst.other_best == theirs[worst.index - 1].argmax()


def test_a_model_is_itself(portable: Path) -> None:
    """Through graphs with scores and without, and in windows of a short context."""
    ids = opened(tiny()).prompt_ids(TEXT)
    for context in (2048, 24):
        chat = opened(tiny(), max_context=context)
        for folder in (tiny(), portable):
            found = compare_models(opened(folder, max_context=context), chat, ids)
            assert found.positions == len(ids) - 1
            assert abs(found.kl) < 1e-6
            assert found.top1 == 1
            np.testing.assert_allclose(found.perplexity, chat.score(ids).perplexity, rtol=1e-4)


def test_other_tokens_cannot_be_compared() -> None:
    chat = opened(tiny())
    refused(compare_models, chat, opened(endless()), [1, 2], mentions=("their tokens are not the same",))
    refused(compare_models, chat, chat, [1], mentions=("2 or more",))


def test_the_command_says_how_far(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text(TEXT)
    ran = command("score", tiny("int4"), file, "--against", tiny(), "--provider", "cpu")
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["perplexity", "KL", "top-1", "worst"]
    assert len(lines) == 9
    found = json.loads(
        command("score", tiny("int4"), file, "--against", tiny(), "--provider", "cpu", "--json").out
    )
    assert found["positions"] == len(found["token_ids"]) - 1
    assert f"{found['kl']:.3g} nats" in lines[1]
    assert f"{found['positions']:,} positions" in lines[1]
    assert "leave it out" in command("score", tiny(), file, "--against", tiny(), "--tokens").error
