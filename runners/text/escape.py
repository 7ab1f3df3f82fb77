"""Text from outside that looks like control tokens, kept text: `escape_special`."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qwen_onnx.errors import UserError
from qwen_onnx.runners.text.messages import Message
from qwen_onnx.runners.text.tokenizer import TAGS, Tokenizer

# Characters that Unicode reserves for such a use: no text holds one.
_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
_LEAST = 2


class Escape:
    """Splits the spelling of control tokens in texts, so that the tokenizer takes it for text.

    Control tokens are added tokens that are special, or in brackets as `<think>`. A mark is put into each that a
    message or a tool spells; the prompt is then encoded in pieces, between marks. Text without them has the ids that
    it always had. In an assistant's content, the tags of reasoning and of calls stay what they are.
    """

    def __init__(self, tokenizer: Tokenizer, texts: object) -> None:
        """`texts`: all that comes into the prompt; it has no mark in it.

        Raises:
            UserError: there is no such mark.
        """
        self._tokenizer, self._normalizer = tokenizer, tokenizer.backend.normalizer
        added = tokenizer.backend.get_added_tokens_decoder().values()
        control = [each for each in added if each.special or each.content.startswith(("<", "["))]
        self._controls = {each.content for each in control if each.content}
        self._normalized = any(each.normalized for each in control)
        strings = [*_strings(texts)]
        free = (mark for mark in _MARKS if not any(mark in text or _json(mark) in text for text in strings))
        if (mark := next(free, None)) is None:
            raise UserError("escape_special: the messages hold each of U+FDD0 to U+FDEF, which no text does")
        self._mark = mark
        self._split = re.compile(f"{mark}|{re.escape(_json(mark))}")

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with marks in them."""
        found = []
        for message in messages:
            marked = self.marked(message)
            content = message.get("content")
            if message.get("role") == "assistant" and isinstance(content, str):
                marked = {**marked, "content": self._marked(content, self._controls - {*TAGS})}
            found.append(marked)
        return found

    def marked(self, value: Any) -> Any:
        """The same JSON value with marks in all of its strings."""
        match value:
            case str():
                return self._marked(value, self._controls)
            case Mapping():
                return {self.marked(key): self.marked(each) for key, each in value.items()}
            case Sequence():
                return [self.marked(each) for each in value]
        return value

    def parts(self, text: str) -> list[str]:
        """A text in the pieces that marks make of it."""
        return [part for part in self._marked(text, self._controls).split(self._mark) if part]

    def encode(self, text: str) -> list[int]:
        """Ids of a text with marks, without those that a tokenizer puts around a text."""
        pieces = self._split.split(text)
        return [
            each
            for piece in pieces
            if piece
            for each in self._tokenizer.encode(piece, add_special_tokens=False)
        ]

    def _marked(self, text: str, controls: set[str]) -> str:
        if self._normalized and self._normalizer is not None:
            # Some tokens are looked for in what the normalizer makes of a text.
            other = self._normalizer.normalize_str(text)
            text = other if any(control in other for control in controls) else text
        cuts = {cut for control in controls for cut in _cuts(text, control)}
        ends = [0, *sorted(cuts), len(text)]
        return self._mark.join(text[start:end] for start, end in itertools.pairwise(ends))


def _cuts(text: str, control: str) -> Iterator[int]:
    """Where to split a text, so that it does not spell a token, alone or with what comes before or after it."""
    if len(control) < _LEAST:
        return
    at = text.find(control)
    while at >= 0:
        yield at + 1
        at = text.find(control, at + 1)
    for size in range(_LEAST, len(control)):
        if text.endswith(control[:size]):
            yield len(text) - 1
        if text.startswith(control[-size:]):
            yield 1
    if _LEAST <= len(text) < len(control) and text in control and not text.isalnum():
        yield 1


def _strings(value: object) -> Iterator[str]:
    match value:
        case str():
            yield value
        case Mapping():
            for key, each in value.items():
                yield from _strings(key)
                yield from _strings(each)
        case Sequence():
            for each in value:
                yield from _strings(each)


def _json(mark: str) -> str:
    """As a template writes it into JSON that is ASCII."""
    return json.dumps(mark)[1:-1]
