"""As test_fuzz_properties.py, of what reaches a terminal, and of what a config.json may say."""

from __future__ import annotations

import io
import re
import unicodedata
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from hypothesis import strategies as st
from test_fuzz_text import VALUES, verify

from qwen_onnx.checkpoints.config import CONFIG_KEYS, config_notes, parse_config
from qwen_onnx.checkpoints.known_keys import TOKENIZER, key_notes, refuse_keys
from qwen_onnx.cli.terminal import output
from qwen_onnx.cli.terminal.markdown import Emphasis
from qwen_onnx.errors import UserError, printable
from support.checkpoints import QWEN2, QWEN3

COMMANDS = st.sampled_from(
    (
        "\x1b[2J", "\x1b]0;title\x07", "\x1b]52;c;aGk=\x07", "\x1bP", "\x9b31m", "\x90", "\x08", "\r", "\x7f", "\x00",
        "\u202e", "\u2066", "\u2069", "\u2028", "\u200b", "\n", "\t", "**", "`", "```", "#", "*", "_", "- ", "a b",
    )
)  # fmt: skip
TEXTS = st.lists(
    COMMANDS
    | st.text(st.characters(categories=["Cs", "Cc", "Cf", "Zl", "So", "Lo", "Ll", "Mn"]), max_size=4),
    max_size=12,
).map("".join)
STYLES = re.compile(r"\x1b\[[0-9;]*m")
"""What our own colors and emphasis are."""
UNKNOWN = st.text(min_size=1, max_size=8).filter(
    lambda name: name not in CONFIG_KEYS and name not in TOKENIZER
)


def is_harmless(text: str) -> bool:
    """No control character but line ends and tabs, and none that turns the direction of writing."""
    turning = {*map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2066, 0x206A))}
    return all(char in "\n\t" or unicodedata.category(char) != "Cc" for char in text) and not turning & {
        *text
    }


class Terminal(io.StringIO):
    """Takes what is written, and says that it shows it."""

    def isatty(self) -> bool:
        return True


def refusal(function: Callable[[], object]) -> str:
    """The line of the refusal; none: empty."""
    try:
        function()
    except UserError as error:
        return str(error)
    return ""


def a_line(text: str) -> None:
    """Of an error or a name: one line."""
    line = printable(text)
    assert line.isprintable()
    assert len(line) <= 1500
    assert not text.isprintable() or len(text) > 1500 or line == text


def a_text(text: str) -> None:
    """Of a model: as it is, or what it would do is spelled out."""
    shown = output.harmless(text)
    assert is_harmless(shown)
    assert not is_harmless(text) or shown == text


def whatever_is_written(texts: list[str], width: int) -> None:
    """By every function that writes, on a terminal, with emphasis and without."""
    out, err = Terminal(), Terminal()
    with (
        mock.patch("sys.stdout", out),
        mock.patch("sys.stderr", err),
        mock.patch("shutil.get_terminal_size", return_value=mock.Mock(columns=width)),
    ):
        output.tell(*texts)
        output.show(*texts)
        emphasis = Emphasis()
        for text in texts:
            output.answer(text, end="", emphasis=emphasis)
            output.think(text, dim=True)
            output.quote(text)
        output.end_answer(emphasis)
        for text in texts:
            output.answer(text)
    for stream in (out, err):
        assert is_harmless(STYLES.sub("", stream.getvalue()))


def a_wrapped_line(text: str, width: int) -> None:
    """All its words in order, none in two; no row wider than the terminal but of one word."""
    line = printable(text)
    rows = output.wrapped(line, width)
    assert " ".join(rows).split() == line.split()
    for row in rows:
        assert len(row) <= width or len(row.split()) == 1


def keys_of_a_config(qwen3: bool, values: dict[str, Any], unknown: dict[str, Any]) -> None:
    """Refused in a line that names the key; or computed, and what nobody knows is named."""
    raw, notes = {**(QWEN3 if qwen3 else QWEN2), **values, **unknown}, list[str]()
    said = refusal(lambda: (parse_config(raw), notes.extend(config_notes(raw))))
    if said:
        assert said.startswith("config.json")
        return
    for name, value in values.items():
        key = CONFIG_KEYS[name]
        assert key.use != "refused" or value in key.neutral, name
    named = [note for note in notes if "nobody here knows" in note]
    assert len(named) == bool(unknown)


def keys_of_a_tokenizer(values: dict[str, Any]) -> None:
    """As of a config."""
    refused = [
        name
        for name, value in values.items()
        if name in TOKENIZER and TOKENIZER[name].use == "refused" and value not in TOKENIZER[name].neutral
    ]
    said = refusal(lambda: refuse_keys("tokenizer_config.json", values, TOKENIZER))
    assert bool(said) == bool(refused)
    assert not said or any(name in said for name in refused)
    assert printable(said) == said
    assert all(isinstance(note, str) for note in key_notes("tokenizer_config.json", values, TOKENIZER))


def some_of(names: Any) -> st.SearchStrategy[Any]:
    return st.dictionaries(st.sampled_from(sorted(names)), VALUES, max_size=3)


PROPERTIES: dict[str, tuple[Callable[..., None], dict[str, st.SearchStrategy[Any]]]] = {
    "line": (a_line, {"text": TEXTS}),
    "text": (a_text, {"text": TEXTS}),
    "written": (whatever_is_written, {"texts": st.lists(TEXTS, max_size=4), "width": st.integers(20, 200)}),
    "wrapped": (a_wrapped_line, {"text": TEXTS, "width": st.integers(10, 120)}),
    "config": (
        keys_of_a_config,
        {
            "qwen3": st.booleans(),
            "values": some_of(CONFIG_KEYS),
            "unknown": st.dictionaries(UNKNOWN, VALUES, max_size=2),
        },
    ),
    "tokenizer_config": (
        keys_of_a_tokenizer,
        {"values": some_of(TOKENIZER) | st.dictionaries(UNKNOWN, VALUES)},
    ),
}


@pytest.mark.parametrize("name", PROPERTIES)
def test_o3_k1_a_hundred_of_each(name: str) -> None:
    """Nothing that a file or a model says is a command to a terminal; no key is passed over in silence."""
    verify(*PROPERTIES[name], 100)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", PROPERTIES)
def test_o3_k1_thousands_of_each(name: str) -> None:
    """The same, twenty times as much."""
    verify(*PROPERTIES[name], 2_000)
