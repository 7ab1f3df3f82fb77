"""ONNX Runtime: which provider really starts, and the options every session is made with."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib.metadata
import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen_onnx.contract import MIN_ONNXRUNTIME, GraphSpec, Manifest
from qwen_onnx.errors import UserError

if TYPE_CHECKING:
    import onnxruntime

PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
_PROVIDER_LIBRARIES = {"cuda": "onnxruntime_providers_cuda", "tensorrt": "onnxruntime_providers_tensorrt"}
_SILENT = 4  # ONNX Runtime's log level that prints nothing below "fatal"
_ERRORS = 3
_MOST_THREADS = 1024  # far above any machine's cores; making more of them takes minutes


@dataclasses.dataclass(frozen=True)
class SessionOptions:
    """What a user may choose of a session."""

    provider: str = "auto"
    """auto, cpu, cuda or tensorrt."""
    threads: int | None = None
    """None: as many as there are cores for this process."""


def import_onnxruntime(*, at_least: str = MIN_ONNXRUNTIME) -> Any:
    """The onnxruntime module, its telemetry switched off.

    Raises:
        UserError: it is missing, broken or too old, with the command that mends it.
    """
    # Its wheels report to their maker: a device id on disk, events over the network. Not from here.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime

        version = onnxruntime.__version__
        onnxruntime.disable_telemetry_events()
    except (ImportError, AttributeError) as error:
        raise UserError(f"onnxruntime cannot be imported ({error}); {_mend()}") from None
    if _numbers(version) < _numbers(at_least):
        raise UserError(f"onnxruntime {version} found, {at_least} or newer wanted; {_mend()}")
    return onnxruntime


def installed_distributions() -> list[str]:
    """Of onnxruntime and onnxruntime-gpu, those that pip installed. Both at once overwrite each other's files."""
    found = []
    for name in ("onnxruntime", "onnxruntime-gpu"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def choose_provider(wanted: str, manifest: Manifest, folder: Path) -> str:
    """The provider that serves this export here; `auto` prefers CUDA when it really starts.

    Raises:
        UserError: the wanted one is unknown, has no graph in this export, or does not start (naming why).
    """
    verify_provider(wanted)
    if wanted == "cpu" or (wanted == "auto" and missing_library("cuda") is not None):
        return "cpu"
    name = "cuda" if wanted == "auto" else wanted
    # One node, and it is there anyway: the honest test is a session, not the list of providers.
    fault = _start_fault(folder / manifest.graph("grow", name).file, name)
    if fault is None:
        return name
    if wanted == "auto":
        return "cpu"
    raise _cannot_start(name, fault)


def verify_provider(wanted: str) -> None:
    """Say early, before an export is made or opened, what `choose_provider` would say of any.

    Raises:
        UserError: unknown, or asked for by name and its libraries do not load.
    """
    if wanted not in ("auto", *PROVIDERS):
        raise UserError(f"provider {wanted!r} is not known; choose auto, cpu, cuda or tensorrt")
    if wanted not in ("auto", "cpu") and (fault := missing_library(wanted)) is not None:
        raise _cannot_start(wanted, fault)
    if wanted == "tensorrt":
        raise UserError("provider tensorrt: no export has a graph for it yet; use --provider cuda or cpu")


def missing_library(provider: str) -> str | None:
    """Why the provider's libraries do not load, in the system's own words; None when they do."""
    ort = import_onnxruntime()
    if PROVIDERS[provider] not in ort.get_available_providers():
        return f"this {' and '.join(installed_distributions()) or 'onnxruntime'} is built without it"
    driver = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    if fault := _load_fault(driver):
        return f"{fault} (the NVIDIA driver)"
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it misses; we say it in our own line
        ort.preload_dlls()
    prefix, suffix = ("", ".dll") if sys.platform == "win32" else ("lib", ".so")
    folder = Path(ort.__file__).parent / "capi"
    _load_fault(str(folder / f"{prefix}onnxruntime_providers_shared{suffix}"))
    return _load_fault(str(folder / f"{prefix}{_PROVIDER_LIBRARIES[provider]}{suffix}"))


def open_session(
    path: Path, provider: str, options: SessionOptions, *, map_weights: bool = False
) -> onnxruntime.InferenceSession:
    """A session on exactly this provider (and the CPU provider behind it).

    Args:
        map_weights: compute on the weights file's own pages instead of a repacked private copy: the session
            starts in a tenth of the time, processes share one copy, and prefill is a tenth slower.

    Raises:
        UserError: the file does not load, or the provider silently gave way to another.
    """
    ort = import_onnxruntime()
    settings = ort.SessionOptions()
    settings.log_severity_level = _ERRORS
    threads = available_cores() if options.threads is None else options.threads
    if not 0 < threads <= _MOST_THREADS:
        raise UserError(f"{threads} threads asked for; 1 to {_MOST_THREADS} are possible")
    settings.intra_op_num_threads = threads
    if map_weights:
        settings.add_session_config_entry("session.disable_prepacking", "1")
    providers: Sequence[Any] = [(PROVIDERS[provider], provider_options(provider))]
    try:
        session = ort.InferenceSession(str(path), settings, providers=providers)
    except Exception as error:  # ONNX Runtime's exceptions share no base class
        raise UserError(f"{path}: ONNX Runtime cannot load it: {first_line(error)}") from None
    if session.get_providers()[0] != PROVIDERS[provider]:
        raise UserError(
            f"provider {provider} did not start; ONNX Runtime fell back to {session.get_providers()}"
        )
    return session


def provider_options(provider: str) -> dict[str, str]:
    """ONNX Runtime's provider options. TF32 is off: f32 asked for is f32 computed."""
    if provider == "cuda":
        return {"use_tf32": "0", "arena_extend_strategy": "kSameAsRequested"}
    return {}


def available_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def verify_sizes(folder: Path, manifest: Manifest, graph: GraphSpec) -> None:
    """The graph and every weights file are there, at the size they were written with.

    Raises:
        UserError: naming the file, the size found and the size wanted.
    """
    for name, spec in manifest.files.items():
        if name != graph.file and not name.endswith(".safetensors"):
            continue
        path = folder / name
        if path.is_symlink() and not (folder / graph.file).is_symlink():
            raise UserError(
                f"{path}: a link out of the folder, which ONNX Runtime follows not; copy or hard-link it"
            )
        if not path.is_file():
            raise UserError(f"{path}: missing; an export's files belong together, copy or export it again")
        if (size := path.stat().st_size) != spec.size:
            raise UserError(f"{path}: {size:,} bytes found, {spec.size:,} wanted; copy or export it again")


def first_line(error: BaseException) -> str:
    """An exception's message without its stack and line breaks."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _cannot_start(provider: str, fault: str) -> UserError:
    return UserError(
        f"provider {provider} cannot start: {fault}; use --provider cpu, or install what is missing"
    )


def _start_fault(path: Path, provider: str) -> str | None:
    ort = import_onnxruntime()
    settings = ort.SessionOptions()
    settings.log_severity_level = _SILENT
    try:
        session = ort.InferenceSession(
            str(path), settings, providers=[(PROVIDERS[provider], provider_options(provider))]
        )
    except Exception as error:
        return first_line(error)
    return None if session.get_providers()[0] == PROVIDERS[provider] else "ONNX Runtime fell back to the CPU"


def _load_fault(library: str) -> str | None:
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return first_line(error)
    return None


def _mend() -> str:
    wheel = "onnxruntime-gpu" if sys.platform in ("linux", "win32") else "onnxruntime"
    return f"mend it with: pip uninstall -y onnxruntime onnxruntime-gpu && pip install '{wheel}>={MIN_ONNXRUNTIME}'"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
