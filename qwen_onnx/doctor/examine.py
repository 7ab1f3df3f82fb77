"""What `qwen-onnx doctor` finds on this machine: versions, NVIDIA's software, and the providers that really start."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from qwen_onnx.doctor.probe import MARK
from qwen_onnx.runners.runtime.machine import physical_cores
from qwen_onnx.runners.runtime.nvidia.driver import Driver, Gpu
from qwen_onnx.runners.runtime.nvidia.libraries import Library
from qwen_onnx.runners.runtime.options import PROVIDERS
from qwen_onnx.runners.runtime.session import installed_distributions

_MODULES = {
    "numpy": "numpy",
    "onnx": "onnx",
    "onnx-ir": "onnx_ir",
    "onnxscript": "onnxscript",
    "tokenizers": "tokenizers",
    "safetensors": "safetensors",
    "huggingface-hub": "huggingface_hub",
}
_SECONDS = 60.0  # TensorRT takes several for its first engine; a hung driver takes forever
_SECONDS_TO_DIE = 5.0
_SILENCE = "no answer"
NOT_FOUND = "cannot open shared object file: No such file or directory"
"""A loader's words for what is not there."""


@dataclasses.dataclass(frozen=True)
class Answers:
    """What a probe answered, and why it answered no more."""

    values: dict[str, Any]
    ending: str | None
    """None: it came to its end."""


Ask = Callable[..., Answers]


@dataclasses.dataclass(frozen=True)
class Package:
    """A package that qwen-onnx uses."""

    name: str
    version: str | None
    """None: not installed."""
    fault: str | None
    """Why it cannot be imported; None when it can."""


@dataclasses.dataclass(frozen=True)
class Runtime:
    """The ONNX Runtime that is imported."""

    distributions: tuple[str, ...]
    """What pip installed, with versions; two of them overwrite each other."""
    build: str | None
    version: str | None
    cuda_version: str | None
    """That it was built for; "" is none, None is not known."""
    fault: str | None


@dataclasses.dataclass(frozen=True)
class Trial:
    """A session of one node on a provider."""

    provider: str
    fault: str | None
    """Why it does not start and compute; None when it does."""


@dataclasses.dataclass(frozen=True)
class Report:
    """The whole of it."""

    version: str
    python: str
    executable: str
    platform: str
    cores: int
    packages: tuple[Package, ...]
    runtime: Runtime
    driver: Driver
    gpus: tuple[Gpu, ...]
    visible_devices: str | None
    """CUDA_VISIBLE_DEVICES."""
    libraries: tuple[Library, ...]
    tensorrt: Library | None
    libraries_fault: str | None
    """Why the libraries could not all be looked at."""
    trials: tuple[Trial, ...]
    verdict: str

    @property
    def ready(self) -> bool:
        """A model can run here, if only on the CPU."""
        return any(trial.provider == "cpu" and trial.fault is None for trial in self.trials)


def ask(*question: str, seconds: float = _SECONDS) -> Answers:
    """Put a question to `qwen_onnx.doctor.probe` in a process of its own, which may print, hang or crash."""
    command = [sys.executable, "-P", "-m", "qwen_onnx.doctor.probe", *question]
    environment = {"ORT_DISABLE_TELEMETRY": "1", **os.environ}  # whoever imports it
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    ending = None
    try:
        process = subprocess.Popen(command, stdin=nothing, stdout=pipe, stderr=pipe, env=environment)
    except OSError as error:
        return Answers({}, f"no process can be started: {error}")
    try:
        out, err = process.communicate(timeout=seconds)
        if process.returncode:
            ending = _ending(process.returncode, err)
    except subprocess.TimeoutExpired as late:
        out, ending = late.stdout or b"", f"no answer within {seconds:.0f} s"
    finally:
        _stop(process)
    marked = (line for line in out.decode(errors="replace").splitlines() if line.startswith(MARK))
    return Answers(dict(json.loads(line.removeprefix(MARK)) for line in marked), ending)


def examine(*, ask: Ask = ask) -> Report:
    """Look at everything; what cannot be looked at is told in its place and stops nothing.

    Args:
        ask: puts a question to the probe.
    """
    told = ask("runtime")
    runtime = Runtime(
        distributions=tuple(installed_distributions()),
        build=told.values.get("build"),
        version=told.values.get("version"),
        cuda_version=told.values.get("cuda_version"),
        fault=told.ending,
    )
    known = () if runtime.cuda_version is None else (runtime.cuda_version,)
    found = ask("libraries", *known)
    tensorrt = found.values.get("tensorrt")
    driver, gpus = _driver(ask("driver"))
    trials = tuple(_trial(ask("trial", provider), provider) for provider in PROVIDERS)
    return Report(
        version=_version("qwen-onnx") or "not installed",
        python=platform.python_version(),
        executable=sys.executable,
        platform=platform.platform(),
        cores=physical_cores(),
        packages=_packages(ask),
        runtime=runtime,
        driver=driver,
        gpus=gpus,
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        libraries=tuple(Library(**library) for library in found.values.get("libraries", ())),
        tensorrt=None if tensorrt is None else Library(**tensorrt),
        libraries_fault=found.ending,
        trials=trials,
        verdict=_verdict(trials, gpus),
    )


def to_json(report: Report) -> str:
    """The report as one JSON object."""
    return json.dumps({**dataclasses.asdict(report), "ready": report.ready})


def _packages(ask: Ask) -> tuple[Package, ...]:
    faults: dict[str, str | None] = {}
    while left := [module for module in _MODULES.values() if module not in faults]:
        told = ask("imports", *left)
        faults |= told.values
        if unanswered := [module for module in left if module not in faults]:
            faults[unanswered[0]] = told.ending or _SILENCE  # what it did not come to is asked again
    return tuple(Package(name, _version(name), faults[module]) for name, module in _MODULES.items())


def _driver(told: Answers) -> tuple[Driver, tuple[Gpu, ...]]:
    fields = told.values.get("driver", {"version": None, "cuda_version": None, "fault": None})
    fault = fields["fault"] or (None if "gpus" in told.values else told.ending or _SILENCE)
    return Driver(**{**fields, "fault": fault}), tuple(Gpu(**gpu) for gpu in told.values.get("gpus", ()))


def _trial(told: Answers, provider: str) -> Trial:
    return Trial(provider, told.values.get("fault", told.ending or _SILENCE))


def _verdict(trials: tuple[Trial, ...], gpus: tuple[Gpu, ...]) -> str:
    faults = {trial.provider: trial.fault for trial in trials}
    if faults["cpu"] is not None:
        return f"not ready: {plain(faults['cpu'])}"
    fast = [name for name in ("cuda", "tensorrt") if faults[name] is None]
    names = ", ".join(dict.fromkeys(gpu.name for gpu in gpus))
    text = f"ready on {' and '.join(fast or ['cpu'])}"
    if fast and names:
        text += f" ({names})"
    return text if faults["cuda"] is None else f"{text}; CUDA cannot start: {plain(faults['cuda'])}"


def plain(fault: str) -> str:
    """A loader's words in fewer of them."""
    return fault.replace(f": {NOT_FOUND}", " is missing")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _ending(code: int, err: bytes) -> str:
    if code < 0:
        return f"the process died of signal {-code} ({signal.strsignal(-code)})"
    lines = err.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines and code == 1 else f"the process ended with exit code {code}"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Kill it, and wait no longer than is sensible: one stuck in a broken driver does not die."""
    process.kill()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    try:
        process.wait(_SECONDS_TO_DIE)
    except subprocess.TimeoutExpired:
        return
