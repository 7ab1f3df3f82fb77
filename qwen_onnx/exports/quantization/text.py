"""What a model reads while it is calibrated, and while its loss is measured: windows of token ids."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.contract.json_file import read_text
from qwen_onnx.errors import UserError, option
from qwen_onnx.runners.text.template.chat_template import ChatTemplate
from qwen_onnx.runners.text.tokenizer import Tokenizer

WINDOW, WINDOWS = 512, 32
"""Tokens that see each other, and how many times so many are read at most."""
_ENOUGH = 10  # tokens for each input of the widest matrix: more change little
_HELD_OUT = 1024  # tokens
_FILE = "text.json"

Windows = NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class CalibrationText:
    """Ids that a model is calibrated with."""

    name: str
    """`auto` for the package's own text, else the name of a file."""
    windows: Windows
    """int64 [windows, tokens]."""

    @property
    def sha256(self) -> str:
        """Of the ids."""
        return hashlib.sha256(self.windows.astype("<i8").tobytes()).hexdigest()


def calibration_text(
    given: str, tokenizer: Tokenizer, template: ChatTemplate | None, *, context_length: int, columns: int
) -> CalibrationText:
    """The text of `--calibrate auto`, of several kinds and languages, or that of a file.

    Args:
        columns: of the widest matrix.

    Raises:
        UserError: the file cannot be read, or is too short.
    """
    size = min(WINDOW, context_length)
    if given == "auto":
        return CalibrationText(
            given, _windows(_own("calibration", tokenizer, template), size, _ENOUGH * columns)
        )
    ids = tokenizer.encode(read_text(Path(given)), add_special_tokens=False)
    if len(ids) < size:
        raise UserError(
            f"{option('calibrate', given)}: the file has {len(ids)} tokens, {size} or more are wanted; "
            f"{WINDOW * WINDOWS:,} are read"
        )
    return CalibrationText(Path(given).name, _windows(ids, size, _ENOUGH * columns))


def held_out_ids(tokenizer: Tokenizer, template: ChatTemplate | None, *, context_length: int) -> Windows:
    """Windows of text that no calibration has seen, int64 [windows, tokens]."""
    return _windows(_own("held_out", tokenizer, template), min(WINDOW, context_length), _HELD_OUT)


def _own(part: str, tokenizer: Tokenizer, template: ChatTemplate | None) -> list[int]:
    """Ids of the package's text, the texts one after the other."""
    raw = resources.files("qwen_onnx.exports.quantization").joinpath(_FILE).read_text(encoding="utf-8")
    texts: list[str | list[dict[str, str]]] = json.loads(raw)[part]
    ids: list[int] = []
    for text in texts:
        if not isinstance(text, str):
            text = _conversation(text, template)
        ids += tokenizer.encode(f"{text}\n\n", add_special_tokens=False)
    return ids


def _conversation(messages: list[dict[str, str]], template: ChatTemplate | None) -> str:
    """As the model's own template writes it; without one, or where it refuses, the messages alone."""
    if template is not None:
        try:
            return template.render(messages, add_generation_prompt=False)
        except UserError:  # some allow no system prompt
            pass
    return "\n\n".join(message["content"] for message in messages)


def _windows(ids: list[int], size: int, enough: int) -> Windows:
    """Of ids that are enough for more, windows at equal distances."""
    found = len(ids) // size
    count = min(found, max(1, min(enough, WINDOWS * WINDOW) // size))
    starts = np.linspace(0, found - 1, count).round().astype(int) * size
    return np.array([ids[start : start + size] for start in starts], np.int64)
