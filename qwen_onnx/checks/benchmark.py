"""How fast an export is on this machine, and how near to what its memory allows."""

from __future__ import annotations

import dataclasses
import itertools
import platform
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from qwen_onnx.checkpoints.safetensors_file import StoredTensor, read_header
from qwen_onnx.checks.machine import describe_machine, read_bandwidth
from qwen_onnx.contract.manifest import is_weights
from qwen_onnx.errors import UserError
from qwen_onnx.memory import anonymous_memory, peak_memory
from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.machine import physical_cores
from qwen_onnx.runners.runtime.options import SessionOptions
from qwen_onnx.runners.runtime.session import import_onnxruntime, installed_distributions
from qwen_onnx.runners.sampling.request import PLAIN

_NOT_READ = ("rotary.cos", "rotary.sin")


@dataclasses.dataclass(frozen=True)
class Spread:
    """Of several measurements of the same."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """What was measured of one export, on what."""

    export: str
    model_id: str
    dtype: str
    how: str
    """Provider and options in a few words."""
    threads: int
    machine: str
    versions: str
    prompt_tokens: int
    new_tokens: int
    repeats: int
    load_s: float
    """Session and cache, after the interpreter, ONNX Runtime and the tokenizer are there."""
    ttft_ms: Spread
    """From the call to the first token; no part of the prompt is in the cache."""
    tokens_per_s: Spread
    """Of each repeat: the tokens after the first, and the time from the first to the last."""
    step_ms: Spread
    """Of single tokens, all repeats together."""
    outside_ms: float
    """Of the median step, what is not ONNX Runtime: binding, choosing, detokenising, Python."""
    bytes_per_step: int
    """Weights read once and the live cache, at the middle of the answer."""
    bandwidth_gb_s: float | None
    """Reading memory with as many threads, 10^9 bytes a second, the better of two; None on a GPU."""
    anonymous_bytes: int | None
    """Private memory that loading and running took; the mapped weights file is not in it."""
    peak_bytes: int | None
    weights_bytes: int

    @property
    def bandwidth_share(self) -> float | None:
        """Of that bandwidth, what decoding reached: bytes_per_step over the median step."""
        if self.bandwidth_gb_s is None:
            return None
        return self.bytes_per_step / (self.step_ms.median / 1e3) / (self.bandwidth_gb_s * 1e9)


def run_benchmark(
    folder: Path, options: SessionOptions, *, prompt_tokens: int = 128, new_tokens: int = 64, repeats: int = 5
) -> Benchmark:
    """Load an export and measure it, on prompts of random ids.

    Raises:
        UserError: not an export, or lengths that its context does not hold.
    """
    for name, value, least in (
        ("--prompt-tokens", prompt_tokens, 1),
        ("--new-tokens", new_tokens, 2),
        ("--repeats", repeats, 1),
    ):
        if value < least:
            raise UserError(f"{name} {value}: {least} or more wanted")
    import_onnxruntime()
    before, started = anonymous_memory(), time.perf_counter()
    runner = Runner(folder, options)
    runner.new_cache()
    load_s = time.perf_counter() - started
    if prompt_tokens + new_tokens > runner.context_length:
        raise UserError(
            f"{prompt_tokens} + {new_tokens} tokens asked for, the context holds {runner.context_length}"
        )
    chat = Chat(runner)
    threads = options.threads or physical_cores()
    on_cpu = runner.provider == "cpu"
    ttfts, speeds, steps, outside = _timed(chat, prompt_tokens, new_tokens, repeats)
    after, peak = anonymous_memory(), peak_memory()
    bandwidths = [read_bandwidth(threads) for _ in range(2)] if on_cpu else []  # after: they take memory too
    return Benchmark(
        export=str(folder),
        model_id=runner.manifest.model_id,
        dtype=runner.manifest.dtype,
        how=runner.describe(),
        threads=threads,
        machine=describe_machine(),
        versions=", ".join([f"Python {platform.python_version()}", *installed_distributions()]),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        repeats=repeats,
        load_s=load_s,
        ttft_ms=Spread.of(ttfts),
        tokens_per_s=Spread.of(speeds),
        step_ms=Spread.of(steps),
        outside_ms=statistics.median(outside),
        bytes_per_step=step_bytes(runner, prompt_tokens + new_tokens // 2),
        bandwidth_gb_s=max(bandwidths) if bandwidths else None,
        anonymous_bytes=None if before is None or after is None else after - before,
        peak_bytes=peak,
        weights_bytes=sum(spec.size for name, spec in runner.manifest.files.items() if is_weights(name)),
    )


def _timed(
    chat: Chat, prompt_tokens: int, new_tokens: int, repeats: int
) -> tuple[list[float], list[float], list[float], list[float]]:
    """TTFT in ms and tokens/s of each repeat; ms of each step, and of it outside ONNX Runtime. One round warms up."""
    rng, first_ids = np.random.default_rng(0), set[int]()
    size = chat.runner.manifest.vocab_size
    ttfts, speeds, steps, outside = [], [], [], []
    with _run_clock() as spent:
        for repeat in range(repeats + 1):
            ids = rng.integers(0, size, prompt_tokens).tolist()
            while ids[0] in first_ids and len(first_ids) < size:  # else the cache would hold the beginning
                ids[0] = int(rng.integers(0, size))
            first_ids.add(ids[0])
            ttft, times, inside = 0.0, [], []
            for token in chat.generate(ids, **PLAIN, max_new_tokens=new_tokens):
                ttft = token.ttft_ms
                times.append(time.perf_counter())
                inside.append(sum(spent))
                spent.clear()
            if not repeat:
                continue
            ttfts.append(ttft)
            speeds.append((new_tokens - 1) / (times[-1] - times[0]))
            walls = [1e3 * (late - early) for early, late in itertools.pairwise(times)]
            steps += walls
            outside += [wall - 1e3 * own for wall, own in zip(walls, inside[1:], strict=True)]
    return ttfts, speeds, steps, outside


@contextmanager
def _run_clock() -> Iterator[list[float]]:
    """The seconds of each run of a session while this is open."""
    session, spent = import_onnxruntime().InferenceSession, list[float]()
    real = session.run_with_iobinding

    def timed(own: Any, binding: Any, run_options: Any = None) -> None:
        begun = time.perf_counter()
        real(own, binding, run_options)
        spent.append(time.perf_counter() - begun)

    with mock.patch.object(session, "run_with_iobinding", timed):
        yield spent


def step_bytes(runner: Runner, live: int) -> int:
    """What one decode step has to read: every weight as it lies in memory, and the cache of `live` tokens."""
    manifest = runner.manifest
    tensors: dict[str, StoredTensor] = {}
    for name in manifest.files:
        if is_weights(name):
            tensors |= read_header(runner.folder / name)
    untied = any(name.startswith("lm_head.") for name in tensors)
    read = {
        name: tensor.nbytes
        for name, tensor in tensors.items()
        if name not in _NOT_READ and not (untied and name.startswith("model.embed_tokens."))
    }
    widened = runner.provider == "cpu" and manifest.dtype in ("f16", "bf16")
    return sum(read.values()) * (2 if widened else 1) + live * runner.cache_spec.slot_bytes
