"""What an export's generation_config.json says of generation, and what of it is not supported here."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from qwen_onnx.checkpoints.known_keys import GENERATION, shortened
from qwen_onnx.contract.json_file import read_json
from qwen_onnx.errors import printable
from qwen_onnx.option_kinds import is_number
from qwen_onnx.options import Given, declared
from qwen_onnx.runners.sampling.request import Request

GENERATION_CONFIG_FILE = "generation_config.json"


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """What holds where a caller says nothing else."""

    given: Given = dataclasses.field(default_factory=dict)
    """Values of Request by field name."""
    ignored: tuple[str, ...] = ()
    """`name value` of what the file says beyond that, which would change an answer in transformers."""


def read_generation_config(folder: Path) -> GenerationConfig:
    """Read a folder's generation_config.json; a missing key and null say nothing.

    Where there is no such file, what config.json says of generation counts, as in transformers. A value that cannot
    be followed is as good as none, and is named in `ignored`: no file makes a model that nobody can run.

    Raises:
        UserError: a file that cannot be read, or holds no JSON object.
    """
    given, ignored = {}, []
    keys = {option.config_key: name for name, option in declared(Request).items() if option.config_key}
    values = {key: value for key, value in _read(folder).items() if value is not None}
    for key, found in values.items():
        if key in keys:
            kind, value = declared(Request)[keys[key]].kind, _as_meant(key, found)
            if kind.accepts(value) and (key, value) != ("max_new_tokens", 0):
                given[keys[key]] = value
            else:
                ignored.append(f"{key} {found!r} ({kind.wanted.rstrip(',')} wanted)")
        elif key not in GENERATION or (
            GENERATION[key].use == "noted" and found not in GENERATION[key].neutral
        ):
            ignored.append(f"{key} {found}")
    return GenerationConfig(given, tuple(map(printable, ignored)))


def generation_notes(folder: Path) -> list[str]:
    """What of it is not followed, in a line."""
    ignored = read_generation_config(folder).ignored
    return [f"{GENERATION_CONFIG_FILE}: not followed: {shortened(list(ignored))}"] if ignored else []


def _read(folder: Path) -> dict[str, Any]:
    if (path := folder / GENERATION_CONFIG_FILE).exists():
        return read_json(path)
    path = folder / "config.json"
    found = read_json(path) if path.exists() else {}
    return {key: value for key, value in found.items() if key in GENERATION}


def _as_meant(key: str, value: Any) -> Any:
    """As transformers and vLLM read it: -1 is every token, a share above 1 is all of it, 20.0 is 20."""
    if (
        isinstance(value, float)
        and value.is_integer()
        and key in ("top_k", "max_new_tokens", "min_new_tokens")
    ):
        value = int(value)
    if key == "top_k" and value == -1:
        return 0
    if key == "top_p" and is_number(value) and value > 1:
        return 1.0
    return value
