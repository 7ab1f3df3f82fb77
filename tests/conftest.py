"""Exports that many tests look at, each made once; and what the tests must not inherit from where they run."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from typing import Any

# Workers have a core each: threads of NumPy's products would only wait for one another.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis
import pytest

from support.exports import Exported, export_random


def pytest_configure(config: pytest.Config) -> None:
    number = getattr(config, "workerinput", {}).get("workerid", "").removeprefix("gw")
    if number and hasattr(os, "sched_setaffinity"):
        # A core to each worker: sessions of several threads would spin against those of the other workers.
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(number) % len(cores)]})
    # `auto` means the CPU here, GPU or not: expected numbers are the CPU provider's. Child processes get it too.
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    # What is exported on the way is nobody's: no test leaves anything in the user's cache.
    os.environ["QWEN_ONNX_CACHE"] = tempfile.mkdtemp(prefix="qwen-onnx-cache-")
    atexit.register(shutil.rmtree, os.environ["QWEN_ONNX_CACHE"], ignore_errors=True)
    # A job in the background starts with SIGINT ignored, and hands that on to the children that wait for it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A machine that is busy is no fault.
    hypothesis.settings.register_profile("untimed", deadline=None)
    hypothesis.settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs the CUDA provider can be left out by its marker, as with a wheel that has none."""
    for item in items:
        if "stand_ins" in getattr(item, "fixturenames", ()):
            item.add_marker("gpu_wheel")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a skipped test is a failure: what was not run must not look like what passed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and reporter is not None and reporter.stats.get("skipped"):
        reporter.write_line("skipped tests count as failed in CI")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Exported]:
    """`exported(name, dtype, **overrides of config.json)`: to be read only, for everyone gets the same one."""
    made: dict[tuple[Any, ...], Exported] = {}

    def make(name: str, dtype: str = "f32", **overrides: Any) -> Exported:
        key = (name, dtype, *sorted(overrides.items()))
        if key not in made:
            made[key] = export_random(tmp_path_factory.mktemp(f"{name}-{dtype}"), name, dtype, **overrides)
        return made[key]

    return make


@pytest.fixture
def few_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A calibration reads a tenth of its text, which takes a second less; the numbers that come of it are others."""
    monkeypatch.setattr("qwen_onnx.exports.quantization.text.WINDOWS", 3)
