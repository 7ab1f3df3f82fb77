"""As many threads as there are cores to compute on, and as much memory as there is, in a container too."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from qwen_onnx.runners.runtime import machine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /sys")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four logical CPUs on two cores, no quota."""
    for cpu in range(4):
        topology = tmp_path / "cpu" / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    (tmp_path / "cgroup").mkdir()
    monkeypatch.setattr(machine, "SYSTEM_CPUS", tmp_path / "cpu")
    monkeypatch.setattr(machine, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "allowed_cpus", lambda: {0, 1, 2, 3})
    return tmp_path


def test_hyperthreads_of_a_core_count_once(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.physical_cores() == 2
    monkeypatch.setattr(machine, "allowed_cpus", lambda: {0, 2})
    assert machine.physical_cores() == 1
    monkeypatch.setattr(machine, "allowed_cpus", lambda: {1, 2, 3, 7})  # of CPU 7 nothing is told
    assert machine.physical_cores() == 3


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
    """Threads beyond the container's share of time would wait for one that is stopped."""
    for name, text in files.items():
        path = system / "cgroup" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert machine.physical_cores() == wanted


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, 1000),
        ({"memory.max": "max\n", "memory.current": "5\n", "memory.stat": "active_file 1\n"}, 1000),
        ({"memory.max": "900\n", "memory.current": "600\n", "memory.stat": "anon 7\nactive_file 0\n"}, 300),
        (
            {
                "memory.max": "900",
                "memory.current": "600",
                "memory.stat": "inactive_file 20\nactive_file 30\n",
            },
            350,
        ),
        ({"memory.max": "900", "memory.current": "950", "memory.stat": "active_file 10\n"}, 0),
        ({"memory.max": "99999", "memory.current": "1", "memory.stat": ""}, 1000),
        ({"memory.max": "900"}, 1000),
    ],
)
def test_a_containers_limit_bounds_free_memory(
    files: dict[str, str], wanted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's memory is not counted as free beyond it."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    assert machine.free_memory() == wanted


def test_there_is_one_at_least_here() -> None:
    assert 1 <= machine.physical_cores() <= len(machine.allowed_cpus())
