"""A process that may have no more memory: one line, at load and in an answer, and never half a traceback."""

from __future__ import annotations

import atexit
import functools
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from qwen_onnx import export
from support.chats import tiny, write_chat_checkpoint
from support.command import child
from support.patience import PATIENCE

if sys.platform != "linux":
    pytest.skip("limits of memory are another thing there", allow_module_level=True)

# All is imported already, so that the limit is met by what the product does.
PROGRAM = """
import resource, sys
import qwen_onnx.cli.main, qwen_onnx.cli.run as module, qwen_onnx.runners.model.open_graph, typer, rich, tokenizers

when, mebibytes = {when!r}, {mebibytes}
whole = module.open_chat

def limited(*arguments):
    chat = whole(*arguments) if when == "answer" else None
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    held = int(status["VmData"].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (held + (mebibytes << 20),) * 2)
    return chat or whole(*arguments)

module.open_chat = limited
"""
QUESTION = "What is 3 plus 4? " * 90


@functools.cache
def wide(dtype: str) -> Path:
    """An export whose every product takes megabytes: what fails for want of memory is then one of these."""
    folder = Path(tempfile.mkdtemp(prefix="qwen-onnx-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shape = {"hidden_size": 256, "intermediate_size": 8192, "max_position_embeddings": 4096}
    return export(write_chat_checkpoint(folder / "checkpoint", **shape), folder / dtype, dtype=dtype).folder


@pytest.mark.parametrize(
    ("dtype", "when", "options"),
    [("f32", "answer", []), ("f32", "load", ["--prepack"]), ("f16", "load", []), ("f16", "answer", [])],
)
@pytest.mark.thorough
def test_out_of_memory_is_one_line(dtype: str, when: str, options: list[str]) -> None:
    program = PROGRAM.format(when=when, mebibytes=32 if when == "load" else 10)
    arguments = ("run", wide(dtype), "--provider", "cpu", "-p", QUESTION, "--max-new-tokens", 2, *options)
    with child(*arguments, program=program) as process:
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, err
    assert out == b""
    line = err.decode()
    assert line.startswith("error: ")
    assert line.count("\n") == 1
    assert "out of memory" in line


def test_enough_is_enough() -> None:
    program = PROGRAM.format(when="load", mebibytes=2048)
    with child("run", tiny(), "--provider", "cpu", "-p", "What is 3 plus 4?", program=program) as process:
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (0, b"3 plus 4 is 7.\n", b"")
