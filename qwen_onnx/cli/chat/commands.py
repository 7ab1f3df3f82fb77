"""The commands of a chat: what they are called, and how a line is read as one."""

from __future__ import annotations

import re
from pathlib import Path

from qwen_onnx.errors import UserError

HELP = """\
/help              this list
/reset             forget the conversation, and what was read for the next question
/show              the conversation so far
/read FILE         put a text file before the next question
/system TEXT       begin anew under this system message; without TEXT, none but the template's
/undo              forget the last question and its answer, and what was read for the next
/retry             answer the last question anew
/tool TEXT         give the result of the function that the model called
/params            how tokens are chosen and what ends an answer
/set NAME VALUE    change one of these; without VALUE, the model's own
/save FILE         keep the conversation, and what was computed of it, in a file
/load FILE         go on with a conversation that was saved
/tokens TEXT       the tokens of a text; without TEXT, how many the conversation has as a prompt
/stats             context used and left, speed of the last answer
/quit              leave (so do /bye, Ctrl-D, and Ctrl-C twice)
Lines between \"\"\" and \"\"\" are one message, and so is a line that ends in a backslash
with the next. //text sends /text.
Ctrl-C stops an answer and keeps the session."""
_LISTED = [line.split() for line in HELP.splitlines() if line.startswith("/")]
COMMANDS = tuple(name for name, *_ in _LISTED)
ALONE = frozenset(name for name, following, *_ in _LISTED if not following.isupper())
"""Commands that nothing comes after."""
_ALIASES = {"/clear": "/reset", "/exit": "/quit", "/bye": "/quit"}
OF_CHATS = ("/reset", "/show", "/read", "/system", "/undo", "/retry", "/tool", "/save", "/load")
_COMMAND = re.compile(r"(/[A-Za-z_]+)(?:\s+(.*))?", re.DOTALL)


FILES = ("/save", "/load", "/read")
"""Commands that a file is named with."""
_QUOTES = '"""'


def is_open_block(text: str) -> bool:
    """It begins with three quotes, and goes on until three more."""
    text = text.strip()
    return text.startswith(_QUOTES) and not (len(text) >= 2 * len(_QUOTES) and text.endswith(_QUOTES))


def block(text: str) -> str | None:
    """What stands between three quotes and three quotes; None where the text is no such block."""
    text = text.strip()
    if not text.startswith(_QUOTES) or is_open_block(text):
        return None
    return text.removeprefix(_QUOTES).removesuffix(_QUOTES).strip("\n")


def parse_command(line: str) -> tuple[str, str]:
    """The command that a line is, in any case, and what comes after it; nothing and nothing where it is none."""
    found = _COMMAND.fullmatch(line.strip())
    name = found[1].lower() if found else ""
    return (_ALIASES.get(name, name), (found[2] or "").strip()) if found else ("", "")


def verify_alone(command: str, text: str) -> None:
    """Raises UserError for text after a command that takes none: it was meant to do something."""
    if text and command in ALONE:
        raise UserError(f"{command}: takes nothing after it; with //, the line goes to the model as it is")


def file_argument(command: str, text: str) -> Path:
    """The file that a command names; raises UserError where it names none."""
    if not text:
        raise UserError(f"{command}: a file is wanted, as {command} session.qwen")
    try:
        return Path(text).expanduser()
    except RuntimeError:  # no such user
        return Path(text)
