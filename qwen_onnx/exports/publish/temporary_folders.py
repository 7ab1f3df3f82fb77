"""Folders beside a destination that are only passing through, and whether the process that made one still lives.

A living process holds an flock on its folder: the system drops it with the process, and it moves with a rename.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from qwen_onnx.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Kind = Literal["new", "old"]

_PATIENCE = 10.0  # seconds; our own locks on a parent folder last for milliseconds
_LONGEST_NAME = 220  # bytes; what is added below takes up to 27, and 255 is the limit
# What file systems without flock answer; EBADF is NFS, which wants a descriptor open for writing.
_NO_FLOCK = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF}


class Temporary(NamedTuple):
    """A folder that `temporary_name` named."""

    path: Path
    kind: Kind
    pid: int

    def is_abandoned(self) -> bool:
        """Whether nobody holds it; where folders cannot be locked, whether its maker has ended."""
        try:
            descriptor = _flock(self.path, False)
        except BlockingIOError:
            return False
        if descriptor is None:
            return not _runs(self.pid)
        os.close(descriptor)
        return True


def temporary_name(destination: Path, kind: Kind) -> Path:
    """A new hidden name beside `destination`: `.NAME.new-PID-XXXXXXXX` is for what is being written or removed,
    `.NAME.old-PID-XXXXXXXX` for what stood there before.
    """
    stem = _stem(destination)
    return destination.with_name(f".{stem}.{kind}-{os.getpid()}-{secrets.token_hex(4)}")


def find_temporaries(parent: Path, destination: Path | None = None) -> list[Temporary]:
    """The temporary folders in `parent`: those of one destination, or all."""
    stem = ".+" if destination is None else re.escape(_stem(destination))
    pattern = re.compile(rf"\.{stem}\.(?P<kind>new|old)-(?P<pid>\d+)-[0-9a-f]{{8}}", re.DOTALL)
    found = []
    for path in parent.iterdir():
        if (match := pattern.fullmatch(path.name)) and path.is_dir() and not path.is_symlink():
            found.append(Temporary(path, "new" if match["kind"] == "new" else "old", int(match["pid"])))
    return found


@contextlib.contextmanager
def hold(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold `folder`'s lock during the block; without effect where folders cannot be locked.

    Raises:
        BlockingIOError: another process holds it, and `wait` is false.
        OSError: the folder cannot be opened.
    """
    descriptor = _flock(folder, wait)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _stem(destination: Path) -> str:
    name = os.fsencode(destination.name)
    return destination.name if len(name) <= _LONGEST_NAME else hashlib.sha256(name).hexdigest()


def _flock(folder: Path, wait: bool) -> int | None:
    """A descriptor that holds the lock until it is closed, or None where there are no such locks."""
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    deadline = time.monotonic() + (_PATIENCE if wait else 0)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not wait:
                    raise
                if time.monotonic() > deadline:
                    raise UserError(
                        f"{folder}: another program holds a lock on it; try again later"
                    ) from None
                time.sleep(0.02)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError) and error.errno in _NO_FLOCK:
            return None
        raise
    return descriptor


def _runs(pid: int) -> bool:
    if sys.platform == "win32":  # where os.kill(pid, 0) would end it
        import ctypes

        query_limited_information = 0x1000
        process = ctypes.windll.kernel32.OpenProcess(query_limited_information, False, pid)
        if process:
            ctypes.windll.kernel32.CloseHandle(process)
        return bool(process)
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it is somebody else's
        return True
    return True
