"""What may be asked of a model that is named, beside its name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from qwen_onnx.contract import DTYPE_SPELLINGS, EXPORT_DTYPES
from qwen_onnx.option_kinds import FilePath, Name, Switch, Text
from qwen_onnx.options import Options, declare

_OPTIONS = "Options"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """Which export of a model is meant.

    Raises:
        UserError: a value of the wrong kind.
    """

    dtype: str | None = declare(
        None,
        Name(EXPORT_DTYPES, spellings=DTYPE_SPELLINGS),
        "Of the export, if made now; CPU default f32.",
        _OPTIONS,
    )
    revision: str | None = declare(None, Text(), "Branch, tag, commit; default main.", _OPTIONS)
    cache_dir: Path | None = declare(
        None, FilePath(), "Folder of exports; default the user's cache.", _OPTIONS
    )
    yes: bool = declare(False, Switch(), "Download without asking.", _OPTIONS, flag="--yes -y")
