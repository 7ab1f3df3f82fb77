"""M5, M8: what a command, or `load`, takes for a model, and which of two of the same name it takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from qwen_onnx import UserError, load
from qwen_onnx.checkpoints.hub import ModelSource
from qwen_onnx.contract.manifest import read_manifest
from qwen_onnx.exports.cached.folder import cached_export_path, find_by_name, list_exports
from qwen_onnx.exports.publish.staging import staged_folder
from support.chats import endless_checkpoint, tiny
from support.command import Ran, command
from support.field_hub import of_checkpoint, on_the_hub
from support.hub_server import COMMIT, Hub, serve

pytestmark = pytest.mark.thorough

CPU = ("--provider", "cpu")
SHORT = ("--prompt-tokens", 5, "--new-tokens", 3, "--repeats", 1, *CPU, "--threads", 1)
QUESTION = "What is 3 plus 4?"
COMMANDS = {
    "run": ("-p", QUESTION, *CPU, "--max-new-tokens", 12),
    "info": (),
    "check": CPU,
    "score": ("-", *CPU),
    "bench": (*SHORT, "--json"),
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of one's own, and a current folder that is empty."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("QWEN_ONNX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("qwen_onnx.checks.machine._PROBE_BYTES", 1 << 20)
    return tmp_path / "cache"


def ran(verb: str, model: object, *more: object) -> Ran:
    return command(verb, model, *COMMANDS[verb], *more, stdin=QUESTION if verb == "score" else "")


def test_m5_every_command_takes_what_run_takes(cache: Path) -> None:
    """The bundled model's name, a checkpoint folder, and the name that `cache ls` shows: one export each."""
    for verb in COMMANDS:
        for model in ("tiny", "tiny-f32", endless_checkpoint()):
            found = ran(verb, model)
            assert found.code == 0, found.err
    assert {(export.model_id, export.dtype) for export in list_exports(cache)} == {
        ("tiny", "f32"),
        ("endless", "f32"),
    }
    assert "exporting tiny" not in ran("run", "tiny").err
    assert ran("run", "tiny-f32").out == "3 plus 4 is 7.\n"
    assert "model      tiny" in ran("info", "tiny-f32").out


def test_m5_a_dtype_is_asked_of_each_command(cache: Path) -> None:
    assert "dtype      int4" in ran("info", "tiny", "--dtype", "int4").out
    assert [export.name for export in list_exports(cache)] == ["tiny-int4"]
    assert ran("score", "tiny-int4").code == 0
    assert "holds int4, --dtype f32 asked for" in ran("run", "tiny-int4", "--dtype", "f32").error
    assert "tiny-int4: an export; --revision main" in ran("info", "tiny-int4", "--revision", "main").error


def test_m5_load_takes_names_too(cache: Path) -> None:
    chat = load("tiny", provider="cpu")
    tokens = chat.generate([{"role": "user", "content": QUESTION}], max_new_tokens=12)
    assert "".join(token.text for token in tokens) == "3 plus 4 is 7."
    assert load("tiny-f32", provider="cpu").runner.folder.parent == cache
    assert load(tiny(), provider="cpu").runner.folder == tiny()
    with pytest.raises(UserError, match=r"\./typo: no such folder"):
        load("./typo")


def test_m5_cache_ls_shows_names_that_cache_rm_and_run_take(cache: Path) -> None:
    ran("info", "tiny")
    assert command("cache", "ls").out.split()[1:] == ["tiny-f32"]
    assert json.loads(command("cache", "ls", "--json").out)[0]["name"] == "tiny-f32"
    assert command("cache", "rm", "tiny-f32").code == 0
    assert list_exports(cache) == []


def test_m5_what_tells_exports_apart_stands_in_their_names(tmp_path: Path) -> None:
    """Owner, commit and version are in a name only where another export would have the same one."""

    def make(model_id: str, commit: str, version: str = "0.5.0") -> Path:
        path = cached_export_path(tmp_path, ModelSource(Path("/x"), "x", model_id, commit), "f32")
        path = path.with_name(path.name.rpartition("--")[0] + f"--{version}")
        with staged_folder(path) as folder:
            (folder / "export.json").write_bytes(b"{}")
        return path

    first = make("Qwen/Qwen3-0.6B", "a" * 40)
    assert [export.name for export in list_exports(tmp_path)] == ["Qwen3-0.6B-f32"]
    assert find_by_name(tmp_path, "Qwen3-0.6B-f32") == first
    assert find_by_name(tmp_path, first.name) == first
    make("Qwen/Qwen3-0.6B", "b" * 40)
    make("Qwen/Qwen3-0.6B", "b" * 40, "0.4.0")
    make("Other/Qwen3-0.6B", "b" * 40)
    names = [export.name for export in list_exports(tmp_path)]
    assert len(set(names)) == 4
    assert "Qwen3-0.6B-f32@aaaaaaa" in names
    assert "Qwen3-0.6B-f32@bbbbbbb-0.4.0" in names
    for export in list_exports(tmp_path):
        assert find_by_name(tmp_path, export.name) == export.path
    with pytest.raises(UserError, match=r"4 exports are called so; one of .*Qwen3-0\.6B-f32@aaaaaaa"):
        find_by_name(tmp_path, "Qwen3-0.6B-f32")
    assert find_by_name(tmp_path, "Qwen3") is None


def test_m5_a_folder_named_tiny_is_not_the_bundled_model(cache: Path) -> None:
    """Each command says which of the two it takes; `./tiny` is the folder."""
    command("export", endless_checkpoint(), "tiny")
    for verb in COMMANDS:
        found = ran(verb, "tiny")
        assert found.code == 0, found.err
        assert "note: tiny is the bundled model; the folder of this name is ./tiny" in found.err
    assert ran("run", "tiny").out == "3 plus 4 is 7.\n"
    assert "model      endless" in ran("info", "./tiny").out
    made = command("export", "tiny", "out")
    assert "note: tiny is the bundled model" in made.err
    assert read_manifest(Path("out")).model_id == "tiny"
    assert "note: " not in ran("info", "./tiny").err


def test_m5_a_folder_here_comes_before_a_name_in_the_cache(cache: Path) -> None:
    ran("info", "tiny")
    command("export", endless_checkpoint(), "tiny-f32")
    assert "model      endless" in ran("info", "tiny-f32").out


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve(Hub({"org/small": of_checkpoint(endless_checkpoint())})) as served:
        yield served


def test_m5_a_hub_id_is_exported_once_for_all_commands(hub: Hub, cache: Path, tmp_path: Path) -> None:
    for verb in ("info", "score"):
        found = on_the_hub(hub, tmp_path, verb, "org/small", *COMMANDS[verb], stdin=QUESTION)
        assert found.code == 0, found.err
    assert hub.fetched().count("model.safetensors") == 1
    assert [export.name for export in list_exports(cache)] == ["small-f32"]
    assert COMMIT[:12] in list_exports(cache)[0].path.name


@pytest.mark.parametrize("verb", [*COMMANDS, "export"])
@pytest.mark.parametrize("typo", ["./typo", "../typo", "/typo", "typo/", "./a/typo"])
def test_m8_a_path_that_is_not_there_is_no_matter_of_the_network(
    verb: str, typo: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qwen_onnx.checkpoints.hub._download", pytest.fail)
    found = command(verb, typo, *COMMANDS.get(verb, ()))
    assert found.error == f"error: {typo}: no such folder"


def test_m8_what_may_be_a_folder_or_a_hub_id_is_said_to_be_neither(
    hub: Hub, cache: Path, tmp_path: Path
) -> None:
    for model in ("typo", "models/typo"):
        found = on_the_hub(hub, tmp_path, "run", model, *COMMANDS["run"])
        assert found.code == 1
        assert f"error: {model}: no folder of this name here, and no such public model on " in found.err


@pytest.mark.parametrize("verb", COMMANDS)
def test_m8_a_folder_that_holds_no_model(verb: str, cache: Path, tmp_path: Path) -> None:
    found = ran(verb, tmp_path / "here").error
    assert "neither an export (export.json is missing) nor a checkpoint (config.json is missing)" in found
