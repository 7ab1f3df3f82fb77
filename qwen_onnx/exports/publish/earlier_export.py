"""What an earlier export is made of: all that may be replaced, and nothing that somebody else put beside it."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from qwen_onnx.contract.manifest import MANIFEST_FILE, read_manifest
from qwen_onnx.errors import UserError
from qwen_onnx.exports.layouts.triton import (
    CONFIG_FILE,
    EXPORT_FOLDER,
    MODEL_FILE,
    config_pbtxt,
    model_source,
)

_INSIDE = ("", f"{EXPORT_FOLDER.as_posix()}/")
"""Where an export lies in a folder: it is one, or it is a model of Triton's."""
_LEFT_BY_SYSTEMS = frozenset({".DS_Store", "Thumbs.db", "desktop.ini", "__pycache__"})


def holds_export(folder: Path) -> bool:
    """Whether this is an export, or a model of Triton's with one inside."""
    return any((folder / inside / MANIFEST_FILE).is_file() for inside in _INSIDE)


def foreign_file(folder: Path) -> str | None:
    """Something in an earlier export that is no part of it, as a path in the folder; None where there is nothing.

    Raises:
        UserError: its manifest cannot be read.
    """
    inside = next(inside for inside in _INSIDE if (folder / inside / MANIFEST_FILE).is_file())
    manifest = read_manifest(folder / inside)
    own = {MANIFEST_FILE, f"{MANIFEST_FILE}.new", *manifest.files, *(graph.file for graph in manifest.graphs)}
    return _first_other(
        folder, {inside + file for file in own} | (_triton_files(folder) if inside else set())
    )


def refuse_foreign_files(folder: Path, *, name: Path) -> None:
    """All that lies in an earlier export is what was exported.

    Args:
        name: what messages call the folder.

    Raises:
        UserError: its manifest cannot be read, or something in the folder is not listed there.
    """
    try:
        foreign = foreign_file(folder)
    except UserError as error:
        said = str(error).replace(str(folder), str(name))
        raise UserError(
            f"{name}: not replaced, since nothing says which of its files were exported ({said}); remove it "
            "yourself, or choose another"
        ) from None
    if foreign is not None:
        raise UserError(
            f"{name}: {foreign} in it is no file of the earlier export, and would be lost; move it away, or "
            "choose another"
        )


def _triton_files(folder: Path) -> set[str]:
    """Of a model's own files those that are as they were written: config.pbtxt is made to be edited."""
    wanted: dict[str | Path, str] = {CONFIG_FILE: config_pbtxt(name=folder.name), MODEL_FILE: model_source()}
    found = set()
    for file, text in wanted.items():
        try:
            if (folder / file).read_text(encoding="utf-8") == text:
                found.add(PurePosixPath(file).as_posix())
        except (OSError, ValueError):  # it is something else
            continue
    return found


def _first_other(folder: Path, files: set[str]) -> str | None:
    """Of all that lies in a folder, the first that is none of these files, nor a folder of theirs."""
    folders = {str(parent) for file in files for parent in PurePosixPath(file).parents}
    for at, below, here in os.walk(folder):
        place = Path(at).relative_to(folder)
        below[:] = sorted(set(below) - _LEFT_BY_SYSTEMS)
        for name in below:
            path = (place / name).as_posix()
            if path not in folders or (folder / path).is_symlink():
                return f"{path}/"
        for name in sorted(set(here) - _LEFT_BY_SYSTEMS):
            if (path := (place / name).as_posix()) not in files:
                return path
    return None
