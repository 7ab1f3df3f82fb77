"""The command, in a process whose Hub is a thread of the test."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from support.command import Ran, child
from support.hub_server import Hub
from support.patience import PATIENCE


def of_checkpoint(folder: Path) -> dict[str, bytes]:
    """What the Hub holds of it."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def environment(hub: Hub, home: Path) -> dict[str, str]:
    """Of somebody with this Hub, and nothing of it yet."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home / "hf"),
        "NO_PROXY": "*",
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


def on_the_hub(hub: Hub, home: Path, *arguments: object, stdin: str = "") -> Ran:
    """What the command prints."""
    settings = {"environment": environment(hub, home), "stdin": subprocess.PIPE, "cwd": os.getcwd()}  # noqa: PTH109
    with child(*arguments, **settings) as process:
        out, err = process.communicate(stdin.encode(), timeout=PATIENCE)
    return Ran(process.returncode, out.decode(), err.decode())
