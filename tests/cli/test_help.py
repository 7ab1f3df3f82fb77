"""What the command says of itself: help that fits a terminal, versions, completion."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

import qwen_onnx
from qwen_onnx.cli.run_options import RunOptions
from qwen_onnx.exports.cached.options import ModelOptions
from qwen_onnx.exports.options import ExportOptions
from qwen_onnx.options import Options, declared
from qwen_onnx.runners.runtime.options import SessionOptions
from qwen_onnx.runners.sampling.request import Request
from support.marks import but_first

SCREEN = 24
"""Lines of a terminal, 80 columns wide."""


def lines_of(*arguments: str) -> list[str]:
    """What `--help` prints on a terminal of 80 columns; in a process of its own, since rich looks at it only once."""
    done = subprocess.run(
        [sys.executable, "-m", "qwen_onnx", *arguments, "--help"],
        env={**os.environ, "COLUMNS": "80", "TERMINAL_WIDTH": "80", "PYTHONUTF8": "1"},
        capture_output=True, text=True, encoding="utf-8", check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_help_of_run_fits_three_screens_in_groups() -> None:
    lines = lines_of("run")
    assert len(lines) <= 3 * SCREEN
    panels = re.findall("╭─ ([A-Za-z]+) ─", "\n".join(lines))
    assert panels == ["Arguments", "Options", "Chat", "Sampling", "Output", "Performance", "CUDA"]
    # An option is a line: none is broken.
    assert not [line for line in lines if re.match("│ {8,}", line)]


@pytest.mark.parametrize(
    "command", but_first(["export", "info", "check", "build", "bench", "score", "doctor"])
)
def test_help_of_other_commands_fits_two_screens(command: str) -> None:
    assert len(lines_of(command)) <= 2 * SCREEN


@pytest.mark.parametrize(
    ("command", "kinds"),
    [("run", (RunOptions, ModelOptions, Request, SessionOptions)), ("export", (ExportOptions,))],
)
def test_each_declared_option_with_a_panel_is_a_flag(command: str, kinds: tuple[type[Options], ...]) -> None:
    text = "\n".join(lines_of(command))
    for kind in kinds:
        for name, option in declared(kind).items():
            if option.panel is not None and not option.hidden:
                flag = option.flag.split()[0].split("/")[0] if option.flag else f"--{name.replace('_', '-')}"
                assert re.search(rf"{flag}\b", text), flag


def test_each_option_says_in_a_line_what_it_does() -> None:
    for kind in (RunOptions, Request, SessionOptions, ExportOptions):
        for name, option in declared(kind).items():
            assert option.help, name
            assert option.about != option.help, name


@pytest.mark.parametrize(
    "start", [["-m", "qwen_onnx"], ["-c", "from qwen_onnx.cli.main import main; main()"]]
)
def test_the_version_is_that_of_the_package(start: list[str]) -> None:
    done = subprocess.run([sys.executable, *start, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"qwen-onnx {qwen_onnx.__version__}\n"
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", qwen_onnx.__version__)


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("qwen-onnx ", {"export", "run", "info", "check", "bench", "score", "doctor", "build", "cache"}),
        ("qwen-onnx run --temp", {"--temperature"}),
        ("qwen-onnx export --dtype i", {"int8", "int4"}),
    ],
)
def test_shells_complete_commands_flags_and_values(typed: str, wanted: set[str]) -> None:
    words = typed.split(" ")
    env = {
        **os.environ, "_QWEN_ONNX_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)
    }  # fmt: skip
    program = "from qwen_onnx.cli.commands import app; app(prog_name='qwen-onnx')"
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False
    )
    assert wanted <= set(done.stdout.split()), done.stdout + done.stderr
