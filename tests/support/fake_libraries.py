"""Libraries that this machine has not, for what asks them through ctypes, and packages that are broken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qwen_onnx.runners.runtime.nvidia.libraries import Load

WORDS = "cannot open shared object file: No such file or directory"


def fills(*values: int, code: int = 0) -> Callable[..., int]:
    """A C function that writes its numbers through the pointers it is given."""

    def call(*arguments: Any) -> int:
        pointers = [argument for argument in arguments if hasattr(argument, "_obj")]
        for pointer, value in zip(pointers, values, strict=True):
            pointer._obj.value = value
        return code

    return call


def loader(there: dict[str, Any]) -> Load:
    """A system that has these libraries, by name or path; an exception is raised, anything else given."""

    def load(name: str) -> Any:
        found = there.get(name, OSError(f"{name}: {WORDS}"))
        if isinstance(found, Exception):
            raise found
        return found

    return load


def shadow(folder: Path, monkeypatch: pytest.MonkeyPatch, package: str, code: str) -> None:
    """Let processes of their own import this code instead of the installed package."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(code, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(folder))
