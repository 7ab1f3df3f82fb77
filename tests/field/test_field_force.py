"""`export --force` replaces what an earlier export is made of, and nothing that somebody put beside it (O2)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qwen_onnx import export
from qwen_onnx.contract.manifest import read_manifest
from qwen_onnx.exports.publish.staging import recover
from qwen_onnx.exports.publish.temporary_folders import temporary_name
from support.chats import copy_export, endless, endless_checkpoint
from support.command import command
from support.refusals import refused
from support.staging import NEW, OLD, manifest_of, publish, tree, write

pytestmark = pytest.mark.thorough


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "content", ["", "{}", "{", "[]", '{"format_version": 1}', '{"format_version": 3}', "x" * 99], ids=repr
)
def test_o2_a_folder_with_some_export_json_is_not_replaced(content: str, tmp_path: Path) -> None:
    write(tmp_path / "out", {"export.json": content, "thesis.tex": "years of work"})
    before = tree(tmp_path)
    line = command("export", "tiny", tmp_path / "out", "--force").error
    assert f"{tmp_path / 'out'}: not replaced" in line
    assert "remove it yourself" in line
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "name", ["notes.txt", ".hidden", "more/notes.txt", "1/export/export.json", "prefill.onnx.bak"]
)
def test_o2_what_a_user_put_into_an_export_stays(name: str, tmp_path: Path) -> None:
    out = copy_export(endless(), tmp_path / "out")
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).write_text("mine")
    before = snapshot(tmp_path)
    named = name if "/" not in name else name.split("/")[0] + "/"
    refused(export, endless_checkpoint(), out, force=True, mentions=(out, f"{named} in it", "move it away"))
    assert snapshot(tmp_path) == before
    (out / name).unlink()
    for folder in (out / name).parents:
        if folder != out and out in folder.parents:
            folder.rmdir()
    export(endless_checkpoint(), out, force=True, dtype="int8")
    assert read_manifest(out).dtype == "int8"


def test_o2_a_folder_or_a_link_in_the_place_of_a_file_is_not_the_file(tmp_path: Path) -> None:
    """What a hostile manifest lists need not be what it says."""
    write(tmp_path / "out", {"export.json": manifest_of("letters", "deep/photo")})
    write(tmp_path / "out" / "letters", {"to mother": "x"})
    write(tmp_path / "elsewhere", {"photo": "x"})
    refused(publish, tmp_path / "out", force=True, mentions=("letters/ in it",))
    (tmp_path / "out" / "letters" / "to mother").unlink()
    (tmp_path / "out" / "letters").rmdir()
    (tmp_path / "out" / "deep").symlink_to(tmp_path / "elsewhere")
    refused(publish, tmp_path / "out", force=True, mentions=("deep/ in it",))
    (tmp_path / "out" / "deep").unlink()
    write(tmp_path / "out" / "deep", {"photo": "x"})
    publish(tmp_path / "out", force=True)
    assert tree(tmp_path / "out") == NEW
    assert tree(tmp_path / "elsewhere") == {"photo": "x"}


def test_o2_what_systems_leave_behind_is_nobodys(tmp_path: Path) -> None:
    out = copy_export(endless(), tmp_path / "out")
    (out / ".DS_Store").write_text("x")
    write(out / "__pycache__", {"a.pyc": "x"})
    export(endless_checkpoint(), out, force=True)
    assert not (out / ".DS_Store").exists()


@pytest.mark.parametrize(
    "name", ["2/model.py", "1/labels.txt", "1/export/notes.txt", "README", "config.pbtxt", "1/model.py"]
)
def test_o2_a_model_of_triton_is_replaced_as_it_was_written(name: str, tmp_path: Path) -> None:
    """config.pbtxt is there to be edited."""
    out = tmp_path / "repository"
    made = export(endless_checkpoint(), out, layout="triton").folder
    model = made.parents[1]
    export(endless_checkpoint(), out, layout="triton", force=True, dtype="int8")
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_text("# mine")
    before = snapshot(out)
    named = "2/" if name.startswith("2/") else name
    refused(export, endless_checkpoint(), out, layout="triton", force=True, mentions=(f"{named} in it",))
    assert snapshot(out) == before


def test_o2_a_displaced_export_with_other_files_is_kept(tmp_path: Path) -> None:
    """As a killed run, or somebody who names folders so, would leave it."""
    displaced = temporary_name(tmp_path / "out", "old")
    write(displaced, {**OLD, "mine": "x"})
    write(tmp_path / "out", NEW)
    [note] = recover(tmp_path / "out")
    assert note.startswith(f"kept {displaced.name}")
    assert tree(displaced)["mine"] == "x"


def test_o2_the_cache_removes_exports_alone(tmp_path: Path) -> None:
    ran = command("run", endless_checkpoint(), "-p", "Hi", "--cache-dir", tmp_path, "--dtype", "int8",
                  "--max-new-tokens", 1, "--provider", "cpu")  # fmt: skip
    assert ran.code == 0
    [cached] = tmp_path.iterdir()
    (cached / "notes.txt").write_text("mine")
    line = command("cache", "rm", "--all", "--cache-dir", tmp_path).error
    assert "notes.txt in it" in line
    assert (cached / "export.json").exists()
    (cached / "notes.txt").unlink()
    (cached / "export.json").write_text(json.dumps({"format_version": 1}))  # of an older version
    assert command("cache", "rm", "--all", "--cache-dir", tmp_path).code == 0
    assert not list(tmp_path.iterdir())
