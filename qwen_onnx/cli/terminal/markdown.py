"""Emphasis in a streamed answer: what Markdown marks is shown so, and every character stays where it is."""

from __future__ import annotations

import re

_BOLD, _CODE, _PLAIN = "\x1b[1m", "\x1b[36m", "\x1b[0m"
_MARK = re.compile(r"\*\*|`+|\n")


class Emphasis:
    """Text in, styled text out, piece by piece; a mark that may go on is held back to the next piece.

    Of Markdown it knows `**bold**`, headings, code in a line and code in fences.
    """

    def __init__(self) -> None:
        self._held = ""
        self._code = ""
        """The backticks that began the code that goes on."""
        self._bold = self._heading = False
        self._line_start = True

    def push(self, text: str) -> str:
        """What can be shown now."""
        text = self._held + text
        begins_line = self._line_start or "\n" in text
        tail = re.search(r"[*`]+\Z|(?:^|(?<=\n))#+\Z" if begins_line else r"[*`]+\Z", text)
        self._held = tail[0] if tail else ""
        return self._styled(text[: len(text) - len(self._held)])

    def end(self) -> str:
        """What was held back, and an end to all styles."""
        text, self._held = self._held, ""
        return self._styled(text) + (_PLAIN if self._code or self._bold or self._heading else "")

    def _styled(self, text: str) -> str:
        shown, at = [], 0
        for found in _MARK.finditer(text):
            shown.append(self._run(text[at : found.start()]))
            shown.append(self._marked(found[0]))
            at = found.end()
        return "".join([*shown, self._run(text[at:])])

    def _run(self, text: str) -> str:
        if not text:
            return ""
        heading = self._line_start and not self._code and re.match(r"#{1,6} ", text)
        self._line_start = False
        if heading:
            self._heading = True
            return _BOLD + text
        return text

    def _marked(self, mark: str) -> str:
        if mark == "\n":
            ends, self._heading = self._heading, False
            if self._code and len(self._code) < 3:  # no code in a line goes beyond it
                self._code, ends = "", True
            if self._bold:
                self._bold, ends = False, True
            self._line_start = True
            return (_PLAIN if ends else "") + mark
        fresh, self._line_start = self._line_start, False
        if mark == "**":
            if self._code:
                return mark
            self._bold = not self._bold
            return _BOLD + mark if self._bold else mark + _PLAIN
        if not self._code:
            self._code = mark
            return _CODE + mark
        if mark == self._code and (len(mark) < 3 or fresh):
            self._code = ""
            return mark + _PLAIN + (_BOLD if self._bold or self._heading else "")
        return mark
