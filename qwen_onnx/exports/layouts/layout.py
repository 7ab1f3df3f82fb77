"""What a layout is: names of graphs and weights in an export, and what is written beside them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qwen_onnx.checkpoints.config import QwenConfig
from qwen_onnx.contract import EXTRA_FILE, WEIGHTS_FILE
from qwen_onnx.contract.cache_spec import CacheSpec
from qwen_onnx.contract.json_file import read_json

TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclasses.dataclass(frozen=True)
class Exported:
    """What a layout's own files tell of."""

    folder: Path
    """Its side files lie there already."""
    config: QwenConfig
    dtype: str
    context_length: int
    eos_token_ids: tuple[int, ...]
    cache: CacheSpec
    """What its graphs carry from step to step; where some compute in another type, of the first."""
    model_file: str
    """The graph of any number of tokens."""
    weights_files: Sequence[str]
    file_counts: Mapping[str, int]
    """Of a graph's weights; of the graphs that exports in other dtypes have, too, where that is known."""


Written = tuple[list[str], list[str]]
"""Names of the files that a layout wrote or changed, and notes for the user."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Who reads the export, and what it asks of it."""

    name: str
    targets: tuple[str, ...]
    """That it works with; the first one by default."""
    write: Callable[[Exported], Written]
    """Its own files, once all others are there."""
    graph_folder: str = ""
    """Of graphs and weights, ends in a slash."""
    largest_file: int | None = None
    """Bytes of a weights file, as far as one tensor does not need more."""
    is_repository: bool = False
    """OUT holds models, each in a folder of its name."""
    inside: str = ""
    """Of the model's folder, the one that is the export."""
    verify_name: Callable[[str], None] = lambda name: None
    """Raise UserError for a model's name that the reader could not take."""
    write_around: Callable[[Path, str], None] = lambda folder, name: None
    """What else the model's folder holds; called with it and the model's name."""

    def graph_file(self, stem: str, dtype: str) -> str:
        """The name of a graph, `model` or another."""
        kind = "_fp16" if self.graph_folder and dtype == "f16" else ""
        return f"{self.graph_folder}{stem}{kind}.onnx"

    def weights_file(self, dtype: str, index: int) -> str:
        """The name of the weights file of this number, from 0 on."""
        if not self.graph_folder:
            return (WEIGHTS_FILE, EXTRA_FILE)[index]
        return self.graph_file("model", dtype) + "_data" + (f"_{index}" if index else "")


def pad_left(folder: Path) -> list[str]:
    """Have tokenizer_config.json say that batches are padded on the left, as generation wants it."""
    path = folder / TOKENIZER_CONFIG
    if not path.exists():
        return []
    write_json(path, read_json(path) | {"padding_side": "left"})
    return [TOKENIZER_CONFIG]


def write_json(path: Path, value: dict[str, Any]) -> None:
    """As the files of a checkpoint are written."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
