"""Reads the JSON files of a checkpoint or an export: a dict, or one line saying what is wrong."""

import json
from pathlib import Path
from typing import Any

from qwen_onnx.errors import UserError


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object stored in `path`.

    Raises UserError, naming the file, when it is missing, unreadable, not UTF-8, not JSON, too deeply
    nested, or not an object.
    """
    try:
        # utf-8-sig: files saved by Windows editors open with a byte order mark.
        value = json.loads(path.read_text(encoding="utf-8-sig"))
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
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds a JSON {_name_of(value)}, not an object")
    return value


def _name_of(value: object) -> str:
    if isinstance(value, list):
        return "array"
    if isinstance(value, str):
        return "string"
    return "null" if value is None else "boolean" if isinstance(value, bool) else "number"
