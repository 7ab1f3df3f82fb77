"""What `qwen-onnx run` prints while it answers, and after."""

from __future__ import annotations

import os
import sys

from qwen_onnx.cli.completion import Completion
from qwen_onnx.memory import peak_memory
from qwen_onnx.options import Given
from qwen_onnx.runners.chat import Chat, Token
from qwen_onnx.runners.text.reasoning import Said

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Printer:
    """Answers go to stdout; reasoning, dimmed where that can be, and all else to stderr."""

    def __init__(self, chat: Chat, *, show_thinking: bool = True, color: bool = True) -> None:
        self._chat, self._show_thinking = chat, show_thinking
        self._dim = color and has_colors()
        # Of a file or a pipe, every character is the reader's; on a terminal some would be commands to it.
        self._harmless = sys.stdout.isatty()
        self._thinking = self._in_line = False

    def print_token(self, token: Token | None, said: Said) -> None:
        """Print what one token says, or its id where there is no tokenizer; and what was asked for beside it."""
        if token is not None:
            self._details(token)
        if said.reasoning and self._show_thinking:
            self._thinking = True
            text = harmless(said.reasoning)
            print(f"{_DIM}{text}{_PLAIN}" if self._dim else text, end="", file=sys.stderr, flush=True)
        text = said.answer
        if self._chat.tokenizer is None and token is not None:
            text = f"{token.token_id} "
        if text and self._thinking:
            self._end_of_thought()
        if text:
            self._in_line = not text.endswith("\n")
            print(harmless(text) if self._harmless else text, end="", flush=True)

    def end(self) -> None:
        """End the line of an answer."""
        if self._thinking:
            self._end_of_thought()
        print(flush=True)
        self._in_line = False

    def _end_of_thought(self) -> None:
        self._thinking = False
        print("\n", file=sys.stderr, flush=True)

    def _details(self, token: Token) -> None:
        if not token.top_logits and token.logprob is None:
            return
        if self._in_line and self._harmless and sys.stderr.isatty():  # both are the same terminal
            print(file=sys.stderr)
        if token.top_logits:
            print("  ".join(self._labelled(*best) for best in token.top_logits), file=sys.stderr)
        if token.logprob is not None:
            pairs = [(token.token_id, token.logprob), *token.top_logprobs]
            print("logprob " + "  ".join(self._labelled(*pair) for pair in pairs), file=sys.stderr)

    def _labelled(self, token_id: int, logit: float) -> str:
        tokenizer = self._chat.tokenizer
        text = tokenizer.decode([token_id], skip_special_tokens=False) if tokenizer else ""
        return f"{token_id} {text!r} {logit:.3f}"


def has_colors() -> bool:
    """stderr is a terminal that shows them, and nobody asked for none (https://no-color.org)."""
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def harmless(text: str) -> str:
    """A text that is no command to a terminal: control characters, but for line ends and tabs, are spelled out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" or not _is_control(c) else _spelled(c) for c in text)


def _is_control(character: str) -> bool:
    code = ord(character)
    return code < 0x20 or 0x7F <= code < 0xA0


def _spelled(character: str) -> str:
    return "" if character == "\r" else character.encode("unicode_escape").decode()


def print_verbose(chat: Chat, asked: Given) -> None:
    """What `--verbose` prints, on stderr: what is computed with, the cache's bytes, the options in force."""
    runner = chat.runner
    slot_bytes = runner.cache_spec.slot_bytes
    most = runner.cache_spec.nbytes(batch_size=1, slots=runner.context_length)
    print(f"{runner.graph.file}, {runner.describe()}", file=sys.stderr)
    print(
        f"KV cache: {slot_bytes:,} bytes a token, {most:,} for the whole context of {runner.context_length}",
        file=sys.stderr,
    )
    print(chat.request(asked).describe(), file=sys.stderr)


def print_stats(chat: Chat, result: Completion) -> None:
    """What `--stats` prints, on stderr."""
    memory = peak_memory()
    fields = [
        f"{len(result.prompt_ids)} prompt tokens",
        f"{len(result.token_ids)} new",
        result.finish_reason,
        "-" if result.ttft_ms is None else f"TTFT {result.ttft_ms:.1f} ms",
        "-" if result.tokens_per_s is None else f"{result.tokens_per_s:.1f} tokens/s",
        f"cache {chat.cache_bytes / 1e6:.1f} MB",
        "" if memory is None else f"peak memory {memory / 1e6:.0f} MB",
        f"context {chat.context_used} of {chat.runner.context_length}",
        chat.runner.describe(),
    ]
    print(", ".join(field for field in fields if field), file=sys.stderr)
