"""Keys of config.json: those that are read, those of other Qwen models, those that nobody knows, with any value."""

from __future__ import annotations

import json
import random
import re
from typing import Any

from qwen_onnx.checkpoints.config import CONFIG_KEYS, QwenConfig, config_notes, parse_config
from qwen_onnx.errors import UserError
from support.checkpoints import CONFIGS
from support.fuzz.mutations import ODD

_OTHERS = (
    "decoder_sparse_step", "norm_topk_prob", "num_experts_per_tok", "output_router_logits",
    "router_aux_loss_coef", "mlp_only_layers", "shared_expert_intermediate_size", "qkv_bias", "kv_channels",
    "seq_length", "scale_attn_weights", "no_bias", "fp16", "bf16", "use_flash_attn", "linear_conv_kernel_dim",
    "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads",
    "full_attention_interval", "attn_output_gate", "mamba_ssm_dtype", "mrope_section", "image_token_id",
    "video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id", "audio_token_index",
    "thinker_config", "talker_config", "rope_local_base_freq", "rope_interleaved", "sliding_window_size",
    "attention_chunk_size", "query_pre_attn", "final_logit_softcapping", "hidden_activation",
    "rms_norm_unit_offset", "logits_scaling", "residual_multiplier", "lora_r", "model_max_length",
    "max_sequence_length", "tie_embeddings", "head_size", "n_layer", "d_model", "vocab_size_padded",
    "num_hidden_layer",
)  # fmt: skip
"""Of configs of other models in transformers, and misspelt ones."""
_NAMES = (
    "",
    " ",
    "a\nb",
    "\x1b]0;x\x07",
    "\u202ekey",
    "é",
    "__class__",
    "x" * 300,
    "rope theta",
    "{0}",
    "%s",
    "\ud800",
)
_VALUES: tuple[Any, ...] = (
    1, 2, 4, 8, 16, 32, 64, 128, 4096, 1e-6, 1e4, 1e6, 0.5, 32.0, True, False, None, "silu", "gelu", "8", "qwen3",
    ["full_attention"] * 3, ["sliding_attention"] * 3, ["full_attention"], {"rope_type": "default"},
    {"type": "yarn", "factor": 4.0}, {"rope_type": "linear", "factor": 2}, {"rope_type": "llama3", "factor": 8.0},
    {"type": "mrope", "mrope_section": [16, 24, 24]}, {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "beta": 2},
    {"full_attention": {"rope_type": "default"}}, {"chunk_size": 32, "local_size": 8}, {"quant_method": "awq"},
    ["Qwen2ForCausalLM"], ["Qwen2MoeForCausalLM"], ["Qwen3Model"], float("nan"), float("inf"),
)  # fmt: skip


def config_keys(rng: random.Random, base: object) -> None:
    """Each is computed, refused in a line, or named in a note; what is neither read nor refused changes nothing."""
    raw = dict(rng.choice(list(CONFIGS.values())))
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        names = rng.choice((list(CONFIG_KEYS), list(raw) or ["x"], _OTHERS, _NAMES))
        name = rng.choice(names)
        if name in raw and rng.random() < 0.15:
            del raw[name]
        else:
            raw[name] = _value(rng, name, raw)
    if rng.random() < 0.2:
        raw = dict(rng.sample(list(raw.items()), len(raw)))
    try:
        found = parse_config(raw)
        notes = list(config_notes(raw))
    except UserError as error:
        if not str(error).startswith("config.json: "):
            raise AssertionError(f"names no file: {error}") from None
        raise
    _verify(found)
    unread = {
        name for name in raw if name not in CONFIG_KEYS or CONFIG_KEYS[name].use in ("harmless", "noted")
    }
    assert parse_config({name: value for name, value in raw.items() if name not in unread}) == found
    for name, value in raw.items():
        if name in CONFIG_KEYS and CONFIG_KEYS[name].use == "refused":
            assert value in CONFIG_KEYS[name].neutral, f"{name} was passed over"
    assert all(note.isprintable() and len(note) <= 1500 for note in notes)
    if unknown := [name for name in raw if name not in CONFIG_KEYS]:
        (note,) = (note for note in notes if "nobody here knows" in note)
        plain = [name for name in unknown if re.fullmatch(r"\w{1,60}", name)]
        assert len(unknown) > 5 or all(name in note for name in plain)
    # What a file of it says is the same.
    text = json.dumps(raw)
    if not any(token in text for token in ("NaN", "Infinity", "ud800")):
        assert parse_config(json.loads(text)) == found


def _value(rng: random.Random, name: str, raw: dict[str, Any]) -> Any:
    if name in CONFIG_KEYS and CONFIG_KEYS[name].neutral and rng.random() < 0.3:
        return rng.choice(CONFIG_KEYS[name].neutral)
    if rng.random() < 0.2 and name in raw:
        old = raw[name]
        return rng.choice((str(old), [old], {"a": old}, old * 2 if isinstance(old, int | str) else None))
    return rng.choice(_VALUES if rng.random() < 0.7 else ODD)


def _verify(found: QwenConfig) -> None:
    for size in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    ):
        assert type(getattr(found, size)) is int
        assert 0 < getattr(found, size) < 2**31
    assert found.num_attention_heads % found.num_key_value_heads == 0
    assert found.head_dim % 2 == 0 < found.context_length
    assert 0 < found.rms_norm_eps < float("inf")
    assert 0 < found.rope_theta < float("inf")
