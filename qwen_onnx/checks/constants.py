"""Tensors of an export that are one number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from qwen_onnx.checkpoints.constant_tensors import constant_tensors, some
from qwen_onnx.checkpoints.safetensors_file import read_header
from qwen_onnx.checks.golden import Finding
from qwen_onnx.contract.manifest import Manifest, is_weights
from qwen_onnx.errors import UserError


def check_constants(folder: Path, manifest: Manifest) -> Iterator[Finding]:
    """A finding where there are any: bad where no answer could mean anything, as with a final norm of zeros."""
    for name in manifest.files:
        if not is_weights(name):
            continue
        try:
            constants = constant_tensors(read_header(folder / name).values())
        except UserError as error:
            yield Finding(False, str(error))
            continue
        if constants:
            ok = not any(each.is_essential for each in constants)
            yield Finding(ok, f"{name}: {len(constants)} tensors that are one number: {some(constants)}")
