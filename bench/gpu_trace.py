"""Where a step's time goes: ONNX Runtime's profile by node, torch's trace by kernel, and the runner's own pieces."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import onnxruntime
from gpu_device import device
from gpu_subject import MODES, Ids, Job, Ours, Report, Setting, fault

from qwen_onnx.runners.model.executors.fixed_shape import BoundStep, FixedShape

_SHOWN = 15
_TRACED_STEPS = 4


@contextlib.contextmanager
def profiled_sessions(folder: Path) -> Iterator[None]:
    """Sessions that are opened in here write a profile into `folder`, each a file of its own."""
    count, real = 0, onnxruntime.SessionOptions

    def options() -> Any:
        nonlocal count
        count += 1
        settings = real()
        settings.enable_profiling = True
        settings.profile_file_prefix = str(folder / f"session{count}")
        return settings

    with mock.patch.object(onnxruntime, "SessionOptions", options):
        yield


def session_of(subject: Ours) -> tuple[Any, str]:
    """The executor of a runner, and the name of the attribute that holds its session."""
    executor = subject.runner.executor
    executor = getattr(
        executor, "decode", executor
    )  # of single tokens, where they have a session of their own
    return executor, "session" if hasattr(executor, "session") else "_session"


def onnxruntime_profile(file: Path, last: int) -> dict[str, Any]:
    """Nodes and their time in the last so many runs of a profile, per run.

    A node's time is the host's: on CUDA the launch of its kernels, which run later.
    """
    events = json.loads(file.read_text())
    runs = sorted((e for e in events if e["name"] == "model_run"), key=lambda event: event["ts"])[-last:]
    begin = runs[0]["ts"]
    nodes = [e for e in events if e.get("cat") == "Node" and "provider" in e["args"] and e["ts"] >= begin]
    by_provider = collections.Counter(event["args"]["provider"] for event in nodes)
    times, counts, on_host = (collections.Counter[str]() for _ in range(3))
    for event in nodes:
        name, provider = event["args"]["op_name"], event["args"]["provider"]
        times[name] += event["dur"]
        counts[name] += 1
        if provider == "CPUExecutionProvider":
            on_host[name] += 1
    return {
        "runs": len(runs),
        "run_us": statistics.median(event["dur"] for event in runs),
        "nodes_by_provider": {name: count / len(runs) for name, count in by_provider.items()},
        "nodes_on_cpu_by_op": {name: count / len(runs) for name, count in on_host.items()},
        "host_us_by_op": {name: spent / len(runs) for name, spent in times.most_common()},
        "nodes_by_op": {name: count / len(runs) for name, count in counts.most_common()},
    }


@contextlib.contextmanager
def _tracing(file: Path) -> Iterator[None]:
    """torch's profiler, which sees the kernels of the whole process, ONNX Runtime's too; the trace is kept.

    Raises:
        RuntimeError: torch has no CUDA here.
    """
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("no torch with CUDA, whose profiler sees kernels")
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        yield
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(file))


def trace_summary(events: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """The device's part of a trace, per step.

    Raises:
        RuntimeError: it has no kernel.
    """
    kernels = [event for event in events if event.get("cat") == "kernel"]
    if not kernels:
        raise RuntimeError("the profiler saw no kernel")
    copies = [event for event in events if event.get("cat") in ("gpu_memcpy", "gpu_memset")]
    called = [event["name"] for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    times: collections.Counter[str] = collections.Counter()
    for event in (*kernels, *copies):
        times[event["name"]] += event["dur"]
    return {
        "steps": steps,
        "graph_launches": called.count("cudaGraphLaunch") / steps,
        "kernel_launches": sum("LaunchKernel" in name for name in called) / steps,
        "kernels": len(kernels) / steps,
        "copies_and_fills": len(copies) / steps,
        "kernels_us": covered(kernels) / steps,
        "copies_us": covered(copies) / steps,
        "us_by_name": {name[:120]: spent / steps for name, spent in times.most_common(_SHOWN)},
    }


def covered(events: list[dict[str, Any]]) -> float:
    """Microseconds in which at least one of the events goes on."""
    total, end = 0.0, float("-inf")
    for begin, length in sorted((float(event["ts"]), float(event["dur"])) for event in events):
        total += max(0.0, begin + length - max(begin, end))
        end = max(end, begin + length)
    return total


class Stopwatch:
    """Adds up by a name the time spent in functions, each without what others of them take within it."""

    def __init__(self) -> None:
        self.spent: collections.defaultdict[str, float] = collections.defaultdict(float)
        self._within = 0.0

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def timed(*arguments: Any, **named: Any) -> Any:
            before, self._within = self._within, 0.0
            begun = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                taken = time.perf_counter() - begun
                self.spent[name] += taken - self._within
                self._within = before + taken

        return timed


class _TimedSession:
    """A session whose bound runs are timed."""

    def __init__(self, session: Any, watch: Stopwatch) -> None:
        self._session = session
        self.run_with_iobinding = watch.around("run_with_iobinding", session.run_with_iobinding)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


@contextlib.contextmanager
def timed_pieces(subject: Ours, watch: Stopwatch) -> Iterator[None]:
    """The pieces of a step are timed from outside."""
    executor, attribute = session_of(subject)
    wrapped: list[tuple[object, str, str]] = [(subject, "choose", "argmax")]
    wrapped += [(subject.runner, name, "finite check") for name in ("_usable_logits", "_chosen")]
    if isinstance(executor, FixedShape):
        wrapped += [(executor.inputs, "prepare_inputs", "arrays made"), (BoundStep, "_upload", "uploads")]
        wrapped += [(BoundStep, name, f"{name} (copy)") for name in ("read_logits", "read_chosen")]
    with contextlib.ExitStack() as stack:
        for home, name, label in wrapped:
            if hasattr(home, name):  # else it is part of the rest
                timed = watch.around(label, getattr(home, name))
                stack.enter_context(mock.patch.object(home, name, timed))
        session = _TimedSession(getattr(executor, attribute), watch)
        stack.enter_context(mock.patch.object(executor, attribute, session))
        yield


def pieces(subject: Ours, ids: Ids, steps: int) -> dict[str, Any]:
    """Medians of a step's pieces, in microseconds; `rest` is all the Python between them."""
    watch, taken = Stopwatch(), []
    with timed_pieces(subject, watch):
        for _ in range(steps):
            watch.spent.clear()
            begun = time.perf_counter()
            ids = subject.step(ids)
            taken.append({"step": time.perf_counter() - begun, **watch.spent})
    names = list(dict.fromkeys(name for step in taken for name in step))
    for step in taken:
        step["rest"] = step["step"] - sum(spent for name, spent in step.items() if name != "step")
    return {name: 1e6 * statistics.median(step.get(name, 0.0) for step in taken) for name in [*names, "rest"]}


def breakdown(job: Job, report: Report) -> None:
    """The pieces of a decode step of f16, and its kernels where torch's profiler can see them."""
    settings, errors = dict[str, dict[str, Any]](), dict[str, str]()
    cuda = device(job.provider)  # here, so that the first setting does not pay for it
    for mode in MODES:
        try:
            subject, ids = _under_way(job, mode)
            found = pieces(subject, ids, job.sizes.new // 2)
            settings[mode] = {"how": subject.how, "pieces_us": found, "kernels": None}
        except Exception as error:  # of ONNX Runtime, torch or CUDA, which share no base class
            errors[mode] = fault(error)
        report({"dtype": "f16", "settings": settings, "errors": errors})
    if cuda is None:
        return
    try:
        _attach(job)
        for mode, entry in settings.items():
            entry["kernels"] = found = _kernels(job, mode)
            entry["run_without_kernels_us"] = entry["pieces_us"]["run_with_iobinding"] - found["kernels_us"]
            report({"settings": settings})
    except Exception as error:
        errors["kernels"] = fault(error)
    report({"settings": settings, "errors": errors})


def _under_way(job: Job, mode: str) -> tuple[Ours, Ids]:
    subject = Ours(job, Setting("f16", mode, 1))
    ids = subject.start()
    for _ in range(job.sizes.new // 2):
        ids = subject.step(ids)
    return subject, ids


def _attach(job: Job) -> None:
    """Start the profiler once, and have it stay: graphs that were captured before may show no kernels."""
    os.environ |= {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}
    with _tracing(job.profiles / "kernels-none.json"):
        pass
    (job.profiles / "kernels-none.json").unlink()


def _kernels(job: Job, mode: str) -> dict[str, Any]:
    subject, ids = _under_way(job, mode)
    file = job.profiles / f"kernels-f16-{mode.replace(' ', '-')}.json"
    with _tracing(file):
        for _ in range(_TRACED_STEPS):
            ids = subject.step(ids)
    return trace_summary(json.loads(file.read_text())["traceEvents"], _TRACED_STEPS)
