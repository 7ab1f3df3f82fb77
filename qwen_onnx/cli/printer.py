"""What `qwen-onnx run` prints while it answers, and after."""

from __future__ import annotations

import sys

from qwen_onnx.cli.completion import Completion, token_text
from qwen_onnx.cli.terminal.markdown import Emphasis
from qwen_onnx.cli.terminal.output import (
    answer,
    end_answer,
    end_thought,
    has_colors,
    pause_answer,
    tell,
    think,
    word_wrap,
)
from qwen_onnx.errors import counted
from qwen_onnx.memory import peak_memory
from qwen_onnx.options import Given
from qwen_onnx.runners.chat import Chat, Token
from qwen_onnx.runners.text.reasoning import Said


class Printer:
    """Answers go to stdout; reasoning, dimmed where that can be, and all else to stderr."""

    def __init__(
        self,
        chat: Chat,
        *,
        show_thinking: bool = True,
        color: bool = True,
        markdown: bool = False,
        wrap: bool = True,
    ) -> None:
        """Nothing is printed yet. On a terminal, `wrap` begins a new line with a word that would be cut."""
        self._chat, self._show_thinking = chat, show_thinking
        self._dim = color and has_colors()
        self._emphasis = Emphasis() if markdown and self._dim and sys.stdout.isatty() else None
        self._wrap = word_wrap(of_answer=True) if wrap else None
        self._wrap_thought = word_wrap(of_answer=False) if wrap else None
        self._thinking = self._in_line = False

    def print_token(self, token: Token | None, said: Said) -> None:
        """Print what one token says, or its id where there is no tokenizer; and what was asked for beside it."""
        if token is not None:
            self._details(token)
        if said.reasoning and self._show_thinking:
            self._thinking = True
            think(said.reasoning, dim=self._dim, wrap=self._wrap_thought)
        text = said.answer
        if self._chat.tokenizer is None and token is not None:
            text = f"{token.token_id} "
        if text and self._thinking:
            self._end_of_thought()
        if text:
            self._in_line = not text.endswith("\n")
            answer(text, end="", emphasis=self._emphasis, wrap=self._wrap)

    def end(self) -> None:
        """End the line of an answer."""
        if self._thinking:
            self._end_of_thought()
        end_answer(self._emphasis, self._wrap)
        self._in_line = False

    def break_off(self) -> None:
        """End the line of an answer that an error ends, where it has begun."""
        if self._thinking or self._in_line:
            self.end()

    def _end_of_thought(self) -> None:
        self._thinking = False
        end_thought(self._wrap_thought, dim=self._dim, lines=2)

    def _details(self, token: Token) -> None:
        if not token.top_logits and token.logprob is None:
            return
        if self._thinking:
            end_thought(self._wrap_thought, dim=self._dim)
        elif self._in_line and sys.stdout.isatty() and sys.stderr.isatty():  # both are the same terminal
            pause_answer(self._wrap)
            tell("")
        if token.top_logits:
            tell("  ".join(self._labelled(*best) for best in token.top_logits))
        if token.logprob is not None:
            pairs = [(token.token_id, token.logprob), *token.top_logprobs]
            tell("logprob " + "  ".join(self._labelled(*pair) for pair in pairs))

    def _labelled(self, token_id: int, logit: float) -> str:
        return f"{token_id} {token_text(self._chat, token_id)!r} {logit:.3f}"


def print_verbose(chat: Chat, asked: Given) -> None:
    """What `--verbose` prints, on stderr: what is computed with, the cache's bytes, the options in force."""
    runner = chat.runner
    slot_bytes = runner.cache_spec.slot_bytes
    most = runner.cache_spec.nbytes(batch_size=1, slots=runner.context_length)
    tell(
        f"{runner.graph.file}, {runner.describe()}",
        f"KV cache: {slot_bytes:,} bytes a token, {most:,} for the whole context of {runner.context_length}",
        *chat.request(asked).describe().splitlines(),
    )


def print_stats(chat: Chat, result: Completion) -> None:
    """What `--stats` prints, on stderr."""
    memory = peak_memory()
    fields = [
        counted(len(result.prompt_ids), "prompt token"),
        f"{len(result.token_ids)} new",
        result.finish_reason,
        "-" if result.ttft_ms is None else f"TTFT {result.ttft_ms:.1f} ms",
        "-" if result.tokens_per_s is None else f"{result.tokens_per_s:.1f} tokens/s",
        f"cache {chat.cache_bytes / 1e6:.1f} MB",
        "" if memory is None else f"peak memory {memory / 1e6:.0f} MB",
        f"context {chat.context_used} of {chat.runner.context_length}",
        chat.runner.describe(),
    ]
    tell(", ".join(field for field in fields if field))
