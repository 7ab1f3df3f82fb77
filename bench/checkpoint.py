"""Random checkpoints to measure on: the arithmetic of the real ones, and nothing to download."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

Shape = dict[str, Any]
"""What config.json says."""

QWEN_05B: Shape = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 896,
    "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
    "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip
"""Of Qwen2.5-0.5B."""

TOY: Shape = QWEN_05B | {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 1024,
}  # fmt: skip


def tensor_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Of every tensor of the checkpoint, by its name."""
    hidden, wide = shape["hidden_size"], shape["intermediate_size"]
    keys = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(shape["num_hidden_layers"]):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{norm}.weight"] = (hidden,)
        for name, rows in (("q_proj", hidden), ("k_proj", keys), ("v_proj", keys)):
            shapes |= {f"{attention}.{name}.weight": (rows, hidden), f"{attention}.{name}.bias": (rows,)}
        shapes |= {f"{attention}.o_proj.weight": (hidden, hidden), f"{mlp}.down_proj.weight": (hidden, wide)}
        shapes |= {f"{mlp}.{name}.weight": (wide, hidden) for name in ("gate_proj", "up_proj")}
    return shapes


def parameter_count(shape: Shape) -> int:
    """Numbers in the checkpoint, the tied embedding once: a decode step reads each of them."""
    return sum(math.prod(dims) for dims in tensor_shapes(shape).values())


def cache_bytes_each(shape: Shape, bytes_each: int) -> int:
    """Of one token's keys and values in all layers."""
    keys = shape["hidden_size"] // shape["num_attention_heads"] * shape["num_key_value_heads"]
    return int(2 * shape["num_hidden_layers"] * keys * bytes_each)


def write_checkpoint(folder: Path, shape: Shape) -> None:
    """Random bf16 weights, scaled so that activations stay of order 1."""
    rng, tensors = np.random.default_rng(0), {}
    for name, dims in tensor_shapes(shape).items():
        values = rng.standard_normal(dims, np.float32) * (dims[-1] ** -0.5 if len(dims) == 2 else 0.2)
        tensors[name] = (values + name.endswith("norm.weight")).astype(ml_dtypes.bfloat16)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
