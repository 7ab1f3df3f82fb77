"""Exports against transformers, which reads the same checkpoint folder: an opinion that is not our own.

The runner is asked for the logits after each token, transformers for all at once (eager attention, f32).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from qwen_onnx.runners.model.runner import Runner
from support.checkpoints import CONFIGS, QWEN2, RawConfig, write_checkpoint
from support.exports import IDS, ON_CPU, Exported, decode_all, export_checkpoint, export_random
from support.tolerances import F16, TRANSFORMERS_F32, Tolerance, assert_close

pytestmark = pytest.mark.transformers

QWEN2_9_3: RawConfig = {**QWEN2, "hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}
"""Odd head counts without biases on o, head_dim 8."""

TOKENS = 97
"""Three times the original length of the YaRN configurations."""


@pytest.fixture(autouse=True)
def _needs_transformers() -> None:
    pytest.importorskip("transformers", minversion="5.0")  # rope_parameters is a spelling of version 5


def transformers_logits(
    folder: Path, ids: np.ndarray, *, mask: np.ndarray | None = None, positions: np.ndarray | None = None
) -> np.ndarray:
    """f32 [B, S, V]."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # the matrices are tiny
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    given = {"attention_mask": mask, "position_ids": positions}
    tensors = {name: torch.tensor(array) for name, array in given.items() if array is not None}
    with torch.no_grad():
        return np.asarray(model.eval()(torch.tensor(ids), **tensors).logits.numpy())


def own_logits(
    model: Exported, ids: np.ndarray, *, mask: np.ndarray | None = None, prompt: int = 40
) -> np.ndarray:
    """f32 [B, S - prompt + 1, V]: after a prefill in chunks, and after each token decoded behind it."""
    runner = Runner(model.folder, ON_CPU, prefill_chunk=16)
    cache = runner.new_cache(batch_size=len(ids))
    first = runner.prefill(cache, ids[:, :prompt], None if mask is None else mask[:, :prompt])
    return np.stack([first, *decode_all(runner, cache, ids[:, prompt:])], axis=1)


def rounded_checkpoint(model: Exported, folder: Path) -> Path:
    """The weights as the export holds them, in f32, where transformers can compute with them."""
    folder.mkdir()
    (folder / "config.json").write_bytes((model.folder / "config.json").read_bytes())
    tensors = {
        name: tensor.astype(np.float32)
        for name, tensor in model.tensors.items()
        if not name.startswith("rotary.")
    }
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def check(found: np.ndarray, wanted: np.ndarray, tolerance: Tolerance) -> None:
    assert_close(found, wanted, tolerance)
    assert found.argmax(axis=-1).tolist() == wanted.argmax(axis=-1).tolist()


@pytest.mark.parametrize("name", [*CONFIGS, "qwen2_9_3"])
def test_f32_equals_transformers_at_every_position(name: str, tmp_path: Path) -> None:
    """Each configuration: grouped heads, tied and own heads, biases, norms on q and k, each kind of rope."""
    model = export_random(tmp_path, {**CONFIGS, "qwen2_9_3": QWEN2_9_3}[name])
    wanted = transformers_logits(model.checkpoint, IDS[:1, :TOKENS])
    check(own_logits(model, IDS[:1, :TOKENS], prompt=1), wanted, TRANSFORMERS_F32)
    # And what a prompt computes at once.
    check(own_logits(model, IDS[:1, :TOKENS], prompt=TOKENS), wanted[:, -1:], TRANSFORMERS_F32)


@pytest.mark.parametrize("lm_head", ["copy", "own"])
def test_untied_shards_in_f16(lm_head: Any, tmp_path: Path) -> None:
    """Weights in several files, and a head of its own."""
    raw = {**CONFIGS["qwen3_head_dim_48"], "tie_word_embeddings": False}
    write_checkpoint(tmp_path / "checkpoint", raw, dtype="F16", shards=3, lm_head=lm_head)
    model = export_checkpoint(tmp_path / "checkpoint", tmp_path / "export", "f32")
    wanted = transformers_logits(model.checkpoint, IDS[:1, :TOKENS])
    check(own_logits(model, IDS[:1, :TOKENS]), wanted[:, 39:], TRANSFORMERS_F32)


@pytest.mark.parametrize("name", ["qwen2_yarn", "qwen2_yarn_new", "qwen2_linear"])
def test_last_positions_of_a_stretched_context(name: str, tmp_path: Path) -> None:
    model = export_random(tmp_path, name)
    wanted = transformers_logits(model.checkpoint, IDS[:1, :128])
    check(own_logits(model, IDS[:1, :128], prompt=100), wanted[:, 99:], TRANSFORMERS_F32)


@pytest.mark.parametrize("name", ["qwen2", "qwen2_14_2", "qwen3"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("f16", F16), ("bf16", TRANSFORMERS_F32)])
def test_narrow_exports_on_their_rounded_weights(
    name: str, dtype: str, tolerance: Tolerance, tmp_path: Path
) -> None:
    """On a CPU f16 rounds between nodes; bf16 weights are computed with in f32."""
    model = export_random(tmp_path, name, dtype)
    wanted = transformers_logits(rounded_checkpoint(model, tmp_path / "rounded"), IDS[:1, :TOKENS])
    assert_close(own_logits(model, IDS[:1, :TOKENS]), wanted[:, 39:], tolerance)


@pytest.mark.parametrize("name", ["qwen2", "qwen2_yarn", "qwen3"])
@pytest.mark.parametrize("lengths", [(3, 5, 17), (17, 16, 1)])
def test_left_padded_batch_equals_theirs(name: str, lengths: Sequence[int], tmp_path: Path) -> None:
    """Rows of different length in one batch, prompt and decode, with the same mask and positions."""
    model = export_random(tmp_path, name)
    prompt, total = max(lengths), max(lengths) + 8
    ids = np.full((3, total), 7)
    mask = (np.arange(total) >= prompt - np.array(lengths)[:, None]).astype(np.int64)
    for row, length in enumerate(lengths):
        ids[row, prompt - length :] = IDS[row, : length + 8]
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    wanted = transformers_logits(model.checkpoint, ids, mask=mask, positions=positions)
    check(own_logits(model, ids, mask=mask, prompt=prompt), wanted[:, prompt - 1 :], TRANSFORMERS_F32)
