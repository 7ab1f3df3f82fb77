"""A manifest whose sizes are not its graphs': refused before anything is allocated of them (O4)."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from qwen_onnx import UserError, load
from qwen_onnx.contract.manifest import read_manifest
from qwen_onnx.runners.model import open_graph
from qwen_onnx.runners.runtime.integrity import verify_graph
from support.chats import copy_export, endless
from support.command import command
from support.damage import edit_graph, forge
from support.refusals import refused

pytestmark = pytest.mark.thorough

HUGE = 2**31 - 1


@pytest.fixture(params=["f32", "f16", "int8"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return copy_export(endless(request.param), tmp_path / "export")


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "export.json"
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


def refused_unopened(folder: Path, monkeypatch: pytest.MonkeyPatch, *mentions: str) -> None:
    """No session of it is opened, and Python and numpy allocate little."""

    def opened(path: Path, *args: Any, **settings: Any) -> None:
        raise AssertionError(f"{path} was opened")

    monkeypatch.setattr(open_graph, "open_session", opened)
    tracemalloc.start()
    try:
        for greedy in (False, True):
            refused(load, folder, provider="cpu", greedy_on_device=greedy, mentions=(folder, *mentions))
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()
    for arguments in (("run", folder, "-p", "x"), ("bench", folder), ("check", folder)):
        assert command(*arguments, "--provider", "cpu").code == 1
    text = folder.parent / "text"
    text.write_text("Hi there")
    assert command("score", folder, text, "--provider", "cpu").code == 1


def swell(raw: dict[str, Any], old: int, new: int, names: tuple[str, ...]) -> None:
    """Each graph's inputs and outputs of these names are told to be so large."""
    for graph in raw["graphs"]:
        for spec in (*graph["inputs"], *graph["outputs"]):
            if spec["name"].startswith(names):
                spec["shape"] = [new if size == old else size for size in spec["shape"]]


def test_o4_a_vocabulary_of_two_billions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the manifest says so once, or everywhere."""
    edit(folder, lambda raw: raw.update(vocab_size=HUGE))
    refused_unopened(folder, monkeypatch, "vocab_size", str(HUGE))
    edit(folder, lambda raw: swell(raw, 400, HUGE, ("logits", "logit_bias")))
    refused_unopened(folder, monkeypatch, "400], export.json says", str(HUGE))


def test_o4_a_context_longer_than_the_tables(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(folder, lambda raw: raw.update(context_length=HUGE))
    refused_unopened(folder, monkeypatch, "tables of 4096 positions", str(HUGE))


def test_o4_heads_of_another_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def larger(raw: dict[str, Any]) -> None:
        raw.update(head_dim=2**24)
        swell(raw, 16, 2**24, ("past", "present", "cache", "larger", "grown", "shrunk"))
        for cache in raw["caches"].values():
            for state in cache["states"]:
                state["shape"] = [2**24 if size == 16 else size for size in state["shape"]]

    edit(folder, larger)
    refused_unopened(folder, monkeypatch, "past_key_values.0.key", str(2**24))


def test_o4_layers_that_no_graph_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deeper(raw: dict[str, Any]) -> None:
        count = raw["num_hidden_layers"]
        raw["num_hidden_layers"] = count * 20
        for cache in raw["caches"].values():
            cache["states"] = [
                {**state, "layer": state["layer"] + count * n} for n in range(20) for state in cache["states"]
            ]
        for graph in raw["graphs"]:
            for kind in ("inputs", "outputs"):
                states = [spec for spec in graph[kind] if spec["name"].startswith(("past", "present"))]
                for spec in states:
                    first, layer, name = spec["name"].split(".")
                    graph[kind] += [
                        {**spec, "name": f"{first}.{int(layer) + count * n}.{name}"} for n in range(1, 20)
                    ]

    edit(folder, deeper)
    refused_unopened(folder, monkeypatch, "inputs, export.json says")


def test_o4_every_graph_is_as_its_own_manifest_says(folder: Path) -> None:
    manifest = read_manifest(folder)
    for graph in manifest.graphs:
        verify_graph(folder, manifest, graph)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda graph: graph.output[0].type.tensor_type.shape.dim.add(dim_value=9),
            "[batch_size, 1, 400, 9]",
        ),
        (lambda graph: graph.input.pop(), "inputs, export.json says"),
        (lambda graph: setattr(graph.input[0].type.tensor_type, "elem_type", 6), "int32"),
        (lambda graph: graph.output.add(name="more"), "field 2 stands 0 times"),
        (lambda graph: setattr(graph.input[0], "name", "ids"), "ids int64"),
    ],
)
def test_o4_a_graph_that_was_changed_with_its_hashes(
    change: Callable[[onnx.GraphProto], object], said: str, tmp_path: Path
) -> None:
    """Its maker forges the manifest's hashes too."""
    folder = copy_export(endless(), tmp_path / "export")
    edit_graph(folder / "prefill.onnx", change)
    forge(folder)
    refused(load, folder, provider="cpu", mentions=("prefill.onnx", said))


def test_o4_bytes_that_are_no_graph_are_one_line(tmp_path: Path) -> None:
    folder = copy_export(endless(), tmp_path / "export")
    whole = (folder / "prefill.onnx").read_bytes()
    for content in (
        b"",
        b"\x00",
        whole[:100],
        whole[: len(whole) // 2],
        whole[3:],
        whole + whole,
        b"\xff" * 99,
    ):
        (folder / "prefill.onnx").write_bytes(content)
        forge(folder)
        with pytest.raises(UserError, match=r"prefill\.onnx"):
            load(folder, provider="cpu")
