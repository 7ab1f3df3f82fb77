"""MODEL on the command line, to a folder of checkpoint files: the bundled model, a local folder, or the Hub.

huggingface_hub is imported when a Hub id is asked for and not before: that takes longer than the rest together.
"""

from __future__ import annotations

import dataclasses
import errno
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qwen_onnx.checkpoints import BUNDLED_MODEL, DEFAULT_MODEL, TEMPLATES_FOLDER
from qwen_onnx.checkpoints.checkpoint import INDEX_FILE, SIDE_FILES, SINGLE_FILE
from qwen_onnx.checkpoints.config import QwenConfig, parse_config
from qwen_onnx.checkpoints.tensor_names import quantization_note
from qwen_onnx.contract.json_file import read_json
from qwen_onnx.errors import UserError, option

SMALL_FILES = (*SIDE_FILES, f"{TEMPLATES_FOLDER}/*.jinja", INDEX_FILE)
"""All that an export reads or copies beside the weights."""

__all__ = [
    "BUNDLED_MODEL", "DEFAULT_MODEL", "SMALL_FILES", "Download", "ModelSource", "as_path", "resolve_model",
]  # fmt: skip
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9_][\w.-]*", re.ASCII)
_LOCAL = re.compile(r"[./~\\]|[A-Za-z]:")
_FULL_DISK = {errno.ENOSPC, errno.EDQUOT}


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A checkpoint on this machine, and what it is called."""

    folder: Path
    name: str
    """The last part of the id, or the folder's name."""
    model_id: str
    """The Hub id, or the local folder's name."""
    revision: str | None
    """The commit a Hub snapshot is of; None for a local folder."""


@dataclasses.dataclass(frozen=True)
class Download:
    """Weights that are to be fetched from the Hub."""

    model_id: str
    config: QwenConfig
    nbytes: int | None
    """Of what is not here yet; None where the Hub does not say."""
    folder: Path
    """The Hub cache."""


def resolve_model(
    model: str,
    *,
    revision: str | None = None,
    before_download: Callable[[Download], None] | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> ModelSource:
    """Find the checkpoint that `model` names, and download what is missing of it.

    `tiny` is the bundled model. An existing folder, or anything that reads like a path, is local, and nothing
    is asked of the network. The rest must be a Hub id.

    Args:
        before_download: is called once it is known what weights are missing; what it raises stops it.
        tell: gets what is worth knowing, a line at a time.

    Raises:
        UserError: no such folder or Hub model, a revision of something local, or a download that failed.
    """
    if model == BUNDLED_MODEL:
        if Path(BUNDLED_MODEL).is_dir():
            tell(f"note: {BUNDLED_MODEL} is the bundled model; the folder of this name is ./{BUNDLED_MODEL}")
        source = ModelSource(Path(__file__).parents[1] / "tiny", BUNDLED_MODEL, BUNDLED_MODEL, None)
    else:
        local = _local_folder(model)
        if local is None:
            return _download(model, revision, before_download)
        name = local.resolve().name or "model"
        source = ModelSource(local, name, name, None)
    if revision is not None:
        asked = option("revision", revision)
        raise UserError(
            f"{model}: {asked} is for models on the Hub; this is the local folder {source.folder}"
        )
    return source


def as_path(model: str) -> Path:
    """What a user named, as a path that can be looked for.

    Raises:
        UserError: no user of that name, a name too long, or a folder that may not be looked into.
    """
    try:
        path = Path(model).expanduser()
        (path / "config.json").exists()  # asked for what it raises
    except (OSError, RuntimeError, ValueError) as error:  # nobody's home; a null byte
        raise UserError(f"{model}: cannot be opened ({getattr(error, 'strerror', error)})") from None
    return path


def _local_folder(model: str) -> Path | None:
    """The folder `model` names, or None when it can only be a Hub id."""
    path = as_path(model)
    if model and path.is_dir():
        return path
    if path.is_file():
        if path.suffix == ".gguf":
            raise UserError(
                f"{model}: GGUF is not read; give the safetensors checkpoint that it was made from"
            )
        raise UserError(f"{model}: a file; wanted the checkpoint's folder (config.json and *.safetensors)")
    if _LOCAL.match(model) or model.endswith(("/", "\\")):
        raise UserError(f"{model}: no such folder")
    if not _HUB_ID.fullmatch(model):
        raise UserError(
            f"{model!r}: neither a folder here nor a Hub id; wanted a path, a Hub id such as {DEFAULT_MODEL}, "
            f"or {BUNDLED_MODEL!r}"
        )
    return None


def _download(
    model: str, revision: str | None, before_download: Callable[[Download], None] | None
) -> ModelSource:
    import huggingface_hub

    try:
        snapshot = huggingface_hub.snapshot_download(
            model, revision=revision, allow_patterns=list(SMALL_FILES), library_name="qwen-onnx"
        )
        folder = Path(snapshot)
        weight_map, config = _weight_map(folder), None
        if (file := folder / "config.json").exists():  # refused before gigabytes are fetched
            config = parse_config(raw := read_json(file))
            quantization_note(raw, map(str, weight_map), ())
        missing = [name for name in _weights_files(folder, weight_map) if not (folder / name).exists()]
        if config is not None and missing and before_download is not None:
            size = _size_on_hub(model, missing, folder.name)
            before_download(Download(model, config, size, Path(huggingface_hub.constants.HF_HUB_CACHE)))
        # One by one and in this thread: inside snapshot_download's threads, Ctrl-C waits for whole files.
        for name in _weights_files(folder, weight_map):
            huggingface_hub.hf_hub_download(model, name, revision=folder.name, library_name="qwen-onnx")
    except UserError as error:
        told = str(error)
        raise UserError(told if told.startswith(f"{model}: ") else f"{model}: {told}") from None
    except Exception as error:
        raise UserError(f"{model}: {_explain(error, model, revision)}") from error
    return ModelSource(folder, model.rsplit("/", 1)[-1], model, folder.name)


def _size_on_hub(model: str, names: list[str], revision: str) -> int | None:
    import huggingface_hub

    urls = [huggingface_hub.hf_hub_url(model, name, revision=revision) for name in names]
    sizes = [huggingface_hub.get_hf_file_metadata(url).size for url in urls]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _weight_map(folder: Path) -> dict[str, Any]:
    """Of a snapshot's index; empty where there is none."""
    if not (folder / INDEX_FILE).exists():
        return {}
    found = read_json(folder / INDEX_FILE).get("weight_map")
    return found if isinstance(found, dict) else {}


def _weights_files(folder: Path, weight_map: Mapping[str, Any]) -> list[str]:
    """The weights of a snapshot: the shards its index names, or the one file."""
    if not (folder / INDEX_FILE).exists():
        return [SINGLE_FILE]
    # What an index should not name is left to open_checkpoint, which says so.
    names = {str(name) for name in weight_map.values()}
    return sorted(name for name in names if re.fullmatch(r"[\w.-]+\.safetensors", name))


def _explain(error: BaseException, model: str, revision: str | None) -> str:
    """What went wrong on the Hub or on the way, and what to do about it."""
    from huggingface_hub import constants, errors

    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    if isinstance(error, errors.LocalEntryNotFoundError):
        if error.__cause__ is None or isinstance(error.__cause__, errors.OfflineModeIsEnabled):
            return f"not (or not all) in {cache}, and HF_HUB_OFFLINE is set; unset it to download"
        return _explain(error.__cause__, model, revision)
    if isinstance(error, errors.GatedRepoError):
        return f"gated; accept its terms at {hub}/{model}, then run `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"no revision {revision!r}; its branches and tags are at {hub}/{model}/tree/main"
    if isinstance(error, errors.DisabledRepoError):
        return f"disabled on {hub}"
    if isinstance(error, errors.EntryNotFoundError):
        return f"no {SINGLE_FILE} or {INDEX_FILE} on {hub}; wanted a checkpoint in safetensors"
    if _status(error) == 401 and "Invalid credentials" in str(error):
        return f"{hub} does not know your token (any more); run `hf auth login`, or `hf auth logout`"
    if isinstance(error, errors.RepositoryNotFoundError) or _status(error) == 401:
        where = f"no folder of this name here, and no such public model on {hub}"
        return f"{where}; check the name, or run `hf auth login` if it is private"
    if _status(error) == 403:
        return f"{hub} refused access (HTTP 403); run `hf auth login` with a token that may read it"
    if _status(error) is not None:
        return f"{hub} answered HTTP {_status(error)}; try again later"
    # Xet, which fetches most weights, says it in words only.
    if getattr(error, "errno", None) in _FULL_DISK or "No space left on device" in str(error):
        return f"the disk is full at {cache}; make room, or set HF_HOME to a folder on another disk"
    # httpx in huggingface_hub 1, httpx2 in 2: told by name, so that both are understood.
    if any(kind.__name__ == "TransportError" for kind in type(error).__mro__):
        return (
            f"no folder of this name here; lost or no connection to {hub} ({_first_line(error)}); finished files "
            "are kept: check the network, then run the same command again"
        )
    if isinstance(error, errors.FileMetadataError | ValueError | AssertionError | KeyError):
        return f"{hub} does not answer like a Hub ({_first_line(error)}); check HF_ENDPOINT and proxies"
    if isinstance(error, OSError) and error.errno is not None:
        return f"cannot write to {error.filename or cache} ({error.strerror}); HF_HOME sets another folder"
    return f"download failed ({_first_line(error)}); run the same command again"


def _status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
