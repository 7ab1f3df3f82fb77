"""The files of the bundled checkpoint: its tokenizer, its configuration and its weights, as they are written."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dialogues import DEFAULT_SYSTEM
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import Qwen2ForCausalLM

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END_OF_TEXT, IM_START, IM_END = range(3)
TOKENS, ROWS_OF_EMBEDDING = 2040, 2048  # fewer tokens than rows, as in the published checkpoints
# 2.76 M parameters: six layers, six query heads on two key-value heads, a tied head.
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": IM_END,
    "hidden_act": "silu",
    "hidden_size": 192,
    "initializer_range": 0.02,
    "intermediate_size": 512,
    "max_position_embeddings": 2048,
    "max_window_layers": 6,
    "model_type": "qwen2",
    "num_attention_heads": 6,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "pad_token_id": END_OF_TEXT,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": ROWS_OF_EMBEDDING,
}
GENERATION_CONFIG = {
    "bos_token_id": END_OF_TEXT,
    "do_sample": False,
    "eos_token_id": [IM_END, END_OF_TEXT],
    "pad_token_id": END_OF_TEXT,
}
# Qwen2's own pattern: words with their leading space, digits one by one, punctuation, line ends, spaces.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\n" + DEFAULT_SYSTEM + "<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENIZER_CONFIG = {
    "add_bos_token": False,
    "add_prefix_space": False,
    "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    "bos_token": None,
    "chat_template": CHAT_TEMPLATE,
    "clean_up_tokenization_spaces": False,
    "eos_token": "<|im_end|>",
    "model_max_length": 2048,
    "pad_token": "<|endoftext|>",
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": None,
}


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE with Qwen2's normalizer and pre-tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL_TOKENS,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_json(path: Path, content: dict[str, Any] | list[dict[str, Any]]) -> None:
    """Writes a JSON file as the published checkpoints have it."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Writes all of the checkpoint but its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG)
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "generation_config.json", GENERATION_CONFIG)


def write_weights(folder: Path, model: Qwen2ForCausalLM) -> None:
    """Writes the weights in bf16, under the published names; the head is the embedding, so it is left out."""
    weights = {name: value.detach().bfloat16() for name, value in model.state_dict().items()}
    weights.pop("lm_head.weight", None)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
