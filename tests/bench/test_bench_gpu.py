"""bench/gpu.py needs a GPU; it is run here at toy size, on the CPU provider and over the stand-ins for CUDA."""

# ruff: noqa: F811 - a test's parameter has the name of the fixture that is imported

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support.cuda import stand_ins as cuda_stand_ins
from support.cuda.fixtures import stand_ins  # noqa: F401
from support.cuda.runs import ENVIRONMENT
from support.patience import PATIENCE

BENCH = Path(__file__).parents[2] / "bench"
SCRIPT = BENCH / "gpu.py"
DTYPES = ("f16", "bf16", "f32")
MODES = ("capture", "no capture", "greedy on device")
ROWS = set(itertools.product(DTYPES, MODES, (1, 8)))
TIMED = {
    "capture, batch 1", "f32, batch 1", "no capture, batch 1", "greedy on device, batch 1", "batch 8",
}  # fmt: skip
PARTS = TIMED | {"exports", "proof", "correctness", "breakdown", "peers, batch 1", "peers, batch 8"}
KEYS = {
    "command", "date", "machine", "versions", "gpu", "driver", "provider", "toy", "minutes", "parts", "not_run",
    "errors", "environment", "sizes", "shape", "seconds",
}  # fmt: skip
TRACED = """
import os
os.environ["QWEN_STAND_IN_TRACE"] = os.path.join({folder!r}, f"{{os.getpid()}}.trace")
"""
"""As sitecustomize.py: every process has a trace of its own."""
RUN = """
import runpy, sys
from pathlib import Path
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def numbers(value: Any) -> Iterator[float]:
    """All in a JSON value."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers(item)
    elif isinstance(value, int | float):
        yield value


def read(output: str, out: Path) -> tuple[str, dict[str, Any]]:
    """The table, and the object on the last line; both are kept."""
    table, _, line = output.rstrip("\n").rpartition("\n")
    found = json.loads(line)
    assert found.keys() >= KEYS
    assert all(math.isfinite(number) for number in numbers(found))
    assert (out / "table.md").read_text().strip() == table.strip()
    assert json.loads((out / "results.json").read_text()) == found
    return table, found


def timed_rows(found: dict[str, Any]) -> dict[tuple[str, str, int], dict[str, Any]]:
    rows = [row for name in TIMED for row in found["parts"][name]["rows"]]
    return {(row["dtype"], row["setting"], row["batch"]): row for row in rows}


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    out = tmp_path_factory.mktemp("bench") / "out"
    command = [sys.executable, str(SCRIPT), "--provider", "cpu", "--toy", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return *read(done.stdout, out), out


@pytest.mark.thorough
def test_every_part_is_run(on_cpu: tuple[str, dict[str, Any], Path]) -> None:
    _, found, out = on_cpu
    assert found["parts"].keys() == PARTS
    assert not found["not_run"]
    # torch is not everywhere, and there is no GPU: nothing else may fail.
    assert all(name.startswith("peers") for name in found["errors"]), found["errors"]
    assert timed_rows(found).keys() == ROWS
    for row in timed_rows(found).values():
        assert len(row["tokens_per_s"]["rounds"]) == found["sizes"]["rounds"]
        assert row["step_ms"]["p10"] <= row["step_ms"]["median"] <= row["step_ms"]["p90"]
        assert row["load_s"] > 0
        assert row["limit_share"] is row["bandwidth_bytes_per_s"] is None
    for dtype in DTYPES:
        assert found["parts"]["proof"]["dtypes"][dtype]["providers"] == ["CPUExecutionProvider"]
        assert (out / "profiles" / f"onnxruntime-{dtype}.json").is_file()
        profile = found["parts"]["proof"]["dtypes"][dtype]["profile"]
        assert (
            profile["nodes_by_provider"]["CPUExecutionProvider"] == sum(profile["nodes_by_op"].values()) > 20
        )


@pytest.mark.thorough
def test_the_settings_agree(on_cpu: tuple[str, dict[str, Any], Path]) -> None:
    """Logits within the package's table, and the same ids from capture, no capture and greedy on device."""
    _, found, _ = on_cpu
    rows = found["parts"]["correctness"]["rows"]
    assert [row["dtype"] for row in rows] == ["f32", "f16", "bf16"]
    for row in rows:
        assert row["max_logit_difference"] <= row["bound"]
        assert 1 < row["largest_logit"] < 10
        assert row["random_steps_of_equal_best_ids"] == found["sizes"]["checked"]
    assert rows[0]["max_logit_difference"] == 0
    assert rows[0]["ids_equal"] is True
    measured = timed_rows(found)
    for dtype, batch in itertools.product(DTYPES, (1, 8)):
        ids = [measured[dtype, mode, batch]["ids"] for mode in MODES]
        assert ids[0] == ids[1] == ids[2]


@pytest.mark.thorough
def test_the_pieces_of_a_step_are_the_step(on_cpu: tuple[str, dict[str, Any], Path]) -> None:
    settings = on_cpu[1]["parts"]["breakdown"]["settings"]
    assert settings.keys() == {*MODES}
    for mode in MODES:
        pieces = settings[mode]["pieces_us"]
        assert pieces.keys() >= {"step", "run_with_iobinding", "finite check", "rest"}
        assert all(0 < spent <= pieces["step"] for spent in pieces.values())
    assert {"uploads", "arrays made", "read_chosen (copy)"} <= settings["greedy on device"][
        "pieces_us"
    ].keys()


def test_the_table_says_what_was_not_measured(on_cpu: tuple[str, dict[str, Any], Path]) -> None:
    table, found, _ = on_cpu
    assert found["gpu"] is None
    assert "GPU: not measured" in table
    lines = table.splitlines()
    for dtype, mode, batch in ROWS:
        # The first of them: the table of transformers has a row of the same setting.
        line = next(text for text in lines if text.startswith(f"| {dtype} | {mode} | {batch} |"))
        assert line.endswith("| not measured | not measured | not measured |")
        assert f"{timed_rows(found)[dtype, mode, batch]['tokens_per_s']['median']:,.1f}" in line


@pytest.mark.parametrize("minutes", ["0", "0.03"])
@pytest.mark.thorough
def test_few_minutes_few_parts(minutes: str, tmp_path: Path) -> None:
    """What is not begun, and what is stopped midway, is named; the line of JSON comes all the same."""
    command = [sys.executable, str(SCRIPT), "--minutes", minutes, "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [*command, "--toy", "--provider", "cpu"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    table, found = read(done.stdout, tmp_path / "out")
    assert found["parts"].keys() | {*found["not_run"]} == PARTS
    assert "Not run (time): " in table
    assert found["not_run"][-1] == "peers, batch 8"
    assert table.count("| f16 | capture | 8 | not measured | not measured | not measured |") == 2
    if minutes == "0":
        assert found["parts"] == found["errors"] == {}
    else:
        # How far it came is the machine's.
        assert all("(time)" in line for line in found["errors"].values()), found["errors"]


@pytest.mark.thorough
def test_over_the_stand_ins(stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flow of a run on a GPU, where no number means anything: memory is measured and graphs are launched."""
    traces, out = tmp_path / "traces", tmp_path / "out"
    traces.mkdir()
    own = (
        TRACED.format(folder=str(traces)) + cuda_stand_ins.EQUAL_IS_FINE
    )  # of each process that the script starts
    (tmp_path / "sitecustomize.py").write_text(own)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    )
    arguments = [SCRIPT, "--provider", "cuda", "--toy", "--out", out]
    done = cuda_stand_ins.run(stand_ins, RUN, *arguments, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    table, found = read(done.stdout, out)
    assert not found["not_run"]
    assert all(name.startswith(("peers", "breakdown")) for name in found["errors"]), found["errors"]
    assert any("torch" in line for name, line in found["errors"].items() if name.startswith("peers"))
    for dtype in DTYPES:
        assert found["parts"]["proof"]["dtypes"][dtype]["providers"][0] == "CUDAExecutionProvider"
        assert found["parts"]["proof"]["dtypes"][dtype]["device_memory_bytes"] > 0
    for (_, mode, _), row in timed_rows(found).items():
        assert row["captures"] == (mode != "no capture")
        assert row["limit_share"] > 0
    memory = [part for name, part in found["parts"].items() if name.startswith("memory")]
    assert {(part["dtype"], part["setting"], part["batch"]) for part in memory} == ROWS
    assert all(part["ratio"] > 0.5 for part in memory)
    assert {"uploads", "read_logits (copy)"} <= found["parts"]["breakdown"]["settings"]["capture"][
        "pieces_us"
    ].keys()
    launched = sum(file.read_text().count("cudaGraphLaunch") for file in traces.glob("*.trace"))
    assert launched > 0
    assert "CUDAExecutionProvider" in table


@pytest.fixture
def gpu_trace(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    spec = importlib.util.spec_from_file_location("gpu_trace", BENCH / "gpu_trace.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_kernels_of_a_trace(gpu_trace: ModuleType) -> None:
    """Two streams at once count once; a graph's launch is a call of the host, and not the device's time."""

    def event(kind: str, name: str, begin: float, length: float) -> dict[str, Any]:
        return {"cat": kind, "name": name, "ts": begin, "dur": length}

    events = [
        event("cuda_runtime", "cudaGraphLaunch", 0, 9),
        event("cuda_runtime", "cudaLaunchKernel", 9, 1),
        event("kernel", "product", 10, 10),
        event("kernel", "sum", 15, 10),
        event("kernel", "product", 40, 5),
        event("gpu_memcpy", "to host", 50, 4),
        {"name": "no category"},
    ]
    found = gpu_trace.trace_summary(events, 2)
    assert (found["kernels"], found["kernels_us"], found["copies_us"]) == (1.5, 10, 2)
    assert (found["graph_launches"], found["kernel_launches"]) == (0.5, 0.5)
    assert found["us_by_name"] == {"product": 7.5, "sum": 5, "to host": 2}
    with pytest.raises(RuntimeError, match="no kernel"):
        gpu_trace.trace_summary(events[:1], 2)
