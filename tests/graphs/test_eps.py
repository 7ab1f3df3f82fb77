"""An epsilon that shows: every other configuration has the 1e-6 of the published models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from qwen_onnx.runners.model.runner import Runner
from support.exporting import export_model
from support.exports import IDS, ON_CPU, ContribCache, DirectCache, Exported, LeftPadded, decode_all
from support.tolerances import F16, F32, assert_close

EPS = 0.3
LENGTH = 12


@pytest.fixture(scope="module")
def model(exported: Callable[..., Exported]) -> Exported:
    return exported("qwen3", rms_norm_eps=EPS)


def logits(folder: Path) -> np.ndarray:
    runner = Runner(folder, ON_CPU)
    cache = runner.new_cache()
    rows = [runner.prefill(cache, IDS[:1, :6]), *decode_all(runner, cache, IDS[:1, 6:LENGTH])]
    return np.concatenate(rows)


def test_the_checkpoints_epsilon_shows(model: Exported, exported: Callable[..., Exported]) -> None:
    """Else the tests below could not fail."""
    usual = exported("qwen3").wanted(IDS[0, :LENGTH])
    assert np.abs(model.wanted(IDS[0, :LENGTH]) - usual).max() > 10 * F16.bound


@pytest.mark.parametrize("lowering", ["static", "static-capture", "static-grouped"])
def test_each_static_lowering_has_the_checkpoints_epsilon(lowering: str, model: Exported) -> None:
    batch = LeftPadded(DirectCache(model, 1, capacity=32, lowering=lowering), [0])
    for queries, entry in ((6, "prefill"), (1, "decode"), (1, "decode")):
        found = batch.step(queries, entry=entry)
        wanted = batch.wanted(0)
        assert wanted is not None
        assert_close(found[0], wanted, F32)


def test_portable_graphs_have_it(model: Exported, tmp_path: Path) -> None:
    folder = export_model(str(model.checkpoint), tmp_path / "portable", target="portable").folder
    assert_close(logits(folder), model.wanted(IDS[0, :LENGTH])[5:], F32)


def test_contrib_graphs_have_it(exported: Callable[..., Exported]) -> None:
    model = exported("qwen3", "f16", rms_norm_eps=EPS)
    cache, wanted = ContribCache(model, 1), model.wanted(IDS[0, :8])
    assert_close(cache.prefill(0, IDS[0, :6]), wanted[5], F16)
    for slot in (6, 7):
        assert_close(cache.decode(IDS[:1, slot])[0], wanted[slot], F16)
