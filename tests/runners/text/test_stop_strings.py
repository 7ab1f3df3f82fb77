"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_onnx import UserError
from qwen_onnx.runners.sampling.request import Request
from qwen_onnx.runners.text.stop_strings import StopStrings


def shown(strings: list[str], *pieces: str) -> tuple[list[str], bool]:
    """What each push shows, then the flush; and whether a string was found."""
    stops = StopStrings(strings)
    return [*(stops.push(piece) for piece in pieces), stops.flush()], stops.found


def test_a_string_across_pieces_is_never_shown() -> None:
    """`E` is held back until `ND` comes."""
    assert shown(["END"], "the ", "E", "ND! and") == (["the ", "", "", ""], True)


def test_a_beginning_that_comes_to_nothing_is_shown_late() -> None:
    """No text that only looked like a stop string is lost."""
    assert shown(["END"], "E", "N", "Emies") == (["", "", "ENEmies", ""], False)
    assert shown(["END"], "the EN") == (["the ", "EN"], False)


def test_a_beginning_within_a_beginning() -> None:
    """After `aab` fails at the second a, the match goes on from there, not from nothing."""
    assert shown(["aab"], "a", "a", "a", "b", "c") == (["", "", "a", "", "", ""], True)


def test_of_several_the_first_complete_one_counts() -> None:
    """Whatever their order in the list; one that began before and never came does not count."""
    assert shown(["second", "one"], "no one second") == (["no ", ""], True)
    assert shown(["abcX", "bc"], "ab", "cX") == (["", "a", ""], True)
    assert shown(["c", "abc"], "xabc") == (["x", ""], True)


def test_without_strings_text_passes() -> None:
    assert shown([], "a", "b") == (["a", "b", ""], False)


def test_where_it_may_not_end_a_string_is_text() -> None:
    """It is not found later, though one that began before and ends after is."""
    stops = StopStrings(["END", "xENDy"])
    assert stops.push("END xE", may_end=False) == "END "
    assert stops.push("ND", may_end=False) == ""
    assert stops.push("z", may_end=True) == "xENDz"
    assert not stops.found
    assert stops.push("E", may_end=False) == ""
    assert stops.push("ND", may_end=True) == ""
    assert stops.found


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_pieces_make_no_difference(strings: list[str], pieces: list[str]) -> None:
    """Against reading the whole text character by character, with nothing held back."""
    text, wanted, found = "".join(pieces), "", False
    for end in range(1, len(text) + 1):
        ending = [string for string in strings if text[:end].endswith(string)]
        if ending:
            wanted, found = text[: end - max(map(len, ending))], True
            break
    else:
        wanted = text
    given_out, stopped = shown(strings, *pieces)
    assert ("".join(given_out), stopped) == (wanted, found)


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.text("abc", max_size=20))
def test_no_more_is_held_back_than_could_be_a_beginning(strings: list[str], text: str) -> None:
    stops, said = StopStrings(strings), ""
    for end in range(1, len(text) + 1):
        said += stops.push(text[end - 1])
        if stops.found:
            return
        held = text[len(said) : end]
        assert not held or any(len(string) > len(held) and string.startswith(held) for string in strings)


@pytest.mark.parametrize("stop", [5, [5], ["a", None], {"a"}, b"END"])
def test_what_is_no_list_of_strings_is_refused(stop: Any) -> None:
    with pytest.raises(UserError, match=r"^stop .*a string or a list of them.* wanted"):
        Request(stop=stop)


def test_one_string_is_one_and_none_is_empty() -> None:
    """`stop="END"` is not its characters; an empty string, which would end every answer at once, is refused."""
    assert Request(stop="END").stops == ("END",)
    assert Request(stop=["a", "b"]).stops == ("a", "b")
    for empty in ("", ["a", ""]):
        with pytest.raises(UserError, match="empty"):
            Request(stop=empty)
