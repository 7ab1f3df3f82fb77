"""The NumPy decoder that calibration runs, against the oracle; and what it says of the inputs of each matrix."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qwen_onnx.checkpoints.checkpoint import Checkpoint, open_checkpoint
from qwen_onnx.exports.quality import checkpoint_logits
from qwen_onnx.exports.quantization.forward import Decoder
from qwen_onnx.exports.weights import rows_of
from qwen_onnx.reference import reference_logits
from support.checkpoints import CONFIGS, write_checkpoint
from support.exports import IDS
from support.tolerances import F32, assert_close


def checkpoint_of(name: str, folder: Path, dtype: str = "F32") -> Checkpoint:
    write_checkpoint(folder / "checkpoint", CONFIGS[name], dtype=dtype)
    return open_checkpoint(folder / "checkpoint")


def decoder_of(checkpoint: Checkpoint, window: int) -> Decoder:
    return Decoder(checkpoint.config, lambda name: rows_of(checkpoint.tensors[name]), window)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_the_oracles(name: str, tmp_path: Path) -> None:
    """Of two windows, each of which begins at position 0 and sees nothing of the other."""
    checkpoint = checkpoint_of(name, tmp_path)
    windows = IDS[:2, :24] % checkpoint.config.vocab_size
    found = np.concatenate(list(checkpoint_logits(checkpoint, windows)))
    wanted = [reference_logits(checkpoint.config, checkpoint.read, ids) for ids in windows]
    assert_close(found, np.concatenate(wanted), F32)


def test_weights_of_other_types(tmp_path: Path) -> None:
    checkpoint = checkpoint_of("qwen2", tmp_path, "BF16")
    windows = IDS[:1, :16]
    found = np.concatenate(list(checkpoint_logits(checkpoint, windows)))
    assert_close(found, reference_logits(checkpoint.config, checkpoint.read, windows[0]), F32)


def test_a_token_counts_as_often_as_it_is_looked_at(tmp_path: Path) -> None:
    """What all tokens look at sums up to one a token; each counts once more, for itself."""
    checkpoint = checkpoint_of("qwen2", tmp_path)
    decoder, window = decoder_of(checkpoint, 16), 16
    x = checkpoint.read("model.embed_tokens.weight")[IDS[:2, :window].ravel()].astype(np.float32)
    seen: dict[str, np.ndarray] = {}
    decoder.layer(0, x, lambda part, inputs: seen.update({part: inputs.copy()}))
    assert seen.keys() == {"qkv", "o", "gate_up", "down"}
    normed = decoder._norm(x, "model.layers.0.input_layernorm.weight")
    weight = np.square(np.linalg.norm(seen["qkv"], axis=1) / np.linalg.norm(normed, axis=1))
    np.testing.assert_allclose(weight.reshape(2, window).sum(1), 2 * window, rtol=1e-5)
    # The last token is looked at by itself alone, the first one by all.
    assert (weight.reshape(2, window)[:, -1] < 2).all()
    assert (weight.reshape(2, window)[:, 0] > 2).all()


def test_what_is_added_to_the_stream_counts_in_its_units(tmp_path: Path) -> None:
    """A stream that is a hundred times as large is hurt a hundred times less by the same error."""
    checkpoint = checkpoint_of("qwen2", tmp_path)
    decoder = decoder_of(checkpoint, 8)
    x = checkpoint.read("model.embed_tokens.weight")[IDS[0, :8]].astype(np.float32)
    sizes = []
    for scale in (100, 10_000):
        seen: dict[str, np.ndarray] = {}
        decoder.layer(
            0, x * np.float32(scale), lambda part, inputs, seen=seen: seen.update({part: inputs.copy()})
        )
        sizes.append(np.linalg.norm(seen["o"]))
    assert 50 < sizes[0] / sizes[1] < 200
