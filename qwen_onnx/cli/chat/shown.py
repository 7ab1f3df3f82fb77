"""What a chat shows of itself: the conversation, the options in force, the tokens of a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qwen_onnx.cli.completion import Completion, bounded
from qwen_onnx.cli.terminal.output import quote, tell
from qwen_onnx.errors import UserError, counted
from qwen_onnx.options import Given
from qwen_onnx.runners.chat import Chat, Message
from qwen_onnx.runners.sampling.params import idle_note

_SHORT = 60  # characters of a question that is named
_LARGEST = 16 << 20  # bytes of a file that goes before a question


def show_messages(messages: Sequence[Message]) -> None:
    """Each message under the role that said it."""
    for message in messages:
        tell(f"[{message['role']}]")
        quote(str(message["content"]))
    if not messages:
        tell("nothing was said yet")


def show_tokens(chat: Chat, text: str) -> None:
    """How many tokens a text is, and which."""
    if chat.tokenizer is None:
        raise UserError("/tokens: this export has no tokenizer")
    verify_length(chat, text)
    ids = chat.tokenizer.encode(text, add_special_tokens=False)
    parts = (
        f"{token_id} {chat.tokenizer.decode([token_id], skip_special_tokens=False)!r}" for token_id in ids
    )
    tell(counted(len(ids), "token"), ", ".join(parts))


def show_count(chat: Chat, count: int) -> None:
    """How many tokens the conversation is, and why /stats has another number."""
    tell(
        f"the conversation: {counted(count, 'token')} of the context's {chat.runner.context_length}, as a prompt "
        f"that the next answer goes on from; {chat.context_used} are in the cache, as /stats counts"
    )


def show_params(chat: Chat, asked: Given) -> None:
    """How tokens are chosen and what ends an answer."""
    request = chat.request(bounded(chat, asked))
    tell(*request.describe().splitlines())
    if request.enable_thinking is not None:
        tell(f"think {'on' if request.enable_thinking else 'off'}")
    if note := idle_note(chat.generation_config.given, asked):
        tell(note)
    if ignored := chat.generation_config.ignored:
        tell(f"not supported, of generation_config.json: {', '.join(ignored)}")


def show_stats(chat: Chat, last: Completion | None) -> None:
    """The context used and left, and the speed of the last answer."""
    used, length = chat.context_used, chat.runner.context_length
    tell(f"context: {counted(used, 'token')} used, {length - used} left")
    if last is not None:
        ttft, speed = _number(last.ttft_ms), _number(last.tokens_per_s)
        tell(f"last answer: {ttft} ms to the first token, {speed} tokens/s")


def shortened(message: Message) -> str:
    """The beginning of what was said, in quotes."""
    text = " ".join(str(message["content"]).split())
    return repr(text if len(text) <= _SHORT else f"{text[:_SHORT]}...")


def verify_length(chat: Chat, text: str) -> None:
    """Raises UserError for a text that is far longer than the context: all of it would take minutes to encode."""
    if chat.tokenizer is not None:
        chat.tokenizer.verify_length(text, chat.runner.context_length)


def read_text(chat: Chat, path: Path) -> str:
    """A UTF-8 file.

    Raises:
        UserError: it cannot be read, is no text, or far longer than the context.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)  # a device may have no end
        if len(content) > _LARGEST:
            raise UserError(f"/read {path}: larger than {_LARGEST >> 20} MiB")
        text = content.decode("utf-8-sig").strip()
        verify_length(chat, text)
        return text
    except UnicodeDecodeError as error:
        raise UserError(f"/read {path}: not UTF-8 (byte {error.start})") from None
    except (OSError, ValueError) as error:  # a null byte in the name
        raise UserError(f"/read {path}: {getattr(error, 'strerror', None) or error}") from None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
