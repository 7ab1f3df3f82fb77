"""Weights that are one number, and logits that are all equal: said by name, by export, check and run (K10)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import qwen_onnx
from qwen_onnx import export, load
from qwen_onnx.checkpoints.safetensors_file import read_header
from qwen_onnx.errors import EqualLogitsError
from qwen_onnx.runners.model.logits_model import LogitsModel
from support.chats import copy_export, endless, write_chat_checkpoint
from support.command import command
from support.damage import forge, poke
from support.refusals import refused

pytestmark = pytest.mark.thorough

CPU = ("--provider", "cpu", "--threads", 1)
ESSENTIAL = ["model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"]


def zeroed(folder: Path, *names: str, number: float = 0.0, **overrides: object) -> Path:
    """A checkpoint in which these tensors are one number."""
    write_chat_checkpoint(folder, **overrides)
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    for name in names:
        tensors[name] = np.full_like(tensors[name], number)
    safetensors.numpy.save_file(tensors, path, {"format": "pt"})
    return folder


@pytest.mark.parametrize("dtype", ["f32", "f16", "int8", "int4"])
@pytest.mark.parametrize("name", ESSENTIAL)
def test_k10_export_refuses_a_model_without_a_norm_embedding_or_head(
    name: str, dtype: str, tmp_path: Path
) -> None:
    model = zeroed(tmp_path / "model", name, tie_word_embeddings=False)
    refused(export, model, tmp_path / "out", dtype=dtype, mentions=(f"{name} all 0", "check=False"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("dtype", ["f32", "f16", "int8", "int4"])
@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_k10_check_names_it_and_a_run_ends_with_exit_1(name: str, dtype: str, tmp_path: Path) -> None:
    model = zeroed(tmp_path / "model", name, tie_word_embeddings=False)
    assert command("export", model, tmp_path / "out", "--dtype", dtype, "--no-check").code == 0
    checked = command("check", tmp_path / "out", *CPU[:2])
    assert checked.code == 1
    zeros = 2 if (name, dtype) == ("lm_head.weight", "int4") else 1  # and the zero points of its blocks
    assert checked.out.startswith(f"MISMATCH: weights.safetensors: {zeros} tensors that are one number: ")
    assert name.removesuffix("weight") in checked.out
    assert "all logits are equal" in checked.err
    ran = command("run", tmp_path / "out", "-p", "Hello", *CPU)
    assert "all logits are equal" in ran.error
    assert "all logits are equal" in command("run", tmp_path / "out", "--prompt-ids", "1,2", *CPU).error


def test_k10_the_bundled_model_without_its_norm(tmp_path: Path) -> None:
    """The list's own input."""
    model = tmp_path / "model"
    shutil.copytree(Path(qwen_onnx.__file__).parent / "tiny", model)
    tensors = safetensors.numpy.load_file(model / "model.safetensors")
    tensors["model.norm.weight"][:] = 0
    safetensors.numpy.save_file(tensors, model / "model.safetensors", {"format": "pt"})
    assert "model.norm.weight all 0" in command("export", model, tmp_path / "out").error


@pytest.mark.parametrize(
    ("name", "number", "said"),
    [
        ("model.layers.1.mlp.down_proj.weight", 0.0, "model.layers.1.mlp.down_proj.weight all 0"),
        ("model.layers.0.self_attn.q_proj.weight", 0.5, "model.layers.0.self_attn.q_proj.weight all 0.5"),
        ("model.layers.2.input_layernorm.weight", 0.0, "model.layers.2.input_layernorm.weight all 0"),
    ],
)
def test_k10_a_layer_of_one_number_is_a_note(name: str, number: float, said: str, tmp_path: Path) -> None:
    """Models that were made deeper have layers of zeros, and answer."""
    exported = export(zeroed(tmp_path / "model", name, number=number), tmp_path / "out")
    assert [note for note in exported.notes if said in note]
    checked = command("check", tmp_path / "out", *CPU[:2])
    assert checked.code == 0
    assert f"weights.safetensors: 1 tensors that are one number: {said}" in checked.err


def test_k10_biases_of_zeros_and_norms_of_ones_are_no_news(tmp_path: Path) -> None:
    model = zeroed(tmp_path / "model", "model.layers.0.self_attn.q_proj.bias")
    zeroed_norms = zeroed(tmp_path / "ones", "model.layers.0.input_layernorm.weight", number=1.0)
    for folder in (model, zeroed_norms):
        assert export(folder, tmp_path / f"{folder.name}-out").notes == ()


def test_k10_one_number_is_seen_wherever_the_other_stands(tmp_path: Path) -> None:
    """Only a last number that differs makes it a tensor like others; zeros have two signs."""
    values = np.zeros((300, 200), np.float32)
    values[::2] = -0.0
    other = values.copy()
    other[-1, -1] = 1e-30
    ones = np.ones(3, np.float16)
    not_numbers = np.full((2, 2), np.nan, np.float32)
    tensors = {"a": values, "b": other, "c": ones, "d": not_numbers, "e": np.empty(0, np.float32)}
    safetensors.numpy.save_file(tensors, tmp_path / "x.safetensors")
    found = {name: tensor.only_number() for name, tensor in read_header(tmp_path / "x.safetensors").items()}
    assert found == {"a": 0.0, "b": None, "c": 1.0, "d": None, "e": None}


def muted(folder: Path, change: Callable[[np.ndarray], np.ndarray]) -> Path:
    """An export whose final norm was changed afterwards."""
    copy_export(endless(), folder)
    poke(folder, "model.norm.weight", change)
    forge(folder)
    return folder


@pytest.mark.parametrize("greedy_on_device", [False, True])
def test_k10_every_way_to_an_answer_says_so(greedy_on_device: bool, tmp_path: Path) -> None:
    chat = load(
        muted(tmp_path / "out", np.zeros_like), provider="cpu", threads=1, greedy_on_device=greedy_on_device
    )
    with pytest.raises(EqualLogitsError, match="all logits are equal"):
        list(chat.generate([1, 2, 3], max_new_tokens=2))
    if not greedy_on_device:
        with pytest.raises(EqualLogitsError):
            list(chat.generate_batch([[1, 2], [3]], max_new_tokens=2))
        with pytest.raises(EqualLogitsError):
            chat.score([1, 2, 3])


def test_k10_logits_that_differ_in_one_place_are_logits() -> None:
    """The first two may well be equal."""

    class OneRow:
        def __init__(self, row: list[float]) -> None:
            self.row = np.array([row], np.float32)

        def verdict(self) -> bool:
            model = LogitsModel(None, vocab_size=self.row.shape[1], context_length=8)  # type: ignore[arg-type]
            try:
                model._usable(NoCache(), self.row)  # type: ignore[arg-type]
            except EqualLogitsError:
                return False
            return True

    class NoCache:
        def renew(self) -> None:
            pass

    verdicts = {
        (1.0, 1.0, 1.0): False, (0.0, -0.0): False, (1.0, 1.0, 2.0): True, (2.0, 1.0, 1.0): True, (1.0,): True,
    }  # fmt: skip
    assert {row: OneRow([*row]).verdict() for row in verdicts} == verdicts
