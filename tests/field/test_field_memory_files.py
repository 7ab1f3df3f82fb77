"""docs/faults.md, chapter C, first half: the files of an export, and the memory that making it takes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_onnx.checkpoints.safetensors_file import read_header
from qwen_onnx.contract.manifest import FileSpec, read_manifest
from qwen_onnx.exports import writer as export_writer
from qwen_onnx.exports.graph_file import verify
from qwen_onnx.runners.model.runner import Runner
from support import sparse
from support.chats import copy_export, tiny
from support.checkpoints import QWEN2, QWEN3, RawConfig, random_tensors, write_checkpoint
from support.command import command
from support.exports import ON_CPU
from support.field_runs import exported_as, graphs
from support.sparse import write_zeros

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
    """Graph files stay small. The weights are linked, so that nothing is written, and zeros are not hashed."""
    real = export_writer.hash_file

    def hash_small(path: Path) -> FileSpec:
        size = path.stat().st_size
        return real(path) if size < MB else FileSpec(size, "0" * 64)

    monkeypatch.setattr(export_writer, "hash_file", hash_small)
    raw = {**QWEN3, "num_hidden_layers": 1, "hidden_size": 1024, "vocab_size": 570_000}
    largest = write_zero_checkpoint(tmp_path / "m", raw, "F32", shards=2)
    assert largest > 2 << 30
    folder = exported_as(tmp_path / "m", tmp_path / "out", link=True, check=False)
    for spec, model in graphs(folder):
        assert (folder / spec.file).stat().st_size < MB
        verify(model)
    assert "vocabulary 570000" in command("info", folder).out


def peak_of_export(model: Path, out: Path, dtype: str) -> int:
    command_line = [sys.executable, "-c", sparse.CHILD, str(model), str(out), dtype]
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
    """Embedding and head are one tensor, whether the checkpoint has one or two equal ones."""
    raw = {**QWEN2, "vocab_size": 5000, "num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 256}
    write_checkpoint(tmp_path / "m", raw, lm_head=head)
    folder = exported_as(tmp_path / "m", tmp_path / "out", **options)
    stored = read_header(folder / "weights.safetensors")
    whole = sum(tensor.nbytes for tensor in stored.values())
    parameters = sum(tensor.size for tensor in random_tensors(raw).values())
    rotary = sum(tensor.nbytes for name, tensor in stored.items() if name.startswith("rotary."))
    width = {"f16": 2, "f32": 4, "int8": 1 + 2 / 32}[options["dtype"]]  # and an f16 scale for each block
    assert whole - rotary <= 1.01 * width * parameters
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) <= 1.01 * whole + 3 * 4096
    assert not [name for name in stored if name.startswith("lm_head")]


@on_linux
@pytest.mark.thorough
def test_c3_memory_of_an_export_is_that_of_a_tensor_or_two(tmp_path: Path) -> None:
    """Peaks for 1 and 3 layers, in two shards each, differ by far less than the layers' size."""
    shape = {"hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 320}
    peaks = []
    for layers in (1, 3):
        folder = tmp_path / f"{layers}"
        folder.mkdir()
        raw = {**QWEN2, **shape, "num_hidden_layers": layers}
        write_zero_checkpoint(folder / "m", raw, "F32", shards=2)
        peaks.append(peak_of_export(folder / "m", folder / "out", "f16"))
        shutil.rmtree(folder)
    # Of 75 MB more in the checkpoint and 37 in the export; the graphs of three layers are larger too.
    assert peaks[1] - peaks[0] < 18 * MB
    assert peaks[1] < 300 * MB


def test_c4_the_export_is_in_its_folder_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One weights file for each layout, for relative paths too, and a folder that can be moved as a whole."""
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
    """A cache of links is read and can hold an export; a file that is gone, short or another's is named."""
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


@pytest.mark.parametrize("dtype", ["f16", "bf16", "int8"])
def test_c12_large_tensors_begin_on_a_page(dtype: str, tmp_path: Path) -> None:
    """Where a graph reads a tensor of whole pages, its offset is a page's, so that it can be mapped."""
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
