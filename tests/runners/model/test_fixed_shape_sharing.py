"""Steps of fixed shapes: several caches on one runner, buffers that serve again, and steps that fail."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import safetensors.numpy

from qwen_onnx.errors import NonFiniteLogitsError, UserError
from qwen_onnx.runners.model import buffers
from qwen_onnx.runners.model.buffers import CacheMemory
from qwen_onnx.runners.model.executors import fixed_shape
from qwen_onnx.runners.model.kv_cache import KVCache
from qwen_onnx.runners.model.runner import Runner
from support.checkpoints import QWEN2_UNTIED, random_tensors, write_checkpoint
from support.cuda.graphs_on_cpu import TOLERANCE, OnCpu, opened, serve_cuda_graphs_on_cpu
from support.cuda.graphs_on_cpu import on_cpu as on_cpu
from support.exports import IDS, ON_CPU, Exported, decode_all, export_checkpoint
from support.tolerances import EXACT, assert_close

DTYPES = ["f32", "f16"]
SPOILED = next(token_id for token_id in range(320) if token_id not in IDS)
"""The id whose embedding is NaN."""


@pytest.fixture(params=DTYPES)
def model(request: pytest.FixtureRequest, on_cpu: OnCpu) -> Exported:
    return on_cpu("qwen2", request.param)


@pytest.fixture
def runner(model: Exported) -> Runner:
    return opened(model, ON_CPU)


def assert_right(runner: Runner, cache: KVCache, model: Exported, row: int, start: int = 0) -> None:
    """Ten tokens at once and five one by one, from `start` on, have the reference's logits."""
    wanted, tolerance = model.wanted(IDS[row, :60]), TOLERANCE[model.dtype]
    ids = IDS[row : row + 1]
    assert_close(runner.prefill(cache, ids[:, start : start + 10])[0], wanted[start + 9], tolerance)
    found = np.concatenate(decode_all(runner, cache, ids[:, start + 10 : start + 15]))
    assert_close(found, wanted[start + 10 : start + 15], tolerance)


# Caches.


def test_two_caches_on_one_runner(runner: Runner, model: Exported) -> None:
    """They share neither inputs nor logits."""
    caches = [runner.new_cache(), runner.new_cache()]
    for slot in range(12):
        for row, cache in enumerate(caches):
            logits = runner.decode(cache, IDS[row : row + 1, slot : slot + 1])
            assert_close(logits[0], model.wanted(IDS[row, :60])[slot], TOLERANCE[model.dtype])


def test_a_dead_cache_gives_its_buffers_to_the_next(runner: Runner, model: Exported) -> None:
    """New buffers would capture a new graph, and ONNX Runtime never lets go of one."""
    cache = runner.new_cache()
    runner.prefill(cache, IDS[2:, :60])
    runner.decode(cache, IDS[2:, 60:61])
    binding, held = cache.binding, [buffer.data_ptr() for buffer in cache.buffers]
    other = runner.new_cache()
    assert not set(held) & {buffer.data_ptr() for buffer in other.buffers}
    del cache
    gc.collect()
    batch = runner.new_cache(batch_size=3)
    assert not set(held) & {buffer.data_ptr() for buffer in batch.buffers}
    cache = runner.new_cache()
    assert [buffer.data_ptr() for buffer in cache.buffers] == held
    assert cache.binding is binding
    assert (cache.length, cache.shared_prefix(IDS[2].tolist())) == (0, 0)
    # Old tokens lie in every slot that is read.
    assert_right(runner, cache, model, row=0)
    assert_right(runner, other, model, row=1)


def test_buffers_that_grew_serve_again_as_large(
    runner: Runner, model: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's account of the cache is as long as they are."""
    monkeypatch.setattr(buffers, "SMALLEST_CAPACITY", 16)
    cache = runner.new_cache()
    runner.prefill(cache, IDS[2:, :40])
    del cache
    gc.collect()
    cache = runner.new_cache()
    assert cache.capacity == 64
    for start in (0, 15, 30):
        assert_right(runner, cache, model, row=0, start=start)


def test_padding_of_a_dead_cache_is_forgotten(runner: Runner, model: Exported) -> None:
    """The binding goes with the buffers, and with it the mask on the device."""
    cache = runner.new_cache()
    runner.prefill(cache, IDS[:1, :8], np.array([[0, 0, 0, 0, 0, 1, 1, 1]]))
    runner.decode(cache, IDS[:1, 8:9])
    del cache
    gc.collect()
    found = np.concatenate(decode_all(runner, runner.new_cache(), IDS[:1, :12]))
    assert_close(found, model.wanted(IDS[0, :60])[:12], TOLERANCE[model.dtype])


# Numbers that are none.


@pytest.fixture(params=DTYPES)
def spoiled(request: pytest.FixtureRequest, tmp_path: Path) -> Exported:
    """An export that is right for all ids but SPOILED."""
    write_checkpoint(tmp_path / "checkpoint", QWEN2_UNTIED)
    tensors = random_tensors(QWEN2_UNTIED)
    tensors["model.embed_tokens.weight"][SPOILED] = np.nan
    safetensors.numpy.save_file(tensors, tmp_path / "checkpoint" / "model.safetensors", {"format": "pt"})
    model = export_checkpoint(tmp_path / "checkpoint", tmp_path / "export", request.param)
    folder = serve_cuda_graphs_on_cpu(model.folder, tmp_path / "on-cpu")
    return Exported(model.checkpoint, folder, request.param)


@pytest.mark.parametrize("tokens", [1, 5])
def test_after_nan_the_same_cache_is_right(tokens: int, spoiled: Exported) -> None:
    """No NaN is left in a slot: hidden by the mask or not, it would make NaN of every later step."""
    runner = opened(spoiled, ON_CPU)
    cache, ids = runner.new_cache(), np.full((1, tokens), SPOILED)
    runner.prefill(cache, IDS[:1, :20])
    with pytest.raises(NonFiniteLogitsError):
        runner.prefill(cache, ids)
    assert cache.length == 0
    assert_right(runner, cache, spoiled, row=0)
    with pytest.raises(NonFiniteLogitsError):
        runner.decode(cache, ids[:, :1])
    assert_right(runner, cache, spoiled, row=1)


def test_nan_does_not_reach_the_next_cache(spoiled: Exported) -> None:
    """Though its buffers serve again."""
    runner = opened(spoiled, ON_CPU)
    cache = runner.new_cache()
    with pytest.raises(NonFiniteLogitsError):
        runner.prefill(cache, np.full((1, 30), SPOILED))
    del cache
    gc.collect()
    assert_right(runner, runner.new_cache(), spoiled, row=0)


# Steps that fail.


class Strikes:
    """In place of a function: raises at its call number `at`, before or after the real one."""

    def __init__(self, real: Any, at: int, *, after: bool) -> None:
        self.real, self.left, self.after = real, at, after

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.left -= 1
        if self.left == 0 and not self.after:
            raise KeyboardInterrupt
        result = self.real(*arguments, **named)
        if self.left == 0:
            raise KeyboardInterrupt
        return result

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else lambda *arguments, **named: self(instance, *arguments, **named)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupted_prefill_keeps_whole_chunks(
    at: int, after: bool, model: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all rows."""
    runner = opened(model, ON_CPU, prefill_chunk=4)
    cache = runner.new_cache(batch_size=2)
    with monkeypatch.context() as patch:
        patch.setattr(fixed_shape, "run_bound", Strikes(fixed_shape.run_bound, at, after=after))
        with pytest.raises(KeyboardInterrupt):
            runner.prefill(cache, IDS[:2, :12])
    runs_a_chunk = 2 if model.dtype == "f16" else 1
    assert cache.length == 4 * ((at - 1) // runs_a_chunk)
    logits = runner.prefill(cache, IDS[:2, cache.length : 20])
    for row in range(2):
        assert_close(logits[row], model.wanted(IDS[row, :60])[19], TOLERANCE[model.dtype])


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("where", "at"), [("run_bound", 1), ("update_inplace", 1), ("update_inplace", 2)])
def test_an_interrupted_step_is_as_if_never_asked(
    where: str, at: int, after: bool, runner: Runner, model: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the device may not hold any more is copied again."""
    same = np.full((1, 60), 5)
    cache, wanted = runner.new_cache(), model.wanted(same[0])
    runner.prefill(cache, same[:, :9])
    runner.decode(cache, same[:, :1])
    home: Any = fixed_shape if where == "run_bound" else onnxruntime.OrtValue
    with monkeypatch.context() as patch:
        patch.setattr(home, where, Strikes(getattr(home, where), at, after=after))
        with pytest.raises(KeyboardInterrupt):
            runner.decode(cache, np.array([[9]]))
    assert cache.length == 10
    cache.truncate(9)
    for slot in range(9, 12):
        assert_close(runner.decode(cache, same[:, :1])[0], wanted[slot], TOLERANCE[model.dtype])


def test_a_cache_whose_renewal_fails_is_not_given_on(
    runner: Runner, model: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though memory runs out twice: when the buffers grow, and when small ones are wanted again."""
    monkeypatch.setattr(buffers, "SMALLEST_CAPACITY", 16)
    cache = runner.new_cache()
    runner.prefill(cache, IDS[:1, :15])

    def full(*_: Any) -> None:
        raise UserError("a KV cache does not fit")

    with monkeypatch.context() as patch:
        patch.setattr(CacheMemory, "_allocate", full)
        with pytest.raises(UserError, match="does not fit"):
            runner.prefill(cache, IDS[:1, 15:20])
    assert_right(runner, cache, model, row=0)
    with monkeypatch.context() as patch:
        patch.setattr(CacheMemory, "_allocate", full)
        with pytest.raises(UserError, match="does not fit"):
            runner.prefill(cache, IDS[:1, 15:20])
    del cache
    gc.collect()
    assert_right(runner, runner.new_cache(), model, row=1)


def test_a_second_life_changes_no_bit(runner: Runner) -> None:
    found = []
    for _ in range(2):
        cache = runner.new_cache(batch_size=2)
        found.append([runner.prefill(cache, IDS[:2, :9]), *decode_all(runner, cache, IDS[:2, 9:14])])
        runner.prefill(cache, IDS[1:, :40])
        del cache
        gc.collect()
    assert_close(np.stack(found[1]), np.stack(found[0]), EXACT)
