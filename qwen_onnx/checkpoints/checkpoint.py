"""A checkpoint folder: its config.json, its shards and their index, and which of their tensors are the model's."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from qwen_onnx.checkpoints import TEMPLATES_FOLDER
from qwen_onnx.checkpoints.config import QwenConfig, config_notes, parse_config
from qwen_onnx.checkpoints.known_keys import tokenizer_notes
from qwen_onnx.checkpoints.safetensors_file import StoredTensor, read_header, refuse_unprintable
from qwen_onnx.checkpoints.tensor_names import decide_head, named_as_causal_lm, only_own, quantization_note
from qwen_onnx.contract.json_file import read_json
from qwen_onnx.contract.manifest import MANIFEST_FILE
from qwen_onnx.errors import UserError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SIDE_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
    "chat_template.json", "LICENSE",
)  # fmt: skip
"""What an export copies as it is, where the checkpoint has it; see side_files."""
_SHARD_NAME = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")


def side_files(folder: Path) -> list[str]:
    """Those that there are, and the chat templates with names, relative to the folder."""
    templates = sorted((folder / TEMPLATES_FOLDER).glob("*.jinja"))
    return [
        *(name for name in SIDE_FILES if (folder / name).is_file()),
        *(f"{TEMPLATES_FOLDER}/{path.name}" for path in templates if path.is_file()),
    ]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A local checkpoint folder whose headers have been verified."""

    folder: Path
    config: QwenConfig
    tensors: dict[str, StoredTensor]
    notes: tuple[str, ...] = ()
    """What was found odd but harmless, one line each."""
    stamps: Mapping[Path, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    """Inode, size and time of the files that were read, from before the first of them was."""

    def read(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """The tensor `name` as a read-only memory map; KeyError when the checkpoint has none."""
        return self.tensors[name].numpy()

    def verify_unchanged(self) -> None:
        """Say whether a download or a training run wrote to the files since they were opened.

        Raises:
            UserError: naming the first of them that is another now.
        """
        now = _stamps(self.folder)
        for path, stamp in self.stamps.items():
            if now.get(path) != stamp:
                raise UserError(f"{path}: was changed while it was read; try again when nothing writes to it")


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read and verify config.json, the index and every header of a checkpoint folder.

    Raises:
        UserError: what is missing, truncated, inconsistent or unsupported, naming the file and tensor.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: not a folder; wanted a checkpoint (config.json and *.safetensors)")
    _refuse_export(folder)
    notes = _adapter_notes(folder)
    stamps = _stamps(folder)
    if not (folder / "config.json").exists() and (gguf := _first(folder, "*.gguf")):
        raise UserError(f"{gguf}: GGUF is not read; give the safetensors checkpoint that it was made from")
    raw = read_json(folder / "config.json")
    config = parse_config(raw)
    notes += [*config_notes(raw), *tokenizer_notes(folder)]
    tensors, odd = _find_tensors(folder)
    note = quantization_note(raw, tensors, [tensor.dtype for tensor in tensors.values()])
    notes += [*odd, *([note] if note else [])]
    kept, extra = only_own(named_as_causal_lm(tensors), config)
    config, kept, of_head = decide_head(config, kept, raw)
    notes += [*extra, *of_head]
    used = {
        *(tensor.file for tensor in kept.values()),
        *(folder / name for name in (*side_files(folder), INDEX_FILE)),
    }
    stamps = {path: stamp for path, stamp in stamps.items() if path in used}
    return Checkpoint(folder, config, kept, tuple(notes), stamps)


def _refuse_export(folder: Path) -> None:
    """Raises UserError for an export; one made with `--link` has the checkpoint's own weights, and is one, too."""
    if (folder / MANIFEST_FILE).is_file() and not any(
        (folder / name).exists() for name in (INDEX_FILE, SINGLE_FILE)
    ):
        made_of = read_json(folder / MANIFEST_FILE).get("model_id")
        raise UserError(
            f"{folder}: an export ({MANIFEST_FILE}), where a checkpoint is wanted: give the folder or Hub id that "
            f"it was made from, {made_of!r}"
        )


def _adapter_notes(folder: Path) -> list[str]:
    """An adapter's description is left behind by merging; its weights are a model of their own."""
    if not (described := folder / "adapter_config.json").exists():
        return []
    weights = _first(folder, "adapter_model*")
    if weights or not (_first(folder, "*.safetensors") or _first(folder, "*.bin")):
        found = described if weights is None else weights
        raise UserError(
            f"{found} found: adapters are not supported; merge it into its base model first, or remove it if it is"
        )
    return [f"{described.name} is passed over: the model beside it is whole"]


def _first(folder: Path, pattern: str) -> Path | None:
    return next(iter(sorted(folder.glob(pattern))), None)


def _stamps(folder: Path) -> dict[Path, tuple[int, ...]]:
    found: dict[Path, tuple[int, ...]] = {}
    try:
        paths = list(folder.iterdir())
    except OSError:  # whoever opens a file in it says so
        return {}
    for path in paths:
        with contextlib.suppress(OSError):  # a broken link, or gone already
            status = path.stat()
            found[path] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return found


def _find_tensors(folder: Path) -> tuple[dict[str, StoredTensor], list[str]]:
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if (index := folder / INDEX_FILE).exists():
        return _follow_index(index, found)
    if SINGLE_FILE in found:
        files, strays = [SINGLE_FILE], [name for name in found if name != SINGLE_FILE]
    else:
        files, strays = _complete_set(folder, found)
    tensors: dict[str, StoredTensor] = {}
    for name in files:
        header = read_header(folder / name)
        if twice := sorted(header.keys() & tensors.keys()):
            raise UserError(f"{folder / name}: tensor {twice[0]} is also in {tensors[twice[0]].file.name}")
        tensors |= header
    return tensors, _stray_notes(strays)


def _complete_set(folder: Path, found: list[str]) -> tuple[list[str], list[str]]:
    """The shards of a folder without an index; their own names say how many there must be."""
    shards = {name: match for name in found if (match := _SHARD_NAME.fullmatch(name))}
    if not shards:
        hint = ""
        if torch_file := _first(folder, "*.bin"):
            hint = f", found {torch_file.name}: convert it to safetensors"
        elif gguf := _first(folder, "*.gguf"):
            hint = f", found {gguf.name}: GGUF is not read, give the checkpoint that it was made from"
        raise UserError(f"{folder}: wanted {SINGLE_FILE} or {INDEX_FILE}{hint}")
    totals = sorted({int(match[2]) for match in shards.values()})
    if len(totals) > 1:
        raise UserError(f"{folder}: wanted one set of shards, found sets of {totals}; remove all but one")
    files = [f"model-{k:05}-of-{totals[0]:05}.safetensors" for k in range(1, totals[0] + 1)]
    if missing := next((name for name in files if name not in shards), None):
        raise UserError(f"{folder}: wanted {missing}; incomplete download?")
    return files, [name for name in found if name not in files]


def _follow_index(index: Path, found: list[str]) -> tuple[dict[str, StoredTensor], list[str]]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: weight_map is missing or empty")
    refuse_unprintable(index, weight_map)
    headers: dict[str, dict[str, StoredTensor]] = {}
    tensors = {}
    for name, file in weight_map.items():
        if not _is_safetensors_name(file):
            raise UserError(
                f"{index}: tensor {name} lies in {reprlib.repr(file)}? wanted the name of a .safetensors file"
            )
        if file not in headers:
            if file not in found:  # as listed: asking for a name may fail for its length
                raise UserError(
                    f"{index.parent / file}: no such file, {index.name} names it; incomplete download?"
                )
            headers[file] = read_header(index.parent / file)
        if name not in headers[file]:
            raise UserError(f"{index.parent / file}: has no tensor {name}, {index.name} says it does")
        tensors[name] = headers[file][name]
    notes = _stray_notes([name for name in found if name not in headers])
    for file, header in headers.items():
        if unnamed := sorted(header.keys() - tensors.keys()):
            notes.append(
                f"{file}: ignored {len(unnamed)} tensors that {index.name} does not name: {unnamed[0]}"
            )
    return tensors, notes


def _is_safetensors_name(file: Any) -> TypeGuard[str]:
    """A plain name, no path; and by its ending none that an export gives to a graph or a manifest."""
    if not isinstance(file, str) or not file.isprintable() or "\\" in file:
        return False
    return Path(file).name == file and file.endswith(".safetensors")


def _stray_notes(strays: list[str]) -> list[str]:
    return [f"ignored {', '.join(strays)}: not part of this checkpoint"] if strays else []
