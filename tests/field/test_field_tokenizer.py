"""docs/faults.md, chapter D: tokenizers and chat templates, as an export hands them on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.options import SessionOptions
from qwen_onnx.runners.text.reasoning import ReasoningSplitter
from qwen_onnx.runners.text.template.chat_template import ChatTemplate
from qwen_onnx.runners.text.tokenizer import Tokenizer
from support.chats import tiny, write_chat_checkpoint
from support.checkpoints import QWEN2, write_checkpoint
from support.command import command
from support.damage import forge
from support.exports import ON_CPU
from support.field_runs import exported_as, opened
from support.text_fixtures import QWEN3_LIKE, QWEN25_LIKE, byte_level_tokenizer, write_folder

GREET = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
OLD = "{{ 'outdated' }}"
IDS_FILE = Path(__file__).parents[1] / "data" / "token_ids.json"
NAMED = byte_level_tokenizer().get_vocab_size()
LIST = [{"name": "other", "template": OLD}, {"name": "default", "template": GREET}]


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"chat_template": GREET}},
        {"tokenizer_config.json": {"chat_template": LIST}},
        {"chat_template.jinja": GREET, "tokenizer_config.json": {"chat_template": OLD}},
        {"chat_template.json": {"chat_template": GREET}, "tokenizer_config.json": {}},
        {"chat_template.jinja": GREET, "chat_template.json": {"chat_template": OLD}},
    ],
    ids=["string", "list", "jinja", "json", "jinja before json"],
)  # fmt: skip
def test_d1_the_template_is_found_wherever_it_was_saved(files: dict[str, Any], tmp_path: Path) -> None:
    """A file of its own wins over tokenizer_config.json, where the outdated one may still be."""
    write_checkpoint(tmp_path / "m", {**QWEN2, "vocab_size": 400, "num_hidden_layers": 1})
    write_folder(tmp_path / "m", files)
    folder = exported_as(tmp_path / "m", tmp_path / "out")
    for name in files:
        assert (folder / name).read_bytes() == (tmp_path / "m" / name).read_bytes()
    chat = opened(folder)
    ids = chat.prompt_ids([{"role": "user", "content": "dog"}])
    assert ids == Tokenizer(byte_level_tokenizer()).encode("<|im_start|>dog<|im_end|>")
    assert command("run", folder, "-p", "dog", "--max-new-tokens", 1, "--provider", "cpu").code == 0


def test_d1_a_base_model_without_a_template_says_what_to_do(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", {**QWEN2, "vocab_size": 400, "num_hidden_layers": 1})
    write_folder(tmp_path / "m", {"tokenizer_config.json": {}})
    folder = exported_as(tmp_path / "m", tmp_path / "out")
    error = command("run", folder, "-p", "dog", "--provider", "cpu").error
    assert "no chat template" in error
    assert "--raw" in error
    assert command("run", folder, "-p", "dog", "--raw", "--max-new-tokens", 1, "--provider", "cpu").code == 0


SYSTEM = {"role": "system", "content": "Sei <kurz> & 'gut'."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "wetter", "arguments": {"ort": "Zürich", "n": [1, 2]}}}],
}  # fmt: skip
TALK = [
    {"role": "user", "content": "Ünïcode 好 🔥?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nJa."},
    {"role": "user", "content": ""},
    CALL,
    {"role": "tool", "content": '{"t": "5 < 6"}'},
    {"role": "tool", "content": "<&>"},
]
CALLED = '{"name": "wetter", "arguments": {"ort": "Zürich", "n": [1, 2]}}'


def test_d3_the_template_of_qwen25_renders_exactly() -> None:
    """With a system message, several turns, tool calls, their results, and empty content."""
    assert ChatTemplate(QWEN25_LIKE).render([SYSTEM, *TALK]) == (
        "<|im_start|>system\nSei <kurz> & 'gut'.<|im_end|>\n"
        "<|im_start|>user\nÜnïcode 好 🔥?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nhm\n</think>\n\nJa.<|im_end|>\n"
        "<|im_start|>user\n<|im_end|>\n"
        f"<|im_start|>assistant\n<tool_call>\n{CALLED}\n</tool_call><|im_end|>\n"
        '<|im_start|>user\n<tool_response>\n{"t": "5 < 6"}\n</tool_response>'
        "\n<tool_response>\n<&>\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_d3_the_template_of_qwen3_renders_exactly() -> None:
    """It uses messages[::-1], namespace, `is string`, startswith and tojson, and adds no system message."""
    text = ChatTemplate(QWEN3_LIKE).render(TALK[:3])
    assert text == (
        "<|im_start|>user\nÜnïcode 好 🔥?<|im_end|>\n"
        "<|im_start|>assistant\nJa.<|im_end|>\n"
        "<|im_start|>user\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    tools = [{"type": "function", "function": {"name": "w", "description": "Größe < & > 'x'"}}]
    text = ChatTemplate(QWEN3_LIKE).render([SYSTEM, *TALK], tools=tools)
    assert '{"type": "function", "function": {"name": "w", "description": "Größe < & > \'x\'"}}' in text
    assert CALLED in text


@pytest.mark.parametrize(("thinking", "end"), [(True, ""), (False, "<think>\n\n</think>\n\n"), (None, "")])
def test_d4_the_switch_of_the_template_is_passed_on(thinking: bool | None, end: str, tmp_path: Path) -> None:
    """enable_thinking reaches the template, which leaves earlier reasoning out."""
    checkpoint = write_chat_checkpoint(tmp_path / "m", template=QWEN3_LIKE)
    chat = opened(exported_as(checkpoint, tmp_path / "out"))
    messages = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\nFour."},
        {"role": "user", "content": "Sure?"},
    ]
    assert chat.tokenizer is not None
    ids = chat.prompt_ids(messages, enable_thinking=thinking)
    prompt = chat.tokenizer.decode(ids, skip_special_tokens=False)
    assert prompt.endswith(f"<|im_start|>assistant\n{end}")
    assert "Two" not in prompt


def test_d4_reasoning_split_over_tokens_is_kept_from_scripts() -> None:
    """The answer has nothing of the tags and of what is between them."""
    splitter = ReasoningSplitter()
    parts = [splitter.push(character) for character in "<think>\nTwo and two.\n</think>\n\nFour."]
    parts.append(splitter.flush())
    assert "".join(said.answer for said in parts) == "Four."
    assert "".join(said.reasoning for said in parts) == "Two and two."


def test_d5_rows_without_a_token_are_never_chosen(tmp_path: Path) -> None:
    """A padded row of the head is never chosen, though its logit is the best of all at each step."""
    raw = {**QWEN2, "vocab_size": 448, "tie_word_embeddings": False, "num_hidden_layers": 2}
    tensors = write_checkpoint(tmp_path / "m", raw)
    head = tensors["lm_head.weight"]
    head[NAMED:] = 0
    head[NAMED + 3], head[NAMED + 7] = 60 * head[5], -60 * head[5]  # one of them is far above all others
    safetensors.numpy.save_file(tensors, tmp_path / "m" / "model.safetensors")
    write_folder(tmp_path / "m", {"tokenizer_config.json": {"chat_template": GREET}})
    folder = exported_as(tmp_path / "m", tmp_path / "out")
    runner = Runner(folder, ON_CPU)
    assert runner.prefill(runner.new_cache(), np.array([[1, 2, 3]])).argmax() in (NAMED + 3, NAMED + 7)
    for options in ({}, {"temperature": 2.0, "seed": 1}):
        tokens = list(opened(folder).generate("dog", max_new_tokens=30, ignore_eos=True, **options))
        assert len(tokens) == 30
        assert max(token.token_id for token in tokens) < NAMED
    on_device = Chat(Runner(folder, SessionOptions(provider="cpu", threads=1, greedy_on_device=True)))
    chosen = [token.token_id for token in on_device.generate("dog", max_new_tokens=20, ignore_eos=True)]
    assert max(chosen) < NAMED


def test_d5_a_tokenizer_larger_than_the_embedding_is_an_error(tmp_path: Path) -> None:
    """An id without a row is refused at export; a tokenizer of just as many is not."""
    write_chat_checkpoint(tmp_path / "m", vocab_size=NAMED - 2)
    error = command("export", tmp_path / "m", tmp_path / "out").error
    assert f"ids up to {NAMED - 1}" in error
    assert f"{NAMED - 2} rows" in error
    write_chat_checkpoint(tmp_path / "exact", vocab_size=NAMED)
    assert command("export", tmp_path / "exact", tmp_path / "out").code == 0


def test_d6_ids_are_those_that_were_stored() -> None:
    """For 200 texts and more, to the last id."""
    stored: dict[str, list[int]] = json.loads(IDS_FILE.read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_folder(tiny())
    assert len(stored) >= 200
    for text, ids in stored.items():
        assert tokenizer.encode(text) == ids, text


@pytest.mark.transformers
def test_d6_stored_ids_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tiny() / "tokenizer.json"))
    for text, ids in json.loads(IDS_FILE.read_text(encoding="utf-8")).items():
        assert theirs(text)["input_ids"] == ids, text


@pytest.mark.parametrize(
    "tokens",
    [
        {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": None},
        {"bos_token": None, "eos_token": {"content": "<|im_end|>", "lstrip": False}, "pad_token": None},
        {"eos_token": None, "add_bos_token": False},
        {},
    ],
)
def test_d8_null_tokens_add_nothing(tokens: dict[str, Any], tmp_path: Path) -> None:
    """A bos_token of null is no text and no id."""
    write_checkpoint(
        tmp_path / "m", {**QWEN2, "vocab_size": 400, "num_hidden_layers": 1, "bos_token_id": None}
    )
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    write_folder(tmp_path / "m", {"tokenizer_config.json": {**tokens, "chat_template": template}})
    folder = exported_as(tmp_path / "m", tmp_path / "out")
    chat = opened(folder)
    end = [362] if tokens.get("eos_token") else []
    plain = byte_level_tokenizer().encode("dog").ids
    assert chat.prompt_ids([{"role": "user", "content": "dog"}]) == plain + end
    assert chat.prompt_ids("dog") == plain
    assert sorted(chat.eos_token_ids) == end
    forge(folder)
    assert command("check", folder, "--provider", "cpu").code == 0
