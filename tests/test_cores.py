"""As many threads as there are cores to compute on: not hyperthreads, not what a container does not grant."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from qwen_onnx.runners import cores

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /sys")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four logical CPUs on two cores, no quota."""
    for cpu in range(4):
        topology = tmp_path / "cpu" / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    (tmp_path / "cgroup").mkdir()
    monkeypatch.setattr(cores, "SYSTEM_CPUS", tmp_path / "cpu")
    monkeypatch.setattr(cores, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(cores, "allowed_cpus", lambda: {0, 1, 2, 3})
    return tmp_path


def test_hyperthreads_of_a_core_count_once(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cores.physical_cores() == 2
    monkeypatch.setattr(cores, "allowed_cpus", lambda: {0, 2})
    assert cores.physical_cores() == 1
    monkeypatch.setattr(cores, "allowed_cpus", lambda: {1, 2, 3, 7})  # of CPU 7 nothing is told
    assert cores.physical_cores() == 3


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"cpu.max": "max 100000\n"}, 2),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "nonsense"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "0\n"}, 2),
    ],
)
def test_a_containers_quota_bounds_them(files: dict[str, str], wanted: int, system: Path) -> None:
    """64 threads on two cores' worth of time: each waits for one that is not running."""
    for name, text in files.items():
        path = system / "cgroup" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert cores.physical_cores() == wanted


def test_there_is_one_at_least_here() -> None:
    assert 1 <= cores.physical_cores() <= len(cores.allowed_cpus())
