"""What an export refuses to write to: nobody's files are deleted, and nothing that is needed goes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qwen_onnx.errors import UserError
from qwen_onnx.exports.publish.staging import refuse_output
from support.staging import OLD, publish, tree, under, write


def refused(out: Path, said: str, *, force: bool = True, keep: Path | None = None) -> None:
    for refuse in (refuse_output, publish):
        with pytest.raises(UserError, match=said) as caught:
            refuse(out, force=force, keep=keep)
        assert "\n" not in str(caught.value)


def test_an_earlier_export_without_force(tmp_path: Path) -> None:
    write(tmp_path / "out", OLD)
    refused(tmp_path / "out", "holds an earlier export", force=False)
    refuse_output(tmp_path / "out", force=True)
    assert tree(tmp_path) == under("out", OLD)


@pytest.mark.parametrize("force", [False, True])
def test_any_other_folder_even_with_force(tmp_path: Path, force: bool) -> None:
    write(tmp_path / "out", {"thesis.tex": "x"})
    refused(tmp_path / "out", r"not an earlier export \(export.json is missing\)", force=force)
    assert tree(tmp_path) == {"out/thesis.tex": "x"}


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    refused(tmp_path / "out", "a file; choose another name")
    refused(tmp_path / "out" / "below", "nothing can be created in")
    assert tree(tmp_path) == {"out": "x"}


@pytest.mark.parametrize("where", [".", "..", "../..", "../../cwd"])
def test_the_current_folder_and_what_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    here = tmp_path / "cwd" / "below"
    write(here, OLD)
    write(tmp_path / "cwd", OLD)
    monkeypatch.chdir(here)
    refused(Path(where), "is or contains the current folder")


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "home", OLD)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    refused(tmp_path / "home", "is or contains your home folder")


def test_the_model_and_what_holds_it_and_what_it_holds(tmp_path: Path) -> None:
    model = tmp_path / "models" / "small"
    write(model, OLD)
    write(tmp_path / "models", OLD)
    (tmp_path / "link").symlink_to(model)
    before = tree(tmp_path)
    for out in (model, tmp_path / "models", tmp_path / "link"):
        refused(out, "is or contains the model's folder", keep=tmp_path / "link")
    for out in (model / "out", tmp_path / "link" / "out"):
        refused(out, "lies inside the model's folder", keep=model)
    assert tree(tmp_path) == before


def test_a_root() -> None:
    refused(Path("/"), "root or mount point")


def test_a_mount_point_which_no_rename_can_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path / "out")
    refused(tmp_path / "out", "root or mount point; choose a folder inside it")
    refuse_output(tmp_path / "out" / "below")


def test_a_place_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    refused(tmp_path / "a" / "out", f"nothing can be created in {tmp_path}")
    assert tree(tmp_path) == {}


def test_a_loop_of_links(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("out")
    with pytest.raises(UserError):
        publish(tmp_path / "out")


def test_a_name_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    """ONNX Runtime could not open a file in it."""
    with pytest.raises(UserError, match="not a UTF-8 name"):
        refuse_output(tmp_path / "bad\udcff")
