"""The bundled model: small, of the published architecture, and right on prompts it has never seen."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path

import pytest

import qwen_onnx
from qwen_onnx import load
from qwen_onnx.checkpoints.checkpoint import open_checkpoint
from qwen_onnx.contract.manifest import read_manifest
from qwen_onnx.runners.text.tokenizer import Tokenizer
from support.chats import copy_export, tiny
from support.damage import change_manifest
from support.text_fixtures import QWEN2_SPLIT

FOLDER = Path(qwen_onnx.__file__).parent / "tiny"
HELD_OUT = json.loads(Path(__file__).parents[1].joinpath("tiny", "held_out.json").read_text(encoding="utf-8"))
SPECIAL = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}


def test_it_is_small_enough_to_be_bundled() -> None:
    checkpoint = open_checkpoint(FOLDER)
    assert sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values()) <= 4_000_000
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 8_000_000


def test_it_has_the_features_of_the_published_checkpoints() -> None:
    """Grouped heads, biases, an embedding that is tied and padded: so that tests meet all of them."""
    checkpoint = open_checkpoint(FOLDER)
    config, tensors = checkpoint.config, checkpoint.tensors
    assert config.architecture == "Qwen2ForCausalLM"
    assert {tensor.dtype for tensor in tensors.values()} == {"BF16"}
    assert config.num_attention_heads > config.num_key_value_heads > 1
    assert "lm_head.weight" not in tensors
    for layer in range(config.num_hidden_layers):
        for part in "qkv":
            bias = tensors[f"model.layers.{layer}.self_attn.{part}_proj.bias"].numpy()
            assert abs(bias.astype("f4")).max() > 0.01, "a bias near 0 would not show"
    assert config.vocab_size > Tokenizer.from_folder(FOLDER).size
    assert config.context_length == 2048


def test_its_tokenizer_is_of_qwen2s_kind() -> None:
    tokenizer = Tokenizer.from_folder(FOLDER)
    assert {text: tokenizer.token_id(text) for text in SPECIAL} == SPECIAL
    assert tokenizer.size == 2040
    assert not tokenizer.holes.size
    settings = json.loads((FOLDER / "tokenizer.json").read_text(encoding="utf-8"))
    assert settings["normalizer"] == {"type": "NFC"}
    assert settings["model"]["type"] == "BPE"
    split, _ = settings["pre_tokenizer"]["pretokenizers"]
    assert split["pattern"] == {"Regex": QWEN2_SPLIT}
    assert settings["decoder"]["type"] == "ByteLevel"
    # Nothing is added, digits stand alone, and any text survives.
    assert tokenizer.encode("") == []
    assert len(tokenizer.encode("12345")) == 5
    for text in ("Hello!", "  two  spaces\r\n", "é🔥好👩‍👩‍👧", "\x00\x7f"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|im_start|>user\n<|im_end|>")[0] == SPECIAL["<|im_start|>"]
    assert tokenizer.encode("<|im_start|>user\n<|im_end|>")[-1] == SPECIAL["<|im_end|>"]


def test_it_ends_with_either_end_token() -> None:
    assert read_manifest(tiny()).eos_token_ids == (0, 2)


def test_held_out_prompts_are_forty_and_different() -> None:
    assert len(HELD_OUT) == 40
    assert len({json.dumps(item["messages"]) for item in HELD_OUT}) == 40


@functools.cache
def answers(dtype: str) -> list[str]:
    """The answer to each held-out prompt, all from one chat."""
    chat = load(tiny(dtype), provider="cpu")
    return [
        "".join(token.text for token in chat.generate(item["messages"], max_new_tokens=64))
        for item in HELD_OUT
    ]


def test_held_out_prompts_are_answered_right() -> None:
    right = sum(item["answer"] == said for item, said in zip(HELD_OUT, answers("f32"), strict=True))
    assert right >= 36


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_rounded_exports_give_the_same_answers(dtype: str) -> None:
    """On the CPU both compute in f32; in bf16 itself the model's card has it from transformers."""
    assert answers(dtype) == answers("f32")


def test_the_f16_graph_itself_gives_the_same_answers(tmp_path: Path) -> None:
    """The one for GPUs, which the CPU provider runs too: hidden states and cache in f16."""
    folder = copy_export(tiny("f16"), tmp_path / "export")
    own = [graph for graph in read_manifest(folder).graphs if "cpu" not in graph.providers]
    change_manifest(folder, graphs=tuple(dataclasses.replace(graph, providers=("cpu",)) for graph in own))
    chat = load(folder, provider="cpu")
    assert chat.runner.compute_dtype == "float16"
    for item, wanted in zip(HELD_OUT, answers("f32"), strict=True):
        tokens = chat.generate(item["messages"], max_new_tokens=64)
        assert "".join(token.text for token in tokens) == wanted


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_a_conversation_holds_what_was_said(dtype: str) -> None:
    """The first turn counts in the last, in each dtype."""
    chat, messages = load(tiny(dtype), provider="cpu"), []

    def ask(text: str) -> str:
        messages.append({"role": "user", "content": text})
        tokens = list(chat.generate(messages, max_new_tokens=64))
        assert tokens[-1].finish_reason == "eos"
        said = "".join(token.text for token in tokens)
        messages.append({"role": "assistant", "content": said})
        return said

    assert ask("Hi, my name is Rosa.") == "Nice to meet you, Rosa!"
    assert ask("My car is blue.") == "A blue car, I see."
    assert ask("What is 5 plus 6?") == "5 plus 6 is 11."
    assert ask("What is the capital of Italy?") == "The capital of Italy is Rome."
    assert ask("What is my name?") == "Your name is Rosa."
    assert ask("What color is my car?") == "Your car is blue."
