"""The logits of an export against float64: how far they may differ, and what quantizing cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.checkpoints.checkpoint import Checkpoint
from qwen_onnx.checkpoints.safetensors_file import FLOAT_DTYPES, read_header
from qwen_onnx.checks.golden import Finding, golden_prompt
from qwen_onnx.checks.tolerances import logit_bound
from qwen_onnx.contract import DTYPES, QWEIGHT, SCALES, WEIGHTS_FILE
from qwen_onnx.contract.manifest import Manifest
from qwen_onnx.exports.quantize import dequantize
from qwen_onnx.reference import Read, reference_logits
from qwen_onnx.runners.chat import Chat

_REFERENCE_TOKENS = 48

# Mean KL divergence from float64, in nats, by the type computed in: what the table's rounding comes to in
# probabilities, with room for a deep model. A layer perturbed by a hundredth lies beyond it in f32 and f16.
KL_BOUNDS = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 2e-2, "int8": 3e-2}


_IN_WORDS = {"int8": "activations in 8 bits"}


def check_logits(chat: Chat, manifest: Manifest, checkpoint: Checkpoint) -> Finding:
    """Logits of a fixed text against the reference in float64, over the weights as they are stored."""
    found, ids = _logits(chat, manifest)
    read = exported_weights(chat.runner.folder, manifest, checkpoint)
    wanted = reference_logits(checkpoint.config, read, ids, last=len(found))
    return compare_logits(found, wanted, chat.runner.arithmetic, layers=manifest.num_hidden_layers)


def exported_weights(folder: Path, manifest: Manifest, checkpoint: Checkpoint) -> Read:
    """The weights that an export computes with: the checkpoint's, rounded to its dtype or its blocks of integers."""
    rounded = FLOAT_DTYPES[DTYPES.get(manifest.dtype, "F32")]
    stored = read_header(folder / WEIGHTS_FILE) if manifest.quantized else {}

    def read(name: str) -> NDArray[Any]:
        tensor = checkpoint.read(name)
        if (blocks := manifest.quantized.get(name)) is None:
            return tensor.astype(rounded, copy=False)
        stem = name.removesuffix("weight")
        integers, scales = stored[stem + QWEIGHT], stored[stem + SCALES].numpy()
        packed = np.memmap(integers.file, np.uint8, "r", integers.offset, integers.shape)
        return dequantize(packed, scales, tensor.shape[1], blocks)

    return read


def check_quality(chat: Chat, manifest: Manifest, checkpoint: Checkpoint) -> Finding:
    """What quantizing cost. It is for the user to judge, so that this is never bad."""
    found, ids = _logits(chat, manifest)
    wanted = reference_logits(checkpoint.config, checkpoint.read, ids, last=len(found))
    kl = float(np.mean(_kl(wanted, found.astype(np.float64))))
    agree = float((found.argmax(-1) == wanted.argmax(-1)).mean())
    return Finding(
        True,
        f"quality: against the checkpoint in float64 over {len(found)} positions of a fixed text: "
        f"top-1 agrees on {agree:.0%}, KL {kl:.1e}",
    )


def _logits(chat: Chat, manifest: Manifest) -> tuple[NDArray[np.float32], list[int]]:
    """The logits of the second half of a fixed text, [positions, vocab], and its ids; prefill and decode."""
    runner, ids = chat.runner, golden_prompt(chat, manifest)
    ids = (ids * (1 + _REFERENCE_TOKENS // len(ids)))[: min(_REFERENCE_TOKENS, runner.context_length)]
    cache, half = runner.new_cache(), len(ids) // 2
    rows = [runner.prefill(cache, np.array([ids[: half + 1]]))]
    rows += [runner.decode(cache, np.array([[token_id]])) for token_id in ids[half + 1 :]]
    return np.concatenate(rows), ids


def compare_logits(
    found: NDArray[np.float32], wanted: NDArray[np.float64], dtype: str, *, layers: int
) -> Finding:
    """The verdict on logits [positions, vocab] computed in `dtype`, against float64 over the same weights."""
    bound = logit_bound(dtype, layers=layers, largest=float(np.abs(wanted).max()))
    kl_bound = KL_BOUNDS[dtype]
    error = float(np.abs(found - wanted).max())
    kl = float(np.mean(_kl(wanted, found.astype(np.float64))))
    best, rest = np.partition(wanted, -2, axis=-1)[:, -1], np.partition(wanted, -2, axis=-1)[:, -2]
    agree = found.argmax(-1) == wanted.argmax(-1)
    ok = error <= bound and kl <= kl_bound and bool(np.all(agree | (best - rest < 2 * bound)))
    text = (
        f"logits: against float64 over {len(wanted)} positions, {_IN_WORDS.get(dtype, dtype)}: "
        f"top-1 agrees on {agree.mean():.0%}, KL {max(kl, 0):.1e} (bound {kl_bound:.0e}), "
        f"largest difference {error:.1e} (bound {bound:.1e})"
    )
    return Finding(ok, text)


def _kl(p_logits: NDArray[np.float64], q_logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """KL(p || q) of the softmax distributions, in nats, per row."""

    def log_softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
        x = x - x.max(-1, keepdims=True)
        shifted: NDArray[np.float64] = x - np.log(np.exp(x).sum(-1, keepdims=True))
        return shifted

    p, q = log_softmax(p_logits), log_softmax(q_logits)
    divergence: NDArray[np.float64] = (np.exp(p) * (p - q)).sum(-1)
    return divergence
