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

    port: int | None = declare(None, Count(0, 65535), "Default 8420, or a free one; 0: a free one.", _PAGE)
    open_browser: bool = declare(False, Switch(), "Open the page in the browser.", _PAGE, flag="--open")
