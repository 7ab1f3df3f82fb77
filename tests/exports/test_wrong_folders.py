"""An export in the place of a checkpoint, an export inside another, and a loop over a graph that it is not for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from qwen_onnx import export
from support.chats import copy_export, endless, tiny
from support.command import command
from support.refusals import refused

LOOP = Path(__file__).parents[2] / "docs" / "embedding" / "static_loop.py"


def test_an_export_is_no_checkpoint(tmp_path: Path) -> None:
    """The line says so, and what it was made from; nothing is written."""
    for asked in (
        ("export", tiny(), tmp_path / "out"),
        ("check", tiny(), "--against", tiny(), "--provider", "cpu"),
    ):
        line = command(*asked).error
        assert f"{tiny()}: an export (export.json), where a checkpoint is wanted" in line
        assert line.endswith("that it was made from, 'tiny'")
    assert not (tmp_path / "out").exists()


def test_linked_weights_are_still_a_checkpoint(tmp_path: Path) -> None:
    """The export has the checkpoint's own files under their names."""
    (source := tmp_path / "source").mkdir()
    checkpoint = endless().parent / "endless"
    for path in checkpoint.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    linked = export(source, tmp_path / "linked", link=True).folder
    assert (linked / "model.safetensors").exists()
    export(linked, tmp_path / "out")


@pytest.mark.parametrize("options", [("--layout", "triton"), ("--layout", "triton", "--force"), ()])
def test_an_export_goes_into_no_other(options: tuple[str, ...], tmp_path: Path) -> None:
    """A repository of Triton's is a folder of models: an export that lies there is not one."""
    outer = copy_export(tiny(), tmp_path / "outer")
    before = sorted(outer.rglob("*"))
    out = outer if options else outer / "inner"
    line = command("export", "tiny", out, *options).error
    assert line.endswith(f"lies inside the export {outer}; choose another place")
    assert sorted(outer.rglob("*")) == before
    refused(export, "tiny", outer / "a" / "b", mentions=(f"lies inside the export {outer}",))


def test_a_repository_takes_several_models(tmp_path: Path) -> None:
    for name in ("tiny", endless().parent / "endless"):
        export(name, tmp_path / "repository", layout="triton")
    export("tiny", tmp_path / "repository", layout="triton", force=True)


def test_the_loop_of_the_docs_says_which_graphs_it_is_for() -> None:
    ran = subprocess.run(
        [sys.executable, LOOP, tiny("int4"), "Hi", "3"], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr == (
        f"{tiny('int4')}: a graph of the lowering contrib, this loop is for static: export f32, f16 or bf16\n"
    )
