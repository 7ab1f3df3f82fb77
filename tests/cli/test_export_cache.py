"""The cache of exports never mistakes one for another, and never removes what is not an export in it."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import shutil
from pathlib import Path

import pytest

from qwen_onnx.checkpoints.hub import ModelSource
from qwen_onnx.errors import UserError
from qwen_onnx.exports.cached.folder import cache_folder, cached_export_path, list_exports, remove_exports
from qwen_onnx.exports.publish.staging import staged_folder

COMMIT = "7ae557604adf67be50417f59c2c2f167def9a775"
HUB = ModelSource(Path("/nowhere"), "Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B", COMMIT)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def local(tmp_path: Path) -> ModelSource:
    folder = tmp_path / "my--model ü"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "chat_template.jinja", "notes.txt"):
        (folder / name).write_text("x")
    return ModelSource(folder, folder.name, folder.name, None)


def make(cache: Path, source: ModelSource, dtype: str = "f32") -> Path:
    path = cached_export_path(cache, source, dtype)
    with staged_folder(path) as folder:
        (folder / "export.json").write_bytes(bytes(10))
        (folder / "weights.safetensors").write_bytes(bytes(1000))
    return path


def test_override_then_variable_then_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("QWEN_ONNX_CACHE", raising=False)
    assert cache_folder(None).parts[-2:] == ("qwen-onnx", "exports")
    assert tmp_path in cache_folder(None).parents
    monkeypatch.setenv("QWEN_ONNX_CACHE", "")
    assert cache_folder(None).parts[-2:] == ("qwen-onnx", "exports")
    monkeypatch.setenv("QWEN_ONNX_CACHE", "~/elsewhere")
    assert cache_folder(None) == tmp_path / "home" / "elsewhere"
    assert cache_folder(tmp_path) == tmp_path


def test_names_are_readable(cache: Path, local: ModelSource) -> None:
    version = importlib.metadata.version("qwen-onnx")
    assert cached_export_path(cache, HUB, "f32") == (
        cache / f"Qwen--Qwen2.5-0.5B--7ae557604adf--f32--{version}"
    )
    assert cached_export_path(cache, HUB, "bf16").name.endswith(f"--bf16--{version}")
    assert cached_export_path(cache, local, "f32").name.startswith("my--model_ü--local-")


def test_every_difference_gives_another_name(
    cache: Path, local: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name(source: ModelSource = local, dtype: str = "f32") -> str:
        return cached_export_path(cache, source, dtype).name

    shutil.copytree(local.folder, tmp_path / "copy")
    names = [
        name(),
        name(dtype="f16"),
        name(HUB),
        name(ModelSource(HUB.folder, HUB.name, HUB.model_id, COMMIT[::-1])),
        name(ModelSource(tmp_path / "copy", local.name, local.model_id, None)),
        name(ModelSource(tmp_path / "copy", "Qwen--Qwen2.5-0.5B", "Qwen--Qwen2.5-0.5B", None)),
    ]
    for file in ("config.json", "model.safetensors", "chat_template.jinja"):
        (local.folder / file).write_text("xy")
        names.append(name())
        os.utime(local.folder / file, ns=(0, 0))
        names.append(name())
    (local.folder / "model-2.safetensors").touch()
    names.append(name())
    (local.folder / "config.json").unlink()
    names.append(name())
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda package: "9.9")
        names.append(name())
    assert len(set(names)) == len(names)

    (local.folder / "notes.txt").write_text("not read by an export")
    assert name() == names[-2]


@pytest.mark.parametrize("folder", ["x" * 255, "é" * 127, "..hidden", "a:b*?<>|", "\udcff"])
def test_any_folder_name_gives_a_name_that_can_be_made(cache: Path, tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir()
    source = ModelSource(tmp_path / folder, folder, folder, None)
    path = make(cache, source)
    [export] = list_exports(cache)
    assert export.path == path
    assert not path.name.startswith(".")


def test_a_vanished_checkpoint_is_one_line(cache: Path, local: ModelSource) -> None:
    shutil.rmtree(local.folder)
    with pytest.raises(UserError, match="No such file or directory"):
        cached_export_path(cache, local, "f32")


def test_listing_tells_what_there_is(cache: Path, local: ModelSource) -> None:
    assert list_exports(cache) == []
    begun = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=2)
    make(cache, HUB, "bf16")
    make(cache, local)
    hub, mine = list_exports(cache)
    assert (hub.model_id, hub.dtype, hub.size) == ("Qwen/Qwen2.5-0.5B", "bf16", 1010)
    assert (mine.model_id, mine.dtype, mine.size) == ("my--model_ü", "f32", 1010)
    assert begun < hub.modified < datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=2)
    assert (hub.name, mine.name) == ("Qwen2.5-0.5B-bf16", "my--model_ü-f32")
    assert hub.path.parent == mine.path.parent == cache


def test_listing_skips_what_is_no_export_of_ours(cache: Path, tmp_path: Path) -> None:
    path = make(cache, HUB)
    outside = make(tmp_path / "outside", HUB)
    (cache / path.name.replace("f32", "f16")).symlink_to(outside)
    (cache / path.name.replace("f32", "bf16")).mkdir()
    (cache / path.name.replace("f32", "int4")).write_text("a file")
    for name in ("photos", "a--b--c--d--e", f".{path.name}.new-1-00000000"):
        shutil.copytree(path, cache / name)
    assert [export.path for export in list_exports(cache)] == [path]

    kept = {entry.name for entry in cache.iterdir()} - {path.name, f".{path.name}.new-1-00000000"}
    (cache / f".{path.name}.new-1-00000000").rename(cache / f".{path.name}.new-4194305-00000000")
    assert [export.path for export in remove_exports(cache, [], everything=True)] == [path]
    assert {entry.name for entry in cache.iterdir()} == kept
    assert (outside / "export.json").exists()


def test_removing_by_name(cache: Path) -> None:
    first, second = make(cache, HUB, "f16"), make(cache, HUB, "f32")
    assert remove_exports(cache, []) == []
    [removed] = remove_exports(cache, [first.name, first.name])
    assert (removed.path, removed.dtype) == (first, "f16")
    assert list(cache.iterdir()) == [second]


def test_an_unknown_name_or_a_path_removes_nothing(cache: Path, tmp_path: Path) -> None:
    path = make(cache, HUB)
    outside = make(tmp_path / "outside", HUB)
    for name in (
        "none",
        "",
        ".",
        "..",
        f"../outside/{outside.name}",
        str(outside),
        str(path),
        f"./{path.name}",
    ):
        with pytest.raises(UserError, match="is no export in") as caught:
            remove_exports(cache, [path.name, name])
        assert "\n" not in str(caught.value)
    assert (outside / "export.json").exists()
    assert (path / "export.json").exists()


def test_an_empty_cache(cache: Path) -> None:
    assert remove_exports(cache, [], everything=True) == []
    with pytest.raises(UserError, match="which holds nothing"):
        remove_exports(cache, ["x"])
