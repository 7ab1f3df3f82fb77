"""Typed access to a JSON object's fields."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from qwen_onnx.errors import UserError


class Fields:
    """Typed access to a JSON object; an error names the file, the key and what was found."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self._raw, self._where = raw, where

    def positive_int(self, key: str, default: int | None = None) -> int:
        """A whole number from 1 on, also as 32.0; raises UserError for anything else."""
        value = self._get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise UserError(f"{self._where}: {key} wants a positive whole number, found {value!r}")
        return value

    def positive_float(self, key: str, default: float | None = None) -> float:
        """A finite number above 0; raises UserError for anything else."""
        value = self._get(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value <= sys.float_info.max
        ):
            raise UserError(f"{self._where}: {key} wants a positive number, found {value!r}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """true or false; raises UserError for anything else."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise UserError(f"{self._where}: {key} wants true or false, found {value!r}")
        return value

    def _get(self, key: str, default: Any) -> Any:
        value = self._raw.get(key)
        if value is None:
            value = default
        if value is None:
            raise UserError(f"{self._where}: {key} is missing")
        return value
