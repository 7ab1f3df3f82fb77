"""JSON for people and programs alike: text as it is, and nothing in it that commands a terminal."""

from __future__ import annotations

import json
import re

_HIDDEN = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
"""What json.dumps leaves as it is: control characters, directions of writing, ends of lines, halves of pairs."""


def as_json_line(value: object) -> str:
    """The value in one line; characters beyond ASCII are themselves."""
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))
