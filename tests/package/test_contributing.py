"""docs/contributing.md counts the files that a reader opens; what it lists is what there is."""

from __future__ import annotations

import collections
import functools
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

import qwen_onnx
from qwen_onnx.checkpoints.config import parse_config
from qwen_onnx.exports.layouts.known import choose_layout
from qwen_onnx.exports.plan import ExportKind, build_planned, graph_plans
from support.chats import tiny
from support.checkpoints import QWEN2, QWEN3
from support.command import command

PAGE = Path(__file__).parents[2] / "docs" / "contributing.md"
PACKAGE = Path(qwen_onnx.__file__).parent
MOST = {
    "How a graph is made": 8, "How a token is made": 12, "Adding an architecture": 6, "Adding a lowering": 5,
    "Adding a sampling option": 3,
}  # fmt: skip
"""Files to open for each question."""


def listed(heading: str) -> list[str]:
    """The files of the numbered list under a heading, as the page names them."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(heading)
    _, _, rest = rest.partition("\n")
    section = re.split(r"^## |^\*\*", rest, maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(r"^\d+\. `?([\w/.]+\.py)?", section, re.MULTILINE)


def called(function: Callable[[], object]) -> collections.Counter[str]:
    """Files of the package whose functions are called, as the page names them, and how often."""
    found: collections.Counter[str] = collections.Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        # The body of a module or a class runs when it is imported: that is no call of it.
        is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED and not frame.f_code.co_name.startswith(
            "<"
        )
        if event == "call" and is_function and path.is_relative_to(PACKAGE):
            name = path.relative_to(PACKAGE).as_posix()
            found[name if name.startswith(("graphs/", "runners/")) else f"qwen_onnx/{name}"] += 1

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("heading", MOST)
def test_lists_are_as_short_as_promised(heading: str) -> None:
    assert 2 < len(listed(heading)) <= MOST[heading]


@pytest.mark.parametrize("raw", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def test_the_f32_decode_graphs_of_a_cpu_are_made_by_the_files_listed(raw: dict[str, object]) -> None:
    layout, _ = choose_layout("plain", None, "f32")
    config = parse_config(raw)
    plans = [
        plan
        for plan in graph_plans(config, ExportKind("f32", layout))
        if plan.entry == "decode" and plan.providers == ("cpu",)
    ]
    assert len(plans) == 2
    for plan in plans:
        made_by = called(functools.partial(build_planned, plan, config, 64))
        assert "graphs/model.py" in made_by
        assert made_by.keys() <= {*listed("How a graph is made")}


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["f32", "int4"])
def test_a_token_passes_through_the_files_listed(dtype: str) -> None:
    """And what runs for each token is named there, in the list or below it."""
    export, most = tiny(dtype), 8

    def run(count: int) -> collections.Counter[str]:
        arguments = ("-p", "Hello!", "--provider", "cpu", "--max-new-tokens", str(count))
        return called(lambda: command("run", export, *arguments))

    run(1)  # what is imported late
    short, long = run(2), run(most)
    named = listed("How a token is made")
    assert {*named} <= long.keys()
    _, _, rest = PAGE.read_text(encoding="utf-8").partition("How a token is made")
    beside = rest.partition("\nHow the model is opened")[0]
    for name in long:
        if long[name] - short[name] >= most - 2:
            assert name in named or Path(name).name in beside, f"{name} runs for each token"
