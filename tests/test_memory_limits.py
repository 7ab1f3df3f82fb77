"""A process that may have no more memory: one line, at load and in an answer, and never half a traceback."""

from __future__ import annotations

import atexit
import ctypes
import functools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from chats import tiny, write_chat_checkpoint
from command import child, command

from qwen_onnx import export
from qwen_onnx.runners.runner import Runner

if sys.platform != "linux":
    pytest.skip("limits of memory are another thing there", allow_module_level=True)

# All is imported already, so that the limit is met by what the product does.
PROGRAM = """
import resource, sys
import qwen_onnx.cli, qwen_onnx.running as running, qwen_onnx.runners.steps, typer, rich, tokenizers

when, mebibytes = {when!r}, {mebibytes}
whole = running._open

def limited(*arguments):
    chat = whole(*arguments) if when == "answer" else None
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    held = int(status["VmData"].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (held + (mebibytes << 20),) * 2)
    return chat or whole(*arguments)

running._open = limited
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
    [("f32", "load", ["--prepack"]), ("f16", "load", []), ("f32", "answer", []), ("f16", "answer", [])],
)
def test_out_of_memory_is_one_line(dtype: str, when: str, options: list[str]) -> None:
    """A traceback of a MemoryError, or ONNX Runtime's name of a source file; or words that are not the model's."""
    program = PROGRAM.format(when=when, mebibytes=32 if when == "load" else 10)
    arguments = ("run", wide(dtype), "--provider", "cpu", "-p", QUESTION, "--max-new-tokens", 2, *options)
    with child(*arguments, program=program) as process:
        out, err = process.communicate(timeout=180)
    assert process.returncode == 1, err
    assert out == b""
    line = err.decode()
    assert line.startswith("error: ")
    assert line.count("\n") == 1
    assert "out of memory" in line


def test_enough_is_enough() -> None:
    program = PROGRAM.format(when="load", mebibytes=2048)
    with child("run", tiny(), "--provider", "cpu", "-p", "What is 3 plus 4?", program=program) as process:
        out, err = process.communicate(timeout=180)
    assert (process.returncode, out, err) == (0, b"3 plus 4 is 7.\n", b"")


HOLE = """
import ctypes, sys
from qwen_onnx.memory import anonymous_memory, give_back_large_blocks

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def block(size):
    at = libc.malloc(size)
    ctypes.memset(at, 1, size)
    return at

if {settled}:
    give_back_large_blocks()
libc.free(block(30 << 20))
before = anonymous_memory()
large, small = block(20 << 20), block(1000)
assert anonymous_memory() - before > 15 << 20
libc.free(large)
print(anonymous_memory() - before)
"""


def test_large_blocks_go_back_to_the_system() -> None:
    """The first large block that is freed makes glibc keep the later ones: holes that count as memory in use."""
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("not glibc")
    kept, given_back = (
        int(
            subprocess.run(
                [sys.executable, "-c", HOLE.format(settled=settled)], capture_output=True, check=True
            ).stdout
        )
        for settled in (False, True)
    )
    assert kept > 15 << 20
    assert given_back < 2 << 20


@pytest.mark.parametrize("dtype", ["f32", "int4"])
def test_a_command_settles_the_allocator_before_it_loads(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr("qwen_onnx.running.give_back_large_blocks", lambda: seen.append("settled"))
    monkeypatch.setattr(
        "qwen_onnx.running.Runner", lambda *given, **options: seen.append("loaded") or Runner(*given)
    )
    assert command("run", tiny(dtype), "-p", "Hi", "--max-new-tokens", 2).code == 0
    assert seen == ["settled", "loaded"]
