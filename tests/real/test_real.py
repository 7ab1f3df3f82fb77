"""A real language model: that it is the model, what it knows in each dtype, and what quantizing costs it."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fetch import fetch_gguf, fetch_model, fetch_tokenizer
from quality import exported, right_answers, text
from questions import QUESTIONS

from qwen_onnx import load
from qwen_onnx.checks.comparison import compare_models
from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.text.detokenizer import StreamDetokenizer
from qwen_onnx.runners.text.template.chat_template import ChatTemplate
from qwen_onnx.runners.text.tokenizer import Tokenizer
from support.tolerances import TRANSFORMERS_REAL, assert_close

pytestmark = pytest.mark.real

KL = {"f16": 1e-3, "bf16": 1e-2, "int8": 0.012, "int4": 0.25}
"""Mean KL divergence from f32 in nats; of llama.cpp q8_0 has 0.005 and q4_0 0.34."""
KNOWN = 24
"""Right answers of f32: 25 were seen."""
LOST = {"int8": 1, "int4": 3}
"""Answers that a dtype may lose of those that f32 has right."""
TOOLS = [{"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {}}}]
TURNS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello!"},
        {"role": "user", "content": "And 你好?"},
    ],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("QWEN_ONNX_REAL")
    found = Path(given) if given else tmp_path_factory.mktemp("real")
    found.mkdir(parents=True, exist_ok=True)
    return found


def opened(model: Path, dtype: str) -> Chat:
    return load(exported(model, dtype), provider="cpu")


def test_the_checkpoint_is_the_model(folder: Path) -> None:
    """Logits and greedy ids as transformers computes them from the GGUF itself."""
    import torch
    from transformers import AutoModelForCausalLM

    source, (plain, _) = fetch_gguf(folder), fetch_model(folder)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    chat = opened(plain, "f32")
    ids = chat.prompt_ids([{"role": "user", "content": "What is the capital of France?"}])
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0, -1].numpy()
        greedy = model.generate(
            torch.tensor([ids]), max_new_tokens=16, do_sample=False, eos_token_id=[*chat.eos_token_ids]
        )
    found = chat.runner.prefill(chat.runner.new_cache(), np.array([ids]))[0]
    assert_close(found, wanted, TRANSFORMERS_REAL)
    tokens = chat.generate(ids, do_sample=False, max_new_tokens=16)
    assert [token.token_id for token in tokens] == greedy[0, len(ids) :].tolist()


@pytest.mark.parametrize("dtype", ["f16", "bf16", "int8", pytest.param("int4", marks=pytest.mark.real_whole)])
def test_what_a_dtype_costs(dtype: str, folder: Path) -> None:
    _, moved = fetch_model(folder)
    chat, reference = opened(moved, dtype), opened(moved, "f32")
    found = compare_models(chat, reference, reference.prompt_ids(text())[:513])
    assert 0 <= found.kl + 1e-6 < KL[dtype]


def test_the_text_is_long_enough(folder: Path) -> None:
    plain, _ = fetch_model(folder)
    assert len(Tokenizer.from_folder(plain).encode(text())) > 5000


@pytest.mark.parametrize("dtype", ["int8", pytest.param("int4", marks=pytest.mark.real_whole)])
def test_a_dtype_knows_what_f32_knows(dtype: str, folder: Path) -> None:
    plain, _ = fetch_model(folder)
    known = right_answers(opened(plain, "f32"))
    assert len(known) >= KNOWN, {*QUESTIONS} - {*known}
    assert len({*known} - {*right_answers(opened(plain, dtype))}) <= LOST[dtype]


def strings(count: int, seed: int) -> list[str]:
    """Of several scripts, with control tokens, line ends, joined emoji and odd spaces among them."""
    draw = random.Random(seed)
    pieces = [
        "the", " quick", "Brown", "don't", " 123", "4,567.89", "\n", "\n\n  ", "\t", "  ", "你好", "世界", "привет",
        "مرحبا", "שלום", "नमस्ते", "こんにちは", "한국어", "é", "e\u0301", "👨‍👩‍👧‍👦", "🇫🇷", "\u200b", "\u00a0", "ﬁ",
        "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "<|im_", "def f(x):\n    return x\n",
        "https://example.com/a?b=c&d", "{\"a\": [1, 2]}", "\r\n", "—", "…", "'s", "'LL", "\u0000", "\ufffd",
    ]  # fmt: skip
    found = []
    for _ in range(count):
        parts = [
            draw.choice(pieces) if draw.random() < 0.8 else chr(draw.choice([*range(32, 0x2FFF), 0x1F600]))
            for _ in range(draw.randrange(1, 20))
        ]
        found.append("".join(parts))
    return found


@pytest.mark.parametrize(
    ("count", "seed"), [(2000, 0), pytest.param(18_000, 1, marks=pytest.mark.real_whole)]
)
def test_qwen3_s_tokenizer_is_transformers_(count: int, seed: int, folder: Path) -> None:
    """Ids, texts, and the same text from a stream of single ids."""
    from transformers import AutoTokenizer

    place = fetch_tokenizer(folder)
    own, oracle = Tokenizer.from_folder(place), AutoTokenizer.from_pretrained(place)
    assert own.size == len(oracle) == 151_669
    for each in strings(count, seed):
        ids = own.encode(each, add_special_tokens=False)
        assert ids == oracle.encode(each, add_special_tokens=False), each
        whole = own.decode(ids, skip_special_tokens=False)
        assert whole == oracle.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False), (
            each
        )
        assert streamed(own, ids) == own.decode(ids), each


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = StreamDetokenizer(tokenizer)
    return "".join([*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()])


@pytest.mark.parametrize("messages", TURNS, ids=["user", "system", "turns"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("enable_thinking", [None, True, False])
def test_qwen3_s_template_renders_as_in_transformers(
    messages: list[dict[str, Any]], tools: Any, enable_thinking: bool | None, folder: Path
) -> None:
    from transformers import AutoTokenizer

    place = fetch_tokenizer(folder)
    template = ChatTemplate.from_folder(place)
    assert template is not None
    switch = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    wanted = AutoTokenizer.from_pretrained(place).apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True, **switch
    )
    assert template.render(messages, tools=tools, **switch) == wanted
