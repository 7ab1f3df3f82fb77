"""Folders published and looked at."""

from __future__ import annotations

import json
from pathlib import Path

from qwen_onnx.exports.publish.staging import staged_folder


def manifest_of(*files: str) -> str:
    """An export.json that lists these files, and describes nothing that could run."""
    names = ("model_id", "architecture", "min_onnxruntime")
    sizes = ("vocab_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "context_length")
    lists = {"eos_token_ids": [], "graphs": [], "packages": {}, "caches": {}, "quantized": {}}
    listed = {name: {"size": 3, "sha256": "0"} for name in files}
    said = {"format_version": 3, "revision": None, "dtype": "f32", "files": listed}
    return json.dumps({**said, **dict.fromkeys(names, "x"), **dict.fromkeys(sizes, 1), **lists})


OLD = {"export.json": manifest_of("old weights"), "old weights": "old"}
NEW = {"export.json": manifest_of("weights"), "weights": "new"}


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def tree(top: Path) -> dict[str, str]:
    """Every file and its content; a folder with nothing in it ends with a slash."""
    found = {}
    for path in top.rglob("*"):
        name = str(path.relative_to(top))
        if path.is_file():
            found[name] = path.read_text()
        elif not any(path.iterdir()):
            found[name + "/"] = ""
    return found


def under(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": text for name, text in files.items()}


def publish(out: Path, *, force: bool = False, keep: Path | None = None) -> None:
    with staged_folder(out, force=force, keep=keep) as folder:
        write(folder, NEW)
