"""Every entry of docs/faults.md, the faults that people meet in this field, is a test named after it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

NUMBERS = {
    "a": (1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14, 15, 17, 18, 19, 21, 22, 23),
    "b": (1, 2, 3, 4, 5, 6, 7, 8, 11, 12),
    "c": (1, 2, 3, 4, 5, 7, 8, 9, 10, 12),
    "d": (1, 3, 4, 5, 6, 8),
    "e": (1, 3, 4, 6, 7),
    "f": (1, 2, 3, 4, 5, 6, 9, 10),
    "g": (1, 3, 4, 5, 6, 7, 8),
    "h": (1, 3, 4, 5),
    "i": (1, 2, 3, 4, 5),
    "j": (1, 3, 4, 5),
}
ENTRIES = {f"{chapter}{number}" for chapter, numbers in NUMBERS.items() for number in numbers}

LEFT_OUT = {
    "g4": "an engine that answers garbage needs TensorRT; the check's own test is that of a4",
    "g7": "which profile is fast needs TensorRT",
    "g8": "TensorRT that is listed and absent; what is believed instead is under h5",
}


def entries_with_a_test() -> set[str]:
    """The entries after which a test in this folder is named."""
    found = set()
    for path in Path(__file__).parent.glob("test_field_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (name := re.match(r"test_([a-j]\d+)_", node.name)):
                found.add(name[1])
    return found


def test_every_entry_is_a_test_or_is_left_out_for_a_reason() -> None:
    """No entry is missing, none is tested and left out too, and every name of a test is an entry."""
    assert LEFT_OUT.keys() <= ENTRIES
    assert entries_with_a_test() == ENTRIES - LEFT_OUT.keys()


def test_the_list_for_readers_has_each_of_them() -> None:
    text = (Path(__file__).parents[2] / "docs" / "faults.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| ([A-J]\d+) \| .", text, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert {entry.lower() for entry in listed} == ENTRIES
