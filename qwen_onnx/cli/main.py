"""The `qwen-onnx` command: stdout is the answer, stderr all else.

Exit codes: 0 done; 1 a UserError, or a check that failed, in one line; 2 a command line that cannot be read, in one
line; 130 Ctrl-C. Nothing is imported here before `main` can catch Ctrl-C.
"""

from __future__ import annotations

import errno
import os
import sys
from types import TracebackType
from typing import Any

FAILED, USAGE, INTERRUPTED = 1, 2, 130


def main() -> None:
    """Run the command that sys.argv names."""
    hooks = sys.excepthook, sys.unraisablehook
    sys.excepthook, sys.unraisablehook = _show_crash, _pass_on_interrupt
    try:
        code = _run()
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.excepthook, sys.unraisablehook = hooks  # what comes by here is no crash
    sys.exit(code)


def _run() -> int:
    _open_closed_streams()
    from qwen_onnx.cli.terminal.encoding import note_of_spelled, spell_out_others

    spell_out_others()
    from qwen_onnx.cli.terminal.output import tell
    from qwen_onnx.errors import UserError

    try:
        try:
            return _command()
        finally:
            sys.stdout.flush()  # here, where what it says is caught
            if note := note_of_spelled():
                tell(note)
    except UserError as error:
        tell(f"error: {' '.join(str(error).split())}")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "start new thread" not in str(error):
            raise
        tell("error: out of memory; free some, or take a smaller model, dtype or --max-context")
    except OSError as error:
        # Of stdout: all else becomes a UserError. A reader that left, as `| head` does, needs no word.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            closed = error.errno == errno.EBADF
            tell(
                f"error: stdout: {'closed; the answer has nowhere to go' if closed else error.strerror or error}"
            )
    return FAILED


def _command() -> int:
    from qwen_onnx.cli.commands import app
    from qwen_onnx.cli.flags import NAMES
    from qwen_onnx.cli.terminal.usage import UsageError, usage_line
    from qwen_onnx.errors import naming

    try:
        with naming(NAMES):
            return int(app(prog_name="qwen-onnx", standalone_mode=False) or 0)
    except UsageError as error:
        from qwen_onnx.cli.terminal.output import tell

        if line := usage_line(error):
            tell(line)
        return USAGE


def _show_crash(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    """A fault of ours: its traceback may hold what a file says."""
    import traceback

    from qwen_onnx.cli.terminal.output import quote

    quote("".join(traceback.format_exception(kind, error, where)), end="")


def _pass_on_interrupt(found: Any) -> None:
    """Ctrl-C that came where Python drops exceptions, as in the middle of an import, comes again."""
    if issubclass(found.exc_type, KeyboardInterrupt):
        import _thread
        import threading

        threading.Timer(0.01, _thread.interrupt_main).start()  # now, it would be dropped again
    else:
        sys.__unraisablehook__(found)


def _open_closed_streams() -> None:
    """No file gets the number of a stream that is closed, as `>&-` does.

    stderr is then as good as /dev/null; what is written to stdout is an error, for it is the answer.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # what is opened takes the lowest number that is free
            os.open(os.devnull, os.O_RDONLY if number == 1 else os.O_RDWR)
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115 - for good
