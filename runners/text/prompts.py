"""Prompts as people give them, and the token ids that they come to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from qwen_onnx.errors import UserError
from qwen_onnx.runners.text.messages import Message as Message
from qwen_onnx.runners.text.messages import verified_messages as verified_messages
from qwen_onnx.runners.text.template.chat_template import ChatTemplate
from qwen_onnx.runners.text.tokenizer import TOKENIZER_FILE, Tokenizer

Prompt = str | Sequence[int] | Sequence[Message]
"""A raw text, token ids, or chat messages."""
Tools = Sequence[Mapping[str, object]]
"""JSON schemas of functions, as OpenAI's API has them."""


class PromptEncoder:
    """The tokenizer and the chat template of an export, where it has them."""

    def __init__(self, folder: Path, *, rows: int) -> None:
        """`rows` of the embedding."""
        has_tokenizer = (folder / TOKENIZER_FILE).exists()
        self.tokenizer = Tokenizer.from_folder(folder) if has_tokenizer else None
        self.template = ChatTemplate.from_folder(folder) if has_tokenizer else None
        self._folder, self._rows = folder, rows

    def encode(
        self,
        prompt: Prompt,
        *,
        tools: Tools | None = None,
        enable_thinking: bool | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """See `Chat.prompt_ids`."""
        if isinstance(prompt, str):
            return self._tokenizer().encode(prompt)
        if not isinstance(prompt, Iterable):
            raise UserError(
                f"a prompt is a text, a list of token ids or a list of messages; found {prompt!r}"
            )
        prompt = list(prompt)  # type: ignore[assignment]
        ids = [item for item in prompt if isinstance(item, int | np.integer) and not isinstance(item, bool)]
        if len(ids) == len(prompt):
            for token_id in ids:  # now, as Python's numbers: an int64 would not hold each of them
                if not 0 <= token_id < self._rows:
                    raise UserError(f"token id {token_id} is outside the embedding's {self._rows} rows")
            return [int(token_id) for token_id in ids]
        if not all(isinstance(item, Mapping) for item in prompt):
            raise UserError("a prompt is a text, a list of token ids or a list of messages, not a mixture")
        if self.template is None:
            raise UserError(f"{self._folder}: has no chat template; give raw text or token ids")
        text = self.template.render(
            verified_messages(prompt),
            tools=tools,
            enable_thinking=enable_thinking,
            add_generation_prompt=add_generation_prompt,
        )
        return self._tokenizer().encode(text, add_special_tokens=False)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError(f"{self._folder}: has no {TOKENIZER_FILE}; give token ids")
        return self.tokenizer
