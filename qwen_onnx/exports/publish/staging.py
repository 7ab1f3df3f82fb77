"""Publishes a folder whole: written beside its destination, then renamed; a killed run is cleaned up by the next."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from qwen_onnx.errors import ExportInProgressError, UserError
from qwen_onnx.exports.publish.earlier_export import foreign_file, holds_export
from qwen_onnx.exports.publish.output_folder import (
    disk_errors_in_words,
    is_missing_or_empty,
    refuse_output,
    resolved,
)
from qwen_onnx.exports.publish.temporary_folders import find_temporaries, hold, temporary_name

__all__ = ["discard", "recover", "refuse_output", "staged_folder", "sweep"]


@contextlib.contextmanager
def staged_folder(out: Path, *, force: bool = False, keep: Path | None = None) -> Iterator[Path]:
    """Yield an empty folder that becomes `out` when the block ends well, and vanishes when it does not.

    Errors of the block pass through, except a disk's: those become a line that names the file.

    Raises:
        UserError: what `refuse_output` says, another export to `out` running, or what the disk said.
    """
    refuse_output(out, force=force, keep=keep)
    real = resolved(out)
    staged = temporary_name(real, "new")
    made: list[Path] = []
    with contextlib.ExitStack() as stack:
        try:
            with disk_errors_in_words(out):
                _make_parents(real.parent, made)
                with hold(real.parent, wait=True):
                    _recover(real)
                    refuse_output(out, force=force, keep=keep)  # an earlier export may have been put back
                    staged.mkdir()
                    stack.enter_context(hold(staged))
            with disk_errors_in_words(out, staged=staged):
                yield staged
            with disk_errors_in_words(out), hold(real.parent, wait=True):
                refuse_output(out, force=force, keep=keep)  # it may have been filled meanwhile
                old = _swap(staged, real, stack)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            for parent in reversed(made):
                with contextlib.suppress(OSError):  # others have put something in it
                    parent.rmdir()
            raise
        shutil.rmtree(old, ignore_errors=True)


def recover(out: Path) -> list[str]:
    """Clean up after a killed export to `out`, and put back the folder it had displaced.

    Returns:
        What was done, a line each.

    Raises:
        UserError: another export to `out` is running, or what the disk said.
    """
    real = resolved(out)
    with disk_errors_in_words(out):
        if not real.parent.is_dir():
            return []
        with hold(real.parent, wait=True):
            return _recover(real)


def discard(out: Path) -> None:
    """Remove an export so that, killed half-way, nothing is left that looks like one.

    Raises:
        UserError: something in it is no file of the export, or what the disk said.
    """
    if (foreign := _foreign(out)) is not None:
        raise UserError(f"{out}: {foreign} in it is no file of the export, and would be lost; move it away")
    doomed = temporary_name(out, "new")
    with disk_errors_in_words(out), contextlib.ExitStack() as stack:
        with hold(out.parent, wait=True):
            stack.enter_context(hold(out))  # the lock moves with the folder: nobody else sweeps it
            out.rename(doomed)
        shutil.rmtree(doomed)


def sweep(parent: Path) -> None:
    """Remove everything that killed exports left in `parent`, whatever their destination.

    Raises:
        UserError: what the disk said.
    """
    with disk_errors_in_words(parent), hold(parent, wait=True):
        for found in find_temporaries(parent):
            if found.is_abandoned():
                shutil.rmtree(found.path)


def _swap(staged: Path, real: Path, stack: contextlib.ExitStack) -> Path:
    """Put `staged` in the place of `real`; return where that has gone, if it was there."""
    old = temporary_name(real, "old")
    try:
        if not is_missing_or_empty(real):
            stack.enter_context(hold(real))  # as in discard
            real.rename(old)
        elif os.name == "nt" and real.exists():
            real.rmdir()  # elsewhere rename replaces an empty folder
        staged.rename(real)
    except BaseException:
        if old.exists() and not real.exists():
            old.rename(real)
        raise
    return old


def _recover(real: Path) -> list[str]:
    """What `recover` does, under the parent's lock."""
    temporaries = find_temporaries(real.parent, real)
    abandoned = [found for found in temporaries if found.is_abandoned()]
    if running := [found.path for found in temporaries if found.kind == "new" and found not in abandoned]:
        raise ExportInProgressError(
            f"{real}: another export to it is running; wait for it (or remove {running[0]})"
        )
    notes = []
    for path in [found.path for found in abandoned if found.kind == "new"]:
        shutil.rmtree(path)
        notes.append(f"removed {path.name}, left by an export that was killed")
    displaced = [found.path for found in abandoned if found.kind == "old"]
    for path in sorted(displaced, key=lambda path: path.stat().st_mtime, reverse=True):
        if is_missing_or_empty(real):
            if real.exists():
                real.rmdir()
            path.rename(real)
            notes.append(f"put back {real.name}, displaced by an export that was killed")
        elif holds_export(real) and _foreign(path) is None:
            shutil.rmtree(path)
            notes.append(f"removed {path.name}, which {real.name} has replaced")
        else:
            notes.append(f"kept {path.name}, an earlier export: {real.name} holds something else now")
    return notes


def _foreign(folder: Path) -> str | None:
    """What somebody put into an export; of older or damaged ones nobody can say."""
    with contextlib.suppress(UserError):
        return foreign_file(folder) if holds_export(folder) else None
    return None


def _make_parents(parent: Path, made: list[Path]) -> None:
    """Create the folders down to `parent`, noting each in `made`."""
    if not parent.exists():
        _make_parents(parent.parent, made)
        with contextlib.suppress(FileExistsError):  # somebody else was quicker
            parent.mkdir()
            made.append(parent)
