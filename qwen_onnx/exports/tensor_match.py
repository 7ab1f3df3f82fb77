"""Whether a checkpoint's tensors are the ones that its graphs need."""

from __future__ import annotations

import re

import onnx_ir as ir

from qwen_onnx.checkpoints.checkpoint import Checkpoint
from qwen_onnx.contract import DTYPES
from qwen_onnx.errors import UserError
from qwen_onnx.exports.graph_file import parameters

_PLAUSIBLE_LAYERS = 200  # the largest Qwen has 80; so few graphs are built in a moment


def verify_depth(checkpoint: Checkpoint) -> None:
    """config.json does not say more layers than there can be, before graphs are built of what it says.

    Raises:
        UserError: with both numbers.
    """
    layers, tensors = checkpoint.config.num_hidden_layers, len(checkpoint.tensors)
    if layers > max(tensors, _PLAUSIBLE_LAYERS):
        raise UserError(
            f"{checkpoint.folder}: config.json says {layers} layers, there are {tensors} tensors in all; "
            "incomplete download?"
        )


def match_tensors(model: ir.Model, checkpoint: Checkpoint, made: set[str]) -> None:
    """Every parameter but the `made` ones has its tensor, of its shape and a float type, and none is left over.

    Raises:
        UserError: naming the file and the tensor.
    """
    wanted = {name: value for name, value in parameters(model).items() if name not in made}
    found = checkpoint.tensors
    if missing := sorted(wanted.keys() - found.keys()):
        raise UserError(f"{checkpoint.folder}: {len(missing)} tensors are missing: {_some(missing)}")
    if surplus := sorted(found.keys() - wanted.keys()):
        file = found[surplus[0]].file
        raise UserError(
            f"{file}: {len(surplus)} tensors that config.json does not describe: {_some(surplus)}; "
            f"{_advice(surplus)}"
        )
    for name, value in wanted.items():
        tensor, shape = found[name], tuple(value.shape.numpy()) if value.shape else ()
        if tensor.shape != shape:
            raise UserError(
                f"{tensor.file}: tensor {name} has shape {list(tensor.shape)}, config.json wants {list(shape)}"
            )
        if tensor.dtype not in DTYPES.values():
            raise UserError(f"{tensor.file}: tensor {name} is {tensor.dtype}; wanted F32, F16 or BF16")


def _advice(surplus: list[str]) -> str:
    """They stand inside the layers, where nothing is passed over."""
    if any(re.search(r"self_attn\.[qkvo]_proj\.bias$", name) for name in surplus):
        return 'if the model has them, config.json wants "attention_bias": true (Qwen3 only); if not, remove them'
    return "remove them if they are left over"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
