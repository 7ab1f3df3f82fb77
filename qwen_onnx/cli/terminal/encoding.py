"""Characters that stdout or stderr has no bytes for: spelled out as JSON does, and said once, at the end."""

from __future__ import annotations

import codecs
import json
import sys

_NAME = "qwen-onnx-escapes"
_spelled: set[str] = set()
"""Encodings that did not have a character."""


def spell_out_others() -> None:
    r"""Have stdout and stderr write `\u00e9` for a character that they do not have: no answer is lost for it.

    A line of JSON stays one, with the same text.
    """
    codecs.register_error(_NAME, _escaped)
    _spelled.clear()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=_NAME)


def note_of_spelled() -> str:
    """What to say of what was spelled out; empty where nothing was."""
    if not _spelled:
        return ""
    return (
        rf"note: {', '.join(sorted(_spelled))} does not have all characters: they are written as \u and their code; "
        "PYTHONIOENCODING=utf-8 has them"
    )


def _escaped(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    _spelled.add(error.encoding)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end
