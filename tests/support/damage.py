"""Ways in which an export goes bad, and the forgery that hides them from the hashes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from qwen_onnx.checkpoints.safetensors_file import FLOAT_DTYPES, read_header
from qwen_onnx.contract.manifest import Manifest, is_weights, read_manifest, write_manifest
from qwen_onnx.exports.writer import hash_file
from qwen_onnx.runners.runtime.integrity import sample

WEIGHTS = "weights.safetensors"


def poke(folder: Path, tensor: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Change a tensor of the weights file; `change` gets its numbers in float64."""
    stored = read_header(folder / WEIGHTS)[tensor]
    held = np.memmap(stored.file, FLOAT_DTYPES[stored.dtype], "r+", stored.offset, stored.shape)
    held[...] = change(np.asarray(held).astype(np.float64)).astype(held.dtype)
    held.flush()


def perturbed(weights: np.ndarray, size: float = 1e-2) -> np.ndarray:
    """Each number moved by `size`, up or down."""
    return weights + np.random.default_rng(0).choice([-size, size], weights.shape)


def edit_graph(path: Path, edit: Callable[[onnx.GraphProto], Any]) -> None:
    model = onnx.load(path, load_external_data=False)
    edit(model.graph)
    path.write_bytes(model.SerializeToString())


def forge(folder: Path) -> None:
    """Write sizes and hashes of the files as they are now into the manifest."""
    files = read_manifest(folder).files
    change_manifest(
        folder,
        files={name: hash_file(folder / name) for name in files},
        samples={name: sample(folder / name) for name in files if is_weights(name)},
    )


def change_manifest(folder: Path, **fields: Any) -> Manifest:
    manifest = dataclasses.replace(read_manifest(folder), **fields)
    write_manifest(folder, manifest)
    return manifest
