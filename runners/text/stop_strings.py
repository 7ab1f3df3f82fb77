"""Stop strings: several at once, across tokens, never shown."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The text of one answer up to the first stop string.

    What could be the beginning of one is held back until it is decided, so that no part of one is shown. How the
    text comes in pieces changes nothing: of several strings the one that is complete first counts, and of those
    complete at once the one that began first.
    """

    def __init__(self, strings: Sequence[str] = ()) -> None:
        """No strings: all text passes at once."""
        self._strings = tuple(strings)
        self._longest = max(map(len, self._strings), default=0)
        self._held = ""
        self.found = False
        """A stop string was complete: all text after it is dropped."""

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Take the next text; return what can be shown.

        Args:
            may_end: False where a string that this text completes is text as any other.
        """
        if self.found or not self._strings:
            return "" if self.found else text
        before, whole = len(self._held), self._held + text
        ends = [end for string in self._strings if (end := _end_after(whole, string, before)) is not None]
        if ends and may_end:
            first = min(ends)
            longest = max(len(string) for string in self._strings if whole[:first].endswith(string))
            self.found, self._held = True, ""
            return whole[: first - longest]
        kept = self._beginning(whole)
        self._held = whole[len(whole) - kept :]
        return whole[: len(whole) - kept]

    def flush(self) -> str:
        """The text held back, once no more comes."""
        held, self._held = self._held, ""
        return held

    def _beginning(self, text: str) -> int:
        """Length of the longest end of `text` that a string begins with."""
        for count in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-count:]
            if any(len(string) > count and string.startswith(end) for string in self._strings):
                return count
        return 0


def _end_after(text: str, string: str, before: int) -> int | None:
    """Where the first occurrence that ends after `before` ends: an earlier one was decided already."""
    start = text.find(string, max(0, before + 1 - len(string)))
    return None if start < 0 else start + len(string)
