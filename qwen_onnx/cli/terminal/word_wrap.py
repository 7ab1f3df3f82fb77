"""Words of a streamed text that a terminal does not cut: one that no longer fits begins a new line."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

from wcwidth import wcwidth

_PIECE = re.compile("\x1b\\[[0-9;]*m|.", re.DOTALL)
_FENCE = re.compile(r"\s*(`{3,}(?=[^`]*\Z)|~{3,})")
_ALONE = re.compile(
    "[\u2e80-\u2fdf\u3000-\u30ff\u3105-\u312f\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff]"
)
"""Chinese and Japanese have no spaces: a line may begin with any of these. Korean has them."""
_WIDENS = "\ufe0f"
"""Makes an emoji of the sign before it: in two cells, in most terminals."""
_TAB, _SPACES = 8, " \t"
_LINE_START = 200
"""Characters of a line that are kept: enough to know a fence."""


class WordWrap:
    """Text in, the same text out with line ends added, piece by piece; a word is held back until it is known to fit.

    A word stands with the spaces after it, and all stay: an indented line keeps its indent. Lines of a fenced code
    block are as they were said, for whoever copies them. Of what is longer than a line nothing is held back.
    """

    def __init__(self, columns: Callable[[], int]) -> None:
        """`columns`: the terminal's width, which may be another with each piece."""
        self._columns = columns
        self._held = self._last = ""
        """A word with its spaces; the last character of it."""
        self._column = self._cells = 0
        """Of the cursor; of what is held, at the beginning of a line."""
        self._overlong = False
        """What goes on is longer than a line: the terminal breaks it."""
        self._line = self._fence = ""
        """How the line begins; what the code block that goes on began with."""

    def push(self, text: str) -> str:
        """What can be shown now. The text may have styles (`ESC [ ... m`), and no other command."""
        width = self._columns()
        shown: list[str] = []
        for piece in _PIECE.findall(text):
            if piece == "\n":
                shown += self._released(width), piece
                self._end_of_line()
            elif len(piece) > 1:  # a style
                self._held += piece
            else:
                if self._last and (_may_part(self._last, piece) or self._fills(piece, width)):
                    shown.append(self._released(width))
                self._held += piece
                self._last = piece
                self._cells = _end(self._cells, piece)
                if len(self._line) < _LINE_START:
                    self._line += piece
                if self._cells > width:
                    shown.append(self._released(width, goes_on=True))
        if self._fence or self._overlong:
            shown.append(self._released(width, goes_on=True))
        return "".join(shown)

    def rest(self) -> str:
        """What was held back. Whoever asks begins a new line after it, and the text goes on there."""
        text = self._released(self._columns())
        self._column = 0
        return text

    def end(self) -> str:
        """What was held back; the text ends, and the line."""
        text = self.rest()
        self._line = self._last = self._fence = ""
        return text

    def _released(self, width: int, *, goes_on: bool = False) -> str:
        """What is held, behind a line end where it goes beyond this line."""
        held, self._held = self._held, ""
        breaks = not (self._fence or self._overlong) and 0 < self._column < _end(self._column, held) > width
        self._column = _end(0 if breaks else self._column, held, width)
        self._overlong, self._cells = goes_on, 0
        return "\n" + held if breaks else held

    def _fills(self, piece: str, width: int) -> bool:
        """What is held fits on a line, but not with one space more."""
        return piece in _SPACES and not self._overlong and _end(self._cells, piece) > width

    def _end_of_line(self) -> None:
        line, self._line, self._last, self._column = self._line, "", "", 0
        if not self._fence:
            found = _FENCE.match(line)
            self._fence = found[1] if found else ""
        elif (end := line.strip()).startswith(self._fence) and not end.strip(self._fence[0]):
            self._fence = ""


def _may_part(before: str, after: str) -> bool:
    """A line may end between these two: after spaces, and beside letters of scripts without them."""
    if after in _SPACES:
        return False
    if before in _SPACES:
        return True
    if not (_ALONE.match(before) or _ALONE.match(after)):
        return False
    # No line begins with what closes, joins or marks, and none ends with what opens.
    kind = unicodedata.category(after)
    joins = kind in ("Lm", "Cf", "Sk") or (kind[0] in "MP" and kind not in ("Ps", "Pi"))
    return not joins and unicodedata.category(before) not in ("Ps", "Pi", "Cf")


def _end(column: int, text: str, width: int | None = None) -> int:
    """The column after the text, that a terminal of this width breaks; without one, none does."""
    for piece in _PIECE.findall(text):
        if piece == "\t":
            column += _TAB - column % _TAB
            column = column if width is None else min(column, max(width - 1, 0))
        elif len(piece) == 1:
            # Never too few: flags and joined emoji may take fewer cells than their parts.
            cells = 1 if piece == _WIDENS else max(wcwidth(piece), 0)
            column = cells if width is not None and column + cells > width else column + cells
    return column
