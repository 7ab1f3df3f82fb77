"""How fast an export is on this machine, and how near to what its memory allows."""

from __future__ import annotations

import concurrent.futures
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
import psutil

from qwen_onnx.checkpoints.safetensors_file import FLOAT_DTYPES, StoredTensor, read_header
from qwen_onnx.contract import DTYPES
from qwen_onnx.errors import UserError
from qwen_onnx.manifest import is_weights
from qwen_onnx.memory import anonymous_memory, peak_memory
from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.machine import physical_cores
from qwen_onnx.runners.runtime.session import SessionOptions, import_onnxruntime, installed_distributions
from qwen_onnx.runners.sampling.params import SamplingOptions

_PROBE_BYTES = 256 << 20
_PROBES = 7
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
    """Reading memory with as many threads, 10^9 bytes a second, measured before and after; None on a GPU."""
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
    bandwidths = [read_bandwidth(threads)] if on_cpu else []
    ttfts, speeds, steps, outside = _timed(chat, prompt_tokens, new_tokens, repeats)
    bandwidths += [read_bandwidth(threads)] if on_cpu else []
    after = anonymous_memory()
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
        peak_bytes=peak_memory(),
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
            tokens = chat.generate(
                ids,
                max_new_tokens=new_tokens,
                ignore_eos=True,
                sampling=SamplingOptions.greedy(),
                stop=(),
                min_new_tokens=0,
            )
            for token in tokens:
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
    item = FLOAT_DTYPES[DTYPES[_CACHE_DTYPES[runner.compute_dtype]]].itemsize
    of_cache: int = 2 * manifest.num_hidden_layers * manifest.num_key_value_heads * manifest.head_dim * item
    return sum(read.values()) * (2 if widened else 1) + live * of_cache


_CACHE_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def read_bandwidth(threads: int) -> float:
    """Bytes read from memory a second by so many threads, the best of a few tries, in 10^9."""
    parts = np.array_split(np.ones(_PROBE_BYTES // 4, np.float32), 4 * threads)
    best = 0.0
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for _ in range(_PROBES):
            begun = time.perf_counter()
            list(pool.map(np.max, parts))
            best = max(best, _PROBE_BYTES / (time.perf_counter() - begun))
    return best / 1e9


def describe_machine() -> str:
    """Processor, cores, memory and system."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        cpu = names[0] if names else cpu
    except OSError:  # no Linux
        pass
    memory = psutil.virtual_memory().total / 1e9
    clock = psutil.cpu_freq()
    cpu += f" at {clock.current:,.0f} MHz" if clock else ""
    return f"{cpu}, {physical_cores()} cores, {memory:.0f} GB, {platform.system()} {platform.release()}"


def as_json(found: Benchmark) -> dict[str, Any]:
    """What `bench --json` prints."""
    return dataclasses.asdict(found) | {"bandwidth_share": found.bandwidth_share}


def as_text(found: Benchmark) -> str:
    """What `bench` prints."""
    share = found.outside_ms / found.step_ms.median
    lines = [
        f"{found.export}: {found.model_id}, {found.dtype}, on {found.how}, {found.threads} threads",
        f"{found.machine}; {found.versions}",
        f"{found.prompt_tokens} prompt tokens, {found.new_tokens} new, {found.repeats} repeats: "
        "median (lowest to highest)",
        f"load          {found.load_s:.2f} s",
        f"TTFT          {_spread(found.ttft_ms, 1)} ms",
        f"decode        {_spread(found.tokens_per_s, 1)} tokens/s, {_spread(found.step_ms, 2)} ms a token",
        f"outside ORT   {found.outside_ms:.2f} ms a token, {share:.1%}",
    ]
    if found.bandwidth_gb_s is not None and found.bandwidth_share is not None:
        lines.append(
            f"bandwidth     {found.bytes_per_step / 1e6:,.0f} MB a token at {found.bandwidth_gb_s:.1f} GB/s measured "
            f"here: {found.bandwidth_share:.0%} of it"
        )
    memory = [f"weights files {found.weights_bytes / 1e6:,.0f} MB"]
    if found.anonymous_bytes is not None:
        memory.insert(0, f"{found.anonymous_bytes / 1e6:,.0f} MB private")
    if found.peak_bytes is not None:
        memory.insert(1, f"peak {found.peak_bytes / 1e6:,.0f} MB with mapped files")
    return "\n".join([*lines, f"memory        {', '.join(memory)}"])


def _spread(spread: Spread, digits: int) -> str:
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f} to {spread.high:.{digits}f})"
