"""Checkpoint folders that are written oddly, and whether their exports compute what the plain ones say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from qwen_onnx.checkpoints.config import parse_config
from qwen_onnx.reference import reference_logits
from qwen_onnx.runners.model.runner import Runner
from support.checkpoints import RawConfig
from support.command import command
from support.exports import IDS, ON_CPU
from support.tolerances import F32, assert_close

Arrays = dict[str, np.ndarray]
TOKENS = 24


def write(folder: Path, raw: RawConfig, tensors: Arrays, **files: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def export(folder: Path, *options: str) -> tuple[np.ndarray, list[str]]:
    """The export's logits after each of some tokens, from the last of a prompt on; and the notes."""
    ran = command("export", folder, folder.parent / "out", "--force", *options)
    assert ran.code == 0, ran.err
    runner = Runner(folder.parent / "out", ON_CPU)
    cache, logits = runner.new_cache(), []
    for token in IDS[0, :TOKENS]:
        logits.append(runner.decode(cache, np.array([[token]]))[0])
    return np.stack(logits), [line for line in ran.err.splitlines() if line.startswith("note: ")]


def wanted(raw: RawConfig, tensors: Arrays) -> np.ndarray:
    """The reference's logits of the checkpoint as it would be published: the usual names, nothing left over."""
    return reference_logits(parse_config(raw), tensors.__getitem__, IDS[0, :TOKENS])


def check_reference(folder: Path, raw: RawConfig, tensors: Arrays) -> list[str]:
    """The export and `check --against` compute what the plain checkpoint says; returns the notes."""
    logits, notes = export(folder)
    assert_close(logits, wanted(raw, tensors), F32)
    ran = command("check", folder.parent / "out", "--against", folder, "--provider", "cpu")
    assert (ran.code, "OK" in ran.out) == (0, True), ran.err
    return notes


def theirs(folder: Path) -> np.ndarray:
    """What transformers computes of the folder."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return np.asarray(model.eval()(torch.tensor(IDS[:1, :TOKENS])).logits[0].numpy())
