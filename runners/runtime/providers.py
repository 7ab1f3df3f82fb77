"""Which of ONNX Runtime's providers really starts here, and which library is missing where one does not."""

from __future__ import annotations

import contextlib
import ctypes
import io
import sys
from pathlib import Path

from qwen_onnx.contract.manifest import Manifest
from qwen_onnx.errors import UserError, option
from qwen_onnx.runners.runtime.nvidia.libraries import tensorrt_library
from qwen_onnx.runners.runtime.options import PROVIDERS
from qwen_onnx.runners.runtime.session import (
    ONE_DISTRIBUTION,
    SILENT,
    first_line,
    import_onnxruntime,
    installed_distributions,
    provider_options,
)

_PROVIDER_LIBRARIES = {"cuda": "onnxruntime_providers_cuda", "tensorrt": "onnxruntime_providers_tensorrt"}
# y = x + x on two float32, opset 13: bytes, so that a broken onnx or a damaged export cannot hide what starts.
ONE_NODE = bytes.fromhex(
    "08083a370a0e0a01780a0178120179220341646412036164645a0f0a0178120a0a08080112040a0208026"
    "20f0a0179120a0a08080112040a02080242040a00100d"
)


def choose_provider(wanted: str, manifest: Manifest) -> str:
    """The provider that serves this export here; `auto` prefers CUDA when it really starts.

    Raises:
        UserError: the wanted one is unknown, has no graph in this export, or does not start (naming why).
    """
    verify_provider(wanted)
    if wanted == "cpu" or (wanted == "auto" and missing_library("cuda") is not None):
        return "cpu"
    name = "cuda" if wanted == "auto" else wanted
    if wanted == "auto" and not any(name in graph.providers for graph in manifest.graphs):
        return "cpu"
    manifest.graph("prefill", name)
    if name == "tensorrt":  # whether it starts, its engine will tell
        return name
    # The honest test is a session that runs, not the list of providers.
    fault = _start_fault(name)
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
        f"provider {provider} cannot start: {fault}; use {option('provider', 'cpu')}, or install what is missing"
    )


def run_one_node(provider: str) -> list[float]:
    """What a session of one node on this provider, and no other, makes of 1.5 and -2: 3 and -4, if it computes.

    Raises:
        UserError: ONNX Runtime fell back to another provider.
        Exception: whatever ONNX Runtime failed with.
    """
    import numpy as np  # here: the doctor must be able to say that it is broken

    ort = import_onnxruntime()
    settings = ort.SessionOptions()
    settings.log_severity_level = SILENT
    if provider != "cpu":
        settings.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    wanted = [(PROVIDERS[provider], provider_options(provider))]
    session = ort.InferenceSession(ONE_NODE, settings, providers=wanted, enable_fallback=0)
    if session.get_providers()[0] != PROVIDERS[provider]:
        raise UserError(f"ONNX Runtime fell back to {session.get_providers()[0]}")
    (found,) = session.run(None, {"x": np.array([1.5, -2.0], np.float32)})
    values: list[float] = found.tolist()
    return values


def _start_fault(provider: str) -> str | None:
    try:
        run_one_node(provider)
    except Exception as error:  # ONNX Runtime's exceptions share no base class
        return first_line(error)
    return None


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
