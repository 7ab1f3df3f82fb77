"""JSON files, read with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qwen_onnx.errors import UserError


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object stored in `path`.

    Raises UserError as `read_json_value`, and for another value than an object.
    """
    value = read_json_value(path)
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds a JSON {_name_of(value)}, not an object")
    return value


def read_json_value(path: Path) -> object:
    """Return the JSON value stored in `path`.

    Raises UserError, naming the file, when it is missing, unreadable, not UTF-8, not JSON, or too deeply nested.
    """
    try:
        # utf-8-sig: files saved by Windows editors open with a byte order mark.
        value: object = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise UserError(f"{path}: JSON nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None
    return value


def _name_of(value: object) -> str:
    if isinstance(value, list):
        return "array"
    if isinstance(value, str):
        return "string"
    return "null" if value is None else "boolean" if isinstance(value, bool) else "number"
