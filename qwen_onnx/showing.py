"""What `qwen-onnx run` prints while it answers, and after."""

from __future__ import annotations

import sys

from qwen_onnx.answer import Answer
from qwen_onnx.memory import peak_memory
from qwen_onnx.runners.chat import Chat, Token


def show(chat: Chat, token: Token) -> None:
    """Print the text of a token, or its id where there is no tokenizer; on stderr what was asked for beside it."""
    if token.top_logits:
        print("  ".join(_labelled(chat, *best) for best in token.top_logits), file=sys.stderr)
    if token.logprob is not None:
        pairs = [(token.token_id, token.logprob), *token.top_logprobs]
        print("logprob " + "  ".join(_labelled(chat, *pair) for pair in pairs), file=sys.stderr)
    text = token.text if chat.tokenizer else f"{token.token_id} "
    print(text, end="", flush=True)


def _labelled(chat: Chat, token_id: int, logit: float) -> str:
    text = chat.tokenizer.decode([token_id], skip_special_tokens=False) if chat.tokenizer else ""
    return f"{token_id} {text!r} {logit:.3f}"


def report(chat: Chat, result: Answer) -> None:
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
