"""The real runner on the provider "cuda" over the stand-ins: exports shaped as the 0.5B model, and programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qwen_onnx import export
from support.checkpoints import QWEN2, RawConfig, write_checkpoint
from support.cuda import stand_ins as cuda_stand_ins

LAYERS = 4
VOCAB = 1000

SHAPED: RawConfig = {
    **QWEN2,
    "vocab_size": VOCAB,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rope_theta": 1_000_000.0,
}
"""A layer is one of Qwen2.5-0.5B's; there are fewer, and fewer words."""

ENVIRONMENT = {"QWEN_STAND_IN_FILL": "0"}
"""Logits are zeros, which the runner takes for numbers."""

PRELUDE = """
import gc, json, os, sys, threading
from pathlib import Path
import numpy as np
from support.cuda import stand_ins as cuda_stand_ins
from support.cuda.stand_ins import counts
from qwen_onnx.errors import UserError
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.options import SessionOptions

ids = np.random.default_rng(5).integers(0, 1000, (8, 4096))

def opened(folder, chunk=16, **options):
    return Runner(Path(folder), SessionOptions(provider="cuda", **options), prefill_chunk=chunk)

def asked(call):
    before = counts()
    call()
    return {name: n for name, n in vars(counts() - before).items() if n and name != "synchronizations"}

class Conversation:
    def __init__(self, runner, batch_size=1):
        self.runner, self.cache = runner, runner.new_cache(batch_size=batch_size)
        self.best, self.rows, self.read = None, ids[:batch_size], 0

    def prefill(self, end):
        start = self.cache.length
        self.read += 1  # once, however many chunks
        self.keep((self.runner.prefill_greedy if self.runner.chooses else self.runner.prefill)(
            self.cache, self.rows[:, start:end]))

    def keep(self, result):
        if self.runner.chooses:
            self.best = result[:, None]
        else:
            assert result.shape == (len(self.rows), 1000)

    def step(self):
        self.read += 1
        slot = self.cache.length
        if self.runner.chooses:
            self.keep(self.runner.decode_greedy(self.cache, self.best))
        else:
            self.keep(self.runner.decode(self.cache, self.rows[:, slot : slot + 1]))

    def steps(self, number):
        return [asked(self.step) for _ in range(number)]

def tell(**told):
    print(json.dumps(told))
"""

Told = Callable[..., SimpleNamespace]


@pytest.fixture(scope="session")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`shaped(dtype)`: the export; to be read only."""
    made: dict[str, Path] = {}

    def make(dtype: str) -> Path:
        if not made:
            made["checkpoint"] = tmp_path_factory.mktemp("shaped") / "checkpoint"
            write_checkpoint(made["checkpoint"], SHAPED, dtype="F16")
        if dtype not in made:
            made[dtype] = export(made["checkpoint"], made["checkpoint"].parent / dtype, dtype=dtype).folder
        return made[dtype]

    return make


@pytest.fixture(scope="session")
def told(stand_ins: Path) -> Told:
    """`told(program, *arguments, ...)`: what a program told last; it begins with PRELUDE."""

    def run(program: str, *arguments: object, **settings: Any) -> SimpleNamespace:
        env = {**ENVIRONMENT, **settings.pop("env", {})}
        done = cuda_stand_ins.run(stand_ins, PRELUDE + program, *arguments, env=env, **settings)
        assert done.returncode == 0, done.stderr
        return SimpleNamespace(**json.loads(done.stdout.splitlines()[-1]))

    return run
