"""Memory of an export: a few pieces of a tensor, whatever the model's size.

The checkpoints are sparse files, zeros that take neither disk nor memory; what is written from them takes disk.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoints import QWEN3, random_tensors

from qwen_onnx.checkpoint import INDEX_FILE
from qwen_onnx.safetensors_file import FLOAT_DTYPES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ONE_LAYER = {**QWEN3, "num_hidden_layers": 1, "hidden_size": 4096, "num_attention_heads": 2}
MB, GB = 10**6, 10**9
LIMIT = 450 * MB

# VmHWM is the kernel's own high-water mark of resident memory since the process began. It counts what an export
# allocates and the pages of its libraries' files too: an upper bound of the first, which misses no short peak.
CHILD = """
import sys
from pathlib import Path
from qwen_onnx.exporter import export_model
export_model(sys.argv[1], Path(sys.argv[2]), dtype=sys.argv[3])
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(int(status["VmHWM"].split()[0]) * 1024)
"""


def write_sparse(folder: Path, dtype: str, nbytes: int, *, tied: bool) -> None:
    """A checkpoint of about `nbytes`: an embedding and, where it is not tied, a head of the same size."""
    matrix = nbytes if tied else nbytes // 2
    vocab = matrix // (ONE_LAYER["hidden_size"] * FLOAT_DTYPES[dtype].itemsize)
    config = {**ONE_LAYER, "vocab_size": vocab, "tie_word_embeddings": tied}
    shapes = {name: tensor.shape for name, tensor in random_tensors({**config, "vocab_size": 1}).items()}
    shapes |= dict.fromkeys({EMBEDDING, HEAD} & shapes.keys(), (vocab, ONE_LAYER["hidden_size"]))
    shards = {name: "head.safetensors" if name == HEAD else "rest.safetensors" for name in shapes}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": shards}))
    for file in set(shards.values()):
        write_zeros(folder / file, dtype, {name: shapes[name] for name in shapes if shards[name] == file})
    if not tied:
        with (folder / "head.safetensors").open(
            "r+b"
        ) as stream:  # a head equal to the embedding would be shared
            stream.seek(-1, os.SEEK_END)
            stream.write(b"\x3f")


def write_zeros(path: Path, dtype: str, shapes: dict[str, tuple[int, ...]]) -> None:
    """A .safetensors file of zeros that nobody ever wrote."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * FLOAT_DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, path.stat().st_size + end)


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


def test_tensor_is_never_held_whole(export: Callable[..., tuple[int, Path]]) -> None:
    """Fault C3: memory that grows with the largest tensor; this one alone would pass the limit."""
    peak, _ = export("F32", "f16", 250 * MB, tied=True)
    assert peak < 250 * MB


def test_peak_memory_is_of_this_process_alone() -> None:
    """Fault: the summary of an export shows the memory of the process that started it."""
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
    """Fault (C3): an export that is killed where the model is larger than memory, or than half of it."""
    peak, _ = export(source, dtype, nbytes)
    assert peak < LIMIT


@pytest.mark.slow
def test_tensor_beyond_the_limit_of_a_protobuf(export: Callable[..., tuple[int, Path]]) -> None:
    """Fault (C1): "exceeds maximum protobuf size of 2GB", after the long part is done."""
    peak, out = export("BF16", "bf16", int(2.3 * GB), tied=True)
    assert peak < LIMIT
    for graph in out.glob("*.onnx"):
        assert graph.stat().st_size < 5 * MB
