"""The options of `qwen-onnx web`."""

from __future__ import annotations

import dataclasses

from qwen_onnx.option_kinds import Count, Switch
from qwen_onnx.options import Options, declare

_PAGE = "Page"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WebOptions(Options):
    """Where the page is.

    Raises:
        UserError: values that are wrong.
    """

    port: int | None = declare(
        None, Count(0, 65535), "Default 8420, or any if that is taken; 0 is any.", _PAGE
    )
    open_browser: bool = declare(False, Switch(), "Open it in the browser, too.", _PAGE, flag="--open")
