"""Memory of an export: a few pieces of a tensor, whatever the model's size.

The checkpoints are sparse files, zeros that take neither disk nor memory; what is written from them takes disk.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qwen_onnx.checkpoints.safetensors_file import FLOAT_DTYPES
from support.sparse import CHILD, GB, MB, write_sparse

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

LIMIT = 450 * MB


@pytest.fixture
def export(tmp_path: Path) -> Iterator[Callable[..., tuple[int, Path]]]:
    """Export such a checkpoint in a process of its own: its peak memory, and the folder, which goes with the test."""

    def run(source: str, dtype: str, nbytes: int, *, tied: bool = False) -> tuple[int, Path]:
        written = nbytes * FLOAT_DTYPES[dtype.upper()].itemsize // FLOAT_DTYPES[source].itemsize
        if shutil.disk_usage(tmp_path).free < written + GB:
            pytest.skip(f"writes {written:,} bytes")
        write_sparse(tmp_path / "model", source, nbytes, tied=tied)
        command = [sys.executable, "-c", CHILD, str(tmp_path / "model"), str(tmp_path / "out"), dtype]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert (tmp_path / "out" / "weights.safetensors").stat().st_size >= 0.99 * written
        return int(done.stdout), tmp_path / "out"

    yield run
    for folder in ("model", "out"):  # at once: pytest keeps the folders of the last three runs
        shutil.rmtree(tmp_path / folder, ignore_errors=True)


@pytest.mark.thorough
def test_tensor_is_never_held_whole(export: Callable[..., tuple[int, Path]]) -> None:
    """This one alone would pass the limit (C3 in docs/faults.md)."""
    peak, _ = export("F32", "f16", 250 * MB, tied=True)
    assert peak < 250 * MB


def test_peak_memory_is_of_this_process_alone() -> None:
    """The process that started it may be larger."""
    ballast = bytearray(300 * MB)
    code = "from qwen_onnx.memory import peak_memory; print(peak_memory())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 5 * MB < int(done.stdout) < 100 * MB < len(ballast)


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [1 * GB, 5 * GB], ids=["1 GB", "5 GB"])
@pytest.mark.parametrize(("source", "dtype"), [("BF16", "f32"), ("F32", "f16"), ("BF16", "bf16")])
def test_memory_does_not_grow_with_the_model(
    export: Callable[..., tuple[int, Path]], source: str, dtype: str, nbytes: int
) -> None:
    """A model may be larger than memory (C3 in docs/faults.md)."""
    peak, _ = export(source, dtype, nbytes)
    assert peak < LIMIT


@pytest.mark.slow
def test_tensor_beyond_the_limit_of_a_protobuf(export: Callable[..., tuple[int, Path]]) -> None:
    """Graph files stay small whatever the tensors are (C1 in docs/faults.md)."""
    peak, out = export("BF16", "bf16", int(2.3 * GB), tied=True)
    assert peak < LIMIT
    for graph in out.glob("*.onnx"):
        assert graph.stat().st_size < 5 * MB
