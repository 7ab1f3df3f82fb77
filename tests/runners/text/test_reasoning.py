"""Reasoning is told from the answer, however the text comes in pieces."""

from __future__ import annotations

import pytest

from qwen_onnx.runners.text.reasoning import ReasoningSplitter, Said, closed

CASES = [
    # text, begun, reasoning, answer
    ("<think>\nTwo and two.\n</think>\n\nFour.", False, "Two and two.", "Four."),
    ("\n<think>a</think>b", False, "a", "b"),
    ("<think>\n\n</think>\n\nFour.", False, "", "Four."),
    ("Let me see.\n\nFour?\n</think>\n\nFour.\n", True, "Let me see.\n\nFour?", "Four.\n"),
    ("Four. <think> is a tag.", False, "", "Four. <think> is a tag."),
    ("<think>a</think><think>b</think>", False, "a", "<think>b</think>"),
    ("<think>a < b </thin k></think>c", False, "a < b </thin k>", "c"),
    ("<think>cut short\n\n", False, "cut short", ""),
    ("cut short </thi", True, "cut short </thi", ""),
    ("<thin", False, "", "<thin"),
    ("  two spaces", False, "", "  two spaces"),
    ("\n\n", False, "", "\n\n"),
    ("", False, "", ""),
]


def joined(pieces: list[Said]) -> tuple[str, str]:
    return "".join(said.reasoning for said in pieces), "".join(said.answer for said in pieces)


@pytest.mark.parametrize(("text", "begun", "reasoning", "answer"), CASES)
def test_reasoning_and_answer_are_parted(text: str, begun: bool, reasoning: str, answer: str) -> None:
    """Wherever the text is cut: the tags of the block and the line ends around it are in neither."""
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            splitter = ReasoningSplitter(begun=begun)
            parts = (text[:first], text[first:second], text[second:])
            pieces = [splitter.push(part) for part in parts if part]
            assert joined([*pieces, splitter.flush()]) == (reasoning, answer)
    splitter = ReasoningSplitter(begun=begun)
    assert joined([*map(splitter.push, text), splitter.flush()]) == (reasoning, answer)


def test_text_is_not_held_back() -> None:
    """Only what may be a tag, or a line end before one, waits."""
    splitter = ReasoningSplitter()
    assert splitter.push("<think>Two") == Said("Two")
    assert splitter.push(" and\n") == Said(" and")
    assert splitter.push("two") == Said("\ntwo")
    assert splitter.push("</think>Four") == Said("", "Four")
    assert splitter.push(".\n") == Said("", ".\n")


def test_reasoning_that_was_cut_short_is_closed() -> None:
    """Templates look for the closing tag to drop it; without one it would be part of the answer."""
    assert closed("<think>\nhm", begun=False) == "<think>\nhm\n</think>\n\n"
    assert closed("hm", begun=True) == "hm\n</think>\n\n"
    for whole in ("Four.", "<think>a</think>b", "<thin"):
        assert closed(whole, begun=False) == whole
