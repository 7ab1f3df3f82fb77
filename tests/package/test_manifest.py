"""export.json: it is read back as it was written, and a damaged one is refused in one line."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qwen_onnx.contract.manifest import MANIFEST_FILE, Golden, Manifest, read_manifest, write_manifest
from support.checkpoints import QWEN2_UNTIED, write_checkpoint
from support.exporting import export_model
from support.refusals import refused

Raw = dict[str, Any]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """One that uses every field."""
    folder = tmp_path_factory.mktemp("manifest")
    write_checkpoint(folder / "model", QWEN2_UNTIED)
    made = export_model(str(folder / "model"), folder / "out", dtype="bf16").manifest
    return dataclasses.replace(made, revision="main", golden=Golden((1, 2), (3, 4), (0.5, 2.0)))


@pytest.fixture
def refuse(tmp_path: Path) -> Callable[..., str]:
    """Write this content as export.json, and read it."""

    def write_and_read(content: str | bytes | Raw, *mentions: object) -> str:
        text = json.dumps(content) if isinstance(content, dict) else content
        (tmp_path / MANIFEST_FILE).write_bytes(text if isinstance(text, bytes) else text.encode())
        return refused(read_manifest, tmp_path, mentions=(tmp_path / MANIFEST_FILE, *mentions))

    return write_and_read


def raw(manifest: Manifest) -> Raw:
    value: Raw = json.loads(json.dumps(dataclasses.asdict(manifest)))
    return value


def test_reads_back_what_was_written(manifest: Manifest, tmp_path: Path) -> None:
    """Every field, tuples as tuples."""
    for written in (manifest, dataclasses.replace(manifest, revision=None, golden=None, eos_token_ids=())):
        write_manifest(tmp_path, written)
        assert read_manifest(tmp_path) == written
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST_FILE]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"a":' * 100_000])
def test_not_a_json_object(content: bytes, refuse: Callable[..., str]) -> None:
    """As an interrupted copy leaves it."""
    refuse(content)


@pytest.mark.parametrize("version", [None, 0, 1, 4, "3", [3], 3.5, True])
def test_other_format_version(manifest: Manifest, refuse: Callable[..., str], version: object) -> None:
    """Earlier formats that are read are in test_old_exports.py."""
    line = refuse({**raw(manifest), "format_version": version}, "export the model again")
    assert version is True or repr(version) in line


def test_each_missing_key(manifest: Manifest, refuse: Callable[..., str]) -> None:
    """But for those that have a default, which holds for every model."""
    for key in raw(manifest).keys() - {
        "golden",
        "target",
        "layout",
        "panel_rows",
        "samples",
        "calibration",
        "quality",
    }:
        refuse({name: value for name, value in raw(manifest).items() if name != key})
    for place in ("graphs", "inputs", "outputs"):
        for key in first(raw(manifest), place):
            damaged = raw(manifest)
            del first(damaged, place)[key]
            refuse(damaged, key)


def first(content: Raw, place: str) -> Raw:
    """The first graph, or the first input or output of it."""
    graph: Raw = content["graphs"][0]
    return graph if place == "graphs" else graph[place][0]


def test_each_key_of_another_type(manifest: Manifest, refuse: Callable[..., str]) -> None:
    """true is no 1."""
    for key, right in raw(manifest).items():
        optional = key in ("revision", "golden")
        for wrong in (None, True, 7, 1.5, "x", [None], {"a": None}, ["x"], {"a": "x", "b": 1}):
            is_right = type(wrong) is type(right) and not isinstance(wrong, list | dict)
            if not (
                is_right
                or (optional and wrong is None)
                or (key in ("packages", "samples") and wrong == {"a": "x"})
            ):
                refuse({**raw(manifest), key: wrong})


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content["files"].update({"weights.safetensors": {"size": "1", "sha256": "0"}}),
        lambda content: content["files"].update({"weights.safetensors": {"size": 1}}),
        lambda content: content["files"].update({"weights.safetensors": [1, "0"]}),
        lambda content: content["graphs"][0].update(providers="cpu"),
        lambda content: content["graphs"][0].update(opsets={"": "21"}),
        lambda content: content["graphs"][0].update(opsets=[21]),
        lambda content: content["graphs"][0]["inputs"][0].update(shape=[1.5]),
        lambda content: content["graphs"][0]["inputs"][0].update(shape=[None]),
        lambda content: content["graphs"][0]["inputs"][0].update(shape=[True]),
        lambda content: content["graphs"][0].update(inputs=[["input_ids", "int64", []]]),
        lambda content: content["golden"].update(margins=["0.5"]),
        lambda content: content["golden"].pop("token_ids"),
        lambda content: content.update(eos_token_ids=["x"] * 100_000),
        lambda content: content.update(eos_token_ids={str(i): i for i in range(100_000)}),
    ],
)  # fmt: skip
def test_wrong_types_further_down(
    manifest: Manifest, refuse: Callable[..., str], damage: Callable[[Raw], Any]
) -> None:
    """The error stays one short line, however long the wrong value is."""
    content = copy.deepcopy(raw(manifest))
    damage(content)
    refuse(content, "malformed")


@pytest.mark.parametrize(
    ("values", "mentions"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_key_value_heads": 7}, "a cache that is not of 7 heads of"),
        ({"head_dim": 7}, "heads of 7"),
    ],
)
def test_shapes_that_are_not_the_graphs(
    manifest: Manifest, refuse: Callable[..., str], values: Raw, mentions: str
) -> None:
    """Sizes beside the graphs are those of the caches."""
    refuse({**raw(manifest), **values}, mentions)


@pytest.mark.skipif(sys.platform == "win32", reason="no pipes there")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / MANIFEST_FILE)
    refused(read_manifest, tmp_path, mentions=(tmp_path / MANIFEST_FILE, "not a file"))


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "/etc/passwd", "a/", "a//b", "./a", "a/../b", "C:b", "a\\b", "..\\x", "a\nb"],
)
def test_names_that_lead_out(manifest: Manifest, refuse: Callable[..., str], name: str) -> None:
    """No file outside the export is opened, hashed or removed."""
    with_file = raw(manifest)
    with_file["files"][name] = {"size": 1, "sha256": "0"}
    refuse(with_file, repr(name))
    with_graph = raw(manifest)
    with_graph["graphs"][-1]["file"] = name
    refuse(with_graph, repr(name))


def test_folder_that_is_no_export(tmp_path: Path) -> None:
    """A path that leads nowhere, a checkpoint, a folder in the place of the file."""
    refused(read_manifest, tmp_path / "none", mentions=(tmp_path / "none", "qwen-onnx export"))
    refused(read_manifest, tmp_path, mentions=(tmp_path, MANIFEST_FILE, "qwen-onnx export"))
    (tmp_path / MANIFEST_FILE).mkdir()
    refused(read_manifest, tmp_path, mentions=(tmp_path / MANIFEST_FILE,))
    (tmp_path / "file").write_text("")
    refused(read_manifest, tmp_path / "file", mentions=(tmp_path / "file",))


def test_graph_for_a_provider_that_has_none(manifest: Manifest) -> None:
    """And those that there are for it are named."""
    assert manifest.graph("prefill", "cpu").file == "prefill.cpu.onnx"
    assert manifest.graph("prefill", "cuda").file == "prefill.onnx"
    refused(manifest.graph, "decode", "tensorrt", mentions=("decode", "tensorrt", "cpu, cuda"))
    refused(manifest.graph, "rewind", "cpu", mentions=("rewind",))
