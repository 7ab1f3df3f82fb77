"""`load` that fails or is interrupted leaves no thread, no mapped file and no session behind (M7)."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qwen_onnx import UserError, load
from qwen_onnx.runners import processor
from qwen_onnx.runners.model import open_graph
from support.chats import copy_export, endless
from support.damage import forge

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

HI = [{"role": "user", "content": "Hi"}]


def held(folder: Path) -> list[str]:
    """What this process still has of a folder: mapped pages, open files."""
    gc.collect()
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(str(path.readlink()))
    return maps + [link for link in links if link.startswith(str(folder))]


def threads() -> int:
    """Of the system: those of ONNX Runtime are none of Python's."""
    return len(list(Path("/proc/self/task").iterdir()))


def fails(load_it: Callable[[], Any], error: type[BaseException]) -> None:
    try:
        load_it()
    except error:
        return
    raise AssertionError("it was loaded")


@pytest.mark.parametrize("dtype", ["f32", "f16", "int8"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, UserError])
def test_m7_whatever_strikes_while_it_opens(
    error: type[BaseException], dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first graph, the second and so on, and once all are open."""
    folder = copy_export(endless(dtype), tmp_path / "export")
    load(folder, provider="cpu", threads=2).close()  # whatever the first one of a process keeps
    gc.collect()
    before = threading.active_count(), threads()
    real, files = open_graph.open_session, sorted(path.name for path in folder.iterdir())
    for strike in itertools.count(1):
        calls = itertools.count(1)

        def struck(*args: Any, calls: Any = calls, strike: int = strike, **settings: Any) -> Any:
            if next(calls) == strike:
                raise error("struck")
            return real(*args, **settings)

        monkeypatch.setattr(open_graph, "open_session", struck)
        if strike == 4 or (strike == 3 and dtype != "f32"):
            break
        fails(lambda: load(folder, provider="cpu", threads=2), error)
        assert held(folder) == []
        assert (threading.active_count(), threads()) == before
        assert sorted(path.name for path in folder.iterdir()) == files
    monkeypatch.undo()
    monkeypatch.setattr(
        processor, "read_generation_config", lambda folder: (_ for _ in ()).throw(error("struck"))
    )
    fails(lambda: load(folder, provider="cpu", threads=2), error)
    assert held(folder) == []
    assert (threading.active_count(), threads()) == before
    monkeypatch.undo()
    with load(folder, provider="cpu", threads=2) as chat:
        assert held(folder)
        assert len(list(chat.generate(HI, max_new_tokens=3))) == 3
    del chat
    assert held(folder) == []
    assert (threading.active_count(), threads()) == before


def test_m7_a_damaged_graph_leaves_nothing(tmp_path: Path) -> None:
    folder = copy_export(endless(), tmp_path / "export")
    load(folder, provider="cpu").close()
    before = threads()
    content = (folder / "decode.grouped.onnx").read_bytes()
    (folder / "decode.grouped.onnx").write_bytes(content[: len(content) // 2])
    forge(folder)
    fails(lambda: load(folder, provider="cpu"), UserError)
    assert held(folder) == []
    assert threads() == before
