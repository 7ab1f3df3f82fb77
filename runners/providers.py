"""Which of ONNX Runtime's providers really starts here, and which library is missing where one does not."""

from __future__ import annotations

import contextlib
import ctypes
import io
import sys
from pathlib import Path

from qwen_onnx.contract import Manifest
from qwen_onnx.errors import UserError
from qwen_onnx.runners.libraries import tensorrt_library
from qwen_onnx.runners.session import (
    ONE_DISTRIBUTION,
    PROVIDERS,
    first_line,
    import_onnxruntime,
    installed_distributions,
    provider_options,
)

_PROVIDER_LIBRARIES = {"cuda": "onnxruntime_providers_cuda", "tensorrt": "onnxruntime_providers_tensorrt"}
_SILENT = 4  # ONNX Runtime's log level that prints nothing below "fatal"


def choose_provider(wanted: str, manifest: Manifest, folder: Path) -> str:
    """The provider that serves this export here; `auto` prefers CUDA when it really starts.

    Raises:
        UserError: the wanted one is unknown, has no graph in this export, or does not start (naming why).
    """
    verify_provider(wanted)
    if wanted == "cpu" or (wanted == "auto" and missing_library("cuda") is not None):
        return "cpu"
    name = "cuda" if wanted == "auto" else wanted
    if name == "tensorrt":
        manifest.graph("prefill", name)  # whether it starts, its engine will tell
        return name
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


def missing_library(provider: str) -> str | None:
    """Why the provider's libraries do not load, in the system's own words; None when they do."""
    ort = import_onnxruntime()
    if PROVIDERS[provider] not in ort.get_available_providers():
        if len(both := installed_distributions()) > 1:  # the last one installed has written over the other
            return f"{' and '.join(both)} overwrite each other; {ONE_DISTRIBUTION}"
        return f"this {''.join(both) or 'onnxruntime'} is built without it"
    driver = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    if fault := _load_fault(driver):
        return f"{fault} (the NVIDIA driver)"
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it misses; we say it in our own line
        ort.preload_dlls()
    if provider == "tensorrt":
        _preload_tensorrt()
    prefix, suffix = ("", ".dll") if sys.platform == "win32" else ("lib", ".so")
    folder = Path(ort.__file__).parent / "capi"
    _load_fault(str(folder / f"{prefix}onnxruntime_providers_shared{suffix}"))
    return _load_fault(str(folder / f"{prefix}{_PROVIDER_LIBRARIES[provider]}{suffix}"))


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
            str(path),
            settings,
            providers=[(PROVIDERS[provider], provider_options(provider))],
            enable_fallback=0,
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


def _preload_tensorrt() -> None:
    """The libraries that pip's TensorRT brings lie where no loader looks; what is loaded already is found."""
    found = tensorrt_library()
    if found is None or found.path is None:
        return
    for path in sorted(Path(found.path).parent.glob("*nvonnxparser*")):
        _load_fault(str(path))
