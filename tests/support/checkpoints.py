"""Random checkpoints for tests: tiny Qwen2 and Qwen3 configurations, and folders as Hugging Face lays them out.

The weights are scaled so that a fault shows: logits of order 10, attention far from uniform, no norm of ones.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import safetensors.numpy

RawConfig = dict[str, Any]

_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

QWEN2: RawConfig = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}
"""Tied head, biases on q, k and v, 4 query heads on 2 key/value heads, head_dim 16."""

QWEN2_UNTIED: RawConfig = {**QWEN2, "tie_word_embeddings": False, "num_hidden_layers": 2}
"""A head of its own, lm_head.weight."""

QWEN2_14_2: RawConfig = {
    **QWEN2,
    "hidden_size": 112,
    "intermediate_size": 144,
    "num_hidden_layers": 2,
    "num_attention_heads": 14,
    "rope_theta": 1_000_000.0,
}
"""The head counts of Qwen2.5-0.5B: 7 query heads share a key/value head, head_dim 8."""

QWEN2_HEAD_DIM_2: RawConfig = {
    **QWEN2,
    "hidden_size": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
}
"""The smallest head there is (one rotated pair), and one key/value head for all."""

QWEN2_YARN: RawConfig = {
    **QWEN2,
    "max_position_embeddings": 32,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
}
"""YaRN in the spelling of the Qwen2.5 model cards; valid up to position 127."""

QWEN2_YARN_NEW: RawConfig = {
    **{key: value for key, value in QWEN2_YARN.items() if key not in ("rope_scaling", "rope_theta")},
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
"""The same model in the spelling of transformers 5."""

QWEN2_LINEAR: RawConfig = {
    **QWEN2,
    "num_hidden_layers": 2,
    "rope_scaling": {"rope_type": "linear", "factor": 2.5},
}

QWEN3: RawConfig = {
    **QWEN2,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 32,
    "rope_theta": 1_000_000.0,
    "attention_bias": False,
}
"""Norms on queries and keys, no bias, and heads twice as wide together as hidden_size."""

QWEN3_BIAS: RawConfig = {**QWEN3, "num_hidden_layers": 2, "attention_bias": True}
"""Biases on q, k, v and o (no published checkpoint; the option exists)."""

QWEN3_HEAD_DIM_48: RawConfig = {
    **QWEN3,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 48,
    "tie_word_embeddings": False,
}
"""Odd head counts, and a head_dim that is no power of two."""

CONFIGS: dict[str, RawConfig] = {
    "qwen2": QWEN2,
    "qwen2_untied": QWEN2_UNTIED,
    "qwen2_14_2": QWEN2_14_2,
    "qwen2_head_dim_2": QWEN2_HEAD_DIM_2,
    "qwen2_yarn": QWEN2_YARN,
    "qwen2_yarn_new": QWEN2_YARN_NEW,
    "qwen2_linear": QWEN2_LINEAR,
    "qwen3": QWEN3,
    "qwen3_bias": QWEN3_BIAS,
    "qwen3_head_dim_48": QWEN3_HEAD_DIM_48,
}


def random_tensors(
    raw_config: RawConfig,
    *,
    dtype: Literal["F32", "F16", "BF16"] = "F32",
    seed: int = 0,
    scale: float = 1.0,
    lm_head: Literal["as configured", "absent", "copy", "own"] = "as configured",
) -> dict[str, np.ndarray]:
    """Return a checkpoint's tensors under their Hugging Face names, in a checkpoint's order.

    Args:
        raw_config: a config.json that states its sizes (head_dim may be left to hidden_size / heads).
        dtype: what the numbers are rounded to.
        seed: the same seed makes the same numbers, whatever the dtype.
        scale: multiplies every matrix; above 1 the attention is sharper and the logits larger.
        lm_head: whether lm_head.weight exists; "as configured" follows tie_word_embeddings. Real checkpoints
            also come tied with a "copy" of the embedding, and could come tied with an "own" one to be ignored.
    """
    rng = np.random.default_rng(seed)
    hidden, vocab, wide = (raw_config[key] for key in ("hidden_size", "vocab_size", "intermediate_size"))
    heads, kv_heads = raw_config["num_attention_heads"], raw_config["num_key_value_heads"]
    head_dim = raw_config.get("head_dim") or hidden // heads
    qwen3 = raw_config["model_type"] == "qwen3"
    qkv_bias, o_bias = not qwen3 or raw_config["attention_bias"], qwen3 and raw_config["attention_bias"]
    if lm_head == "as configured":
        lm_head = "absent" if raw_config["tie_word_embeddings"] else "own"
    tensors: dict[str, np.ndarray] = {}

    def matrix(name: str, rows: int, columns: int, gain: float) -> None:
        # Inputs of size 1 give outputs of size gain.
        tensors[name] = rng.normal(0, scale * gain / math.sqrt(columns), (rows, columns))

    def norm(name: str, size: int, mean: float = 1.0) -> None:
        tensors[name] = rng.normal(mean, 0.2, size)

    matrix("model.embed_tokens.weight", vocab, hidden, 2.5)
    for i in range(raw_config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        norm(f"{layer}.input_layernorm.weight", hidden)
        for part, rows in ("q", heads * head_dim), ("k", kv_heads * head_dim), ("v", kv_heads * head_dim):
            matrix(f"{layer}.self_attn.{part}_proj.weight", rows, hidden, 1.3)
            if qkv_bias:
                tensors[f"{layer}.self_attn.{part}_proj.bias"] = rng.normal(0, 0.4, rows)
        if qwen3:
            norm(f"{layer}.self_attn.q_norm.weight", head_dim, 1.3)
            norm(f"{layer}.self_attn.k_norm.weight", head_dim, 1.3)
        matrix(f"{layer}.self_attn.o_proj.weight", hidden, heads * head_dim, 1.3)
        if o_bias:
            tensors[f"{layer}.self_attn.o_proj.bias"] = rng.normal(0, 0.4, hidden)
        norm(f"{layer}.post_attention_layernorm.weight", hidden)
        matrix(f"{layer}.mlp.gate_proj.weight", wide, hidden, 1.3)
        matrix(f"{layer}.mlp.up_proj.weight", wide, hidden, 1.3)
        matrix(f"{layer}.mlp.down_proj.weight", hidden, wide, 1.3)
    norm("model.norm.weight", hidden)
    if lm_head == "own":
        matrix("lm_head.weight", vocab, hidden, 2.5)
    elif lm_head == "copy":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    return {name: tensor.astype(_DTYPES[dtype]) for name, tensor in tensors.items()}


def write_checkpoint(
    folder: Path,
    raw_config: RawConfig,
    *,
    dtype: Literal["F32", "F16", "BF16"] = "F32",
    seed: int = 0,
    shards: int = 1,
    scale: float = 1.0,
    lm_head: Literal["as configured", "absent", "copy", "own"] = "as configured",
) -> dict[str, np.ndarray]:
    """Write config.json and random weights into `folder`, made if need be; return the tensors as stored.

    One shard is model.safetensors; more are model-00001-of-0000n.safetensors ... and their index. The other
    options are those of `random_tensors`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw_config, indent=2) + "\n", encoding="utf-8")
    tensors = random_tensors(raw_config, dtype=dtype, seed=seed, scale=scale, lm_head=lm_head)
    names = list(tensors)
    if not 1 <= shards <= len(names):
        raise ValueError(f"{len(names)} tensors do not make {shards} shards")
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors"
        own = names[len(names) * shard // shards : len(names) * (shard + 1) // shards]
        # transformers asks for the format; without it, it refuses the file.
        safetensors.numpy.save_file({name: tensors[name] for name in own}, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(own, file))
    if shards > 1:
        total_size = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    return tensors
