"""Manifests that are wrong: values that no export has are refused as it is read, the rest are found by `check`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qwen_onnx import UserError
from qwen_onnx.contract.manifest import Golden, read_manifest
from support.chats import copy_export, endless
from support.command import command
from support.damage import change_manifest
from support.marks import but_first

GOLDEN = {"prompt_ids": [1, 2], "token_ids": [3, 4], "margins": [1.0, 2.0]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy_export(endless(), tmp_path / "export")


def set_raw(folder: Path, **fields: Any) -> None:
    path = folder / "export.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"context_length": -5},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": 4},
        {"vocab_size": 0},
        {"dtype": "f8"},
        {"golden": {**GOLDEN, "margins": []}},
        {"golden": {**GOLDEN, "prompt_ids": []}},
        {"golden": {"prompt_ids": [1], "token_ids": [], "margins": []}},
        {"golden": {**GOLDEN, "prompt_ids": [99_999]}},
    ],
    ids=str,
)
def test_values_that_no_export_has(fields: dict[str, Any], folder: Path) -> None:
    """They are refused as the manifest is read, and its file is named."""
    set_raw(folder, **fields)
    with pytest.raises(UserError, match=r"export\.json: .*; export the model again"):
        read_manifest(folder)


def test_a_cache_of_another_rank(folder: Path) -> None:
    raw = json.loads((folder / "export.json").read_text())
    raw["graphs"][0]["inputs"][-1]["shape"] = [1]
    set_raw(folder, graphs=raw["graphs"])
    with pytest.raises(UserError, match=r"another past_key_values\.2\.value than its cache"):
        read_manifest(folder)
    set_raw(folder, graphs=json.loads((endless() / "export.json").read_text())["graphs"])
    raw["caches"]["float32, cache_capacity"]["states"][-1]["shape"] = [1]
    set_raw(folder, caches=raw["caches"])
    with pytest.raises(UserError, match="no shape of a state tensor"):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"context_length": 8192}, "rows of the tables"),
        ({"eos_token_ids": ()}, "eos_token_ids"),
        ({"files": {}}, "does not list"),
    ],
)
def test_what_the_files_say_otherwise_is_found(fields: dict[str, Any], says: str, folder: Path) -> None:
    change_manifest(folder, **fields)
    ran = command("check", folder, "--provider", "cpu")
    assert (ran.code, ran.out.startswith("MISMATCH: manifest: ")) == (1, True)
    assert says in ran.out


def test_a_file_put_beside_the_export_is_found(folder: Path) -> None:
    """A chat template in a file of its own would replace the one in tokenizer_config.json."""
    (folder / "chat_template.jinja").write_text("")
    assert "chat_template.jinja was added" in command("check", folder, "--provider", "cpu").out


def test_inputs_that_the_graph_does_not_have(folder: Path) -> None:
    raw = json.loads((folder / "export.json").read_text())
    raw["graphs"][0]["inputs"][0]["name"] = "ids"
    set_raw(folder, graphs=raw["graphs"])
    assert "has not the inputs of lowering static" in command("check", folder, "--provider", "cpu").error


def test_outputs_that_the_graph_does_not_have(folder: Path) -> None:
    raw = json.loads((folder / "export.json").read_text())
    raw["graphs"][0]["outputs"][1]["shape"][3] += 1
    set_raw(folder, graphs=raw["graphs"])
    assert "other inputs or outputs" in command("check", folder, "--provider", "cpu").out


def change_graphs(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    raw = json.loads((folder / "export.json").read_text())
    for graph in raw["graphs"]:
        change(graph)
    set_raw(folder, graphs=raw["graphs"])


def test_graphs_that_serve_other_providers_than_they_were_made_for(folder: Path) -> None:
    """The graphs for a GPU run on a CPU too, but they are not those that an export has for it."""
    swapped = {"cpu": "cuda", "cuda": "cpu"}
    change_graphs(
        folder, lambda graph: graph.update(providers=[swapped.get(p, p) for p in graph["providers"]])
    )
    assert "MISMATCH: graphs: " in command("check", folder, "--provider", "cpu").out


@pytest.mark.parametrize("lowering", ["magic", "contrib", "portable"])
def test_a_lowering_that_the_graph_is_not_of(lowering: str, folder: Path) -> None:
    """Its inputs would not be those that the runner gives it; that is refused before anything runs."""
    change_graphs(
        folder, lambda graph: graph.update(lowering=lowering) if graph["file"] == "prefill.onnx" else None
    )
    for verb in (["run", folder, "-p", "Hi"], ["check", folder]):
        assert f"lowering {lowering}" in command(*verb, "--provider", "cpu").error.replace("'", "")


def test_another_number_of_layers(folder: Path) -> None:
    raw = json.loads((folder / "export.json").read_text())
    set_raw(folder, num_hidden_layers=raw["num_hidden_layers"] - 1)
    assert "has no cache of" in command("run", folder, "-p", "Hi", "--provider", "cpu").error


@pytest.mark.parametrize("context", but_first([2, 32, 3, 16, 31, 40, 62, 63], 2))
def test_an_export_too_short_for_the_golden_ids_is_good(context: int, tmp_path: Path) -> None:
    """As many golden ids are compared as its context holds."""
    out = tmp_path / "short"
    assert command("export", "tiny", out, "--max-context", context).code == 0
    ran = command("check", out, "--provider", "cpu")
    assert ran.code == 0, ran.err


def test_golden_ids_that_are_all_wrong(folder: Path) -> None:
    change_manifest(folder, golden=Golden((1, 2), (5,) * 32, (1e-9,) * 32))
    assert "a mismatch" in command("check", folder, "--provider", "cpu").out


def test_an_export_of_a_newer_runtime_is_not_run(folder: Path) -> None:
    change_manifest(folder, min_onnxruntime="99.0")
    assert "99.0 or newer wanted" in command("run", folder, "-p", "Hi", "--provider", "cpu").error
