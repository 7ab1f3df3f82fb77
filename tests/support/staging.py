"""Folders published and looked at."""

from __future__ import annotations

from pathlib import Path

from qwen_onnx.exports.publish.staging import staged_folder

OLD = {"export.json": "old", "old weights": "old"}
NEW = {"export.json": "new", "weights": "new"}


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
