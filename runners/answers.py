"""Whole answers: what a Chat does beside streaming tokens, made of its `generate`."""

from __future__ import annotations

import abc
import asyncio
import threading
from collections.abc import AsyncIterator, Generator
from typing import Any

from qwen_onnx.options import Given, method_options
from qwen_onnx.runners.output import Token
from qwen_onnx.runners.sampling.request import Request
from qwen_onnx.runners.text.prompts import Prompt


class Answers(abc.ABC):
    """Answers as text, and tokens for `async for`."""

    _answering: threading.Lock
    """Held for a whole answer, so that those of several threads come one after the other."""
    generate: Any
    """See Chat; the options are its keywords."""

    @property
    @abc.abstractmethod
    def has_template(self) -> bool:
        """Messages can be put into a prompt."""

    @method_options(Request)
    def complete(self, prompt: Prompt, options: Given) -> str:
        """What the model says after a raw text, token ids or chat messages: all of it, reasoning too.

        Several threads may ask at once: their answers are made one after the other.

        Raises:
            UserError, NonFiniteLogitsError, EqualLogitsError: as `generate`.
        """
        return self._text(prompt, options)

    @method_options(Request)
    def __call__(self, prompt: Prompt, options: Given) -> str:
        """The answer to a question: a text is put into the chat template, as the user's first message.

        Each call is a conversation of its own; for one that goes on, give all of its messages. Where there is no
        template, and for anything but a text, it is the same as `complete`.
        """
        if isinstance(prompt, str) and self.has_template:
            prompt = [{"role": "user", "content": prompt}]
        return self._text(prompt, options)

    @method_options(Request)
    def generate_async(self, prompt: Prompt, options: Given) -> AsyncIterator[Token]:
        """As `generate`, for `async for`: each step is made in a thread, and the event loop goes on meanwhile.

        Cancelled or closed, it ends after the step that is being made.
        """
        return _in_threads(self.generate(prompt, **options))

    def _text(self, prompt: Prompt, options: Given) -> str:
        with self._answering:
            return "".join(token.text for token in self.generate(prompt, **options))


async def _in_threads(tokens: Generator[Token]) -> AsyncIterator[Token]:
    step: asyncio.Future[Token | None] | None = None
    try:
        while True:
            step = asyncio.ensure_future(asyncio.to_thread(next, tokens, None))
            token = await asyncio.shield(step)  # a thread cannot be stopped: it is waited for below
            if token is None:
                return
            yield token
    finally:
        try:
            if step is not None and not step.done():
                await asyncio.wait([step])
        finally:
            if step is None or step.done():
                tokens.close()
