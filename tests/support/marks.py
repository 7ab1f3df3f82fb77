"""Marks of single cases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def but_first(values: Iterable[Any], default: int = 1) -> list[Any]:
    """Values for parametrize: the first ones are in every run, the others are `thorough`, which CI runs."""
    return [
        value
        if number < default
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.thorough)
        for number, value in enumerate(values)
    ]
