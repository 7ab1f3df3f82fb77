"""Damaged and hostile files, templates, ids, options and texts: each is right, or one line and exit 1.

The same cases each time, by number; a number that fails goes into corpus.json. The long run: `pytest -m fuzz`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from support.fuzz.fuzzing import Case, Result, choose_cases, corpus, make_base, run_cases, summary
from support.fuzz.targets import NEVER_REFUSED, TARGETS
from support.marks import but_first

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="limits of memory are another thing there")

FEW, SHORT, LONG = 200, 2_000, 44_000


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("fuzz"))


def verify(cases: list[Case], results: list[Result]) -> None:
    print(summary(results))
    faults = [result for result in results if result.outcome == "fault"]
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(map(str, faults[:10]))
    assert sorted((result.target, result.number) for result in results) == sorted(cases)
    for target in TARGETS:
        outcomes = {result.outcome for result in results if result.target == target}
        if target == "forged_graph":  # one of sixty is damaged where it does not matter
            assert "refused" in outcomes
            continue
        wanted = {"refused"} if target == "graph" else {"right", "refused"}  # no other graph may run
        wanted = {"right"} if target in NEVER_REFUSED else wanted
        assert outcomes == wanted, f"{target}: {outcomes} only, so its cases say little"


@pytest.mark.parametrize("count", but_first([FEW, SHORT]))
def test_a_short_run(count: int, base: Path) -> None:
    """No case ends in a traceback, a hang, a crash of the process, or a file that is written elsewhere."""
    cases = choose_cases(count)
    assert len(cases) >= count
    verify(cases, run_cases(cases, base))


@pytest.mark.fuzz
def test_a_long_run(base: Path) -> None:
    """The same, twenty times as much; QWEN_ONNX_FUZZ_FIRST is the number to begin at."""
    cases = choose_cases(LONG, int(os.environ.get("QWEN_ONNX_FUZZ_FIRST", "0")))
    assert len(cases) - len(corpus()) >= LONG
    verify(cases, run_cases(cases, base, processes=os.cpu_count() or 1))


@pytest.mark.thorough
def test_a_case_is_the_same_each_time(base: Path) -> None:
    """A number in the corpus stands for one case, whatever ran before it."""
    cases = [(target, number) for target in TARGETS for number in (3, 4)]
    first, second = ([result.outcome for result in run_cases(order, base)] for order in (cases, cases[::-1]))
    assert first == second[::-1]


@pytest.mark.thorough
def test_what_is_a_fault_is_seen(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of fault is found, and the cases after one that kills its process are run."""
    monkeypatch.setenv("QWEN_ONNX_FUZZ_SECONDS", "1")
    said = (
        "ended with -11",
        "ended with -27",  # SIGPROF
        "written outside",
        "ValueError: x",
        "not one printable line",
        "MemoryError",
    )
    results = run_cases([*(("faulty", number) for number in range(len(said))), ("config", 0)], base)
    *faults, last = results
    assert [fault.outcome for fault in faults] == ["fault"] * len(said)
    for words, fault in zip(said, faults, strict=True):
        assert words in fault.detail
    assert last.outcome in ("right", "refused")
