"""Messages as people and programs give them, and as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypeGuard

from qwen_onnx.errors import UserError
from qwen_onnx.runners.text.tokenizer import verify_unicode
from qwen_onnx.runners.text.tool_calls import decoded

Message = Mapping[str, object]
"""A chat message: `role` (system, user, assistant, tool) and `content`."""


def verified_messages(messages: object) -> list[Message]:
    """Messages as chat templates take them: parts of text, as OpenAI's API has them, are joined.

    Raises:
        UserError: not a list of objects with a role and content.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise UserError(f"messages {messages!r}: a list of messages wanted, at least one")
    return [_verified(number, message) for number, message in enumerate(messages, start=1)]


def _verified(number: int, message: object) -> Message:
    if not isinstance(message, Mapping):
        raise UserError(f"message {number}: an object with role and content wanted")
    if not isinstance(role := message.get("role"), str):
        raise UserError(f"message {number}: role {role!r}: a string wanted")
    content = message.get("content")
    if isinstance(content, str):
        verify_unicode(f"message {number}: content", content)
    if role == "tool" and "content" in message and not _are_parts(content):
        return {**message, "content": _as_text(content)}
    if isinstance(content, str) or (
        content is None and ("tool_calls" in message or "reasoning_content" in message)
    ):
        return message
    if not _are_parts(content):
        raise UserError(f"message {number}: content {content!r}: a string wanted, or parts of text")
    joined = "".join(part["text"] for part in content)
    verify_unicode(f"message {number}: content", joined)
    return {**message, "content": joined}


def _are_parts(content: object) -> TypeGuard[list[dict[str, str]]]:
    """Parts of text, at least one."""
    return (
        isinstance(content, list)
        and bool(content)
        and all(
            isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in content
        )
    )


def _as_text(content: object) -> str:
    """What a tool returned: text, or JSON."""
    if isinstance(content, str):
        return content
    try:
        return json.dumps(content, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise UserError(f"what a tool returned is text or JSON, found {type(content).__name__}") from None


def with_decoded_arguments(messages: Sequence[Message]) -> list[Message]:
    """Messages as templates want them: a call's arguments are an object, which OpenAI's clients send as a string."""
    return [
        {**message, "tool_calls": [_with_object(call) for call in calls]}
        if isinstance(calls := message.get("tool_calls"), list | tuple)
        else message
        for message in messages
    ]


def _with_object(call: object) -> object:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_object(call["function"])}
    if not isinstance(arguments := call.get("arguments", {}), str | None):
        return call
    found = decoded(arguments) if arguments and arguments.strip() else {}
    found = {} if found is None else found
    return {**call, "arguments": found} if isinstance(found, dict) else call
