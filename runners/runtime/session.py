"""ONNX Runtime itself, and sessions on exactly one provider."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from qwen_onnx.contract.manifest import MIN_ONNXRUNTIME
from qwen_onnx.errors import OutOfMemoryError, UserError, option
from qwen_onnx.runners.runtime.machine import physical_cores
from qwen_onnx.runners.runtime.options import OPTIMIZATION_LEVELS, PROVIDERS, SessionOptions

if TYPE_CHECKING:
    import onnxruntime

SILENT = 4
"""ONNX Runtime's log level that prints nothing: its errors come as exceptions, and are said once."""
# Flash, memory-efficient and unfused attention, and not cuDNN's, which Hopper would get: it plans anew for each
# length of prompt, and rotates and appends in kernels of their own.
_SDPA_KERNELS = str(1 + 2 + 16)
_OUT_OF_MEMORY = re.compile(
    r"bad_alloc|Cannot allocate memory|Failed to allocate memory(?: for requested buffer of size (\d+))?"
)
_NO_MEMORY = "out of memory"


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


ONE_DISTRIBUTION = "keep one: pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime-gpu"
"""What mends two distributions of ONNX Runtime at once."""


def installed_distributions() -> list[str]:
    """Of onnxruntime and onnxruntime-gpu, those that pip installed. Both at once overwrite each other's files."""
    found = []
    for name in ("onnxruntime", "onnxruntime-gpu"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def open_session(
    path: Path,
    provider: str,
    options: SessionOptions,
    *,
    in_place: bool = False,
    capture: bool = False,
    more: Mapping[str, str] = MappingProxyType({}),
    lean: bool = False,
) -> onnxruntime.InferenceSession:
    """A session on exactly this provider (and the CPU provider behind it).

    Args:
        in_place: compute on weights as they lie, f32 on the file's own pages, instead of a repacked private copy: the
            session starts in a fraction of the time, and processes share one copy of f32.
        capture: runs become CUDA graphs, but for those that say otherwise.
        more: options of the provider.
        lean: in place whatever the type, each weight converted only when its turn comes: slow, and in little memory.

    Raises:
        UserError: the file does not load, or the provider silently gave way to another.
    """
    ort = import_onnxruntime()
    settings = ort.SessionOptions()
    settings.log_severity_level = SILENT
    level = OPTIMIZATION_LEVELS[options.optimization_level]
    settings.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    threads = options.threads
    if threads is None:  # on a GPU what is left to the CPU is the arithmetic of shapes
        threads = physical_cores() if provider == "cpu" else 1
    settings.intra_op_num_threads = threads
    if provider == "cpu":
        settings.add_session_config_entry("session.prepack.enable_parallel", "1")
        # A thread that spins as it waits for its session's next run keeps a core from another session's.
        settings.add_session_config_entry("session.force_spinning_stop", "1")
        # A pattern is a block for each shape of input, kept: 10 MB more, and no faster.
        settings.enable_mem_pattern = False
    if lean:  # the default order begins with all conversions
        settings.execution_order = ort.ExecutionOrder.PRIORITY_BASED
        settings.enable_cpu_mem_arena = False  # which would grow by powers of two
    if in_place or lean:
        settings.add_session_config_entry("session.disable_prepacking", "1")
    chosen = {
        **provider_options(provider, tf32=options.tf32, capture=capture, gpu_mem_limit=options.gpu_mem_limit),
        **more,
    }
    providers: list[Any] = [(PROVIDERS[provider], chosen)]
    unwanted = set(options.disabled_optimizers)
    if provider == "tensorrt":
        settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        providers.append((PROVIDERS["cuda"], provider_options("cuda", tf32=options.tf32)))
        # It would write transposed copies of the weights into what TensorRT's parser is given.
        unwanted.add("ConstantFolding")
    try:
        # No fallback: it prints on stdout, and starts on the CPU what was asked for elsewhere.
        session = ort.InferenceSession(
            str(path), settings, providers=providers, enable_fallback=0, disabled_optimizers=unwanted or None
        )
    except Exception as error:  # ONNX Runtime's exceptions share no base class
        if options.gpu_mem_limit is not None and "bfc_arena" in str(error):
            limit = f"{options.gpu_mem_limit:,} bytes of GPU memory"
            raise UserError(
                f"{path}: {limit}, the limit given, are too few for it; raise {option('gpu_mem_limit')}"
            ) from None
        raise failed(f"{path}: ONNX Runtime cannot load it", error) from None
    if session.get_providers()[0] != PROVIDERS[provider]:
        raise UserError(
            f"provider {provider} did not start; ONNX Runtime fell back to {session.get_providers()}"
        )
    return session


def provider_options(
    provider: str, *, tf32: bool = False, capture: bool = False, gpu_mem_limit: int | None = None
) -> dict[str, str]:
    """ONNX Runtime's provider options. TF32 is off unless asked for: f32 asked for is f32 computed."""
    if provider != "cuda":
        return {}
    options = {
        "use_tf32": str(int(tf32)),
        "enable_cuda_graph": str(int(capture)),
        "arena_extend_strategy": "kSameAsRequested",
        "sdpa_kernel": _SDPA_KERNELS,
    }
    if gpu_mem_limit is not None:
        options["gpu_mem_limit"] = str(gpu_mem_limit)
    return options


def onnxruntime_version() -> str:
    """Of what is imported."""
    version: str = import_onnxruntime().__version__
    return version


def failed(what: str, error: BaseException) -> UserError:
    """What ONNX Runtime failed with, in words."""
    line = first_line(error)
    return (OutOfMemoryError if line.startswith(_NO_MEMORY) else UserError)(f"{what}: {line}")


def first_line(error: BaseException) -> str:
    """An exception's message without its stack and line breaks; of a CUDA call's, what CUDA says."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if full := _OUT_OF_MEMORY.search(text):
        wanted = f" ({int(full[1]):,} bytes more were wanted)" if full[1] else ""
        return f"{_NO_MEMORY}{wanted}; free some, or take a smaller model, dtype or {option('max_context')}"
    found = re.search(r"CU\w+ failure \d+: [^;]+", text)
    return found[0].strip() if found else text


def _mend() -> str:
    wheel = "onnxruntime-gpu" if sys.platform in ("linux", "win32") else "onnxruntime"
    return f"mend it with: pip uninstall -y onnxruntime onnxruntime-gpu && pip install '{wheel}>={MIN_ONNXRUNTIME}'"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
