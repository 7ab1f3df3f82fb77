"""`qwen-onnx bench`: what it counts, and what it refuses. Its times are nobody's business here."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from qwen_onnx import load
from qwen_onnx.checkpoints.safetensors_file import read_header
from qwen_onnx.checks import benchmark, machine
from qwen_onnx.checks.benchmark import _timed, step_bytes
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.options import SessionOptions
from support.chats import tiny
from support.command import command

SHORT = ("--prompt-tokens", 9, "--new-tokens", 5, "--repeats", 2, "--provider", "cpu", "--threads", 1)


@pytest.fixture(autouse=True)
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_PROBE_BYTES", 1 << 20)


def test_json_holds_every_figure() -> None:
    ran = command("bench", tiny("int4"), *SHORT, "--json")
    assert (ran.code, ran.err) == (0, "")
    found = json.loads(ran.out)
    assert (found["prompt_tokens"], found["new_tokens"], found["repeats"], found["threads"]) == (9, 5, 2, 1)
    assert found["dtype"] == "int4"
    for name in ("ttft_ms", "tokens_per_s", "step_ms"):
        spread = found[name]
        assert 0 < spread["low"] <= spread["median"] <= spread["high"]
    for name in ("load_s", "outside_ms", "bytes_per_step", "bandwidth_gb_s", "bandwidth_share"):
        assert found[name] > 0, name
    assert found["outside_ms"] < found["step_ms"]["median"]
    assert found["weights_bytes"] == (tiny("int4") / "weights.safetensors").stat().st_size


def test_text_has_a_line_for_each_part() -> None:
    ran = command("bench", tiny("f32"), *SHORT)
    assert ran.code == 0
    for words in ("TTFT", "decode", "tokens/s", "outside ORT", "GB/s measured here", "memory", "onnxruntime"):
        assert words in ran.out


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
def test_a_step_reads_each_weight_once(dtype: str) -> None:
    """The live cache counts too, the rotary tables do not; bf16 weights count as the f32 that they are in memory."""
    runner = Runner(tiny(dtype), SessionOptions(provider="cpu", threads=1))
    tensors = read_header(runner.folder / "weights.safetensors")
    read = sum(tensor.nbytes for name, tensor in tensors.items() if not name.startswith("rotary."))
    widened = 2 if dtype == "bf16" else 1
    manifest = runner.manifest
    token = 2 * manifest.num_hidden_layers * manifest.num_key_value_heads * manifest.head_dim * 4
    assert step_bytes(runner, 100) == read * widened + 100 * token


def test_the_peak_is_of_the_model_and_not_of_the_bandwidth_s_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(benchmark, "peak_memory", lambda: asked.append("peak") or 1)
    monkeypatch.setattr(benchmark, "read_bandwidth", lambda threads: float(asked.append("probe") or 10))
    assert command("bench", tiny("f32"), *SHORT).code == 0
    assert asked == ["peak", "probe", "probe"]


def test_lengths_that_cannot_be_are_refused_in_one_line() -> None:
    export = tiny("f32")
    for arguments, words in (
        (("--prompt-tokens", 0), "--prompt-tokens 0: 1 or more"),
        (("--new-tokens", 1), "--new-tokens 1: 2 or more"),
        (("--repeats", 0), "--repeats 0: 1 or more"),
        (("--prompt-tokens", 100_000), "the context holds"),
        (("--provider", "gpu"), "gpu"),
        (("--no-prepack",), None),
    ):
        ran = command("bench", export, *SHORT, *arguments)
        assert words in ran.error if words else ran.code == 0
    assert "--no-prepack" in command("bench", tiny("int8"), *SHORT, "--no-prepack").error
    assert "no such folder" in command("bench", export / "nothing").error


def test_repacked_weights_give_the_same_logits() -> None:
    ids = np.arange(3, 40)[None]
    found = []
    for prepack in (None, True):
        runner = Runner(tiny("f32"), SessionOptions(provider="cpu", threads=1, prepack=prepack))
        cache = runner.new_cache()
        found.append(np.concatenate([runner.prefill(cache, ids), runner.decode(cache, ids[:, :1])]))
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)


def test_bandwidth_is_a_number() -> None:
    assert 0 < machine.read_bandwidth(2) < math.inf


def test_speeds_are_of_the_steps_between_first_and_last_token() -> None:
    """Of each repeat; the round that warms up is none."""
    chat = load(tiny("f32"), provider="cpu", threads=1)
    ttfts, speeds, steps, outside = _timed(chat, prompt_tokens=9, new_tokens=5, repeats=3)
    assert [len(each) for each in (ttfts, speeds, steps, outside)] == [3, 3, 12, 12]
    walls = np.reshape(steps, (3, 4)).sum(axis=1)
    np.testing.assert_allclose(speeds, 4e3 / walls, rtol=1e-6)
    assert all(0 < out < step for out, step in zip(outside, steps, strict=True))
