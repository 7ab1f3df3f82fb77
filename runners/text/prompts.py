"""Prompts as people give them, and the token ids that they come to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qwen_onnx.errors import UserError
from qwen_onnx.runners.text.escape import Escape
from qwen_onnx.runners.text.messages import Message as Message
from qwen_onnx.runners.text.messages import verified_messages as verified_messages
from qwen_onnx.runners.text.messages import with_decoded_arguments
from qwen_onnx.runners.text.reasoning import CLOSE, OPEN
from qwen_onnx.runners.text.template.chat_template import ChatTemplate, special_tokens
from qwen_onnx.runners.text.tokenizer import TOKENIZER_FILE, Tokenizer, has_tokenizer

Prompt = str | Sequence[int] | Sequence[Message]
"""A raw text, token ids, or chat messages."""
Tools = Sequence[Mapping[str, object]]
"""JSON schemas of functions, as OpenAI's API has them."""


class PromptIds(list[int]):
    """Token ids of a prompt, and whether an answer to them may reason first."""

    begun: bool | None = None
    """Of a chat: its template began the reasoning already (`<think>` is its end). None: text to go on with."""


class PromptEncoder:
    """The tokenizer and the chat template of an export, where it has them."""

    def __init__(self, folder: Path, *, rows: int) -> None:
        """`rows` of the embedding."""
        self.tokenizer = Tokenizer.from_folder(folder) if has_tokenizer(folder) else None
        self.template = ChatTemplate.from_folder(folder) if has_tokenizer(folder) else None
        self._folder, self._rows = folder, rows
        self._named: dict[str, ChatTemplate] = {}

    def template_of(self, asked: Mapping[str, Any]) -> ChatTemplate | None:
        """As `template_for`, by what is asked of a Request."""
        return self.template_for(asked.get("chat_template"), tools=bool(asked.get("tools")))

    def template_for(self, chat_template: str | None, *, tools: bool) -> ChatTemplate | None:
        """The template of this name, or of this Jinja text; where it is None, the one of calls if there are tools.

        Raises:
            UserError: no such name, or no usable template.
        """
        own = self.template.named if self.template else {}
        if chat_template is None:
            if not tools or "tool_use" not in own:
                return self.template
            chat_template = "tool_use"
        source = own.get(chat_template, chat_template)
        if chat_template not in own and "{" not in chat_template:
            there = f"has the templates {', '.join(map(repr, own))}" if own else "has no templates with names"
            raise UserError(f"chat template {chat_template!r}: {self._folder} {there}; or give a file")
        if source not in self._named:
            special = special_tokens(self._folder)
            origin = f"chat template {chat_template!r}" if chat_template in own else "the chat template given"
            self._named[source] = ChatTemplate(source, special_tokens=special, origin=origin)
        return self._named[source]

    def encode(
        self,
        prompt: Prompt,
        *,
        tools: Tools | None = None,
        enable_thinking: bool | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        escape_special: bool = False,
        close_reasoning: bool = False,
        most: int | None = None,
    ) -> PromptIds:
        """See `Chat.prompt_ids`."""
        if isinstance(prompt, str):
            if most is not None:
                self._tokenizer().verify_length(prompt, most)
            return PromptIds(self._raw(prompt, escape_special=escape_special))
        _verify_list(prompt)
        prompt = prompt if isinstance(prompt, PromptIds) else list(prompt)  # type: ignore[assignment]
        ids = [item for item in prompt if isinstance(item, int | np.integer) and not isinstance(item, bool)]
        if len(ids) == len(prompt):
            for token_id in ids:  # now, as Python's numbers: an int64 would not hold each of them
                if not 0 <= token_id < self._rows:
                    raise UserError(f"token id {token_id} is outside the embedding's {self._rows} rows")
            return prompt if isinstance(prompt, PromptIds) else PromptIds(map(int, ids))
        if not all(isinstance(item, Mapping) for item in prompt):
            raise UserError("a prompt is a text, a list of token ids or a list of messages, not a mixture")
        template = self.template_for(chat_template, tools=bool(tools))
        if template is None:
            raise UserError(f"{self._folder}: has no chat template; give raw text or token ids")
        messages = with_decoded_arguments(verified_messages(prompt))
        escape = None
        if escape_special:
            escape = Escape(self._tokenizer(), [template.source, messages, tools or []])
            messages, tools = escape.messages(messages), escape.marked(tools)
        text = template.render(
            messages,
            tools=tools,
            enable_thinking=enable_thinking,
            add_generation_prompt=add_generation_prompt,
        )
        if most is not None:
            self._tokenizer().verify_length(text, most)
        begun = text.rstrip().endswith(OPEN)
        if begun and close_reasoning:  # as templates write reasoning that is switched off
            text, begun = f"{text.rstrip()}\n\n{CLOSE}\n\n", False
        found = PromptIds(
            escape.encode(text) if escape else self._tokenizer().encode(text, add_special_tokens=False)
        )
        found.begun = begun
        return found

    def _raw(self, text: str, *, escape_special: bool) -> list[int]:
        tokenizer = self._tokenizer()
        if escape_special and len(parts := Escape(tokenizer, text).parts(text)) > 1:
            inner = [each for part in parts for each in tokenizer.encode(part, add_special_tokens=False)]
            # What the tokenizer puts around a text, as around one that has a single token.
            one, around = (
                tokenizer.encode(parts[0][:1], add_special_tokens=False),
                tokenizer.encode(parts[0][:1]),
            )
            at = next(at for at in range(len(around)) if around[at : at + len(one)] == one)
            return [*around[:at], *inner, *around[at + len(one) :]]
        return tokenizer.encode(text)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError(f"{self._folder}: has no {TOKENIZER_FILE}; give token ids")
        return self.tokenizer


def _verify_list(prompt: object) -> None:
    if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | bytearray | memoryview | Mapping):
        found = type(prompt).__name__ if isinstance(prompt, Iterable) else repr(prompt)
        raise UserError(f"a prompt is a text, a list of token ids or a list of messages; found {found}")
