"""Exports of earlier versions run as they did, or one line says to export the model again.

data/exports-0.4.0.tar.xz was made with version 0.4.0, of a random model of two layers: an export of each kind, with
golden ids that its `check` recorded; the ids that it chose (expected.json) and a session that it saved; and the
manifests of other layouts.
"""

from __future__ import annotations

import copy
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qwen_onnx import UserError, load
from qwen_onnx.checkpoints.config import parse_config
from qwen_onnx.checks.check import _plans
from qwen_onnx.contract.json_file import read_json
from qwen_onnx.contract.manifest import FORMAT_VERSION, MANIFEST_FILE, RESIZING, read_manifest, write_manifest
from qwen_onnx.contract.quant import QuantConfig
from qwen_onnx.runners.chat import Chat, Token
from qwen_onnx.runners.runtime.panels import suits_processor
from support.command import command
from support.refusals import refused

ARCHIVE = Path(__file__).parents[1] / "data" / "exports-0.4.0.tar.xz"
KINDS = ["f32", "f16", "bf16", "int8", "int4", "panels", "portable"]
CHOOSE_ON_DEVICE = ["f32", "f16", "int8", "int4", "panels"]
COUNT = 20
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive's folders; to be read only."""
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def expected(old: Path) -> dict[str, Any]:
    """The prompts, and by kind what 0.4.0 made of them: `greedy`, and `sampled` with temperature 0.8 and seed 1."""
    return read_json(old / "expected.json")


def opened(folder: Path, **options: Any) -> Chat | None:
    """The export; None of one in panels of other processors than this one, which must be refused here."""
    if suits_processor(folder, read_manifest(folder)):
        return load(folder, provider="cpu", threads=1, **options)
    refused(load, folder, provider="cpu", **options, mentions=("export it anew here",))
    return None


def ids(tokens: list[Token]) -> list[int]:
    return [token.token_id for token in tokens]


@every_kind
def test_greedy_and_sampled_tokens_are_those_of_the_version_that_made_it(
    kind: str, old: Path, expected: dict[str, Any]
) -> None:
    if (chat := opened(old / kind)) is None:
        return
    for prompt, greedy in zip(expected["prompts"], expected["greedy"][kind], strict=True):
        assert ids(list(chat.generate(prompt, max_new_tokens=COUNT))) == greedy
    for prompt, sampled in zip(expected["prompts"], expected["sampled"].get(kind, ()), strict=False):
        drawn = chat.generate(prompt, max_new_tokens=COUNT, temperature=0.8, seed=1)
        assert ids(list(drawn)) == sampled


@every_kind
def test_prompts_go_side_by_side(kind: str, old: Path, expected: dict[str, Any]) -> None:
    if (chat := opened(old / kind)) is None:
        return
    found: list[list[int]] = [[] for _ in expected["prompts"]]
    for index, token in chat.generate_batch(expected["prompts"], max_new_tokens=COUNT):
        found[index].append(token.token_id)
    assert found == expected["greedy"][kind]


@pytest.mark.parametrize("kind", CHOOSE_ON_DEVICE)
def test_its_greedy_graph_chooses_the_same_tokens(kind: str, old: Path, expected: dict[str, Any]) -> None:
    if (chat := opened(old / kind, greedy_on_device=True)) is None:
        return
    assert chat.runner.graph.entry == "greedy"
    for prompt, greedy in zip(expected["prompts"], expected["greedy"][kind], strict=True):
        assert ids(list(chat.generate(prompt, max_new_tokens=COUNT))) == greedy


@pytest.mark.parametrize("kind", ["f32", "bf16", "panels"])
def test_its_score_graph_verifies_the_same_tokens(kind: str, old: Path, expected: dict[str, Any]) -> None:
    if (chat := opened(old / kind, speculate=True)) is None:
        return
    assert chat.runner.graph.entry == "score"
    for prompt, greedy in zip(expected["prompts"], expected["greedy"][kind], strict=True):
        assert ids(list(chat.generate(prompt, max_new_tokens=COUNT))) == greedy


@every_kind
def test_check_and_info_take_it(kind: str, old: Path) -> None:
    """`check` compares the golden ids that were recorded then."""
    described = command("info", old / kind, "--graphs")
    assert (described.code, described.err) == (0, "")
    if opened(old / kind) is None:
        return
    checked = command("check", old / kind, "--provider", "cpu")
    assert checked.code == 0, checked.err
    assert "golden ids: 32 of 32 equal on cpu" in checked.err


def test_a_saved_session_goes_on(old: Path, expected: dict[str, Any]) -> None:
    """With the cache that was saved: nothing of it is computed again, and the tokens are those of a new chat."""
    first = [*expected["prompts"][0], *expected["greedy"]["f32"][0]]
    longer = [*first, 11, 12, 13]
    resumed, new = (load(old / "f32", provider="cpu", threads=1) for _ in range(2))
    assert resumed.load(old / "f32.session") == []
    tokens = list(resumed.generate(longer, max_new_tokens=8))
    assert tokens[0].cached_tokens == len(first) - 1
    assert ids(tokens) == ids(list(new.generate(longer, max_new_tokens=8)))


@every_kind
def test_each_graph_has_the_cache_that_such_a_graph_has_now(kind: str, old: Path) -> None:
    """The older format has no caches by themselves: they are made of the graphs' inputs."""
    manifest = read_manifest(old / kind)
    plans = {
        plan.file: plan for plan in _plans(parse_config(read_json(old / kind / "config.json")), manifest)
    }
    assert plans.keys() == {graph.file for graph in manifest.graphs}
    used = set()
    for graph in manifest.graphs:
        cache = plans[graph.file].cache(parse_config(read_json(old / kind / "config.json")))
        assert (graph.cache is None) is (graph.entry in (*RESIZING, "probe"))
        if graph.cache is not None:
            assert manifest.caches[graph.cache] == cache
            used.add(graph.cache)
    assert used == manifest.caches.keys()


@every_kind
def test_it_is_written_again_in_the_new_format(kind: str, old: Path, tmp_path: Path) -> None:
    """As `check` does where it records golden ids."""
    assert read_json(old / kind / MANIFEST_FILE)["format_version"] == 2
    manifest = read_manifest(old / kind)
    write_manifest(tmp_path, manifest)
    assert read_json(tmp_path / MANIFEST_FILE)["format_version"] == FORMAT_VERSION
    assert read_manifest(tmp_path) == manifest


@pytest.mark.parametrize(
    ("name", "layout", "target", "dtype"),
    [
        ("linked", "plain", "onnxruntime", "bf16"),
        ("onnxruntime-genai", "onnxruntime-genai", "portable", "f32"),
        ("transformers.js", "transformers.js", "portable", "f16"),
        ("optimum", "optimum", "portable", "f32"),
        ("triton", "triton", "onnxruntime", "int8"),
    ],
)
def test_manifests_of_every_layout_are_read(
    name: str, layout: str, target: str, dtype: str, old: Path
) -> None:
    manifest = read_manifest(old / "manifests" / name)
    assert (manifest.layout, manifest.target, manifest.dtype) == (layout, target, dtype)
    assert manifest.eos_token_ids == (2, 7)


def test_names_that_are_other_words_now(old: Path) -> None:
    """`quantised` is `quantized`; layout `cpu` is plain, with the rows of a panel as before."""
    panels = read_manifest(old / "panels")
    assert (panels.layout, panels.panel_rows) == ("plain", 16)
    assert set(read_manifest(old / "int4").quantized.values()) == {QuantConfig(4, 32)}
    head = read_manifest(old / "manifests" / "triton").quantized["model.embed_tokens.weight"]
    assert head == QuantConfig(4, 16)


Raw = dict[str, Any]


def without(place: str, key: str) -> Callable[[Raw], object]:
    """Takes a key out of every graph, or of every input."""

    def damage(raw: Raw) -> None:
        for graph in raw["graphs"]:
            for holder in [graph] if place == "graphs" else graph["inputs"]:
                del holder[key]

    return damage


def cache_input(raw: Raw) -> Raw:
    """The last input of the first graph: values of the last layer."""
    found: Raw = raw["graphs"][0]["inputs"][-1]
    assert found["name"] == "past_key_values.1.value"
    return found


@pytest.mark.parametrize(
    ("damage", "mentions"),
    [
        (lambda raw: raw.pop("graphs"), "graphs"),
        (lambda raw: raw.pop("quantised"), "quantised"),
        (lambda raw: raw.pop("files"), "files"),
        (without("graphs", "inputs"), "inputs"),
        (without("graphs", "entry"), "entry"),
        (without("graphs", "lowering"), "lowering"),
        (without("inputs", "name"), "name"),
        (without("inputs", "shape"), "shape"),
        (without("inputs", "dtype"), "dtype"),
        (lambda raw: raw.update(graphs=[1]), "malformed"),
        (lambda raw: raw.update(graphs={"a": 1}), "malformed"),
        (lambda raw: raw.update(quantised=[]), "malformed"),
        (lambda raw: cache_input(raw).update(shape=[1]), "no shape of a state tensor"),
        (lambda raw: cache_input(raw).update(shape=["batch_size", 1, "x", 16]), "no shape of a state tensor"),
        (lambda raw: cache_input(raw).update(dtype="int64"), "no state tensor"),
        (lambda raw: cache_input(raw).update(name="past_key_values.key"), "malformed"),
        (lambda raw: cache_input(raw).update(name="past_key_values.x.key"), "malformed"),
        (lambda raw: cache_input(raw).update(name="past_key_values.1.key"), "two of one name"),
        (lambda raw: raw["graphs"][0]["inputs"].pop(), "has another past_key_values.1.value than its cache"),
        (lambda raw: raw["graphs"][0].update(inputs=[]), "has a cache None"),
        (lambda raw: raw.update(num_hidden_layers=3), "has no cache of 3 layers"),
        (lambda raw: raw.update(head_dim=8), "not of 1 heads of 8"),
        (lambda raw: raw.update(layout="docker"), "layout is 'docker'"),
    ],
)
def test_damaged_manifests_of_the_older_format_are_refused(
    damage: Callable[[Raw], object], mentions: str, old: Path, tmp_path: Path
) -> None:
    raw = copy.deepcopy(read_json(old / "f32" / MANIFEST_FILE))
    damage(raw)
    (tmp_path / MANIFEST_FILE).write_text(json.dumps(raw))
    refused(read_manifest, tmp_path, mentions=(MANIFEST_FILE, mentions, "export the model again"))


def test_a_changed_weights_file_is_found(old: Path, tmp_path: Path) -> None:
    """By the samples that were taken of it then."""
    folder = shutil.copytree(old / "f32", tmp_path / "f32")
    content = bytearray((folder / "weights.safetensors").read_bytes())
    content[-4096:] = bytes(4096)
    (folder / "weights.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"weights\.safetensors"):
        load(folder, provider="cpu")
