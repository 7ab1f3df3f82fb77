"""L10 and L11: positions and dtypes in every spelling that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_onnx.checkpoints.config import config_notes, parse_config
from qwen_onnx.contract import EXPORT_DTYPES
from qwen_onnx.contract.manifest import read_manifest
from qwen_onnx.errors import UserError
from qwen_onnx.exports.options import ExportOptions
from qwen_onnx.reference import reference_logits
from qwen_onnx.runners.model.runner import Runner
from support.checkpoints import QWEN2, RawConfig, write_checkpoint
from support.command import command
from support.exports import IDS, ON_CPU
from support.field_runs import exported_as
from support.tolerances import F32, TRANSFORMERS_F32, assert_close

pytestmark = pytest.mark.thorough

TOKENS = 97
"""Three times the original length."""
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
DEFAULT = {"rope_type": "default", "rope_theta": 10_000.0}
PLAIN: RawConfig = {**QWEN2, "max_position_embeddings": 32, "rope_scaling": YARN}
NO_THETA = {key: value for key, value in PLAIN.items() if key != "rope_theta"}


def yarn(**more: Any) -> RawConfig:
    return {**PLAIN, "rope_scaling": {**YARN, **more}}


SAME: list[tuple[RawConfig, str]] = [
    ({**PLAIN, "rope_parameters": DEFAULT}, "rope_scaling is used"),
    ({**NO_THETA, "rope_parameters": DEFAULT}, "rope_scaling is used"),
    ({**PLAIN, "rope_parameters": {"rope_type": "default"}}, "rope_scaling is used"),
    ({**PLAIN, "rope_scaling": {}, "rope_parameters": YARN}, ""),
    (yarn(original_max_position_embeddings=32.0), ""),
    ({**PLAIN, "max_position_embeddings": 32.0, "vocab_size": 320.0, "num_hidden_layers": 3.0}, ""),
    (yarn(attn_factor=1.0, extrapolation_factor=1, finetuned=True), ""),
    (yarn(attn_factor=0.5), "attn_factor 0.5 is passed over"),
    (yarn(attention_factor=None, mscale=None), ""),
    (yarn(beta_fast=0, beta_slow=0), ""),
    (yarn(truncate=True), ""),
]
OTHERS: list[RawConfig] = [
    yarn(attention_factor=1.25, attn_factor=1.0),
    yarn(truncate=None, beta_fast=16),
    yarn(truncate=False, beta_fast=16),
    {**PLAIN, "rope_parameters": YARN, "rope_scaling": {"type": "linear", "factor": 4}},
    {**PLAIN, "rope_scaling": {"type": "linear", "factor": 2.5, "original_max_position_embeddings": 32}},
]


@pytest.mark.parametrize(("raw", "note"), SAME, ids=str)
def test_l10_yarn_in_every_spelling_is_one_model(raw: RawConfig, note: str) -> None:
    assert parse_config(raw) == parse_config(PLAIN)
    (*notes,) = config_notes(raw)
    assert len(notes) == bool(note)
    assert note in " ".join(notes)


def test_l10_truncate_null_is_false_as_in_transformers() -> None:
    assert parse_config(yarn(truncate=None)) == parse_config(yarn(truncate=False)) != parse_config(PLAIN)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({**PLAIN, "rope_parameters": {**YARN, "factor": 2.0}}, "disagree"),
        ({**NO_THETA, "rope_parameters": {**DEFAULT, "rope_theta": 1e6}}, "rope_theta 1000000.0"),
        ({**PLAIN, "rope_parameters": {**DEFAULT, "rope_theta": 1e6}}, "write it into rope_scaling"),
        (yarn(original_max_position_embeddings=32.5), "original_max_position_embeddings"),
        (yarn(attention_factor="1"), "attention_factor"),
        ({**PLAIN, "vocab_size": 320.5}, "vocab_size"),
    ],
)
def test_l10_what_cannot_be_meant_is_refused(raw: RawConfig, says: str) -> None:
    """A base that transformers would lose without a word is written where it counts, by whoever knows it."""
    with pytest.raises(UserError, match=says):
        parse_config(raw)


def test_l10_the_export_computes_it(tmp_path: Path) -> None:
    """The logits beyond the original length are those of the plain spelling."""
    raw = {**NO_THETA, "rope_parameters": DEFAULT}
    raw["rope_scaling"] = {**YARN, "original_max_position_embeddings": 32.0, "attn_factor": 2.0}
    tensors = write_checkpoint(tmp_path / "m", raw)
    runner = Runner(exported_as(tmp_path / "m", tmp_path / "out"), ON_CPU)
    found = runner.prefill(runner.new_cache(), IDS[:1, :TOKENS])[0]
    assert_close(found, reference_logits(parse_config(PLAIN), tensors.__getitem__, IDS[0, :TOKENS])[-1], F32)


@pytest.mark.transformers
def test_l10_transformers_computes_the_same(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    import torch
    from transformers import AutoModelForCausalLM

    loaded = [raw for raw, _ in SAME if not isinstance(raw["max_position_embeddings"], float)]
    for number, raw in enumerate([*loaded, *OTHERS[:3], OTHERS[4]]):
        folder = tmp_path / str(number)
        tensors = write_checkpoint(folder, raw)
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            theirs = model.eval()(torch.tensor(IDS[:1, :TOKENS])).logits[0].numpy()
        ours = reference_logits(parse_config(raw), tensors.__getitem__, IDS[0, :TOKENS])
        assert_close(np.asarray(ours, np.float32), theirs, TRANSFORMERS_F32)


SPELLINGS = {
    "f32": ("F32", "float32", "fp32", "Float", "torch.float32"),
    "f16": ("F16", "float16", "fp16", "half", "FP16", "torch.float16"),
    "bf16": ("BF16", "bfloat16", "Bfloat16", "torch.bfloat16"),
    "int8": ("INT8", "Int8"),
    "int4": ("INT4",),
}


def test_l11_dtypes_are_known_by_their_other_names() -> None:
    assert SPELLINGS.keys() == set(EXPORT_DTYPES)
    for dtype, others in SPELLINGS.items():
        for spelling in (dtype, *others):
            assert ExportOptions(dtype=spelling).dtype == dtype
    for wrong in ("fp8", "float64", "", "torch.", "f32 f16", "int"):
        with pytest.raises(UserError, match="one of f32, f16, bf16, int8, int4 wanted"):
            ExportOptions(dtype=wrong)


def test_l11_export_and_run_take_them(tmp_path: Path) -> None:
    """`run` finds what it exported under another name of the same dtype."""
    assert command("export", "tiny", tmp_path / "out", "--dtype", "Half").code == 0
    assert read_manifest(tmp_path / "out").dtype == "f16"
    question = ("-p", "What is 3 plus 4?", "--provider", "cpu", "--cache-dir", tmp_path / "cache")
    first = command("run", "tiny", *question, "--dtype", "FP32")
    assert (first.code, first.out, "exporting" in first.err) == (0, "3 plus 4 is 7.\n", True)
    assert "exporting" not in command("run", "tiny", *question, "--dtype", "float32").err
    assert command("run", tmp_path / "out", *question[:4], "--dtype", "float16").out == "3 plus 4 is 7.\n"


@pytest.mark.parametrize("spelling", ["fp16", "float16", "half", "F32", "torch.bfloat16", "auto", 5])
def test_l11_the_config_may_spell_its_dtype_as_it_likes(spelling: Any, tmp_path: Path) -> None:
    """The tensors say what they are."""
    write_checkpoint(tmp_path / "m", QWEN2)
    files = read_manifest(exported_as(tmp_path / "m", tmp_path / "plain")).files
    for key in ("dtype", "torch_dtype"):
        (tmp_path / "m" / "config.json").write_text(json.dumps({**QWEN2, key: spelling}))
        found = read_manifest(exported_as(tmp_path / "m", tmp_path / "out", force=True)).files
        assert {**found, "config.json": None} == {**files, "config.json": None}
