"""A checkpoint of the 7B shape, 15 GB of zeros that take no disk, exported as a user does it: `make huge`.

Not in CI: minutes, and 15 GB of disk for a while.
"""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.checkpoints import random_tensors
from support.sparse import write_zeros

QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 152_064, "hidden_size": 3584,
    "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
}  # fmt: skip
GB = 10**9


def shapes_7b() -> dict[str, tuple[int, ...]]:
    """Of every tensor, by its name: those of a small model with the sizes exchanged."""
    small = {
        "vocab_size": 11, "hidden_size": 28 * 2, "intermediate_size": 13, "num_attention_heads": 28,
        "num_key_value_heads": 4, "num_hidden_layers": 28,
    }  # fmt: skip
    sizes = {11: 152_064, 28 * 2: 3584, 13: 18_944, 4 * 2: 512}
    tensors = random_tensors({**QWEN_7B, **small})
    return {name: tuple(sizes[size] for size in tensor.shape) for name, tensor in tensors.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Emptied at once: pytest keeps the folders of the last three runs."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN_7B))
    write_zeros(model / "model.safetensors", "BF16", shapes_7b())
    with (model / "model.safetensors").open("r+b") as stream:  # a head equal to the embedding would be shared
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x3f")
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.huge
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("dtype", "size"), [("bf16", 15.2 * GB), ("int4", 4.37 * GB)])
def test_7b_exports_in_little_memory(dtype: str, size: float, folder: Path) -> None:
    """No tensor is held whole, and the progress is shown."""
    parameters = 7.6e9
    if shutil.disk_usage(folder).free < size + GB:
        pytest.skip(f"writes {size / GB:.0f} GB")
    terminal, stderr = pty.openpty()
    command = [sys.executable, "-c", "from qwen_onnx.cli.main import main; main()", "export"]
    command += [str(folder / "model"), str(folder / "out"), "--dtype", dtype, "--no-check"]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    os.close(stderr)
    shown: list[bytes] = []

    def read() -> None:
        while True:
            try:
                shown.append(os.read(terminal, 4096))
            except OSError:  # the other end is closed
                return

    reader = threading.Thread(target=read)
    reader.start()
    anonymous = 0
    status = Path(f"/proc/{started.pid}/status")
    while started.poll() is None:
        try:
            if found := re.search(r"RssAnon:\s*(\d+)", status.read_text()):
                anonymous = max(anonymous, int(found[1]) * 1024)
        except OSError:
            break
        try:
            started.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
    reader.join()
    text = b"".join(shown).decode(errors="replace")
    assert started.returncode == 0, text
    assert 0 < anonymous < 2 * GB
    written = (folder / "out" / "weights.safetensors").stat().st_size
    assert written == pytest.approx(size, rel=0.05), f"{8 * written / parameters:.2f} bits a parameter"
    assert len(set(re.findall(r"([\d.]+)/[\d.]+ GB", text))) > 10
    print(f"\n{dtype}: {anonymous / 1e6:.0f} MB anonymous, {8 * written / parameters:.2f} bits a parameter")
