"""What quantizing cost: an export's predictions beside its checkpoint's, over text that nothing was tuned on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.checkpoints.checkpoint import Checkpoint
from qwen_onnx.checkpoints.safetensors_file import StoredTensor
from qwen_onnx.contract.quant import Quality
from qwen_onnx.exports.quantization.forward import Decoder, Floats, Read
from qwen_onnx.exports.weights import rows_of
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.options import SessionOptions

KL_BOUNDS = {"int8": 0.05, "int4": 0.5}
"""Most KL divergence, in nats, that an export of this dtype should have: four times what a real model had."""
MOST_LOST = {4: 0.5, 8: 0.1}
"""By bits, ||W - Q|| / ||W|| of a calibrated matrix: a real model's had 0.3 and 0.01, another has 1.4."""
_POSITIONS = 128  # of which logits are held at a time

Ids = NDArray[np.int64]


def measure_quality(folder: Path, checkpoint: Checkpoint, windows: Ids) -> Quality:
    """The export in `folder`, run on the CPU, against the checkpoint.

    Args:
        windows: int64 [windows, tokens].

    Raises:
        UserError: the export does not run.
        NonFiniteLogitsError: it computes NaN or infinity.
    """
    runner = Runner(folder, SessionOptions(provider="cpu"))
    return compare(windows, checkpoint_logits(checkpoint, windows), export_logits(runner, windows))


def beyond(dtype: str, quality: Quality) -> str | None:
    """What is to be said of a loss that is more than it should be."""
    if quality.kl <= KL_BOUNDS.get(dtype, math.inf):
        return None
    better = "--calibrate auto, smaller blocks or int8" if dtype == "int4" else "f16 or f32"
    return (
        f"its answers are not the checkpoint's any more: KL {quality.kl:.2g} nats, {KL_BOUNDS[dtype]:g} at most "
        f"wanted of {dtype}; use {better}"
    )


def in_words(quality: Quality) -> str:
    """One line of all numbers."""
    return (
        f"KL {quality.kl:.2g} nats to the checkpoint, top-1 agrees on {quality.top1:.0%} of {quality.positions:,} "
        f"positions, perplexity {quality.perplexity:.4g} (checkpoint {quality.checkpoint_perplexity:.4g})"
    )


def compare(windows: Ids, wanted: Iterator[Floats], found: Iterator[Floats]) -> Quality:
    """Of logits f32 [positions, vocabulary], the same positions at a time from both, each window from its first."""
    sums = _Sums(0, 0.0, 0, 0.0, 0.0)
    targets = np.append(windows[:, 1:], np.full((len(windows), 1), -1), axis=1).ravel()
    at = 0
    for theirs, own in zip(wanted, found, strict=True):
        sums = sums.plus(theirs, own, targets[at : at + len(own)])
        at += len(own)
    count, kl, same, own_nll, nll = sums
    return Quality(count, kl / count, same / count, _exp(own_nll / count), _exp(nll / count))


def checkpoint_logits(checkpoint: Checkpoint, windows: Ids, read: Read | None = None) -> Iterator[Floats]:
    """Logits of the checkpoint in f32, of _POSITIONS at a time; over other weights than its own with `read`."""

    def plain(name: str) -> Iterator[Floats]:
        return rows_of(checkpoint.tensors[name])

    config, read = checkpoint.config, read or plain
    decoder = Decoder(config, read, windows.shape[1])
    x_SD = _rows(read, "model.embed_tokens.weight", windows.ravel())
    for index in range(config.num_hidden_layers):
        x_SD = decoder.layer(index, x_SD)
    x_SD = decoder.normed(x_SD)
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    for window in x_SD.reshape(*windows.shape, -1):
        for start in range(0, len(window), _POSITIONS):
            yield np.concatenate([window[start : start + _POSITIONS] @ rows.T for rows in read(head)], axis=1)


def export_logits(runner: Runner, windows: Ids) -> Iterator[Floats]:
    """Logits of an export, of _POSITIONS at a time."""
    scorer = runner.scorer()
    cache = scorer.new_cache()
    for ids in windows:
        cache.truncate(0)
        for start in range(0, len(ids), _POSITIONS):
            own = ids[np.newaxis, start : start + _POSITIONS]
            if scorer.scores:
                yield scorer.score(cache, own, own.shape[1])[0]
            else:
                yield np.concatenate([scorer.prefill(cache, own[:, i : i + 1]) for i in range(own.shape[1])])


def relative_error(found: Floats, tensor: StoredTensor) -> float:
    """||W - Q|| / ||W||, of the checkpoint's matrix and what is left of it."""
    lost, size, start = 0.0, 0.0, 0
    for rows in rows_of(tensor):
        lost += float(np.square(rows - found[start : start + len(rows)]).sum())
        size += float(np.square(rows).sum())
        start += len(rows)
    return math.sqrt(lost / size) if size else math.sqrt(lost)


class _Sums(NamedTuple):
    positions: int
    kl: float
    same: int
    own_nll: float
    nll: float

    def plus(self, wanted: Floats, found: Floats, targets: Ids) -> _Sums:
        theirs, own = _log_softmax(wanted), _log_softmax(found)
        rows = np.flatnonzero(targets >= 0)
        theirs, own, targets = theirs[rows], own[rows], targets[rows]
        at = np.arange(len(rows))
        return _Sums(
            self.positions + len(rows),
            self.kl + float(np.sum(np.exp(theirs) * (theirs - own))),
            self.same + int((theirs.argmax(-1) == own.argmax(-1)).sum()),
            self.own_nll - float(own[at, targets].sum()),
            self.nll - float(theirs[at, targets].sum()),
        )


def _log_softmax(logits: Floats) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(-1, keepdims=True))
    return wide


def _rows(read: Callable[[str], Iterator[Floats]], name: str, ids: Ids) -> Floats:
    """Rows of a table that is read in pieces."""
    found: Floats | None = None
    start = 0
    for piece in read(name):
        found = np.empty((len(ids), piece.shape[1]), np.float32) if found is None else found
        own = np.flatnonzero((ids >= start) & (ids < start + len(piece)))
        found[own] = piece[ids[own] - start]
        start += len(piece)
    assert found is not None
    return found


def _exp(mean: float) -> float:
    return math.exp(mean) if mean < 700 else math.inf
