"""Runs fuzz cases, many to a process: `worker.py FOLDER`, the cases as JSON lines on stdin, results on stdout."""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from qwen_onnx.errors import UserError
from support.fuzz.targets import Base, case
from support.patience import PATIENCE

SECONDS = float(os.environ.get("QWEN_ONNX_FUZZ_SECONDS", "20"))
"""Most processor time of a case, so that a busy machine makes no fault of it."""
MEMORY = 24 << 30
"""Most address space, of which ONNX Runtime reserves much and uses little."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_CHANGES = {
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.symlink",
    "os.link",
    "os.truncate",
    "shutil.rmtree",
}


class Watch:
    """Notes every file that Python opens for writing, makes, moves or removes outside of one folder."""

    def __init__(self, folder: Path) -> None:
        self._inside = (f"{folder.resolve()}{os.sep}", os.devnull)
        self.found: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = isinstance(mode, str) and set(mode) & set("wax+")
            if not isinstance(path, int) and (writes or (isinstance(flags, int) and flags & _WRITING)):
                self._note(event, path)
        elif event in ("os.remove", "os.rmdir") and arguments[1] >= 0:  # by the descriptor of its folder
            self._note(event, Path(f"/proc/self/fd/{arguments[1]}").readlink() / os.fsdecode(arguments[0]))
        elif event in _CHANGES:
            for path in arguments[:2]:
                if isinstance(path, str | bytes | os.PathLike):
                    self._note(event, path)

    def _note(self, event: str, path: Any) -> None:
        real = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - Path.resolve would come here again
        if not real.startswith(self._inside):
            self.found.append(f"{event} of {real}")


def run(target: str, number: int, base: Base, watch: Watch) -> tuple[str, str]:
    """`right`, `refused` or `fault`, and what is to be said of it."""
    watch.found.clear()
    try:
        case(target, number, base)
        found = ("right", "")
    except UserError as error:
        line = str(error)
        found = ("refused", line) if line.isprintable() else ("fault", f"not one printable line: {line!r}")
        if len(line) > 1500:
            found = ("fault", f"{len(line)} characters: {line[:200]}")
    except BaseException:
        found = ("fault", traceback.format_exc())
    return ("fault", f"written outside: {watch.found}") if watch.found else found


def main() -> None:
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what else prints, a library's native code too, prints to stderr
    base = Base(Path(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    faulthandler.register(signal.SIGPROF, chain=True)  # says where it was, and ends the process
    watch = Watch(base.scratch)
    for line in sys.stdin:
        target, number = json.loads(line)
        print(json.dumps({"begun": [target, number]}), file=results)
        faulthandler.dump_traceback_later(PATIENCE, exit=True)  # of one that sleeps
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        started = time.process_time()
        outcome, detail = run(target, number, base, watch)
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.cancel_dump_traceback_later()
        seconds = round(time.process_time() - started, 4)
        print(json.dumps({"outcome": outcome, "detail": detail[-2000:], "seconds": seconds}), file=results)


if __name__ == "__main__":
    main()
