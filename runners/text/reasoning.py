"""The reasoning of models that think before they answer, told from the answer as the text streams."""

from __future__ import annotations

import dataclasses

OPEN, CLOSE = "<think>", "</think>"


@dataclasses.dataclass(frozen=True)
class Said:
    """Two parts of a text; either may be empty."""

    reasoning: str = ""
    answer: str = ""


class ReasoningSplitter:
    """Splits one answer at its `<think>` and `</think>`.

    A block of reasoning stands at the beginning and once only: tags that come later are text as any other. The tags
    and the line ends around the block belong to neither part.
    """

    def __init__(self, *, begun: bool = False) -> None:
        """`begun`: the prompt ends with `<think>`, as some templates make it, so that reasoning comes first."""
        self._tag = CLOSE if begun else OPEN
        """What is looked for; nothing once the answer proper has begun."""
        self._held = ""
        self._fresh = True
        """Nothing but line ends yet, of the part that is being read."""
        self._after = False
        """A block has been closed."""

    @property
    def thinking(self) -> bool:
        """The text so far ends within the reasoning."""
        return self._tag == CLOSE

    def push(self, text: str) -> Said:
        """Take the next text; what of it is certain to be reasoning, and what answer."""
        self._held += text
        if self._tag == OPEN:
            start = self._held.lstrip()
            if start != OPEN and OPEN.startswith(start):  # it may become the tag
                return Said()
            if not start.startswith(OPEN):
                self._tag = ""
            else:
                self._tag, self._held = CLOSE, start[len(OPEN) :]
        reasoning = ""
        if self._tag == CLOSE:
            before, tag, after = self._held.partition(CLOSE)
            if not tag:
                kept = _undecided(before)
                self._held = before[len(before) - kept :]
                return Said(reasoning=self._without_first_lines(before[: len(before) - kept]))
            reasoning = self._without_first_lines(before.rstrip("\n"))
            self._tag, self._held, self._fresh, self._after = "", after, True, True
        text, self._held = self._held, ""
        return Said(reasoning, self._without_first_lines(text) if self._after else text)

    def flush(self) -> Said:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return Said(self._without_first_lines(held.rstrip("\n"))) if self.thinking else Said(answer=held)

    def _without_first_lines(self, text: str) -> str:
        if self._fresh:
            text = text.lstrip("\n")
            self._fresh = not text
        return text


class AnswerStart:
    """Parts the text of an answer where its reasoning ends, and leaves the tags and line ends in the first part."""

    def __init__(self, *, begun: bool) -> None:
        """`begun` as of ReasoningSplitter."""
        self._tag, self._held, self._found = CLOSE if begun else OPEN, "", False

    def push(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """Take the next text: what of it comes before the answer, and what is of it.

        Args:
            last: no more text comes, so that what was held back does.
        """
        if self._found:
            return "", text
        held, passed = self._held + text, ""
        if self._tag == OPEN:
            start = held.lstrip()
            if OPEN.startswith(start) and not last:
                self._held = held
                return "", ""
            self._tag = CLOSE if start.startswith(OPEN) else ""
            if not self._tag:
                self._found = True
                return "", held
        if self._tag == CLOSE:
            before, tag, held = held.partition(CLOSE)
            if not tag:
                kept = 0 if last else _begun_tag(before)
                self._held = before[len(before) - kept :]
                return before[: len(before) - kept], ""
            self._tag, passed = "", before + tag
        answer = held.lstrip("\n")
        self._held, self._found = "", bool(answer)
        return passed + held[: len(held) - len(answer)], answer


def _begun_tag(text: str) -> int:
    """Length of the end of `text` that the closing tag may begin with."""
    return next((count for count in range(len(CLOSE) - 1, 0, -1) if text.endswith(CLOSE[:count])), 0)


def _undecided(text: str) -> int:
    """Length of the end of `text` that may be line ends before the closing tag, or a part of it."""
    kept = _begun_tag(text)
    body = text[: len(text) - kept]
    return kept + len(body) - len(body.rstrip("\n"))


def split(text: str, *, begun: bool = False) -> Said:
    """A whole answer in its two parts."""
    splitter = ReasoningSplitter(begun=begun)
    first, last = splitter.push(text), splitter.flush()
    return Said(first.reasoning + last.reasoning, first.answer + last.answer)


def closed(text: str, *, begun: bool) -> str:
    """An answer as it can stand in a conversation: reasoning that was cut short is closed.

    Templates drop the reasoning of earlier turns by its closing tag.
    """
    splitter = ReasoningSplitter(begun=begun)
    splitter.push(text)
    return f"{text}\n{CLOSE}\n\n" if splitter.thinking else text
