"""The portable export in other runtimes, each in an environment of its own; and the rule they are judged by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from environments import RUNTIMES, Runtime
from matrix import (
    NEAR,
    Expected,
    Limits,
    Outcome,
    Subject,
    Verdict,
    compare,
    compare_ids,
    compare_rows,
    markdown,
)

QUICK = [runtime for runtime in RUNTIMES if runtime.quick]


@pytest.fixture(scope="session")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    made: dict[str, Subject] = {}

    def make(dtype: str) -> Subject:
        if dtype not in made:
            made[dtype] = Subject(tmp_path_factory.mktemp("runtimes"), dtype)
        return made[dtype]

    return make


@pytest.mark.runtimes
@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("runtime", QUICK, ids=lambda runtime: runtime.name)
def test_every_id_is_ours(runtime: Runtime, dtype: str, subject: Callable[[str], Subject]) -> None:
    """One that cannot be installed fails too: a test that was not run is no test that passed."""
    outcome = subject(dtype).run(runtime)
    assert not outcome.faults
    assert outcome.ok


@pytest.fixture
def wanted() -> Expected:
    """Ids 1, 2, 0; at the second step, 0 is a near tie."""
    logits = np.array([[0, 9, 1], [6.95, 1, 7], [5, 2, 1]], np.float32)
    return Expected(logits.argmax(axis=-1).tolist(), logits)


@pytest.mark.parametrize(
    ("found", "near", "verdict"),
    [
        ([1, 2, 0], 0.0, Verdict(True, "yes", 3)),
        ([1, 0, 1], 0.1, Verdict(True, "parts at step 1, margin 0.05", 1)),
        ([1, 0, 0], 0.0, Verdict(False, "parts at step 1, margin 0.05", 1)),
        ([1, 1, 0], 0.1, Verdict(False, "parts at step 1, margin 6", 1)),
        ([0, 2, 0], 0.1, Verdict(False, "parts at step 0, margin 9", 0)),
        ([1, 9, 0], 0.1, Verdict(False, "parts at step 1, margin inf", 1)),
        ([1, 2], 0.1, Verdict(False, "2 ids found, 3 wanted", 0)),
    ],
    ids=["equal", "near-tie", "near-tie-f32", "near-tie-but-a-third-id", "wide", "no-such-id", "short"],
)
def test_where_ids_may_part(found: list[int], near: float, verdict: Verdict, wanted: Expected) -> None:
    assert compare_ids(found, wanted, near) == verdict


def test_the_worst_row_counts(wanted: Expected) -> None:
    right, parted, wrong = [1, 2, 0], [1, 0, 0], [1, 2, 1]
    assert compare_rows([right, parted, right], [wanted] * 3, 0.1).words == "parts at step 1, margin 0.05"
    assert not compare_rows([right, wrong, parted], [wanted] * 3, 0.1).ok
    assert not compare_rows([right], [wanted] * 3, 0.1).ok


@pytest.fixture
def compared(wanted: Expected, tmp_path: Path) -> Callable[..., Outcome]:
    """The same ids wanted of every part; a RESULT.json as said, with logits that lie 0.01 from ours."""
    rows = {"prompt": [wanted], "turn": [wanted], "batch": [wanted, wanted], "chunked": [wanted]}
    ids = {"prompt": wanted.ids, "turn": wanted.ids, "batch": [wanted.ids] * 2, "chunked": wanted.ids}

    def run(logits: np.ndarray | float, **changes: Any) -> Outcome:
        (tmp_path / "result.f32").write_bytes((wanted.logits + logits).astype("<f4").tobytes())
        result = {"version": "1.0", "logits": "result.f32"} | ids | changes
        return compare(result, tmp_path, rows, Limits(0.1, 0.02))

    return run


def test_a_right_answer(compared: Callable[..., Outcome]) -> None:
    outcome = compared(0.01)
    assert outcome.ok
    assert outcome.faults == []
    assert outcome.difference == pytest.approx(0.01, rel=1e-3)


def test_one_wrong_row_fails(compared: Callable[..., Outcome]) -> None:
    outcome = compared(0.01, batch=[[1, 2, 0], [1, 1, 0]])
    assert not outcome.ok
    assert outcome.faults == ["batch: parts at step 1, margin 6"]


def test_what_a_runtime_has_not_is_no_fault_and_what_failed_is(compared: Callable[..., Outcome]) -> None:
    assert compared(0.0, chunked=None).ok
    outcome = compared(0.0, chunked=None, errors={"chunked": "RuntimeError: no"})
    assert outcome.faults == ["chunked: RuntimeError: no"]
    assert not compared(0.0, prompt=None).ok


def test_after_a_near_tie_nothing_is_compared(compared: Callable[..., Outcome]) -> None:
    """Ids and logits after it, and the next turn, are those of another answer."""
    far = np.array([[0.01], [0.01], [5]])
    outcome = compared(far, prompt=[1, 0, 1], turn=[2, 2, 2])
    assert outcome.ok
    assert outcome.verdicts["prompt"].words == "parts at step 1, margin 0.05"
    assert outcome.difference == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("off", [0.03, float("nan")])
def test_right_ids_of_wrong_logits_fail(off: float, compared: Callable[..., Outcome]) -> None:
    outcome = compared(off)
    assert not outcome.ok
    assert outcome.faults[0].startswith("logits: ")


def test_what_was_not_run_is_not_what_passed() -> None:
    not_run, failed = Outcome(not_run="no clang on the PATH"), Outcome("1.0", error="RuntimeError: no MatMul")
    assert not not_run.ok
    assert not failed.ok
    assert not Outcome("1.0").ok
    text = markdown([Runtime("some", "run_some.py")], {"some": {"f32": not_run, "f16": failed}})
    assert "| some | 1.0 | not run |" in text
    assert "- some, f32, no clang on the PATH" in text
    assert "- some, f16, RuntimeError: no MatMul" in text
