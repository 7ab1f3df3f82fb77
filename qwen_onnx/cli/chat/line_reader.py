"""Lines from a person at a terminal: edited, remembered from one session to the next, several at once if need be."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from qwen_onnx.cli.chat.commands import FILES, is_open_block
from qwen_onnx.cli.terminal.output import tell

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

_PROMPT_STYLE = "bold ansigreen"
HISTORY_VARIABLE = "QWEN_ONNX_HISTORY"


def read_plain(prompt: str) -> str:
    """A line from stdin, the prompt on stderr; with the next where it ends in a backslash or three quotes are open.

    Raises:
        EOFError: at the end of stdin, or Ctrl-D.
        KeyboardInterrupt: Ctrl-C.
        UnicodeError: bytes that are no text.
    """
    lines = []
    while True:
        tell(prompt, end="")
        lines.append(as_typed(input()))
        in_block = is_open_block("\n".join(lines))
        if not in_block and not lines[-1].endswith("\\"):
            return "\n".join(lines)
        if not in_block:
            lines[-1] = lines[-1][:-1]
        prompt = "... "


class LineReader:
    """Reads with prompt_toolkit, on stderr: stdout is for answers.

    Enter sends; Alt-Enter, or Enter after a backslash, begins a new line, and what is pasted keeps its lines. Ctrl-C
    clears what is typed, before it means anything else.
    """

    def __init__(
        self, *, commands: Sequence[str], settings: Sequence[str], status: Callable[[], str], color: bool
    ) -> None:
        """Tab completes `commands`, `settings` after /set, and files; `status` is shown at the end of the line."""
        from prompt_toolkit import PromptSession  # here, because it takes a tenth of a second
        from prompt_toolkit.output import ColorDepth, create_output

        self._color = color
        self._session: PromptSession[str] = PromptSession(
            multiline=True,
            prompt_continuation=lambda width, line, wrapped: "" if wrapped else "... ",
            rprompt=status,
            key_bindings=_keys(),
            history=_history(),
            completer=_completer(commands, settings),
            complete_while_typing=False,
            enable_suspend=True,
            color_depth=None if color else ColorDepth.DEPTH_1_BIT,
            output=create_output(stdout=sys.stderr),
        )

    def __call__(self, prompt: str) -> str:
        """The next line or lines. Raises EOFError for Ctrl-D in an empty line, KeyboardInterrupt for Ctrl-C."""
        return as_typed(self._session.prompt([(_PROMPT_STYLE, prompt)] if self._color else prompt))

    def leave(self, code: int) -> None:
        """Of a signal handler: end the program with this exit code, the terminal as it was before."""
        app = self._session.app
        if not app.is_running or app.loop is None:
            raise SystemExit(code)
        # Raised here, it would end somewhere within prompt_toolkit's own tasks.
        app.loop.call_soon_threadsafe(lambda: app.exit(exception=SystemExit(code)))


def as_typed(text: str) -> str:
    """What came from a terminal, a pipe or the command line, whose encoding did not know all of it.

    Bytes that were passed through are UTF-8, as terminals send it.

    Raises:
        UnicodeError: they are not.
    """
    return text.encode("utf-8", "surrogateescape").decode("utf-8")


def can_edit() -> bool:
    """Somebody sits at a terminal that moves its cursor."""
    moves = os.name == "nt" or os.environ.get("TERM", "dumb") != "dumb"
    return moves and sys.stdin.isatty() and sys.stderr.isatty()


def history_file() -> Path | None:
    """$QWEN_ONNX_HISTORY, or in the user's state folder; None where that variable is empty: nothing is kept."""
    if (given := os.environ.get(HISTORY_VARIABLE)) is not None:
        return Path(os.path.expanduser(given)) if given else None  # noqa: PTH111 - which fails for nobody's home
    return platformdirs.user_state_path("qwen-onnx", appauthor=False) / "history"


def _history() -> History:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Kept(FileHistory):
        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError):  # a full disk is no reason to lose the session
                super().store_string(string)

    path = history_file()
    if path is None:
        return InMemoryHistory()
    try:
        if path.exists() and not path.is_file():
            raise OSError("not a file")  # a device may have no end
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # what somebody asked is nobody else's
    except OSError as error:
        tell(f"note: no history of this session ({path}: {error.strerror or error})")
        return InMemoryHistory()
    return Kept(path)


def _completer(commands: Sequence[str], settings: Sequence[str]) -> Completer:
    """Of what is typed: a command, the name after /set, the file after those that take one."""
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter, WordCompleter
    from prompt_toolkit.document import Document

    class OfChats(Completer):
        def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
            command, space, rest = document.text_before_cursor.partition(" ")
            if not space:
                return WordCompleter(list(commands), sentence=True).get_completions(document, event)
            if command == "/set":
                return WordCompleter(list(settings), sentence=True).get_completions(Document(rest), event)
            if command in FILES:
                return PathCompleter(expanduser=True).get_completions(Document(rest), event)
            return []

    return OfChats()


def _keys() -> KeyBindings:
    from prompt_toolkit.filters import is_searching
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter", filter=~is_searching)  # there it takes the line that was found
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open_block(buffer.text):
            buffer.newline()
        elif buffer.document.char_before_cursor == "\\":
            buffer.delete_before_cursor()
            buffer.newline()
        else:
            buffer.validate_and_handle()

    @keys.add("c-c", filter=~is_searching)
    def _clear(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline()

    return keys
