"""Exports made on the way: where they lie, what they are called, and how they go."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import fnmatch
import hashlib
import importlib.metadata
import os
import re
from collections.abc import Sequence
from pathlib import Path

import platformdirs

from qwen_onnx.checkpoints.hub import SMALL_FILES, ModelSource
from qwen_onnx.contract.manifest import MANIFEST_FILE
from qwen_onnx.errors import UserError
from qwen_onnx.exports.publish.staging import discard, sweep

CACHE_VARIABLE = "QWEN_ONNX_CACHE"
_PARTS = 3  # after the model: source, dtype and layout, package version
_SOURCE = re.compile(r"local-[0-9a-f]{12}|[0-9a-f]{12}")


@dataclasses.dataclass(frozen=True)
class CachedExport:
    """One export in the cache."""

    name: str
    """As short as tells it from the others: `Qwen2.5-0.5B-Instruct-int4`, then `@` and commit, then version."""
    path: Path
    model_id: str
    dtype: str
    size: int
    """In bytes, of all its files."""
    modified: datetime.datetime
    """When it was made, in local time."""


def cache_folder(override: Path | None = None) -> Path:
    """The folder of cached exports: `override`, else $QWEN_ONNX_CACHE, else the system's place for caches."""
    if override is not None:
        return override
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named).expanduser()
    return platformdirs.user_cache_path("qwen-onnx", appauthor=False) / "exports"


def cached_export_path(cache: Path, source: ModelSource, kind: str) -> Path:
    """Where the export of `source` of this kind lies, or is to be made: a dtype, or `f32-panels16` for one in panels.

    A changed checkpoint, another dtype and another version of this package each give another name:
    `Qwen--Qwen2.5-0.5B-Instruct--7ae557604adf--f32--0.3.0`.

    Raises:
        UserError: a local checkpoint cannot be read.
    """
    origin = source.revision[:12] if source.revision else f"local-{_fingerprint(source.folder)}"
    parts = [_readable(source.model_id), origin, kind, importlib.metadata.version("qwen-onnx")]
    return cache / "--".join(parts)


def list_exports(cache: Path) -> list[CachedExport]:
    """The whole exports in `cache`, by name; nothing when it does not exist.

    Raises:
        UserError: it cannot be read.
    """
    try:
        if not cache.is_dir():
            return []
        found = [_read(path) for path in sorted(cache.iterdir())]
    except OSError as error:
        raise UserError(f"{error.filename or cache}: {error.strerror}") from None
    exports = [export for export in found if export is not None]
    names = _short_names([export.path.name for export in exports])
    return [dataclasses.replace(export, name=names[export.path.name]) for export in exports]


def find_by_name(cache: Path, name: str) -> Path | None:
    """The export that is called so, or whose folder is; None where there is none.

    Raises:
        UserError: several are, but for what stands behind `@`; or the cache cannot be read.
    """
    exports = list_exports(cache)
    for export in exports:
        if name in (export.name, export.path.name):
            return export.path
    if several := [export.name for export in exports if export.name.startswith(f"{name}@")]:
        raise UserError(f"{name}: {len(several)} exports are called so; one of {', '.join(several)} wanted")
    return None


def remove_exports(cache: Path, names: Sequence[str], *, everything: bool = False) -> list[CachedExport]:
    """Remove exports by name, or all of them with what killed runs left; return those removed.

    Nothing is removed unless every name is known.

    Raises:
        UserError: a name that is no export in `cache`, or what the disk said.
    """
    exports = list_exports(cache)
    by_name = {
        **{export.path.name: export for export in exports},
        **{export.name: export for export in exports},
    }
    if unknown := [name for name in names if name not in by_name]:
        known = ", ".join(export.name for export in exports) or "nothing"
        raise UserError(f"{unknown[0]!r} is no export in {cache}, which holds {known}")
    chosen = exports if everything else [*{by_name[name].path: by_name[name] for name in names}.values()]
    for export in chosen:
        discard(export.path)
    if everything and cache.is_dir():
        sweep(cache)
    return chosen


def _short_names(folders: Sequence[str]) -> dict[str, str]:
    """Names that a person can type, by folder: what tells exports apart is added where it does."""
    spellings: dict[str, list[str]] = {}
    for folder in folders:
        model, source, kind, version = folder.rsplit("--", _PARTS)
        # The owner of a Hub id goes; panels are this machine's affair.
        owner, _, name = model.partition("--")
        short = f"{model if source.startswith('local-') else name or owner}-{kind.partition('-panels')[0]}"
        source = source.removeprefix("local-")[:7]
        spellings[folder] = [short, f"{short}@{source}", f"{short}@{source}-{version}", f"{short}@{folder}"]
    for length in range(4):
        counts = collections.Counter(names[min(length, len(names) - 1)] for names in spellings.values())
        for names in spellings.values():
            if len(names) > length + 1 and counts[names[length]] == 1:
                del names[length + 1 :]
    return {folder: names[-1] for folder, names in spellings.items()}


def _readable(model_id: str) -> str:
    """A model's id as part of a folder's name; what it loses, the name's other parts tell apart."""
    name = re.sub(r"[^\w.-]", "_", model_id.replace("/", "--")).lstrip(".")
    return os.fsencode(name)[:120].decode(errors="ignore") or "model"


def _fingerprint(folder: Path) -> str:
    """Changes with the place, size or time of any file that an export reads."""
    patterns = (*SMALL_FILES, "*.safetensors")
    digest = hashlib.sha256(os.fsencode(folder.resolve()))
    try:
        for path in sorted(folder.iterdir()):
            if any(fnmatch.fnmatchcase(path.name, pattern) for pattern in patterns):
                status = path.stat()
                digest.update(
                    f"\0{path.name}\0{status.st_size}\0{status.st_mtime_ns}".encode(errors="replace")
                )
    except OSError as error:
        raise UserError(f"{error.filename or folder}: {error.strerror}") from None
    return digest.hexdigest()[:12]


def _read(path: Path) -> CachedExport | None:
    """The export at `path`; None for anything that is not one of ours, or is a link out of the cache."""
    model, *parts = path.name.rsplit("--", _PARTS)
    if len(parts) != _PARTS or not _SOURCE.fullmatch(parts[0]):
        return None
    # A leading dot is staging's: an export that is being made, or removed.
    if path.name.startswith(".") or path.is_symlink() or not (path / MANIFEST_FILE).is_file():
        return None
    # Neither an id nor a name on the Hub holds two dashes; a local folder's name may.
    model_id = model if parts[0].startswith("local-") else model.replace("--", "/", 1)
    size = sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())
    made = datetime.datetime.fromtimestamp((path / MANIFEST_FILE).stat().st_mtime).astimezone()
    return CachedExport(path.name, path, model_id, parts[1].partition("-")[0], size, made)
