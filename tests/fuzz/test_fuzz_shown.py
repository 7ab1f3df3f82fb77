"""As test_fuzz_properties.py, of lines that are broken for a terminal, and of keys of tokenizer_config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from test_fuzz_text import VALUES, verify

from qwen_onnx.checkpoints.config import CONFIG_KEYS
from qwen_onnx.checkpoints.known_keys import TOKENIZER, key_notes, refuse_keys
from qwen_onnx.cli.terminal import output
from qwen_onnx.errors import UserError, printable

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
UNKNOWN = st.text(min_size=1, max_size=8).filter(
    lambda name: name not in CONFIG_KEYS and name not in TOKENIZER
)


def refusal(function: Callable[[], object]) -> str:
    """The line of the refusal; none: empty."""
    try:
        function()
    except UserError as error:
        return str(error)
    return ""


def a_wrapped_line(text: str, width: int) -> None:
    """All its words in order, none in two; no row wider than the terminal but of one word."""
    line = printable(text)
    rows = output.wrapped(line, width)
    assert " ".join(rows).split() == line.split()
    for row in rows:
        assert len(row) <= width or len(row.split()) == 1


def keys_of_a_tokenizer(values: dict[str, Any]) -> None:
    """Refused in a line that names the key, or read."""
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
    "wrapped": (a_wrapped_line, {"text": TEXTS, "width": st.integers(10, 120)}),
    "tokenizer_config": (
        keys_of_a_tokenizer,
        {"values": some_of(TOKENIZER) | st.dictionaries(UNKNOWN, VALUES)},
    ),
}


@pytest.mark.parametrize("name", PROPERTIES)
def test_o3_k1_a_hundred_of_each(name: str) -> None:
    """No word is cut; no key is passed over in silence."""
    verify(*PROPERTIES[name], 100)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", PROPERTIES)
def test_o3_k1_thousands_of_each(name: str) -> None:
    """The same, twenty times as much."""
    verify(*PROPERTIES[name], 2_000)
