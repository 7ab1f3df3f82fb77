"""The logits of an export against float64: how far they may differ, and what quantizing cost."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.checkpoints.checkpoint import Checkpoint
from qwen_onnx.checkpoints.safetensors_file import FLOAT_DTYPES, read_header
from qwen_onnx.checks.golden import Finding, golden_prompt
from qwen_onnx.checks.tolerances import logit_bound
from qwen_onnx.contract import DTYPES, QWEIGHT, SCALES, WEIGHTS_FILE, ZERO_POINTS
from qwen_onnx.contract.manifest import Manifest
from qwen_onnx.exports.quality import beyond, checkpoint_logits, compare, export_logits, in_words
from qwen_onnx.exports.quantization.blocks import Blocks, dequantize
from qwen_onnx.exports.quantization.text import held_out_ids
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
        zero_points = stored[stem + ZERO_POINTS].numpy() if blocks.zero_points else None
        packed = Blocks(stored[stem + QWEIGHT].numpy(), stored[stem + SCALES].numpy(), zero_points)
        return dequantize(packed, tensor.shape[1], blocks)

    return read


def check_quality(chat: Chat, manifest: Manifest, checkpoint: Checkpoint) -> Iterator[Finding]:
    """What quantizing cost over real text, and which part of it is that of the weights; bounded by the dtype.

    Without a tokenizer there is no text: over some fixed ids then, and without a bound.
    """
    windows, text = np.zeros((0, 1), np.int64), "of text that nothing was tuned on"
    if (tokenizer := chat.tokenizer) is not None:
        windows = held_out_ids(tokenizer, chat.template, context_length=manifest.context_length)
    if not (bounded := windows.size > 0):
        windows, text = np.array([_fixed_ids(chat, manifest)]), "of fixed ids, for want of a tokenizer"
    wanted = _held(checkpoint_logits(checkpoint, windows))
    found = compare(windows, wanted(), export_logits(chat.runner, windows))
    lost = beyond(manifest.dtype, found) if bounded else None
    yield Finding(lost is None, f"quality: {in_words(found)}, {text}" + (f"; {lost}" if lost else ""))
    read = exported_weights(chat.runner.folder, manifest, checkpoint)
    rounded = checkpoint_logits(checkpoint, windows, lambda name: iter([_as_matrix(read(name))]))
    of_weights = compare(windows, wanted(), rounded)
    yield Finding(
        True,
        f"quality: rounded weights alone, computed with in f32: KL {of_weights.kl:.2g}, "
        f"top-1 {of_weights.top1:.0%}, perplexity {of_weights.perplexity:.4g}; "
        "the rest is that of activations in 8 bits",
    )


def _held(pieces: Iterator[NDArray[np.float32]]) -> Callable[[], Iterator[NDArray[np.float32]]]:
    """Logits that are wanted twice, in a file without a name: they are gigabytes for a large vocabulary."""
    file, shapes = tempfile.TemporaryFile(), []  # noqa: SIM115 - closed when nobody reads it any more
    for piece in pieces:
        shapes.append(piece.shape)
        file.write(piece.tobytes())

    def again() -> Iterator[NDArray[np.float32]]:
        file.seek(0)
        for shape in shapes:
            yield np.frombuffer(file.read(4 * math.prod(shape)), np.float32).reshape(shape)

    return again


def _as_matrix(tensor: NDArray[Any]) -> NDArray[np.float32]:
    return np.atleast_2d(tensor).astype(np.float32, copy=False)


def _logits(chat: Chat, manifest: Manifest) -> tuple[NDArray[np.float32], list[int]]:
    """The logits of the second half of a fixed text, [positions, vocab], and its ids; prefill and decode."""
    runner, ids = chat.runner, _fixed_ids(chat, manifest)
    cache, half = runner.new_cache(), len(ids) // 2
    rows = [runner.prefill(cache, np.array([ids[: half + 1]]))]
    rows += [runner.decode(cache, np.array([[token_id]])) for token_id in ids[half + 1 :]]
    return np.concatenate(rows), ids


def _fixed_ids(chat: Chat, manifest: Manifest) -> list[int]:
    ids = golden_prompt(chat, manifest)
    return (ids * (1 + _REFERENCE_TOKENS // len(ids)))[: min(_REFERENCE_TOKENS, chat.runner.context_length)]


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
