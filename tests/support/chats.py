"""Exports that can chat, each made once per test run: of the bundled model, and of random weights."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from qwen_onnx import export
from support.checkpoints import QWEN2, write_checkpoint
from support.damage import forge, poke
from support.text_fixtures import QWEN25_LIKE, write_folder

ENDLESS_CONTEXT = 4096


def tiny(dtype: str = "f32") -> Path:
    """The bundled model. To be read only: everyone gets the same folder."""
    return _exported("tiny", dtype)


def endless(dtype: str = "f32") -> Path:
    """Random weights that end an answer by chance only, and say broken characters too. To be read only."""
    return _exported(endless_checkpoint(), dtype)


@functools.cache
def endless_checkpoint() -> Path:
    return write_chat_checkpoint(_scratch() / "endless", max_position_embeddings=ENDLESS_CONTEXT)


def write_chat_checkpoint(
    folder: Path,
    *,
    seed: int = 0,
    template: str | None = QWEN25_LIKE,
    **overrides: Any,
) -> Path:
    """Random weights with a tokenizer and, unless it is None, a chat template."""
    # Rows beyond the tokenizer's ids, as published checkpoints have them.
    write_checkpoint(folder, {**QWEN2, "vocab_size": 400, **overrides}, seed=seed)
    return write_folder(
        folder, {"tokenizer_config.json": {"eos_token": "<|im_end|>", "chat_template": template}}
    )


def poisoned(folder: Path) -> Path:
    """An export in which token 77, and no other, makes what is no number."""
    write_chat_checkpoint(folder / "checkpoint", tie_word_embeddings=False)
    made = export(folder / "checkpoint", folder / "export").folder

    def poison(weights: np.ndarray) -> np.ndarray:
        weights[77] = np.inf
        return weights

    poke(made, "model.embed_tokens.weight", poison)
    forge(made)
    return made


def copy_export(source: Path, target: Path) -> Path:
    """An export of one's own, to be damaged."""
    shutil.copytree(source, target)
    return target


@functools.cache
def _exported(model: str | Path, dtype: str) -> Path:
    return export(model, _scratch() / f"{Path(model).name}-{dtype}", dtype=dtype).folder


@functools.cache
def _scratch() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="qwen-onnx-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
