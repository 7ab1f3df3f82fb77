"""`qwen-onnx check`: one verdict line; good exports pass in each dtype, each kind of damage is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from qwen_onnx.checks import golden as golden_module
from qwen_onnx.contract.manifest import Golden, read_manifest
from support.chats import copy_export, endless, endless_checkpoint, tiny, write_chat_checkpoint
from support.command import Ran, command
from support.damage import WEIGHTS, change_manifest, edit_graph, forge, perturbed, poke

GOOD = "OK: the export is what it should be\n"
DOWN = "model.layers.1.mlp.down_proj.weight"


def check(folder: Path, *arguments: object) -> Ran:
    ran = command("check", folder, *arguments, "--provider", "cpu")
    assert len(ran.out.splitlines()) == 1, "one verdict line"
    assert (ran.code, ran.out.startswith("OK: ")) in ((0, True), (1, False))
    assert ran.err.count("FAILED") == (ran.code == 1)
    return ran


@pytest.fixture
def checked(tmp_path: Path) -> Path:
    """An f32 export of one's own, its golden ids recorded."""
    folder = copy_export(endless(), tmp_path / "export")
    assert check(folder).code == 0
    return folder


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_good_exports_pass(dtype: str, tmp_path: Path) -> None:
    """The first check records golden ids where there are none; later ones compare with them."""
    folder = copy_export(endless(dtype), tmp_path / "export")
    first = check(folder)
    assert first.out == GOOD
    assert "golden ids: 32 recorded on the CPU provider" in first.err
    assert "nothing to compare with yet" in first.err
    golden = read_manifest(folder).golden
    assert golden is not None
    assert len(golden.token_ids) == len(golden.margins) == 32
    second = check(folder, "--against", endless_checkpoint())
    assert second.out == GOOD
    assert "golden ids: 32 of 32 equal on cpu" in second.err
    assert f"weights: the checkpoint's, as {dtype}, bit for bit" in second.err
    assert "top-1 agrees on 100%" in second.err
    assert read_manifest(folder).golden == golden


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_the_bundled_model_brings_its_golden_ids(dtype: str) -> None:
    ran = check(tiny(dtype), "--against", "tiny")
    assert ran.out == GOOD
    assert "golden ids: 32 of 32 equal on cpu" in ran.err


def test_golden_ids_that_cannot_be_kept_are_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The export may lie in a folder that can only be read."""

    def refuse(folder: Path, manifest: Any) -> None:
        raise PermissionError(13, "Permission denied", str(folder / "export.json"))

    monkeypatch.setattr(golden_module, "write_manifest", refuse)
    ran = check(endless())
    assert ran.out == GOOD
    assert "not recorded (Permission denied)" in ran.err


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        (WEIGHTS, flip_a_byte, "was changed, its sha256 differs"),
        ("decode.onnx", flip_a_byte, "was changed, its sha256 differs"),
        ("tokenizer.json", flip_a_byte, "was changed, its sha256 differs"),
        (WEIGHTS, lambda path: path.write_bytes(path.read_bytes()[:-1]), "were written"),
        ("grow.onnx", Path.unlink, "is missing"),
        (WEIGHTS, Path.unlink, "is missing"),
    ],
)
def test_files_that_are_not_as_written(
    name: str, damage: Callable[[Path], Any], says: str, tmp_path: Path
) -> None:
    folder = copy_export(endless(), tmp_path / "export")
    damage(folder / name)
    ran = check(folder)
    assert ran.out.startswith(f"MISMATCH: files: {name} ")
    assert says in ran.out


def test_a_perturbed_layer_under_forged_hashes(checked: Path) -> None:
    """Golden ids find it, and with the checkpoint its weights are compared bit for bit."""
    poke(checked, DOWN, perturbed)
    forge(checked)
    ran = check(checked)
    assert "ok      files: " in ran.err
    assert ran.out.startswith("MISMATCH: golden ids: ")
    ran = check(checked, "--against", endless_checkpoint())
    assert ran.out == f"MISMATCH: weights: {DOWN} differs from the checkpoint's\n"


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_a_perturbed_layer_of_a_rounded_export(dtype: str, tmp_path: Path) -> None:
    folder = copy_export(endless(dtype), tmp_path / "export")
    assert check(folder).out.startswith("OK")  # and golden ids recorded
    poke(folder, DOWN, perturbed)
    forge(folder)
    assert check(folder).out.startswith("MISMATCH: golden ids: ")
    ran = check(folder, "--against", endless_checkpoint())
    assert ran.out == f"MISMATCH: weights: {DOWN} differs from the checkpoint's\n"


def epsilon_of_one(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name == "epsilon":
                attribute.f = 1.0


def type_of_another(graph: onnx.GraphProto) -> None:
    graph.node[0].op_type = "NoSuchOperator"


@pytest.mark.parametrize(
    ("edit", "says"),
    [(type_of_another, "MISMATCH: prefill.onnx: "), (epsilon_of_one, "MISMATCH: golden ids: ")],
)
@pytest.mark.thorough
def test_an_edited_graph_under_forged_hashes(
    edit: Callable[[onnx.GraphProto], None], says: str, checked: Path
) -> None:
    """A graph may be valid ONNX and still compute something else: its ids tell."""
    edit_graph(checked / "prefill.onnx", edit)
    forge(checked)
    ran = command("check", checked, "--against", endless_checkpoint(), "--provider", "cpu")
    assert ran.code == 1
    assert "FAILED" in ran.err
    ran = command("check", checked, "--provider", "cpu")
    assert ran.code == 1
    assert ran.out.startswith(says)


def test_a_graph_of_noise_under_forged_hashes(checked: Path) -> None:
    """What cannot be read at all is a mismatch like any other."""
    (checked / "prefill.onnx").write_bytes(b"\xff" * 100)
    forge(checked)
    ran = command("check", checked, "--provider", "cpu")
    assert ran.code == 1
    assert ran.out.startswith("MISMATCH: ")
    assert "prefill.onnx: not an ONNX file" in ran.out
    assert len(ran.out.splitlines()) == 1


def test_numbers_that_overflow(checked: Path) -> None:
    """NaN is within no bound, and chooses no token."""
    poke(checked, "model.norm.weight", lambda weights: weights * 1e38)
    forge(checked)
    assert "logits are not finite" in command("run", checked, "-p", "Hi", "--provider", "cpu").error
    ran = check(checked)
    assert ran.out.startswith("MISMATCH: the logits are not finite")


@pytest.mark.parametrize("step", [0, 17, 31])
def test_corrupted_golden_ids(step: int, checked: Path) -> None:
    golden = read_manifest(checked).golden
    assert golden is not None
    ids = list(golden.token_ids)
    ids[step] = (ids[step] + 1) % 300
    change_manifest(checked, golden=Golden(golden.prompt_ids, tuple(ids), golden.margins))
    said = check(checked).out
    assert said.startswith("MISMATCH: golden ids: ")
    assert said.endswith(": a mismatch; no less with all of ONNX Runtime's optimizations off\n")


def test_the_checkpoint_of_another_model(checked: Path, tmp_path: Path) -> None:
    other = write_chat_checkpoint(tmp_path / "other", seed=1, max_position_embeddings=4096)
    ran = check(checked, "--against", other)
    assert ran.out.startswith("MISMATCH: weights: ")
    assert ran.out.endswith(" differs from the checkpoint's\n")
    deeper = write_chat_checkpoint(tmp_path / "deeper", num_hidden_layers=4, max_position_embeddings=4096)
    assert "is not in the export" in check(checked, "--against", deeper).out
    ran = command("check", checked, "--against", "/nope", "--provider", "cpu")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.endswith("error: /nope: no such folder\n")


def test_perturbed_moves_each_number_by_a_hundredth() -> None:
    weights = np.zeros((50, 50))
    assert np.abs(perturbed(weights)).min() == np.abs(perturbed(weights)).max() == 1e-2
