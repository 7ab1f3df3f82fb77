"""The messages of a chat, and what can be done to them: undo, ask again, make room in the context."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qwen_onnx.errors import UserError, counted
from qwen_onnx.runners.chat import Message


class Conversation:
    """Messages, an optional system message first. A turn begins with each message of the user."""

    def __init__(self, system: str | None = None) -> None:
        """A new one, under this system message."""
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self.unanswered: list[Message] | None = None
        """Messages that were to be answered and were not: nothing of it was seen before it ended."""
        self.read = ""
        """What /read put before the next question; no other conversation gets it."""
        self._earlier: tuple[list[Message] | None, str] = None, ""

    @property
    def system(self) -> list[Message]:
        """The system message, or nothing."""
        return [message for message in self.messages[:1] if message["role"] == "system"]

    @property
    def turns(self) -> list[int]:
        """Where the turns begin in `messages`."""
        return [index for index, message in enumerate(self.messages) if message["role"] == "user"]

    def forget_read(self) -> str:
        """Forget what was read for the next question, and say so; nothing where there was nothing."""
        said = "; what /read put before the next question is forgotten, too" if self.read else ""
        self.read = ""
        return said

    def begin(self, messages: list[Message], *, takes_read: bool = False) -> None:
        """These are to be answered; the last of them has what was read in it, where it takes that."""
        self._earlier = self.unanswered, self.read
        self.unanswered, self.read = messages, "" if takes_read else self.read

    def make_room(
        self, room: int, context_length: int, count: Callable[[Sequence[Message]], int], *, shift: bool
    ) -> tuple[list[Message], int]:
        """The messages to be answered with `room` in the context after them, and how many turns were dropped for it.

        Args:
            count: see with_room.
            shift: turns may be dropped.

        Raises:
            UserError: they may not be, and there is no room; the conversation is then what it was before `begin`.
        """
        messages = self.unanswered or []
        if shift:
            self.unanswered, dropped = with_room(messages, room, context_length, count)
            return self.unanswered, dropped
        if count(messages) + room > context_length:
            self.unanswered, self.read = self._earlier
            mend = "/undo or /reset make room" if self.turns else "ask less"
            raise UserError(
                f"with this question the context of {counted(context_length, 'token')} has no room for {room} more: "
                f"{mend}, or a smaller max_new_tokens"
            )
        return messages, 0

    def end(self, content: str) -> None:
        """They were, with this."""
        if self.unanswered is None:
            raise ValueError("nothing was asked")
        self.messages = [*self.unanswered, {"role": "assistant", "content": content}]
        self.unanswered = None

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages, self.unanswered = self.system, None

    def undo(self) -> Message | None:
        """Forget the last turn, or the question that was not answered; the question; None if there is neither."""
        held = self.messages if self.unanswered is None else self.unanswered
        question = next((message for message in reversed(held) if message["role"] == "user"), None)
        if self.unanswered is not None:
            self.unanswered = None
        elif self.turns:
            del self.messages[self.turns[-1] :]
        return question

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
