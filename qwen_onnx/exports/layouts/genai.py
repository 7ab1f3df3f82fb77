"""genai_config.json: what onnxruntime-genai reads of a model beside its graph and tokenizer."""

from __future__ import annotations

import math
from typing import Any

from qwen_onnx.checkpoints.config import ARCHITECTURES
from qwen_onnx.contract import ATTENTION_MASK, INPUT_IDS, LOGITS, POSITION_IDS
from qwen_onnx.contract.cache_spec import CacheSpec
from qwen_onnx.contract.json_file import read_json
from qwen_onnx.errors import UserError, option
from qwen_onnx.exports.layouts.layout import Exported, Written, write_json

GENAI_CONFIG = "genai_config.json"
_TYPES = {architecture: model_type for model_type, architecture in ARCHITECTURES.items()}
# What onnxruntime-genai searches with where generation_config.json says nothing: its own defaults, spelled out.
_SEARCH: dict[str, Any] = {
    "diversity_penalty": 0.0,
    "do_sample": False,
    "early_stopping": True,
    "length_penalty": 1.0,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
}
_BOUNDS = {"top_p": (0.0, 1.0), "num_beams": (1, 64), "num_return_sequences": (1, 64)}
# Not of the search: ids and versions, which stand elsewhere.
_ELSEWHERE = {
    "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "_from_model_config", "max_length",
}  # fmt: skip


def write_genai_config(exported: Exported) -> Written:
    """Everything of generation_config.json that onnxruntime-genai knows; the rest is named in a note.

    The cache grows, so that past and present cannot share a buffer.
    """
    config, path = exported.config, exported.folder / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    raw = read_json(exported.folder / "config.json")
    kv_heads, head_size = _heads(exported.cache)

    def token(name: str) -> int | None:
        found = generation.get(name, raw.get(name))
        return found if isinstance(found, int) else None

    eos = [token_id for token_id in exported.eos_token_ids if token_id < config.vocab_size]
    pad = token("pad_token_id")
    said = {name: value for name, value in generation.items() if value is not None}
    odd = sorted(name for name, value in said.items() if name in _SEARCH and not _fits(name, value))
    odd += [name for name in ("bos_token_id", "pad_token_id") if name in said and token(name) is None]
    most = said.get("max_length")
    longest = exported.context_length
    if isinstance(most, int) and 0 < most < longest:
        longest = most
    if isinstance(said.get("min_length"), int) and said["min_length"] > longest:
        odd.append("min_length")  # it would never end
    search = _SEARCH | {name: value for name, value in said.items() if name in _SEARCH and name not in odd}
    model: dict[str, Any] = {
        "bos_token_id": token("bos_token_id"),
        "context_length": exported.context_length,
        "decoder": {
            "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
            "filename": exported.model_file,
            "head_size": head_size,
            "hidden_size": config.hidden_size,
            "inputs": {
                "input_ids": INPUT_IDS,
                "attention_mask": ATTENTION_MASK,
                "position_ids": POSITION_IDS,
                "past_key_names": "past_key_values.%d.key",
                "past_value_names": "past_key_values.%d.value",
            },
            "outputs": {
                "logits": LOGITS,
                "present_key_names": "present.%d.key",
                "present_value_names": "present.%d.value",
            },
            "num_attention_heads": config.num_attention_heads,
            "num_hidden_layers": config.num_hidden_layers,
            "num_key_value_heads": kv_heads,
        },
        "eos_token_id": eos,
        "pad_token_id": pad if pad is not None else next(iter(eos), 0),
        "type": _TYPES[config.architecture],
        "vocab_size": config.vocab_size,
    }
    if model["bos_token_id"] is None:
        del model["bos_token_id"]
    write_json(
        exported.folder / GENAI_CONFIG,
        {
            "model": model,
            "search": search | {"max_length": longest, "past_present_share_buffer": False},
        },
    )
    unknown = sorted(said.keys() - _SEARCH.keys() - _ELSEWHERE)
    notes = [f"{GENAI_CONFIG}: onnxruntime-genai has no {name}; pass it by hand" for name in unknown]
    notes += [
        f"{GENAI_CONFIG}: onnxruntime-genai takes no {name} of {said[name]!r}; left at its default"
        for name in odd
    ]
    if beyond := [token_id for token_id in exported.eos_token_ids if token_id >= config.vocab_size]:
        notes.append(f"{GENAI_CONFIG}: end tokens {beyond} are outside the vocabulary, and left out")
    return [GENAI_CONFIG], notes


def _heads(cache: CacheSpec) -> tuple[int, int]:
    """How many key/value heads there are, and their size, which the file says once for all layers."""
    sizes = {state.fixed_sizes for state in cache.states}
    names = {state.name for state in cache.states}
    if len(sizes) > 1 or names != {"key", "value"}:
        raise UserError(
            "onnxruntime-genai wants one key and one value of one shape in all layers: use "
            f"{option('layout', 'plain')}"
        )
    heads, size = filter(None, sizes.pop())
    return heads, size


def _fits(name: str, value: object) -> bool:
    """Whether it reads the value, and accepts it."""
    default = _SEARCH[name]
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if not isinstance(value, int if isinstance(default, int) else (int, float)):
        return False
    low, high = _BOUNDS.get(name, (0.0, math.inf))
    return math.isfinite(value) and low <= value <= high
