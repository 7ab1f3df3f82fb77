"""The commands of a chat: what they are called, and how a line is read as one."""

from __future__ import annotations

import re
from pathlib import Path

from qwen_onnx.errors import UserError

HELP = """\
/help              this list
/reset             forget the conversation
/system TEXT       begin anew under this system message; without TEXT, none
/undo              forget the last question and its answer
/retry             answer the last question anew
/tool TEXT         give the result of the function that the model called
/params            how tokens are chosen and what ends an answer
/set NAME VALUE    change one of these; without VALUE, the model's own
/save FILE         keep the conversation, and what was computed of it, in a file
/load FILE         go on with a conversation that was saved
/stats             context used and left, speed of the last answer
/quit              leave (so do Ctrl-D, and Ctrl-C twice)
A line that ends in a backslash goes on in the next; //text sends /text.
Ctrl-C stops an answer and keeps the session."""
COMMANDS = tuple(line.split()[0] for line in HELP.splitlines() if line.startswith("/"))
_ALIASES = {"/clear": "/reset", "/exit": "/quit"}
OF_CHATS = ("/reset", "/system", "/undo", "/retry", "/tool", "/save", "/load")
_COMMAND = re.compile(r"(/[a-z_]+)(?:\s+(.*))?", re.DOTALL)


def parse_command(line: str) -> tuple[str, str]:
    """The command that a line is, and what comes after it; nothing and nothing where it is none."""
    found = _COMMAND.fullmatch(line.strip())
    return (_ALIASES.get(found[1], found[1]), (found[2] or "").strip()) if found else ("", "")


def file_argument(command: str, text: str) -> Path:
    """The file that a command names; raises UserError where it names none."""
    if not text:
        raise UserError(f"{command}: a file is wanted, as {command} session.qwen")
    try:
        return Path(text).expanduser()
    except RuntimeError:  # no such user
        return Path(text)
