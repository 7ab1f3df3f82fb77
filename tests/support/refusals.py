"""What every refusal must be: a UserError of one printable line that names what is at fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from qwen_onnx.errors import UserError


def refused(
    function: Callable[..., Any], *args: Any, mentions: tuple[object, ...] = (), **kwargs: Any
) -> str:
    """Call `function`, which must raise such an error; return its line."""
    with pytest.raises(UserError) as caught:
        function(*args, **kwargs)
    line = str(caught.value)
    assert line.isprintable(), f"not one printable line: {line!r}"
    assert len(line) < 600, "nobody reads that much"
    for wanted in mentions:
        assert str(wanted) in line, f"{wanted} is not named: {line}"
    return line
