"""Memory of a long prompt: the scores of a chunk grow with what is cached, unless the chunk shrinks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.checkpoints import QWEN2_14_2
from support.exports import export_random

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

CHILD = """
import sys
import numpy as np
from pathlib import Path
from qwen_onnx.memory import peak_memory
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.options import SessionOptions
runner = Runner(Path(sys.argv[1]), SessionOptions(provider="cpu"))
runner.prefill(runner.new_cache(), np.ones((1, int(sys.argv[2])), np.int64))
print(peak_memory())
"""


def test_a_prompt_of_16000_tokens_takes_no_more_than_one_of_4000(tmp_path: Path) -> None:
    """Scores of all tokens at once would take 60 kB a token with 14 heads, 2 GB at 32,000 tokens."""
    raw = {**QWEN2_14_2, "num_hidden_layers": 1, "max_position_embeddings": 20_000}
    folder = export_random(tmp_path, raw).folder

    def peak(tokens: int) -> int:
        run = [sys.executable, "-c", CHILD, str(folder), str(tokens)]
        return int(subprocess.run(run, capture_output=True, text=True, check=True).stdout)

    assert peak(16_000) - peak(4_096) < 30e6  # the cache itself and the mask; 4 MB was seen
