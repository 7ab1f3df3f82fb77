"""Exports that many tests look at: each is made once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from exports import Exported, export_random


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Exported]:
    """`exported(name, dtype, **overrides of config.json)`: to be read only, for everyone gets the same one."""
    made: dict[tuple[Any, ...], Exported] = {}

    def make(name: str, dtype: str = "f32", **overrides: Any) -> Exported:
        key = (name, dtype, *sorted(overrides.items()))
        if key not in made:
            made[key] = export_random(tmp_path_factory.mktemp(f"{name}-{dtype}"), name, dtype, **overrides)
        return made[key]

    return make
