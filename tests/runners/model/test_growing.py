"""The runner on the `portable` graph, served by the CPU provider: a cache of new tensors each step."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from qwen_onnx import UserError
from qwen_onnx.contract.manifest import read_manifest
from qwen_onnx.runners.model import buffers
from qwen_onnx.runners.model.runner import Runner
from support.damage import change_manifest
from support.exports import IDS, ON_CPU, Exported, decode_all
from support.tolerances import F16, F32, F32_ORDER, Tolerance, assert_close

OpenPortable = Callable[..., tuple[Runner, Exported]]
BOUND: dict[str, Tolerance] = {"f32": F32, "f16": F16}


def serve_portable_on_cpu(source: Path, target: Path) -> Path:
    """A copy of an export of which only the graphs for TensorRT are left, and serve the CPU."""
    shutil.copytree(source, target)
    graphs = tuple(
        dataclasses.replace(graph, providers=("cpu",))
        for graph in read_manifest(source).graphs
        if "tensorrt" in graph.providers
    )
    change_manifest(target, graphs=graphs)
    return target


@pytest.fixture
def portable(exported: Callable[..., Exported], tmp_path: Path) -> OpenPortable:
    def make(name: str = "qwen2", dtype: str = "f32") -> tuple[Runner, Exported]:
        model = exported(name, dtype)
        folder = serve_portable_on_cpu(model.folder, tmp_path / f"{name}-{dtype}")
        runner = Runner(folder, ON_CPU)
        assert runner.graph.lowering == "portable"
        return runner, model

    return make


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("qwen2", "f32"), ("qwen2", "f16"), ("qwen2_14_2", "f32"), ("qwen3", "f16"), ("qwen2_yarn", "f32")],
)
def test_prompts_chunks_and_steps_of_padded_rows(name: str, dtype: str, portable: OpenPortable) -> None:
    """Without a past and with one; the tensors are as long as what they hold."""
    runner, model = portable(name, dtype)
    cache, pads = runner.new_cache(batch_size=3), np.array([0, 4, 2])
    ids = np.stack([np.roll(IDS[row], pad) for row, pad in enumerate(pads)])[:, :40]
    mask = (np.arange(40) >= pads[:, None]).astype(np.int64)
    found = [runner.prefill(cache, ids[:, :9], mask[:, :9]), runner.prefill(cache, ids[:, 9:20])]
    found += decode_all(runner, cache, ids[:, 20:])
    for end, logits in zip([9, *range(20, 41)], found, strict=True):
        for row, pad in enumerate(pads):
            assert_close(logits[row], model.wanted(IDS[row, :40])[end - pad - 1], BOUND[dtype])
    assert cache.buffers[0].shape()[2] == cache.length == 40
    kv_heads, size = model.config.num_key_value_heads, model.config.head_dim
    width = 2 if dtype == "f16" else 4
    assert cache.nbytes == 2 * model.config.num_hidden_layers * 3 * kv_heads * 40 * size * width


@pytest.mark.parametrize("kept", [0, 1, 7, 12])
def test_a_cache_cut_back_goes_on_as_a_new_one(kept: int, portable: OpenPortable) -> None:
    """Nothing of what was taken back is left."""
    runner, _ = portable()
    cache = runner.new_cache()
    runner.prefill(cache, IDS[:1, :12])
    cache.truncate(kept)
    after = [runner.prefill(cache, IDS[1:2, :5]), *decode_all(runner, cache, IDS[1:2, 5:9])]
    fresh = runner.new_cache()
    if kept:
        runner.prefill(fresh, IDS[:1, :kept])
    wanted = [runner.prefill(fresh, IDS[1:2, :5]), *decode_all(runner, fresh, IDS[1:2, 5:9])]
    assert_close(np.stack(after), np.stack(wanted), F32_ORDER)


def test_a_prompt_longer_than_the_first_bucket(
    portable: OpenPortable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's account of the tokens is as long."""
    monkeypatch.setattr(buffers, "SMALLEST_CAPACITY", 8)
    runner, model = portable()
    cache = runner.new_cache()
    assert_close(runner.prefill(cache, IDS[:1, :50])[0], model.wanted(IDS[0, :50])[-1], F32)
    assert cache.shared_prefix(IDS[0, :60].tolist()) == 50


def test_a_failed_step_leaves_the_cache_as_it_was(
    portable: OpenPortable, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, model = portable()
    cache = runner.new_cache()
    runner.prefill(cache, IDS[:1, :10])
    with monkeypatch.context() as broken:
        broken.setattr(
            "qwen_onnx.runners.model.executors.growing.run_bound",
            lambda *_: (_ for _ in ()).throw(KeyboardInterrupt),
        )
        with pytest.raises(KeyboardInterrupt):
            runner.decode(cache, IDS[:1, 10:11])
    assert cache.length == 10
    assert_close(runner.decode(cache, IDS[:1, 10:11])[0], model.wanted(IDS[0, :11])[-1], F32)


def test_no_greedy_graph_is_said_so(portable: OpenPortable) -> None:
    runner, _ = portable()
    with pytest.raises(UserError, match="no greedy graph"):
        Runner(runner.folder, dataclasses.replace(ON_CPU, greedy_on_device=True))
