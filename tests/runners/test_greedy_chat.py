"""Conversations in which the device chooses the tokens: the same texts as when the host does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_onnx import UserError
from qwen_onnx.runners.chat import Chat, Token
from qwen_onnx.runners.model.runner import Runner
from support.chats import endless, tiny
from support.cuda.graphs_on_cpu import GREEDY_ON_CPU, serve_cuda_graphs_on_cpu
from support.exports import ON_CPU

DTYPES = ["f32", "f16"]


@pytest.fixture(params=DTYPES)
def chats(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Chat, Chat]:
    """On the bundled model: the device chooses, and the host does."""
    folder = serve_cuda_graphs_on_cpu(tiny(request.param), tmp_path / "export")
    return Chat(Runner(folder, GREEDY_ON_CPU)), Chat(Runner(folder, ON_CPU))


def said(tokens: Iterator[Token]) -> list[Any]:
    return [
        (token.token_id, token.text, token.finish_reason, token.cached_tokens, token.top_logits)
        for token in tokens
    ]


def test_several_turns_say_the_same(chats: tuple[Chat, Chat]) -> None:
    history: list[dict[str, str]] = []
    for content in ("Hello!", "What is 2 + 3?", "Say it again."):
        history.append({"role": "user", "content": content})
        found, wanted = (said(chat.generate(history, max_new_tokens=24, top_logits=3)) for chat in chats)
        assert found == wanted
        assert all(len(top) == 3 and top[0][0] == token_id for token_id, *_, top in found)
        history.append({"role": "assistant", "content": "".join(text for _, text, *_ in found)})
    assert wanted[-1][2] == "eos"


def test_an_edited_history_says_the_same(chats: tuple[Chat, Chat]) -> None:
    for prompt in ("The cat sat on", "The cat ran", "The cat sat on", "The"):
        found, wanted = (said(chat.generate(prompt, max_new_tokens=10, ignore_eos=True)) for chat in chats)
        assert found == wanted


@pytest.mark.parametrize("dtype", DTYPES)
def test_ids_without_a_name_are_never_chosen(dtype: str, tmp_path: Path) -> None:
    """Not even where such a row of the embedding has the best logit."""
    folder = serve_cuda_graphs_on_cpu(endless(dtype), tmp_path / "export")
    chat, plain = Chat(Runner(folder, GREEDY_ON_CPU)), Chat(Runner(folder, ON_CPU))
    size = chat.processor.vocabulary.size
    assert size < chat.runner.manifest.vocab_size
    nameless = 0
    for first in range(0, 380, 7):
        found, wanted = (
            said(each.generate([first, 5], max_new_tokens=2, ignore_eos=True)) for each in (chat, plain)
        )
        assert found == wanted
        assert all(token_id < size for token_id, *_ in found)
        chat.runner.prefill_greedy(cache := chat.runner.new_cache(), np.array([[first, 5]]))
        nameless += int(chat.runner.logits(cache)[0].argmax() >= size)
    assert nameless, "no nameless id was ever the best: nothing is shown"


def test_log_probabilities_come_along_and_nothing_else_is_asked_of_the_device(
    chats: tuple[Chat, Chat],
) -> None:
    """And what is not greedy is refused."""
    on_device, on_host = chats
    prompt = [{"role": "user", "content": "What is 2 + 3?"}]
    asked = {"max_new_tokens": 24, "logprobs": 2}
    found, wanted = (
        [(token.token_id, token.logprob, token.top_logprobs) for token in chat.generate(prompt, **asked)]
        for chat in chats
    )
    assert found == wanted
    assert all(best[0] == (token_id, logprob) and len(best) == 2 for token_id, logprob, best in found)
    for options in ({"temperature": 1}, {"min_new_tokens": 3}):
        with pytest.raises(UserError, match=r"^greedy_on_device is greedy"):
            list(on_device.generate(prompt, **options))
    stopped = [said(chat.generate(prompt, stop=[" ", "5"])) for chat in (on_device, on_host)]
    assert stopped[0] == stopped[1]
    assert stopped[0][-1][2] == "stop"
