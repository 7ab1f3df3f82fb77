"""Tokens chosen in the graph, which goes on from them by itself: the same ids and texts as chosen on the host."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import safetensors.numpy

from qwen_onnx import contract
from qwen_onnx.errors import NonFiniteLogitsError
from qwen_onnx.runners.model import buffers
from qwen_onnx.runners.model.executors import fixed_shape
from qwen_onnx.runners.model.runner import Runner
from support.checkpoints import QWEN2_UNTIED, random_tensors, write_checkpoint
from support.cuda.graphs_on_cpu import (
    GREEDY_ON_CPU,
    LONG,
    OnCpu,
    names_of,
    note_uploads,
    opened,
    serve_cuda_graphs_on_cpu,
)
from support.cuda.graphs_on_cpu import on_cpu as on_cpu
from support.exports import IDS, ON_CPU, Exported, export_checkpoint
from support.tolerances import EXACT, assert_close

DTYPES = ["f32", "f16"]
SPOILED = next(token_id for token_id in range(320) if token_id not in IDS)
"""The id whose embedding is NaN."""


@pytest.fixture(params=DTYPES)
def model(request: pytest.FixtureRequest, on_cpu: OnCpu) -> Exported:
    return on_cpu("qwen2", request.param, **LONG)


@pytest.fixture
def runner(model: Exported) -> Runner:
    return opened(model, GREEDY_ON_CPU)


def greedy_ids(runner: Runner, ids: np.ndarray, steps: int, mask: np.ndarray | None = None) -> np.ndarray:
    """[B, steps]: greedy ids after a prompt, chosen on the device or on the host."""
    cache, chosen = runner.new_cache(batch_size=len(ids)), []
    best = runner.prefill_greedy(cache, ids, mask) if runner.chooses else runner.prefill(cache, ids, mask)
    for _ in range(steps):
        best = best if runner.chooses else best.argmax(axis=-1)
        chosen.append(best)
        best = (runner.decode_greedy if runner.chooses else runner.decode)(cache, best[:, None])
    return np.stack(chosen, axis=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("chunk", [1, 5, 512])
def test_ids_are_those_of_the_host(
    dtype: str, batch_size: int, chunk: int, on_cpu: OnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 64 steps, and growth from 16 slots to 128: no token, position or length is a step late."""
    monkeypatch.setattr(buffers, "SMALLEST_CAPACITY", 16)
    model = on_cpu("qwen3", dtype, **LONG)
    pads = np.arange(batch_size)[:, None] * 4
    ids, mask = IDS[:batch_size, 40:53], (np.arange(13) >= pads).astype(np.int64)
    on_device = greedy_ids(opened(model, GREEDY_ON_CPU, prefill_chunk=chunk), ids, 64, mask)
    on_host = greedy_ids(opened(model, ON_CPU, prefill_chunk=chunk), ids, 64, mask)
    assert on_device.tolist() == on_host.tolist()
    assert len({*on_host[0].tolist()}) > 16, "the same few ids: nothing could be late"


def test_a_step_uploads_nothing(runner: Runner, model: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the chosen token nor lengths come from the host."""
    cache = runner.new_cache(batch_size=2)
    best = runner.decode_greedy(cache, runner.prefill_greedy(cache, IDS[:2, :9])[:, None])
    uploaded = note_uploads(monkeypatch)
    found = []
    for _ in range(20):
        best = runner.decode_greedy(cache, best[:, None])
        found.append(best)
    # On a CPU the contrib graph is told the live length, which is quickest; where it is captured nothing comes up.
    assert set(names_of(uploaded, cache)) <= {contract.TOTAL_SEQUENCE_LENGTH}
    assert (
        np.stack(found, axis=1).tolist() == greedy_ids(opened(model, ON_CPU), IDS[:2, :9], 22)[:, 2:].tolist()
    )


def test_an_id_of_the_callers_own_is_used(runner: Runner, model: Exported) -> None:
    """The device does not go on with its own choice then, for the row that got another."""
    plain = opened(model, ON_CPU)
    cache, beside = runner.new_cache(batch_size=2), plain.new_cache(batch_size=2)
    runner.prefill_greedy(cache, IDS[:2, :9])
    plain.prefill(beside, IDS[:2, :9])
    for slot in (9, 10, 11):
        given = IDS[:2, slot : slot + 1].copy()
        best = runner.decode_greedy(cache, given)
        given[:] = 0  # the caller's array is the caller's
        assert best.tolist() == plain.decode(beside, IDS[:2, slot : slot + 1]).argmax(axis=-1).tolist()
    mixed = np.array([[best[0]], [IDS[1, 12]]])
    assert runner.decode_greedy(cache, mixed).tolist() == plain.decode(beside, mixed).argmax(axis=-1).tolist()


def test_the_logits_are_those_it_chose_from(runner: Runner, model: Exported) -> None:
    plain = opened(model, ON_CPU)
    cache, beside = runner.new_cache(), plain.new_cache()
    best = runner.prefill_greedy(cache, IDS[:1, :9])
    assert_close(runner.logits(cache), plain.prefill(beside, IDS[:1, :9]), EXACT)
    for _ in range(5):
        given, best = best, runner.decode_greedy(cache, best[:, None])
        assert_close(runner.logits(cache), plain.decode(beside, given[:, None]), EXACT)


def test_rewound_and_other_prompts_between(runner: Runner, model: Exported) -> None:
    """What the device holds for its next step is not used for another prompt."""
    first = runner.new_cache()
    runner.prefill_greedy(first, IDS[2:, :30])
    second = runner.new_cache()
    best = runner.prefill_greedy(second, IDS[:1, :9])
    runner.decode_greedy(first, IDS[2:, 30:31])
    first.truncate(0)
    wanted = greedy_ids(opened(model, ON_CPU), IDS[:1, :9], 12)[0].tolist()
    again = runner.prefill_greedy(first, IDS[:1, :9])
    found: list[list[int]] = [[], []]
    for _ in range(12):
        found[0].append(int(again[0]))
        found[1].append(int(best[0]))
        again = runner.decode_greedy(first, again[:, None])
        best = runner.decode_greedy(second, best[:, None])
    assert found == [wanted, wanted]
    del first, second
    gc.collect()
    assert greedy_ids(runner, IDS[:1, :9], 12)[0].tolist() == wanted


@pytest.mark.parametrize("where", ["run_bound", "read_chosen"])
def test_an_interruption_between_the_run_and_the_reading(
    where: str, runner: Runner, model: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that the host has not seen is made again."""
    cache, found = runner.new_cache(), []
    best = runner.prefill_greedy(cache, IDS[:1, :9])
    home: Any = fixed_shape if where == "run_bound" else fixed_shape.BoundStep
    real = getattr(home, where)

    def interrupted(*arguments: Any) -> Any:
        if where == "run_bound":
            real(*arguments)
        raise KeyboardInterrupt

    for _ in range(8):
        found.append(int(best[0]))
        length = cache.length
        with monkeypatch.context() as patch:
            patch.setattr(home, where, interrupted)
            with pytest.raises(KeyboardInterrupt):
                runner.decode_greedy(cache, best[:, None])
        assert cache.length == length
        best = runner.decode_greedy(cache, best[:, None])
    assert found == greedy_ids(opened(model, ON_CPU), IDS[:1, :9], 8)[0].tolist()


def test_without_it_there_is_no_choice(model: Exported) -> None:
    runner = opened(model, ON_CPU)
    assert not runner.chooses
    cache = runner.new_cache()
    for choose in (runner.prefill_greedy, runner.decode_greedy):
        with pytest.raises(ValueError, match="greedy_on_device"):
            choose(cache, IDS[:1, :1])
    assert cache.length == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch_size", [1, 2])
def test_logits_that_are_not_finite_are_an_error(dtype: str, batch_size: int, tmp_path: Path) -> None:
    """Though ArgMax gives some id even of NaN."""
    write_checkpoint(tmp_path / "checkpoint", QWEN2_UNTIED)
    tensors = random_tensors(QWEN2_UNTIED)
    tensors["model.embed_tokens.weight"][SPOILED] = np.nan
    safetensors.numpy.save_file(tensors, tmp_path / "checkpoint" / "model.safetensors", {"format": "pt"})
    made = export_checkpoint(tmp_path / "checkpoint", tmp_path / "export", dtype)
    serve_cuda_graphs_on_cpu(made.folder, tmp_path / "on-cpu")
    spoiled = Exported(made.checkpoint, tmp_path / "on-cpu", dtype)
    runner = opened(spoiled, GREEDY_ON_CPU)
    wanted = greedy_ids(opened(spoiled, ON_CPU), IDS[:batch_size, :9], 6)
    cache, bad = runner.new_cache(batch_size=batch_size), IDS[:batch_size, :1].copy()
    bad[-1] = SPOILED
    for choose in (runner.decode_greedy, runner.prefill_greedy):
        best, found = runner.prefill_greedy(cache, IDS[:batch_size, :9]), []
        for _ in range(6):
            found.append(best)
            best = runner.decode_greedy(cache, best[:, None])
        assert np.stack(found, axis=1).tolist() == wanted.tolist()
        with pytest.raises(NonFiniteLogitsError, match="not finite"):
            choose(cache, bad)
        assert cache.length == 0


def test_excluded_ids_are_never_chosen(runner: Runner, model: Exported) -> None:
    """Also those told after the graph was bound, and anew."""
    plain, rng = opened(model, ON_CPU), np.random.default_rng(3)
    cache, beside = runner.new_cache(batch_size=3), plain.new_cache(batch_size=3)
    for slot in range(12):
        excluded = rng.random(320) < 0.9
        runner.exclude(excluded)
        best = runner.decode_greedy(cache, IDS[:3, slot : slot + 1])
        logits = np.where(excluded, -np.inf, plain.decode(beside, IDS[:3, slot : slot + 1]))
        assert best.tolist() == logits.argmax(axis=-1).tolist()


def test_a_choice_is_read_as_8_bytes_a_row(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits, 600 kB a step for a real vocabulary, are not read back with it."""
    cache = runner.new_cache(batch_size=3)
    best = runner.prefill_greedy(cache, IDS[:3, :9])
    read, real = [], onnxruntime.OrtValue.numpy

    def note(value: Any) -> np.ndarray:
        array: np.ndarray = real(value)
        read.append(array.nbytes)
        return array

    monkeypatch.setattr(onnxruntime.OrtValue, "numpy", note)
    for _ in range(3):
        best = runner.decode_greedy(cache, best[:, None])
    assert read == [24, 24, 24]
