"""`qwen-onnx export`, and the exports that `run MODEL` makes on the way: once, in a cache that can be emptied."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from qwen_onnx.contract.manifest import read_manifest
from qwen_onnx.exports import exporter
from support.chats import endless_checkpoint
from support.command import command

HI = ("-p", "Hi", "--max-new-tokens", "2", "--provider", "cpu")


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_summary_is_one_screen(dtype: str, tmp_path: Path) -> None:
    """It names the folder, each file with its size, what each graph is for, and the command to try next."""
    out = tmp_path / "out"
    ran = command("export", endless_checkpoint(), out, "--dtype", dtype)
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert len(lines) <= 22
    assert lines[0] == f"{out}: endless as {dtype}, 4096 positions"
    manifest = read_manifest(out)
    for name, spec in manifest.files.items():
        assert any(line.split()[:2] == [f"{spec.size:,}", name] for line in lines)
        assert (out / name).stat().st_size == spec.size
    for graph in manifest.graphs:
        role = rf"{re.escape(graph.file)} +{graph.entry} for {' and '.join(graph.providers)}$"
        assert re.search(role, ran.out, re.MULTILINE)
    assert re.fullmatch(
        rf"made in [\d.]+ s(, peak memory \d+ MB)?; try: qwen-onnx run {re.escape(str(out))}", lines[-1]
    )
    assert {path.name for path in out.iterdir()} == {"export.json", *manifest.files}


def test_default_out_is_the_name_and_the_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("export", endless_checkpoint(), "--dtype", "f16").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["endless-f16"]


def test_an_export_is_replaced_by_force_only_and_nothing_else_ever(tmp_path: Path) -> None:
    out = tmp_path / "out"
    export = ("export", endless_checkpoint(), out)
    assert command(*export).code == 0
    made = (out / "export.json").read_bytes()
    line = command(*export, "--dtype", "f16").error
    assert str(out) in line
    assert "--force" in line
    assert (out / "export.json").read_bytes() == made
    assert command(*export, "--dtype", "f16", "--force").code == 0
    assert read_manifest(out).dtype == "f16"
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").touch()
    assert (
        "not an earlier export"
        in command("export", endless_checkpoint(), tmp_path / "photos", "--force").error
    )
    assert (tmp_path / "photos" / "a.jpg").exists()


def test_max_context_of_an_export(tmp_path: Path) -> None:
    assert command("export", endless_checkpoint(), tmp_path / "out", "--max-context", 64).code == 0
    assert read_manifest(tmp_path / "out").context_length == 64
    for wrong, words in (
        (0, "--max-context 0: a whole number of 1 or more wanted"),
        (4097, "--max-context 4097"),
    ):
        line = command("export", endless_checkpoint(), tmp_path / "other", "--max-context", wrong).error
        assert words in line
        assert ("4096" in line) == (wrong == 4097)
    assert not (tmp_path / "other").exists()


def test_run_of_a_model_exports_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run finds the export of the first."""
    run = ("run", endless_checkpoint(), *HI, "--cache-dir", tmp_path)
    first = command(*run)
    [folder] = tmp_path.iterdir()
    assert first.code == 0
    assert first.err.startswith(f"exporting endless as f32, once, to {folder}: ")
    assert len(first.err.splitlines()) == 1
    monkeypatch.setattr(exporter, "export_model", pytest.fail)
    monkeypatch.setattr("qwen_onnx.cli.progress.export_model", pytest.fail)
    assert command(*run) == (0, first.out, "")
    # The folder itself is an export like any other.
    assert command("run", folder, *HI) == (0, first.out, "")


def test_a_dtype_is_an_export_of_its_own_and_a_context_is_not(tmp_path: Path) -> None:
    """--dtype makes another export; --max-context is the runner's, and uses the one there is."""
    for options in ((), ("--dtype", "f16"), ("--max-context", "64")):
        assert command("run", endless_checkpoint(), *HI, *options, "--cache-dir", tmp_path).code == 0
    manifests = [read_manifest(folder) for folder in tmp_path.iterdir()]
    assert {(made.dtype, made.context_length) for made in manifests} == {
        ("f32", 4096), ("f16", 4096),
    }  # fmt: skip
    assert len(manifests) == 2


def test_cache_is_listed_and_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN_ONNX_CACHE", str(tmp_path))
    assert command("cache", "ls") == (0, "", f"no exports in {tmp_path}\n")
    assert command("cache", "ls", "--json") == (0, "[]\n", "")
    for dtype in ("f32", "f16"):
        assert command("run", endless_checkpoint(), *HI, "--dtype", dtype).code == 0
    listed = json.loads(command("cache", "ls", "--json").out)
    assert [entry.keys() for entry in listed] == [{"name", "model", "dtype", "bytes"}] * 2
    assert {(entry["model"], entry["dtype"]) for entry in listed} == {("endless", "f32"), ("endless", "f16")}
    for entry in listed:
        [folder] = tmp_path.glob(f"endless--*--{entry['dtype']}*")
        assert entry["bytes"] == sum(file.stat().st_size for file in folder.iterdir())
    lines = command("cache", "ls").out.splitlines()
    assert [line.split() for line in lines] == [[f"{entry['bytes']:,}", entry["name"]] for entry in listed]

    name = listed[0]["name"]
    assert "'nonsense' is no export in" in command("cache", "rm", name, "nonsense").error
    assert "--all" in command("cache", "rm").error
    assert len(list(tmp_path.iterdir())) == 2
    ran = command("cache", "rm", name)
    assert (ran.code, ran.out, ran.err) == (0, "", f"removed 1 export, {listed[0]['bytes']:,} bytes\n")
    assert [name.split("--")[0] for name in map(str, (path.name for path in tmp_path.iterdir()))] == [
        "endless"
    ]
    assert command("cache", "ls").out.split()[1] == listed[1]["name"]
    assert command("cache", "rm", "--all").err.startswith("removed 1 export, ")
    none = command("cache", "ls")
    assert (none.out, none.err) == ("", f"no exports in {tmp_path}\n")
    assert list(tmp_path.iterdir()) == []


def test_cache_dir_wins_over_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN_ONNX_CACHE", str(tmp_path / "variable"))
    assert command("run", endless_checkpoint(), *HI, "--cache-dir", tmp_path / "option").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["option"]
    assert command("cache", "ls") == (0, "", f"no exports in {tmp_path / 'variable'}\n")
    assert command("cache", "ls", "--cache-dir", tmp_path / "option").out != ""
