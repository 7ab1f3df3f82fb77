"""Which folders an export may be written to: never one that holds something else, never one that is needed."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from qwen_onnx.contract.manifest import MANIFEST_FILE
from qwen_onnx.errors import UserError, option
from qwen_onnx.exports.publish.earlier_export import holds_export, refuse_foreign_files

_LONGEST = 60  # characters of four bytes, so that 255 are enough
_FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def refuse_output(out: Path, *, force: bool = False, keep: Path | None = None) -> None:
    """Say now what `staged_folder` would say later, before anything is downloaded or written.

    `keep` is a folder that must outlive the export: the model's.

    Raises:
        UserError: `out` is a file, not empty (with `force`: not an earlier export alone), is or contains a folder
            that is needed, lies inside `keep` or another export, or lies where nothing can be written.
    """
    real = resolved(out)
    try:
        str(real).encode()
    except UnicodeEncodeError:  # ONNX Runtime could never open it
        raise UserError(f"{str(out)!r}: not a UTF-8 name; choose another") from None
    with disk_errors_in_words(out):
        if not real.name or os.path.ismount(real):
            raise UserError(f"{out}: a file system's root or mount point; choose a folder inside it")
        if real.exists() and not real.is_dir():
            raise UserError(f"{out}: a file; choose another name")
        if keep is not None and keep.resolve() in real.parents:
            raise UserError(f"{out}: lies inside the model's folder {keep}; choose another place")
        for name, folder in _needed_folders(keep).items():
            if folder == real or real in folder.parents:
                raise UserError(f"{out}: is or contains {name}; choose another")
        if outer := next((folder for folder in real.parents if (folder / MANIFEST_FILE).is_file()), None):
            raise UserError(f"{out}: lies inside the export {outer}; choose another place")
        nearest = next(folder for folder in real.parents if folder.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            raise UserError(f"{out}: nothing can be created in {nearest}; choose another place")
        if is_missing_or_empty(real):
            return
        if not holds_export(real):
            raise UserError(
                f"{out}: not empty and not an earlier export ({MANIFEST_FILE} is missing); choose another"
            )
        if force:
            refuse_foreign_files(real, name=out)
            return
    raise UserError(
        f"{out}: holds an earlier export; choose another, or {option('force', True)} to replace it"
    )


def calibration_folder(out: Path) -> Path:
    """Where an export to `out` keeps the layers that it has calibrated, until it is published."""
    real = resolved(out)
    return real.with_name(f".{real.name[:_LONGEST]}.calibration")


def resolved(out: Path) -> Path:
    """`out` without links, absolute.

    Raises:
        UserError: not something that can be a folder.
    """
    try:
        return out.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links; a null byte
        raise UserError(f"{out}: cannot be used as a folder ({error})") from None


def is_missing_or_empty(folder: Path) -> bool:
    """Whether an export to `folder` would replace nothing."""
    return not folder.exists() or not any(folder.iterdir())


@contextlib.contextmanager
def disk_errors_in_words(out: Path, *, staged: Path | None = None) -> Iterator[None]:
    """Turn an OSError of the block into a line that names the file, or `out` where it has no name to show.

    With `staged`, only errors of files in it and of full disks; they are named as they would be in `out`.

    Raises:
        UserError: in the place of the OSError.
    """
    try:
        yield
    except RuntimeError as error:
        if "loop" not in str(error):
            raise
        raise UserError(f"{out}: links that lead in a circle") from None  # Path.resolve's word for it
    except OSError as error:
        file = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else out
        if staged is not None and staged in (file, *file.parents):
            file = out / file.relative_to(staged)
        elif staged is not None and error.errno not in _FULL_DISK:
            raise
        elif file.parent in (
            out.absolute().parent,
            Path(os.path.realpath(out)).parent,
        ):  # a temporary name beside it
            file = out
        raise UserError(f"{file}: {error.strerror or error}") from error


def _needed_folders(keep: Path | None) -> dict[str, Path]:
    needed = {}
    if keep is not None:
        needed["the model's folder"] = keep.resolve()
    with contextlib.suppress(OSError):  # it was removed under us
        needed["the current folder"] = Path.cwd().resolve()
    with contextlib.suppress(RuntimeError):  # nobody's home
        needed["your home folder"] = Path.home().resolve()
    return needed
