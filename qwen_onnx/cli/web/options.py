"""The options of `qwen-onnx web`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from qwen_onnx.option_kinds import Count, FilePath, Switch, Text
from qwen_onnx.options import Options, declare

_PAGE, _MODEL = "Page", "Model, where it is no export yet"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WebOptions(Options):
    """Where the page is, and what is made on the way.

    Raises:
        UserError: values that are wrong.
    """

    port: int | None = declare(
        None, Count(0, 65535), "Default 8420, or any if that is taken; 0 is any.", _PAGE
    )
    open_browser: bool = declare(False, Switch(), "Open it in the browser, too.", _PAGE, flag="--open")
    dtype: str | None = declare(
        None, Text(("f32", "f16")), "f32, the default; or f16, half the download.", _MODEL
    )
    revision: str | None = declare(None, Text(), "Branch, tag or commit of a Hub id.", _MODEL)
    cache_dir: Path | None = declare(None, FilePath(), "Folder for exports that are made.", _MODEL)
