"""What is timed: this package in one setting, answering one prompt; and how several take turns."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from checkpoint import QWEN_05B, TOY, Shape, cache_bytes_each, parameter_count
from numpy.typing import NDArray

from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.options import SessionOptions
from qwen_onnx.runners.runtime.session import first_line

Ids = NDArray[np.int64]
Report = Callable[[dict[str, Any]], None]

CAPTURE, NO_CAPTURE, GREEDY = "capture", "no capture", "greedy on device"
MODES: dict[str, dict[str, bool]] = {
    CAPTURE: {}, NO_CAPTURE: {"cuda_graph": False}, GREEDY: {"greedy_on_device": True},
}  # fmt: skip
"""A setting's name, and the options of the session."""
DTYPES = {"f16": 2, "bf16": 2, "f32": 4}
"""In the order of importance, with the bytes of a weight."""
ITEM = {"float16": 2, "bfloat16": 2, "float32": 4}


def fault(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {first_line(error)}"


class Sizes(NamedTuple):
    """How much is run."""

    prompt: int
    new: int
    rounds: int
    prefills: int
    """In each round; the last one is decoded from."""
    checked: int
    """Greedy ids compared."""
    copied: int
    """Bytes of the copy that tells the device's bandwidth."""


REAL_SIZES = Sizes(prompt=512, new=128, rounds=5, prefills=3, checked=64, copied=2**30)
TOY_SIZES = Sizes(prompt=32, new=8, rounds=2, prefills=2, checked=8, copied=2**20)


class Setting(NamedTuple):
    """A row of the table."""

    dtype: str
    mode: str
    batch: int


@dataclasses.dataclass(frozen=True)
class Job:
    """What a process of its own is asked for."""

    part: str
    scratch: Path
    """Of the checkpoint, `model`, and the exports, by their dtype."""
    profiles: Path
    provider: str
    toy: bool
    setting: tuple[str, str, int] | None = None
    """Of a memory measurement."""

    @property
    def sizes(self) -> Sizes:
        """How much to run."""
        return TOY_SIZES if self.toy else REAL_SIZES

    @property
    def shape(self) -> Shape:
        """Of the checkpoint."""
        return TOY if self.toy else QWEN_05B

    def prompt(self, batch: int) -> Ids:
        """The same random ids in every process, [batch, prompt]."""
        size = (batch, self.sizes.prompt)
        return np.random.default_rng(1).integers(0, self.shape["vocab_size"], size)


class Subject(Protocol):
    """Something that answers; `start` and `step` return when the ids are on the host."""

    captures: bool | None
    load_s: float | None
    how: str

    def prepare(self) -> None:
        """Forget the last answer; not timed."""

    def start(self) -> Ids:
        """The ids [batch] after the prompt."""

    def step(self, ids: Ids) -> Ids:
        """The ids after these."""


class Ours:
    """This package in one setting."""

    def __init__(self, job: Job, setting: Setting, provider: str | None = None) -> None:
        options = SessionOptions(provider=provider or job.provider, **MODES[setting.mode])
        begun = time.perf_counter()
        self.runner = Runner(job.scratch / setting.dtype, options)
        self.load_s: float | None = time.perf_counter() - begun
        self.captures: bool | None = self.runner.captures
        self.how = self.runner.describe()
        self.cache = self.runner.new_cache(batch_size=setting.batch)
        self.prompt = job.prompt(setting.batch)

    def prepare(self) -> None:
        """Forget the last answer."""
        self.cache.truncate(0)

    def start(self) -> Ids:
        """Prefill and choice."""
        if self.runner.chooses:
            best: Ids = self.runner.prefill_greedy(self.cache, self.prompt)
            return best
        return self.choose(self.runner.prefill(self.cache, self.prompt))

    def step(self, ids: Ids) -> Ids:
        """One decode step and choice: all that a user's step has."""
        if self.runner.chooses:
            best: Ids = self.runner.decode_greedy(self.cache, ids[:, None])
            return best
        return self.choose(self.runner.decode(self.cache, ids[:, None]))

    def choose(self, logits: NDArray[np.float32]) -> Ids:
        """On the host."""
        best: Ids = logits.argmax(axis=-1)
        return best


class Samples:
    """The times of one subject, in seconds."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.ttft: list[float] = []
        self.steps: list[list[float]] = []
        """Round by round."""
        self.ids: list[list[int]] = []
        """Of the last round, step by step."""

    def take(self, sizes: Sizes) -> None:
        """One round."""
        for _ in range(sizes.prefills):
            self.subject.prepare()
            begun = time.perf_counter()
            ids = self.subject.start()
            self.ttft.append(time.perf_counter() - begun)
        chosen, times = [ids], []
        for _ in range(sizes.new):
            begun = time.perf_counter()
            ids = self.subject.step(ids)
            times.append(time.perf_counter() - begun)
            chosen.append(ids)
        self.steps.append(times)
        self.ids = np.stack(chosen).tolist()

    def forget(self) -> None:
        """What was taken to warm up."""
        self.ttft, self.steps = [], []


def take_turns(
    subjects: dict[str, Subject],
    sizes: Sizes,
    errors: dict[str, str],
    note: Callable[[dict[str, Samples]], None],
) -> None:
    """Rounds A B C, A B C, ..., so that drift hits all alike. One that fails is named in `errors` and left out.

    `note` is told all samples after each round.
    """
    samples = {name: Samples(subject) for name, subject in subjects.items()}
    for number in range(-1, sizes.rounds):
        for name in list(samples):
            try:
                samples[name].take(sizes)
                if number < 0:  # warm: buffers have grown, graphs are captured, kernels are loaded
                    samples[name].forget()
            except Exception as error:  # of ONNX Runtime, torch or CUDA, which share no base class
                errors[name] = fault(error)
                del samples[name]
        if number >= 0:
            note(samples)


def summary(job: Job, setting: Setting, taken: Samples, bandwidth: float | None) -> dict[str, Any]:
    """The figures of a row; None where nothing was measured."""
    steps = np.array([time for times in taken.steps for time in times])
    speeds = [setting.batch * len(times) / sum(times) for times in taken.steps]
    median = float(np.median(steps))
    weights, cache = step_bytes(job, setting, taken.subject)
    return {
        "dtype": setting.dtype, "setting": setting.mode, "batch": setting.batch, "how": taken.subject.how,
        "captures": taken.subject.captures, "load_s": taken.subject.load_s,
        "ttft_ms": {"median": 1e3 * statistics.median(taken.ttft), "all": [1e3 * t for t in taken.ttft]},
        "tokens_per_s": {"median": statistics.median(speeds), "rounds": speeds},
        "step_ms": {
            "median": 1e3 * median,
            "p10": 1e3 * float(np.percentile(steps, 10)),
            "p90": 1e3 * float(np.percentile(steps, 90)),
        },
        "weight_bytes_per_step": weights, "cache_bytes_per_step": cache, "bandwidth_bytes_per_s": bandwidth,
        "limit_share": (weights + cache) / bandwidth / median if bandwidth else None,
        "ids": [row[0] for row in taken.ids],
    }  # fmt: skip


def step_bytes(job: Job, setting: Setting, subject: Subject) -> tuple[int, int]:
    """What a decode step must read: all weights, the tied head included, and the live cache at half of the answer."""
    item = DTYPES[setting.dtype]
    held = ITEM[subject.runner.compute_dtype] if isinstance(subject, Ours) else item
    live = setting.batch * (job.sizes.prompt + job.sizes.new // 2)
    return parameter_count(job.shape) * item, live * cache_bytes_each(job.shape, held)


def compare(rows: Sequence[dict[str, Any]], control: dict[str, Any] | None) -> None:
    """To each row, its speed over the control's in the same rounds, and whether row 0's ids are the same."""
    for row in rows:
        row["control"] = row["speed_over_control"] = row["same_ids_as_control"] = None
        if control is not None:
            row["control"] = f"{control['dtype']}, {control['setting']}, batch {control['batch']}"
            row["speed_over_control"] = row["tokens_per_s"]["median"] / control["tokens_per_s"]["median"]
            row["same_ids_as_control"] = row["ids"] == control["ids"]
