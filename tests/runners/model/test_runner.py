"""The runner on real exports: prefill and decode, batches, providers, limits and failures."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors.numpy

from qwen_onnx import contract, export
from qwen_onnx.errors import NonFiniteLogitsError, UserError
from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.model import open_graph
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.options import SessionOptions
from qwen_onnx.runners.runtime.providers import missing_library
from support.checkpoints import QWEN2, random_tensors, write_checkpoint
from support.exports import IDS, ON_CPU, DirectCache, Exported, LeftPadded, decode_all
from support.tolerances import EXACT, F32, F32_ORDER, OF_DTYPE, assert_close

Export = Callable[..., Exported]


@pytest.fixture
def runner(exported: Export) -> Runner:
    return Runner(exported("qwen2").folder, ON_CPU)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int4"])
def test_no_session_keeps_cores_or_blocks_from_another(
    dtype: str, exported: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and single tokens have sessions of their own; none waits for the other's threads."""
    opened: list[onnxruntime.SessionOptions] = []
    real = onnxruntime.InferenceSession

    def session(path: str, options: onnxruntime.SessionOptions, **given: Any) -> Any:
        opened.append(options)
        return real(path, options, **given)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    Runner(exported("qwen2", dtype).folder, ON_CPU)
    assert len(opened) > 1
    assert {options.get_session_config_entry("session.force_spinning_stop") for options in opened} == {"1"}
    assert {options.enable_mem_pattern for options in opened} == {False}


def test_single_tokens_are_given_what_their_own_lowering_takes_in(
    exported: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of the table may make the decode graph take in other tensors than that of prompts."""
    asked: list[str] = []
    real = open_graph.step_inputs
    monkeypatch.setattr(
        open_graph, "step_inputs", lambda lowering, **given: asked.append(lowering) or real(lowering, **given)
    )
    model = exported("qwen2")
    Runner(model.folder, ON_CPU)
    of_cpu = [each for each in model.manifest.graphs if each.entry == "decode" and "cpu" in each.providers]
    assert asked == ["static-grouped"]
    assert asked[0] in {graph.lowering for graph in of_cpu}


# Against the reference, and against plain runs.


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_prefill_in_chunks_then_decode(dtype: str, chunk: int, exported: Export) -> None:
    model = exported("qwen3", dtype)
    runner = Runner(model.folder, ON_CPU, prefill_chunk=chunk)
    cache, wanted = runner.new_cache(), model.wanted(IDS[0, :60])
    assert_close(runner.prefill(cache, IDS[:1, :40])[0], wanted[39], OF_DTYPE[dtype])
    found = np.concatenate(decode_all(runner, cache, IDS[:1, 40:60]))
    assert_close(found, wanted[40:], OF_DTYPE[dtype])
    assert cache.length == 60


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_bound_run_is_the_plain_run(batch_size: int, runner: Runner, exported: Export) -> None:
    """Step after step, and of arrays that are not contiguous."""
    plain = LeftPadded(
        DirectCache(exported("qwen2"), batch_size, capacity=128, bound=False), [0] * batch_size
    )
    cache = runner.new_cache(batch_size=batch_size)
    columns = np.asfortranarray(IDS[:batch_size]).astype(np.int32)
    assert_close(runner.prefill(cache, columns[:, :9]), plain.step(9), EXACT)
    for slot in range(9, 29):
        found = runner.decode(cache, columns.T[slot : slot + 1].T)
        assert_close(found, plain.step(1, entry="prefill"), F32_ORDER)
    assert_close(runner.prefill(cache, columns[:, 29:35]), plain.step(6), F32_ORDER)


def test_left_padded_batch_is_each_prompt_alone(runner: Runner) -> None:
    """Padding has no effect on a row's logits."""
    lengths, longest = [3, 5, 17], 17
    ids, mask = np.full((3, longest), 7), np.zeros((3, longest), np.int64)
    for row, length in enumerate(lengths):
        ids[row, -length:], mask[row, -length:] = IDS[row, :length], 1
    together = runner.new_cache(batch_size=3)
    alone = [runner.new_cache() for _ in lengths]
    batched = runner.prefill(together, ids, mask)
    single = [runner.prefill(alone[row], IDS[row : row + 1, :n]) for row, n in enumerate(lengths)]
    for _ in range(8):
        assert_close(batched, np.concatenate(single), F32_ORDER)
        best = batched.argmax(axis=-1)
        assert best.tolist() == [int(logits.argmax()) for logits in single]
        batched = runner.decode(together, best[:, None])
        single = [runner.decode(cache, best[row : row + 1, None]) for row, cache in enumerate(alone)]


def test_positions_count_the_tokens_of_each_row(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its slots: no logit would tell, as rotations are relative, until a padded row leaves the tables."""
    fed: list[list[list[int]]] = []
    real = onnxruntime.IOBinding.bind_ortvalue_input

    def note(binding: Any, name: str, value: Any) -> None:
        if name == contract.POSITION_IDS:
            fed.append(value.numpy().tolist())
        real(binding, name, value)

    monkeypatch.setattr(onnxruntime.IOBinding, "bind_ortvalue_input", note)
    cache = runner.new_cache(batch_size=2)
    runner.prefill(cache, IDS[:2, :4], np.array([[1, 1, 1, 1], [0, 0, 1, 1]]))
    runner.decode(cache, IDS[:2, 4:5])
    assert fed == [[[0, 1, 2, 3], [0, 0, 0, 1]], [[4], [2]]]


# Sessions and providers.


@pytest.mark.parametrize(("dtype", "sessions"), [("f32", 2), ("f16", 1), ("int8", 1)])
def test_weights_in_private_memory_are_opened_by_one_session(
    dtype: str, sessions: int, exported: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second session would hold them again. Where they are mapped it costs nothing."""
    folder, opened, real = exported("qwen2", dtype).folder, [], onnxruntime.InferenceSession

    def count(path: str, *arguments: Any, **options: Any) -> Any:
        graph = onnx.load(path, load_external_data=False).graph
        opened.append(any(tensor.external_data for tensor in graph.initializer))
        return real(path, *arguments, **options)

    monkeypatch.setattr(onnxruntime, "InferenceSession", count)
    runner = Runner(folder, ON_CPU)
    cache = runner.new_cache()
    runner.prefill(cache, IDS[:1, :5])
    runner.decode(cache, IDS[:1, 5:6])
    assert sorted(opened) == [False] + [True] * sessions  # grow, and the model


@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_a_provider_that_cannot_start_says_what_is_missing(provider: str, exported: Export) -> None:
    """It never gives way to the CPU."""
    fault = missing_library(provider)
    if fault is None:
        pytest.skip(f"{provider} starts here")
    assert re.search(r"\.so|\.dll|\.dylib|built without", fault)
    with pytest.raises(UserError, match=re.escape(fault)):
        Runner(exported("qwen2").folder, SessionOptions(provider=provider))


def test_auto_is_the_cpu_without_cuda(exported: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "qwen_onnx.runners.runtime.providers.missing_library", lambda provider: f"no {provider}.so"
    )
    runner = Runner(exported("qwen2").folder, SessionOptions(provider="auto", threads=1))
    assert runner.provider == "cpu"
    with pytest.raises(UserError, match="one of auto, cpu, cuda, tensorrt wanted"):
        Runner(exported("qwen2").folder, SessionOptions(provider="CUDA"))


# Refusals and failures.


@pytest.fixture
def computing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Notes each run of a session."""
    runs: list[int] = []
    real = onnxruntime.InferenceSession.run_with_iobinding

    def note(session: Any, *arguments: Any) -> None:
        runs.append(1)
        real(session, *arguments)

    monkeypatch.setattr(onnxruntime.InferenceSession, "run_with_iobinding", note)
    return runs


@pytest.mark.parametrize("stranger", [-1, 320, 2**40])
def test_ids_outside_the_embedding_are_refused(stranger: int, runner: Runner, computing: list[int]) -> None:
    """Before ONNX Runtime, for which -1 is the last row, sees them."""
    cache = runner.new_cache()
    for compute, ids in ((runner.prefill, [[1, stranger, 2]]), (runner.decode, [[stranger]])):
        with pytest.raises(UserError, match=rf"{stranger}\b.*\b320\b"):
            compute(cache, np.array(ids))
    assert not computing
    assert cache.length == 0


@pytest.mark.parametrize("stranger", [-1, 320, 2**63, -(2**70)])
def test_prompts_of_strange_ids_are_refused(stranger: int, runner: Runner, computing: list[int]) -> None:
    """Also those that no int64 holds; the conversation is kept."""
    chat = Chat(runner)
    list(chat.generate([1, 2, 3], max_new_tokens=1))
    computing.clear()
    with pytest.raises(UserError, match=rf"{stranger}\b.*\b320\b"):
        list(chat.generate([1, stranger, 3], max_new_tokens=1))
    assert not computing
    assert chat.context_used == 3


@pytest.mark.parametrize("tokens", [63, 64, 65, 200])
def test_context_of_64(tokens: int, exported: Export, computing: list[int]) -> None:
    """It is filled to the last position, and the first beyond it is refused."""
    model = exported("qwen2", max_position_embeddings=64)
    runner = Runner(model.folder, ON_CPU, prefill_chunk=16)
    cache, ids = runner.new_cache(), np.tile(IDS[:1], 2)[:, :tokens]
    if tokens <= 64:
        assert_close(runner.prefill(cache, ids)[0], model.wanted(ids[0])[-1], F32)
        for _ in range(tokens, 64):
            runner.decode(cache, ids[:, :1])
        computing.clear()
        with pytest.raises(UserError, match=r"\b65\b.*\b64\b"):
            runner.decode(cache, ids[:, :1])
    else:
        with pytest.raises(UserError, match=rf"\b{tokens}\b.*\b64\b"):
            runner.prefill(cache, ids)
        assert cache.length == 0
    assert not computing


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        ("f32", "cpu, float32"), ("f16", "cpu, float32"), ("bf16", "cpu, float32"),
        ("int8", "cpu, int8 weights, float32"), ("int4", "cpu, int4 weights, float32"),
    ],
)  # fmt: skip
def test_how_a_cpu_computes_in_words(dtype: str, said: str, exported: Export) -> None:
    """Nothing of what only a GPU has."""
    folder = exported("qwen2", dtype).folder
    assert Runner(folder, ON_CPU).describe() == said
    chooses = dataclasses.replace(ON_CPU, greedy_on_device=True)
    assert Runner(folder, chooses).describe() == f"{said}, greedy on the device"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_an_error(value: float, tmp_path: Path) -> None:
    """Argmax of NaN would be token 0, again and again."""
    write_checkpoint(tmp_path / "checkpoint", QWEN2)
    tensors = random_tensors(QWEN2)
    tensors["model.norm.weight"][7] = value
    safetensors.numpy.save_file(tensors, tmp_path / "checkpoint" / "model.safetensors", {"format": "pt"})
    runner = Runner(export(tmp_path / "checkpoint", tmp_path / "export", check=False).folder, ON_CPU)
    for compute in (runner.prefill, runner.decode):
        with pytest.raises(NonFiniteLogitsError, match="not finite"):
            compute(runner.new_cache(), IDS[:1, :1])


@pytest.mark.parametrize("error", [RuntimeError("out of memory\nat line 7"), KeyboardInterrupt()])
def test_a_failed_run_leaves_the_cache_as_it_was(
    error: BaseException, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C or a full device in the middle of a step: no slot is counted that was not written."""
    cache, fresh = runner.new_cache(), runner.new_cache()
    runner.prefill(cache, IDS[:1, :9])
    runner.prefill(fresh, IDS[:1, :9])

    def fail(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(onnxruntime.InferenceSession, "run_with_iobinding", fail)
        wanted = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else UserError
        with pytest.raises(wanted) as caught:
            runner.decode(cache, IDS[1:2, :1])
    assert "\n" not in str(caught.value)
    assert cache.length == 9
    assert_close(runner.decode(cache, IDS[:1, 9:10]), runner.decode(fresh, IDS[:1, 9:10]), EXACT)
