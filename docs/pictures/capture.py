"""Draws a chat in a terminal as SVG: `python docs/pictures/capture.py EXPORT docs/pictures/chat.svg`.

What is drawn is what `qwen-onnx run EXPORT` wrote to a terminal of 80 columns as these lines were typed.
"""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

TYPED = ("My name is Ada.", "What is my name?", "/stats", "/quit")


def talk(export: str) -> str:
    """Type each line once the program waits for it; all that came on the screen."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "qwen_onnx", "run", export]
    env = {**os.environ, "TERM": "dumb", "COLUMNS": "80", "QWEN_ONNX_HISTORY": ""}
    program = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=env)
    os.close(follower)
    screen = ""
    for line in TYPED:
        screen += _until_prompt(leader)
        os.write(leader, f"{line}\n".encode())
    program.wait(60)
    os.close(leader)
    return screen + f"{TYPED[-1]}\n"


def _until_prompt(terminal: int) -> str:
    found, ends = "", time.monotonic() + 60
    while not found.endswith("> ") and time.monotonic() < ends:
        if select.select([terminal], [], [], 0.5)[0]:
            found += os.read(terminal, 4096).decode()
    return found


def main() -> None:
    """Write the picture."""
    export, out = sys.argv[1:]
    console = Console(record=True, width=80, file=io.StringIO())
    console.print(Text(f"$ qwen-onnx run {Path(export).name}"))
    console.print(Text(talk(export).replace("\r", "").rstrip()))
    Path(out).write_text(console.export_svg(title="qwen-onnx"), encoding="utf-8")


if __name__ == "__main__":
    main()
