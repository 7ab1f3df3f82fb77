"""`--weights-order panels`: matrices in panels, what is computed with them, and the processors that refuse them."""

from __future__ import annotations

import dataclasses
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

from qwen_onnx import contract, export, load
from qwen_onnx.checkpoints.safetensors_file import StoredTensor, read_header
from qwen_onnx.checks.check import check_export
from qwen_onnx.cli import run as cli_run
from qwen_onnx.contract import PROBE_WEIGHT, PROBE_X, WEIGHTS_FILE
from qwen_onnx.contract.manifest import read_manifest, write_manifest
from qwen_onnx.exports import panels as panel_sizes
from qwen_onnx.exports import weights
from qwen_onnx.exports.weights import in_panels
from qwen_onnx.exports.writer import hash_file
from qwen_onnx.runners.model import open_graph
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime import panels
from qwen_onnx.runners.runtime.integrity import sample
from qwen_onnx.runners.runtime.options import SessionOptions
from qwen_onnx.runners.runtime.panels import panel_rows
from support.checkpoints import QWEN2, write_checkpoint
from support.command import command
from support.exports import IDS, ON_CPU, Exported, decode_all, open_on_cpu
from support.refusals import refused
from support.tolerances import EXACT, F32, F32_ORDER, assert_close

Export = Callable[..., Exported]

pytestmark = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="these kernels are for x86-64"
)
ASKED = "weights_order='panels'"
CONFIGS = ["qwen2", "qwen2_untied", "qwen3", "qwen3_bias", "qwen2_yarn"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "Model"
    write_checkpoint(folder, QWEN2)
    return folder


@pytest.fixture(scope="module")
def in_this_order(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """To be read only."""
    return export(checkpoint, tmp_path_factory.mktemp("export") / "out", weights_order="panels").folder


def refused_in_panels(checkpoint: Path, tmp_path: Path, *mentions: str, **options: Any) -> None:
    refused(export, checkpoint, tmp_path / "out", weights_order="panels", mentions=mentions, **options)


# The file.


def stored(path: Path, values: np.ndarray, dtype: str) -> StoredTensor:
    path.write_bytes(values.tobytes())
    return StoredTensor("w", path, dtype, values.shape, 0, values.nbytes)


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("shape", [(48, 32), (21, 16), (5, 64), (1, 8)])
def test_every_number_stands_where_it_should(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, dtype: str, shape: tuple[int, int]
) -> None:
    """Row o and column i at [o // rows, i, o % rows]; zeros below; whatever the pieces it is made in."""
    kind = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[dtype]
    values = np.random.default_rng(3).normal(size=shape).astype(kind)
    wanted = np.zeros((-(-shape[0] // rows), shape[1], rows), np.float32)
    for o in range(shape[0]):
        for i in range(shape[1]):
            wanted[o // rows, i, o % rows] = values[o, i]
    for piece in (1, 4 * shape[1] * 20, 1 << 20):
        monkeypatch.setattr(weights, "PIECE", piece)
        made = in_panels(stored(tmp_path / "w", values, dtype), rows)
        assert (made.name, made.dtype, made.shape) == ("w", "F32", wanted.shape)
        pieces = [memoryview(each) for each in made.pieces()]
        assert b"".join(pieces) == wanted.tobytes()
        assert max(each.nbytes for each in pieces) <= max(piece, 4 * rows * shape[1])


def test_weights_lie_once_and_packed_matrices_side_by_side(in_this_order: Path) -> None:
    """A tied head is read from the embedding's panels; q, k and v begin a panel each and follow each other."""
    places = read_header(in_this_order / WEIGHTS_FILE)
    rows = read_manifest(in_this_order).panel_rows or 0
    assert places["model.embed_tokens.weight"].shape == (320 // rows, 64, rows)
    assert "lm_head.weight" not in places
    for graph in read_manifest(in_this_order).graphs:
        proto = onnx.load(in_this_order / graph.file, load_external_data=False).graph
        outside = {
            tensor.name: {entry.key: entry.value for entry in tensor.external_data}
            for tensor in proto.initializer
            if tensor.external_data
        }
        if graph.entry in ("grow", "probe"):
            assert not outside
            continue
        embedding = places["model.embed_tokens.weight"]
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert (int(outside[name]["offset"]), int(outside[name]["length"])) == (
                embedding.offset,
                embedding.nbytes,
            )
        packed = outside["model.layers.1.self_attn.qkv_proj.weight"]
        parts = [places[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
        assert int(packed["offset"]) == parts[0].offset
        assert int(packed["length"]) == sum(part.nbytes for part in parts)


# What is computed.


def runner(model: Exported, **options: Any) -> Runner:
    return Runner(model.folder, dataclasses.replace(ON_CPU, **options))


@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_and_decode_are_the_references(name: str, exported: Export) -> None:
    """Whatever the length of the chunks that a prompt goes in."""
    model = exported(name, "f32", weights_order="panels")
    for chunk in (1, 7, 512):
        own = Runner(model.folder, ON_CPU, prefill_chunk=chunk)
        cache, wanted = own.new_cache(), model.wanted(IDS[0, :60])
        assert_close(own.prefill(cache, IDS[:1, :40])[0], wanted[39], F32)
        assert_close(np.concatenate(decode_all(own, cache, IDS[:1, 40:60])), wanted[40:], F32)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
@pytest.mark.parametrize("lengths", [(9, 9), (3, 17, 5), (1, 64, 40)])
def test_batches_padded_on_the_left(name: str, lengths: tuple[int, ...], exported: Export) -> None:
    """Tokens of all rows go through the products side by side, and each row is as it would be alone."""
    model, longest = exported(name, "f32", weights_order="panels"), max(lengths)
    own = runner(model)
    ids, mask = np.full((len(lengths), longest), 7), np.zeros((len(lengths), longest), np.int64)
    for row, length in enumerate(lengths):
        ids[row, -length:], mask[row, -length:] = IDS[row, :length], 1
    cache = own.new_cache(batch_size=len(lengths))
    found = own.prefill(cache, ids, mask)
    for step in range(4):
        for row, length in enumerate(lengths):
            assert_close(found[row], model.wanted(IDS[row, : length + step])[-1], F32)
        following = np.array([[IDS[row, length + step]] for row, length in enumerate(lengths)])
        found = own.decode(cache, following)


def test_a_vocabulary_that_ends_inside_a_panel(tmp_path: Path) -> None:
    """There are logits of real ids only, and the last ids have their embedding."""
    write_checkpoint(tmp_path / "m", QWEN2 | {"vocab_size": 323})
    model = Exported(
        tmp_path / "m", export(tmp_path / "m", tmp_path / "out", weights_order="panels").folder, "f32"
    )
    own, ids = runner(model), np.array([[322, 320, 5, 321, 322]])
    cache = own.new_cache()
    found = own.prefill(cache, ids)
    assert found.shape == (1, 323)
    assert_close(found[0], model.wanted(ids[0])[-1], F32)
    findings = check_export(model.folder, SessionOptions(provider="cpu"), against=str(tmp_path / "m"))
    assert all(finding.ok for finding in findings)


def test_scores_and_greedy_choose_as_plain_decoding_does(exported: Export) -> None:
    """The score and greedy graphs are of the same matrices."""
    model = exported("qwen2", "f32", weights_order="panels")
    plain, ids = runner(model), IDS[:1, :20]
    scorer = plain.scorer()
    assert scorer is not plain
    scored = scorer.score(scorer.new_cache(), ids, 20)
    assert_close(scored[0], model.wanted(ids[0]), F32)
    cache = plain.new_cache()
    chosen = [int(plain.prefill(cache, ids).argmax())]
    for _ in range(12):
        chosen.append(int(plain.decode(cache, np.array([chosen[-1:]])).argmax()))
    device = runner(model, greedy_on_device=True)
    cache = device.new_cache()
    found = [int(device.prefill_greedy(cache, ids)[0])]
    for _ in range(12):
        found.append(int(device.decode_greedy(cache, np.array([found[-1:]]))[0]))
    assert found == chosen


def test_speculation_gives_the_ids_of_plain_greedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of one token and of several differ by less than the margin that speculation leaves."""
    folder = export("tiny", tmp_path / "out", weights_order="panels").folder
    plain, speculating = (load(folder, provider="cpu", threads=1, speculate=on) for on in (False, True))
    rng = np.random.default_rng(5)
    prompts = [(rng.integers(0, 2000, int(n)).tolist() * 3)[:40] for n in rng.integers(2, 30, 16)]
    counts = []
    score = speculating.runner.score
    monkeypatch.setattr(
        speculating.runner, "score", lambda *given: counts.append(found := score(*given)) or found
    )
    for prompt in prompts:
        ids = [
            [t.token_id for t in chat.generate(prompt, max_new_tokens=40)] for chat in (plain, speculating)
        ]
        assert ids[0] == ids[1]
    assert any(logits.shape[1] > 1 for logits in counts)


def test_the_context_grows_past_the_first_cache(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", QWEN2 | {"max_position_embeddings": 1200})
    model = Exported(
        tmp_path / "m", export(tmp_path / "m", tmp_path / "out", weights_order="panels").folder, "f32"
    )
    ids = np.random.default_rng(5).integers(0, 320, (1, 700))
    own = runner(model)
    cache = own.new_cache()
    own.prefill(cache, ids[:, :500])
    found = decode_all(own, cache, ids[:, 500:520])
    own.prefill(cache, ids[:, 520:690])
    found += decode_all(own, cache, ids[:, 690:])
    wanted = model.wanted(ids[0])
    assert_close(np.concatenate(found), np.concatenate([wanted[500:520], wanted[690:]]), F32)


@pytest.mark.parametrize("level", ["disabled", "basic", "extended", "all"])
def test_every_optimization_level_gives_the_same(level: str, exported: Export) -> None:
    """ONNX Runtime rewrites convolutions into these operators itself, and leaves ours as they are."""
    model = exported("qwen2", "f32", weights_order="panels")
    own = runner(model, optimization_level=level)
    cache = own.new_cache()
    found = [own.prefill(cache, IDS[:1, :30]), own.decode(cache, IDS[:1, 30:31])]
    assert_close(np.concatenate(found), model.wanted(IDS[0, :31])[-2:], F32)


def test_threads_share_the_work(exported: Export) -> None:
    model = exported("qwen2", "f32", weights_order="panels")
    found = []
    for threads in (1, 2, 5):
        own = runner(model, threads=threads)
        found.append(own.prefill(own.new_cache(), IDS[:1, :50]))
    assert_close(found[1], found[0], F32_ORDER)
    assert_close(found[2], found[0], F32_ORDER)


def test_prepacking_changes_nothing(exported: Export) -> None:
    """Panels are the kernels' own order, so that nothing is left to be packed."""
    model = exported("qwen2", "f32", weights_order="panels")
    found = [
        own.prefill(own.new_cache(), IDS[:1, :50])
        for own in (runner(model, prepack=True), runner(model, prepack=False))
    ]
    assert_close(found[0], found[1], EXACT)


def test_every_size_has_a_number_or_a_name(in_this_order: Path) -> None:
    """As test_graph_files has it of other exports."""
    for graph in read_manifest(in_this_order).graphs:
        proto = onnx.load(in_this_order / graph.file, load_external_data=False).graph
        sizes = [dim for value in proto.value_info for dim in value.type.tensor_type.shape.dim]
        assert all(dim.dim_param or dim.dim_value for dim in sizes), graph.file


@pytest.mark.parametrize("spelled", [("--weights-order", "panels"), ("--layout", "cpu")])
def test_an_option_asks_for_panels_in_both_spellings(
    spelled: tuple[str, str], checkpoint: Path, in_this_order: Path, tmp_path: Path
) -> None:
    """`--layout cpu` is the older one; the files are the same."""
    assert command("export", checkpoint, tmp_path / "out", *spelled).code == 0
    made, wanted = read_manifest(tmp_path / "out"), read_manifest(in_this_order)
    assert (made.layout, made.panel_rows, made.files) == ("plain", wanted.panel_rows, wanted.files)


# Which processor.


class Processor:
    """A session of the probe on a processor whose panels have so many rows; 0: one that computes something else."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def run(self, names: list[str], inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        assert names == [contract.PROBE_Y]
        x, panels = inputs[PROBE_X].ravel(), inputs[PROBE_WEIGHT].ravel()
        if not self.rows:
            return [np.zeros((1, 16, 1, 1), np.float32)]
        weight = panels.reshape(16 // self.rows, 16, self.rows).swapaxes(1, 2).reshape(16, 16)
        return [(weight @ x).reshape(1, 16, 1, 1)]


@pytest.mark.parametrize("rows", [8, 16])
def test_the_probe_tells_processors_apart(rows: int) -> None:
    assert panel_rows(Processor(rows)) == rows


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_the_probe_knows_no_other_processor(rows: int) -> None:
    """Panels of other sizes are no panels to it."""
    assert panel_rows(Processor(rows)) is None


def test_the_probe_agrees_with_the_processors_flags(in_this_order: Path) -> None:
    """Where the system lists the processor's instructions, they give the same number."""
    flags = Path("/proc/cpuinfo")
    if not flags.exists():
        pytest.skip("the system does not say what the processor can")
    wanted = 16 if " avx512f " in flags.read_text() else 8
    assert panel_rows(open_on_cpu(in_this_order / "probe.onnx")) == wanted
    assert read_manifest(in_this_order).panel_rows == wanted


def test_an_export_of_another_processor_is_refused(in_this_order: Path, tmp_path: Path) -> None:
    """The operator cannot know what order a matrix is in, and would compute with wrong numbers."""
    manifest = read_manifest(in_this_order)
    other = 24 - (manifest.panel_rows or 0)
    folder = shutil.copytree(in_this_order, tmp_path / "moved")
    write_manifest(folder, dataclasses.replace(manifest, panel_rows=other))
    line = refused(Runner, folder, ON_CPU, mentions=(folder, f"panels of {other} rows", ASKED))
    assert f"take panels of {manifest.panel_rows}" in line
    ran = command("run", folder, "--prompt-ids", "1,2")
    assert ran.error.endswith("without --weights-order panels")


def test_a_probe_that_is_another_graph_is_one_line(in_this_order: Path, tmp_path: Path) -> None:
    """The manifest may name another graph as its probe."""
    folder = shutil.copytree(in_this_order, tmp_path / "moved")
    manifest = read_manifest(folder)
    graphs = [
        dataclasses.replace(graph, file="grow.onnx") if graph.entry == "probe" else graph
        for graph in manifest.graphs
    ]
    write_manifest(folder, dataclasses.replace(manifest, graphs=tuple(graphs)))
    refused(Runner, folder, ON_CPU, mentions=("probe",))


def test_another_processors_damaged_export_is_none_for_this_one(in_this_order: Path, tmp_path: Path) -> None:
    """In a cache that machines share, the next export is looked for."""
    folder = shutil.copytree(in_this_order, tmp_path / "moved")
    (folder / "probe.onnx").write_bytes(b"")
    assert not panels.suits_processor(folder, read_manifest(folder))
    assert panels.suits_processor(in_this_order, read_manifest(in_this_order))


def test_panels_of_another_dtype_are_malformed(in_this_order: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(in_this_order, tmp_path / "moved")
    write_manifest(folder, dataclasses.replace(read_manifest(folder), dtype="bf16"))
    refused(read_manifest, folder, mentions=("in panels and in bf16",))


def test_another_kind_of_machine_cannot_export_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On other processors these kernels were never tried."""
    monkeypatch.setattr(panel_sizes.platform, "machine", lambda: "riscv64")
    refused_in_panels(checkpoint, tmp_path, "riscv64", ASKED)
    assert not (tmp_path / "out").exists()


def test_a_processor_without_such_kernels_cannot_export_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panel_sizes, "panel_rows", lambda probe: None)
    refused_in_panels(checkpoint, tmp_path, ASKED)


def test_only_the_cpu_runs_it(in_this_order: Path) -> None:
    refused(Runner, in_this_order, SessionOptions(provider="cuda"))
    assert Runner(in_this_order, SessionOptions(provider="auto")).provider == "cpu"


def test_an_export_without_panels_is_not_probed(exported: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other exports open no session for it."""
    opened: list[Path] = []
    original = open_graph.open_session

    def watched(path: Path, *arguments: Any, **options: Any) -> Any:
        opened.append(path)
        return original(path, *arguments, **options)

    monkeypatch.setattr("qwen_onnx.runners.runtime.panels.open_session", watched)
    Runner(exported("qwen2").folder, ON_CPU)
    assert opened == []
    Runner(exported("qwen2", "f32", weights_order="panels").folder, ON_CPU)
    assert [path.name for path in opened] == ["probe.onnx"]


# Exports made on the way.


def cached(cache: Path) -> list[str]:
    return sorted(path.name.split("--")[-2] for path in cache.iterdir())


def probe_finds(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """As on a processor of such panels; what it computes is then that of another."""
    monkeypatch.setattr(panel_sizes, "panel_rows", lambda probe: rows)
    monkeypatch.setattr(panels, "panel_rows", lambda probe: rows)


def test_run_makes_what_suits_this_processor(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the export in panels, for CUDA and other dtypes the plain one."""
    probe_finds(monkeypatch, 16)
    run = ("run", checkpoint, "--prompt-ids", "1,2", "--max-new-tokens", 3, "--cache-dir", tmp_path / "cache")
    first = command(*run, "--provider", "cpu")
    assert (first.code, cached(tmp_path / "cache")) == (0, ["f32-panels16"])
    again = command(*run, "--provider", "cpu")
    assert (again.code, again.out) == (0, first.out)
    assert "exporting" not in again.err
    monkeypatch.setattr(cli_run, "verify_provider", lambda *arguments: None)  # as if there were a GPU
    assert command(*run, "--provider", "cuda", "--dtype", "f32").code == 1
    assert cached(tmp_path / "cache") == ["f32", "f32-panels16"]
    command(*run, "--provider", "cpu", "--dtype", "int8")
    assert cached(tmp_path / "cache") == ["f32", "f32-panels16", "int8"]


def test_run_leaves_another_processors_export_alone(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a home folder that machines share, each of them runs what suits it."""
    run = ("run", checkpoint, "--prompt-ids", "1,2", "--max-new-tokens", 3, "--cache-dir", tmp_path / "cache")
    with monkeypatch.context() as other:
        probe_finds(other, 16)
        assert command(*run, "--provider", "cpu").code == 0
    probe_finds(monkeypatch, 8)
    ran = command(*run, "--provider", "cpu")
    assert (ran.code, cached(tmp_path / "cache")) == (0, ["f32", "f32-panels16"])


def test_run_goes_on_beside_a_damaged_export(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes a plain export beside it."""
    probe_finds(monkeypatch, 16)
    run = ("run", checkpoint, "--prompt-ids", "1,2", "--max-new-tokens", 3, "--cache-dir", tmp_path / "cache")
    assert command(*run, "--provider", "cpu").code == 0
    (made,) = (tmp_path / "cache").iterdir()
    (made / "probe.onnx").write_bytes(b"")
    ran = command(*run, "--provider", "cpu")
    assert (ran.code, cached(tmp_path / "cache")) == (0, ["f32", "f32-panels16"])


def test_run_makes_a_plain_export_where_panels_do_not_fit(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", QWEN2 | {"intermediate_size": 100})
    ran = command(
        "run", tmp_path / "m", "--prompt-ids", "1,2", "--max-new-tokens", 3, "--cache-dir", tmp_path / "cache",
        "--provider", "cpu",
    )  # fmt: skip
    assert (ran.code, cached(tmp_path / "cache")) == (0, ["f32"])


# What does not go together.


@pytest.mark.parametrize("dtype", ["f16", "bf16", "int8", "int4"])
def test_other_dtypes_are_refused(checkpoint: Path, tmp_path: Path, dtype: str) -> None:
    refused_in_panels(checkpoint, tmp_path, ASKED, "f32", dtype, dtype=dtype)


def test_portable_and_linked_exports_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    for options, mentions in (
        ({"target": "portable"}, (ASKED,)),
        ({"layout": "optimum"}, (ASKED,)),
        ({"link": True}, ("link", ASKED)),
    ):
        refused_in_panels(checkpoint, tmp_path, *mentions, **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        (
            "hidden_size",
            {"hidden_size": 36, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16},
        ),
        ("intermediate_size", {"intermediate_size": 100}),
        ("num_key_value_heads", {"num_key_value_heads": 1, "head_dim": 4}),
    ],
)
def test_sizes_that_fill_no_panel_are_refused(tmp_path: Path, name: str, sizes: dict[str, int]) -> None:
    """No panel holds rows of two matrices; a plain export is possible."""
    raw = QWEN2 | sizes
    write_checkpoint(tmp_path / "m", raw)
    refused_in_panels(tmp_path / "m", tmp_path, name, ASKED)
    export(tmp_path / "m", tmp_path / "plain")


def test_check_finds_a_number_that_was_changed(checkpoint: Path, tmp_path: Path) -> None:
    """`check` compares panels with the checkpoint, bit for bit."""
    folder = export(checkpoint, tmp_path / "out", weights_order="panels").folder
    findings = list(check_export(folder, SessionOptions(provider="cpu"), against=str(checkpoint)))
    assert all(finding.ok for finding in findings)
    path, place = (
        folder / WEIGHTS_FILE,
        read_header(folder / WEIGHTS_FILE)["model.layers.1.mlp.down_proj.weight"],
    )
    content = bytearray(path.read_bytes())
    content[place.offset + 41 * 4] ^= 1  # the lowest bit of one number
    path.write_bytes(content)
    manifest = read_manifest(folder)
    manifest.files[WEIGHTS_FILE], manifest.samples[WEIGHTS_FILE] = hash_file(path), sample(path)
    write_manifest(folder, manifest)
    findings = list(check_export(folder, SessionOptions(provider="cpu"), against=str(checkpoint)))
    assert [f.text.split(":")[1].split()[0] for f in findings if not f.ok] == [
        "model.layers.1.mlp.down_proj.weight"
    ]


def test_info_names_the_processors_it_is_for(in_this_order: Path) -> None:
    ran = command("info", in_this_order, "--graphs")
    rows = read_manifest(in_this_order).panel_rows
    assert f"panels of {rows} rows" in ran.out
    assert ran.out.count(f"only on processors for which probe.onnx finds panels of {rows} rows") == 5
