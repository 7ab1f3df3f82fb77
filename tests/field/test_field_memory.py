"""FIELD.md, chapter C: memory and file sizes."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import test_export_memory
from chats import copy_export, endless, tiny
from checkpoints import QWEN2, QWEN3, RawConfig, random_tensors, write_checkpoint
from command import command
from exports import IDS, ON_CPU, Exported
from field_runs import exported_as, graphs, opened
from test_export_memory import write_zeros
from tolerances import F32_ORDER, assert_close

from qwen_onnx import export_writer
from qwen_onnx.contract import FileSpec, read_manifest
from qwen_onnx.graphs.build import verify
from qwen_onnx.memory import anonymous_memory
from qwen_onnx.runners.runner import Runner
from qwen_onnx.runners.session import provider_options
from qwen_onnx.safetensors_file import read_header

Export = Callable[..., Exported]
MB = 10**6
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def write_zero_checkpoint(folder: Path, raw: RawConfig, dtype: str, *, shards: int) -> int:
    """Zeros that take no disk, of this config's shapes, in shards; the bytes of the largest tensor."""
    small = {**raw, "vocab_size": 1}
    shapes = {name: tensor.shape for name, tensor in random_tensors(small).items()}
    shapes["model.embed_tokens.weight"] = (raw["vocab_size"], raw["hidden_size"])
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    files = {name: f"part{number % shards}.safetensors" for number, name in enumerate(shapes)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    for file in set(files.values()):
        write_zeros(
            folder / file, dtype, {name: shape for name, shape in shapes.items() if files[name] == file}
        )
    return max(int(np.prod(shape)) for shape in shapes.values()) * (4 if dtype == "F32" else 2)


def test_c1_a_tensor_of_two_gigabytes_is_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "Exceeds maximum protobuf size of 2GB". Linked, so that nothing is written; and its zeros are not hashed."""
    real = export_writer.hash_file

    def hash_small(path: Path) -> FileSpec:
        size = path.stat().st_size
        return real(path) if size < MB else FileSpec(size, "0" * 64)

    monkeypatch.setattr(export_writer, "hash_file", hash_small)
    raw = {**QWEN3, "num_hidden_layers": 1, "hidden_size": 1024, "vocab_size": 570_000}
    largest = write_zero_checkpoint(tmp_path / "m", raw, "F32", shards=2)
    assert largest > 2 << 30
    folder = exported_as(tmp_path / "m", tmp_path / "out", link=True)
    for spec, model in graphs(folder):
        assert (folder / spec.file).stat().st_size < MB
        verify(model)
    assert "vocabulary 570000" in command("info", folder).out


def peak_of_export(model: Path, out: Path, dtype: str) -> int:
    command_line = [sys.executable, "-c", test_export_memory.CHILD, str(model), str(out), dtype]
    return int(subprocess.run(command_line, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize(
    ("options", "head"),
    [
        ({"dtype": "f16"}, "absent"),
        ({"dtype": "f16"}, "copy"),
        ({"dtype": "f32", "target": "portable"}, "absent"),
        ({"dtype": "int8"}, "copy"),
    ],
)
def test_c2_tied_weights_are_written_once(options: dict[str, Any], head: Any, tmp_path: Path) -> None:
    """A 0.5B that grows by its embedding, 272 MB: transposed for the head, or stored twice as it came."""
    raw = {**QWEN2, "vocab_size": 5000, "num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 256}
    write_checkpoint(tmp_path / "m", raw, lm_head=head)
    folder = exported_as(tmp_path / "m", tmp_path / "out", **options)
    stored = read_header(folder / "weights.safetensors")
    whole = sum(tensor.nbytes for tensor in stored.values())
    parameters = sum(tensor.size for tensor in random_tensors(raw).values())
    rotary = sum(tensor.nbytes for name, tensor in stored.items() if name.startswith("rotary."))
    width = {"f16": 2, "f32": 4, "int8": 1 + 4 / 128}[options["dtype"]]  # and an f32 scale for each block
    assert whole - rotary <= 1.01 * width * parameters
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) <= 1.01 * whole + 3 * 4096
    assert not [name for name in stored if name.startswith("lm_head")]


@on_linux
def test_c3_memory_of_an_export_is_that_of_a_tensor_or_two(tmp_path: Path) -> None:
    """Killed without a message: models held whole, twice or thrice. Two shards, of 1 layer and of 4."""
    shape = {"hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 320}
    peaks = []
    for layers in (1, 4):
        folder = tmp_path / f"{layers}"
        folder.mkdir()
        raw = {**QWEN2, **shape, "num_hidden_layers": layers}
        write_zero_checkpoint(folder / "m", raw, "F32", shards=2)
        peaks.append(peak_of_export(folder / "m", folder / "out", "f16"))
        shutil.rmtree(folder)
    # Of 110 MB more in the checkpoint and 55 in the export; the graphs of four layers are larger too.
    assert peaks[1] - peaks[0] < 25 * MB
    assert peaks[1] < 300 * MB


def test_c4_the_export_is_in_its_folder_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """onnx__MatMul_5917 and its hundreds; a relative OUT that sends data elsewhere."""
    write_checkpoint(tmp_path / "m", QWEN3, shards=3)
    here = tmp_path / "here"
    here.mkdir()
    (here / "mine.txt").write_text("mine")
    monkeypatch.chdir(here)
    for arguments in (("sub/a", "--target", "portable"), ("b", "--layout", "transformers.js"), ("c",)):
        assert command("export", "../m", *arguments).code == 0
        assert sorted(path.name for path in here.iterdir() if path.name not in "abc") == ["mine.txt", "sub"]
    weights = {"sub/a": ["weights.safetensors"], "b": ["onnx/model.onnx_data"], "c": ["weights.safetensors"]}
    for name, data in weights.items():
        files = {
            path.relative_to(here / name).as_posix() for path in (here / name).rglob("*") if path.is_file()
        }
        kinds = {path for path in files if not path.endswith((".onnx", ".json"))}
        assert sorted(kinds) == data
        assert files - {"export.json"} == read_manifest(here / name).files.keys()
    monkeypatch.chdir(tmp_path)
    shutil.move(here / "c", tmp_path / "moved")  # all of it together
    assert Runner(tmp_path / "moved", ON_CPU).manifest.model_id


def linked_blobs(folder: Path, target: Path, names: list[str]) -> Path:
    """As the Hub's cache has files: links out of the folder, to names that say nothing."""
    (target / "blobs").mkdir(parents=True)
    snapshot = target / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(path for path in folder.iterdir() if path.is_file())):
        if path.name in names:
            shutil.copy(path, target / "blobs" / f"{number:064x}")
            (snapshot / path.name).symlink_to(Path("../../blobs") / f"{number:064x}")
        else:
            shutil.copy(path, snapshot / path.name)
    return snapshot


def test_c5_links_and_missing_data_are_told(tmp_path: Path) -> None:
    """Models in a cache of links that stopped loading; data gone, cut short or another's, and no word which."""
    write_checkpoint(tmp_path / "plain", QWEN2, shards=2)
    files = [path.name for path in (tmp_path / "plain").iterdir()]
    cached = linked_blobs(tmp_path / "plain", tmp_path / "hub", files)
    out = exported_as(cached, tmp_path / "out")
    assert not [path for path in out.iterdir() if path.is_symlink()]
    for _, model in graphs(out):
        for tensor in model.graph.initializer:
            places = {entry.key: entry.value for entry in tensor.external_data}
            assert places.get("location", "weights.safetensors") == "weights.safetensors"
    ids = ("--prompt-ids", "1,2,3", "--max-new-tokens", 2, "--provider", "cpu")
    ran = command("run", out, *ids)
    assert ran.code == 0
    uploaded = linked_blobs(out, tmp_path / "uploaded", [path.name for path in out.iterdir()])
    assert command("run", uploaded, *ids) == ran
    data = out / "weights.safetensors"
    size = data.stat().st_size
    os.truncate(data, size - 4096)
    cut = command("run", out, *ids).error
    assert str(data) in cut
    assert f"{size:,}" in cut
    assert f"{size - 4096:,}" in cut
    data.unlink()
    assert str(data) in command("run", out, *ids).error
    data.symlink_to(exported_as(cached, tmp_path / "again") / data.name)
    assert str(data) in command("run", out, *ids).error


@pytest.mark.parametrize("dtype", ["f16", "bf16", "int4"])
def test_c7_weights_in_private_memory_have_one_session(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill and decode as two sessions, and the weights in memory twice."""
    made, real = list[str](), onnxruntime.InferenceSession

    def count(path: str, *given: Any, **named: Any) -> Any:
        made.append(Path(path).name)
        return real(path, *given, **named)

    monkeypatch.setattr(onnxruntime, "InferenceSession", count)
    tokens = list(opened(endless(dtype)).generate("Hello", max_new_tokens=6))
    assert len(tokens) == 6
    assert len([name for name in made if not name.startswith("grow")]) == 1


@on_linux
def test_c7_mapped_weights_are_in_memory_once_for_all_sessions(tmp_path: Path) -> None:
    """N sessions, N copies: in f32 there are three, over one file of 34 MB, of which none is copied."""
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
    assert after - before < 0.3 * weights


@on_linux
@pytest.mark.parametrize("target", ["onnxruntime", "portable"])
def test_c8_memory_stays_while_lengths_change(target: str, tmp_path: Path) -> None:
    """An arena that keeps a block for each length that ever was: prompts of 60 lengths, and steps after each."""
    write_checkpoint(tmp_path / "m", {**QWEN2, "max_position_embeddings": 1024})
    runner = Runner(exported_as(tmp_path / "m", tmp_path / "out", target=target), ON_CPU)
    cache = runner.new_cache()
    lengths = np.random.default_rng(2).permutation(np.arange(3, 300, 5))

    def answers() -> None:
        for length in lengths:
            cache.truncate(0)
            runner.prefill(cache, np.tile(IDS[:1], 2)[:, :length])
            for slot in range(8):
                runner.decode(cache, IDS[:1, slot : slot + 1])

    answers()
    gc.collect()
    before = anonymous_memory()
    answers()
    after = anonymous_memory()
    assert before is not None
    assert after is not None
    assert after - before < 8 * MB  # a block for each would be 60 x 0.5 MB


def test_c8_the_gpu_arena_takes_what_is_asked_for() -> None:
    """kNextPowerOfTwo: twice the memory, of which half is never used; and no limit that a user can set."""
    assert provider_options("cuda")["arena_extend_strategy"] == "kSameAsRequested"
    assert provider_options("cuda", gpu_mem_limit=3 << 30)["gpu_mem_limit"] == str(3 << 30)
    assert "--gpu-mem-limit" in command("run", "--help", terminal=True).out


def test_c9_a_context_of_131072_is_not_allocated_at_hello(tmp_path: Path) -> None:
    """Bad allocation on the first prompt: buffers for the whole context, of which ten slots are used."""
    raw = {**QWEN3, "max_position_embeddings": 131_072, "num_hidden_layers": 2, "head_dim": 16}
    write_checkpoint(tmp_path / "m", raw)
    folder = exported_as(tmp_path / "m", tmp_path / "out", dtype="f16")
    ran = command(
        "run", folder, "--prompt-ids", "1,2,3", "--max-new-tokens", 4, "--provider", "cpu", "--stats"
    )
    planned = 2 * 2 * 2 * 16 * 256 * 4  # keys and values, layers, heads, size, slots, and f32 on a CPU
    assert f"cache {planned / 1e6:.1f} MB" in ran.err
    assert "of 131072" in ran.err
    runner = Runner(folder, ON_CPU)
    cache = runner.new_cache()
    assert (cache.capacity, cache.nbytes, runner.context_length) == (256, planned, 131_072)
    small = Runner(folder, ON_CPU, max_context=64).new_cache()
    assert (small.capacity, small.nbytes) == (64, planned // 4)


@pytest.mark.parametrize("dtype", ["f32", "int8"])
def test_c10_a_prompt_of_2000_tokens_has_one_row_of_logits(dtype: str) -> None:
    """5 GB of logits for 8,192 positions, of which one row is looked at; all of them where they are asked for."""
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
        scorer = opened(folder).runner.__class__(folder, _speculating())
        cache = scorer.new_cache()
        scorer.prefill(cache, ids[:, :1990])
        rows = scorer.score(cache, ids[:, 1990:], 10)
        assert rows.shape == (1, 10, 400)
        assert_close(rows[:, -1], last, F32_ORDER)


def _speculating() -> Any:
    return type(ON_CPU)("cpu", threads=1, speculate=True)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "int8"])
def test_c12_large_tensors_begin_on_a_page(dtype: str, tmp_path: Path) -> None:
    """Weights that cannot be mapped, and load at twice their size; in each graph that reads them."""
    folder = copy_export(tiny(dtype), tmp_path / "export")
    pages = 0
    for spec, model in graphs(folder):
        for tensor in model.graph.initializer:
            places = {entry.key: entry.value for entry in tensor.external_data}
            length = int(places.get("length", 0))
            if length >= 4096 and length % 4096 == 0:
                pages += 1
                assert int(places["offset"]) % 4096 == 0, (spec.file, tensor.name)
    assert pages > 20
