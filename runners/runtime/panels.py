"""In which order this processor's convolutions read a matrix, and whether an export has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from qwen_onnx.contract import PROBE_SIZE, PROBE_WEIGHT, PROBE_X, PROBE_Y
from qwen_onnx.contract.manifest import Manifest
from qwen_onnx.errors import UserError, option
from qwen_onnx.runners.runtime.integrity import verify_graph
from qwen_onnx.runners.runtime.options import SessionOptions
from qwen_onnx.runners.runtime.session import failed, open_session


def panel_rows(probe: Any) -> int | None:
    """Rows of a panel, 16 or 8, of which a session of the probe graph gives the right product; None: of neither.

    Raises:
        UserError: it is the session of another graph.
    """
    weight = np.arange(PROBE_SIZE**2, dtype=np.float32).reshape(PROBE_SIZE, PROBE_SIZE)
    x = np.arange(PROBE_SIZE, dtype=np.float32)
    for rows in (16, 8):
        panels = np.ascontiguousarray(weight.reshape(-1, rows, PROBE_SIZE).swapaxes(1, 2))
        inputs = {PROBE_X: x.reshape(1, -1, 1, 1), PROBE_WEIGHT: panels.reshape(*weight.shape, 1, 1)}
        try:
            (y,) = probe.run([PROBE_Y], inputs)
        except Exception as error:  # ONNX Runtime's exceptions share no base class
            raise failed("the probe of panels", error) from None
        if np.array_equal(y.ravel(), weight @ x):  # whole numbers below 2^24: exact in any order
            return rows
    return None


def suits_processor(folder: Path, manifest: Manifest) -> bool:
    """Whether the matrices of an export lie as this processor reads them; True of those in no panels.

    False for a probe that is damaged: what cannot be read suits nobody.
    """
    try:
        return manifest.panel_rows is None or _found(folder, manifest) == manifest.panel_rows
    except UserError:
        return False


def verify_panels(folder: Path, manifest: Manifest) -> None:
    """An export in panels was made for processors like this one.

    Raises:
        UserError: it was not; another processor would compute with the wrong numbers and not say so.
    """
    if manifest.panel_rows is None or (found := _found(folder, manifest)) == manifest.panel_rows:
        return
    has = f"take panels of {found}" if found else "have no such kernels"
    raise UserError(
        f"{folder}: its matrices lie in panels of {manifest.panel_rows} rows; ONNX Runtime's kernels for this "
        f"processor {has}; export it anew here, or anywhere without "
        f"{option('weights_order', 'panels')}"
    )


def orders_in_words(there: object, here: object) -> str:
    """How matrices lie in two exports: in panels of so many rows or as in the checkpoint; "" if alike."""
    theirs, ours = (f"panels of {rows} rows" if rows else "the checkpoint's order" for rows in (there, here))
    return (
        ""
        if theirs == ours
        else f"; weights lie in {theirs} there, in {ours} here ({option('weights_order')})"
    )


def _found(folder: Path, manifest: Manifest) -> int | None:
    graph = manifest.graph("probe", "cpu")
    verify_graph(folder, manifest, graph)
    return panel_rows(open_session(folder / graph.file, "cpu", SessionOptions(provider="cpu", threads=1)))
