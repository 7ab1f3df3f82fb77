"""The messages of a chat, and what can be done to them: undo, ask again, make room in the context."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qwen_onnx.runners.chat import Message


class Conversation:
    """Messages, an optional system message first. A turn begins with each message of the user."""

    def __init__(self, system: str | None = None) -> None:
        """A new one, under this system message."""
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self.unanswered: list[Message] | None = None
        """Messages that were to be answered and were not: nothing of it was seen before it ended."""

    @property
    def system(self) -> list[Message]:
        """The system message, or nothing."""
        return [message for message in self.messages[:1] if message["role"] == "system"]

    @property
    def turns(self) -> list[int]:
        """Where the turns begin in `messages`."""
        return [index for index, message in enumerate(self.messages) if message["role"] == "user"]

    def begin(self, messages: list[Message]) -> None:
        """These are to be answered."""
        self.unanswered = messages

    def end(self, content: str) -> None:
        """They were, with this."""
        if self.unanswered is None:
            raise ValueError("nothing was asked")
        self.messages = [*self.unanswered, {"role": "assistant", "content": content}]
        self.unanswered = None

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages, self.unanswered = self.system, None

    def undo(self) -> bool:
        """Forget the last turn, or the question that was not answered; False if there is neither."""
        if self.unanswered is not None:
            self.unanswered = None
            return True
        if not self.turns:
            return False
        del self.messages[self.turns[-1] :]
        return True

    def question(self) -> list[Message] | None:
        """The messages to be answered anew: without the last answer; None if there is none."""
        if self.unanswered is not None:
            return self.unanswered
        if not self.turns or self.messages[-1]["role"] != "assistant":
            return None
        return self.messages[:-1]


def with_room(
    messages: Sequence[Message], room: int, context_length: int, count: Callable[[Sequence[Message]], int]
) -> tuple[list[Message], int]:
    """The messages, and how many of their oldest turns were dropped: none while they leave `room` in the context.

    Where they do not, turns go until half the context is free, so that not every turn after it begins anew. The
    system message and the last turn stay; where these alone are too many, nothing is dropped.

    Args:
        count: tokens of the prompt that messages make.
    """
    kept = Conversation()
    kept.messages = list(messages)
    if count(kept.messages) + room <= context_length:
        return kept.messages, 0
    dropped = 0
    while len(kept.turns) > 1 and count(kept.messages) > context_length // 2:
        kept.messages = kept.system + kept.messages[kept.turns[1] :]
        dropped += 1
    if count(kept.messages) >= context_length:
        return list(messages), 0
    return kept.messages, dropped
