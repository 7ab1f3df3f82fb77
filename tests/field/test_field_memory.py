"""docs/faults.md, chapter C, second half: memory of a running model."""

from __future__ import annotations

import dataclasses
import gc
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from qwen_onnx.memory import anonymous_memory
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.options import SessionOptions
from qwen_onnx.runners.runtime.session import provider_options
from support.chats import endless
from support.checkpoints import QWEN2, QWEN3, write_checkpoint
from support.command import command
from support.exports import IDS, ON_CPU
from support.field_runs import exported_as, graphs, opened
from support.tolerances import F32_ORDER, assert_close

MB = 10**6
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.parametrize("dtype", ["f16", "bf16", "int4"])
def test_c7_weights_in_private_memory_have_one_session(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt and steps run on one session, so the weights are in memory once."""
    folder, opened_files, real = endless(dtype), list[str](), onnxruntime.InferenceSession

    def count(path: str, *given: Any, **named: Any) -> Any:
        opened_files.append(Path(path).name)
        return real(path, *given, **named)

    monkeypatch.setattr(onnxruntime, "InferenceSession", count)
    tokens = list(opened(folder).generate("Hello", max_new_tokens=6))
    assert len(tokens) == 6
    assert len([name for name in opened_files if not name.startswith("grow")]) == 1


@on_linux
def test_c7_mapped_weights_are_in_memory_once_for_all_sessions(tmp_path: Path) -> None:
    """In f32 there are several over one file of 34 MB, and none copies it."""
    raw = {**QWEN2, "vocab_size": 16_000, "hidden_size": 512, "intermediate_size": 64, "num_hidden_layers": 1}
    write_checkpoint(tmp_path / "m", raw)
    folder = exported_as(tmp_path / "m", tmp_path / "out")
    weights = (folder / "weights.safetensors").stat().st_size
    assert weights > 32 * MB
    Runner(endless(), ON_CPU)  # whatever the first session of a process takes
    gc.collect()
    before = anonymous_memory()
    runner = Runner(folder, ON_CPU)
    cache = runner.new_cache()
    runner.prefill(cache, IDS[:1, :8])
    runner.decode(cache, IDS[:1, 8:9])
    after = anonymous_memory()
    assert before is not None
    assert after is not None
    assert after - before < 0.5 * weights  # a copy is 1.0, and more where it is repacked


@on_linux
@pytest.mark.parametrize("target", ["onnxruntime", "portable"])
def test_c8_memory_stays_while_lengths_change(target: str, tmp_path: Path) -> None:
    """Prompts of 60 lengths, with steps after each, take no more memory the second time."""
    write_checkpoint(tmp_path / "m", {**QWEN2, "max_position_embeddings": 1024})
    runner = Runner(exported_as(tmp_path / "m", tmp_path / "out", target=target), ON_CPU)
    cache = runner.new_cache()
    lengths = np.random.default_rng(2).permutation(np.arange(3, 300, 5))

    def run_all_lengths() -> None:
        for length in lengths:
            cache.truncate(0)
            runner.prefill(cache, np.tile(IDS[:1], 2)[:, :length])
            for slot in range(8):
                runner.decode(cache, IDS[:1, slot : slot + 1])

    run_all_lengths()
    gc.collect()
    before = anonymous_memory()
    run_all_lengths()
    after = anonymous_memory()
    assert before is not None
    assert after is not None
    assert after - before < 8 * MB  # a block for each would be 60 x 0.5 MB


def test_c8_the_gpu_arena_takes_what_is_asked_for() -> None:
    """It does not round up to powers of two, and a user can set a limit."""
    assert provider_options("cuda")["arena_extend_strategy"] == "kSameAsRequested"
    assert provider_options("cuda", gpu_mem_limit=3 << 30)["gpu_mem_limit"] == str(3 << 30)
    assert "--gpu-mem-limit" in command("run", "--help", terminal=True).out


def test_c9_a_context_of_131072_is_not_allocated_at_hello(tmp_path: Path) -> None:
    """Buffers begin small whatever the context is; a context smaller than that is their size."""
    raw = {**QWEN3, "max_position_embeddings": 131_072, "num_hidden_layers": 2, "head_dim": 16}
    write_checkpoint(tmp_path / "m", raw)
    folder = exported_as(tmp_path / "m", tmp_path / "out", dtype="f16")
    ran = command(
        "run", folder, "--prompt-ids", "1,2,3", "--max-new-tokens", 4, "--provider", "cpu", "--stats"
    )
    planned = 2 * 2 * 2 * 16 * 256 * 4  # keys and values, layers, heads, size, slots, and f32 on a CPU
    assert f"cache {planned / 1e6:.1f} MB" in ran.err
    assert "of 131072" in ran.err
    told = command(
        "run", folder, "--prompt-ids", "1,2,3", "--max-new-tokens", 1, "--provider", "cpu", "-v"
    ).err
    assert (
        f"KV cache: {planned // 256} bytes a token, {planned * 512:,} for the whole context of 131072" in told
    )
    runner = Runner(folder, ON_CPU)
    cache = runner.new_cache()
    assert (cache.capacity, cache.nbytes, runner.context_length) == (256, planned, 131_072)
    small = Runner(folder, dataclasses.replace(ON_CPU, max_context=64)).new_cache()
    assert (small.capacity, small.nbytes) == (64, planned // 4)


@pytest.mark.parametrize("dtype", ["f32", "int8"])
def test_c10_a_prompt_of_2000_tokens_has_one_row_of_logits(dtype: str) -> None:
    """Graphs for generation put out the last row only; `score` puts out as many as are asked for."""
    folder = endless(dtype)
    for spec, _ in graphs(folder):
        shapes = {value.name: value.shape for value in spec.outputs}
        if spec.entry in ("prefill", "decode", "greedy"):
            assert shapes["logits"] == ("batch_size", 1, 400), spec.file
    ids = np.random.default_rng(3).integers(0, 366, (1, 2000))
    runner = Runner(folder, ON_CPU)
    last = runner.prefill(runner.new_cache(), ids)
    assert last.shape == (1, 400)
    if dtype == "f32":  # whose logits do not hang on how many tokens go at once
        scorer = Runner(folder, SessionOptions(provider="cpu", threads=1, speculate=True))
        cache = scorer.new_cache()
        scorer.prefill(cache, ids[:, :1990])
        rows = scorer.score(cache, ids[:, 1990:], 10)
        assert rows.shape == (1, 10, 400)
        assert_close(rows[:, -1], last, F32_ORDER)
