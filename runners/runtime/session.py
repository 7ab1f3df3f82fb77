"""ONNX Runtime itself, and the options that every session is made with."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from qwen_onnx.errors import OutOfMemoryError, UserError
from qwen_onnx.manifest import MIN_ONNXRUNTIME
from qwen_onnx.runners.runtime.machine import physical_cores

if TYPE_CHECKING:
    import onnxruntime

PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
OPTIMIZATION_LEVELS = {
    "disabled": "ORT_DISABLE_ALL", "basic": "ORT_ENABLE_BASIC", "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}  # fmt: skip
"""How far ONNX Runtime may rewrite a graph, by our name; in rising order."""
SILENT = 4
"""ONNX Runtime's log level that prints nothing: its errors come as exceptions, and are said once."""
# Flash, memory-efficient and unfused attention, and not cuDNN's, which Hopper would get: it plans anew for each
# length of prompt, and rotates and appends in kernels of their own.
_SDPA_KERNELS = str(1 + 2 + 16)
_OUT_OF_MEMORY = re.compile(
    r"bad_alloc|Cannot allocate memory|Failed to allocate memory(?: for requested buffer of size (\d+))?"
)
_NO_MEMORY = "out of memory"
_MOST_THREADS = 1024  # far above any machine's cores; making more of them takes minutes


@dataclasses.dataclass(frozen=True)
class SessionOptions:
    """What a user may choose of a session.

    Raises:
        UserError: a value that is none of its kind.
    """

    provider: str = "auto"
    """auto, cpu, cuda or tensorrt."""
    threads: int | None = None
    """None: on the CPU one for each physical core that this process may use, else 1."""
    prepack: bool | None = None
    """On the CPU, copy the weights to private memory in the order that products read: prompts are 10 to 17 % faster,
    the start takes seconds. None: int8 and int4 only, which need it; float weights stay where they are."""
    cuda_graph: bool = True
    """Capture decode steps as CUDA graphs and replay them; on the CUDA provider."""
    tf32: bool = False
    """Let f32 products on CUDA round their factors to 10 bits (TensorFloat-32)."""
    greedy_on_device: bool = False
    """Choose greedy tokens in the graph, which feeds its own next step."""
    speculate: bool = False
    """Guess several greedy tokens from what the context says already, and verify them in one step; on the CPU."""
    gpu_mem_limit: int | None = None
    """Most bytes of a session on CUDA, weights and activations; the cache is not counted. None: no limit."""
    optimization_level: str = "all"
    """How far ONNX Runtime rewrites graphs: one of OPTIMIZATION_LEVELS, to find out which rewriting did harm."""
    disabled_optimizers: tuple[str, ...] = ()
    """ONNX Runtime's names of single rewritings to leave out, as `SkipLayerNormFusion`."""

    def __post_init__(self) -> None:
        for name in ("threads", "gpu_mem_limit"):
            if type(value := getattr(self, name)) not in (int, type(None)):
                raise UserError(f"{name} {value!r}: a whole number wanted, or None")
        if self.gpu_mem_limit is not None and not 0 < self.gpu_mem_limit < 2**63:
            raise UserError(f"gpu_mem_limit {self.gpu_mem_limit}: 1 to {2**63 - 1} bytes wanted")
        for name in ("cuda_graph", "tf32", "greedy_on_device", "speculate"):
            if type(getattr(self, name)) is not bool:
                raise UserError(f"{name} {getattr(self, name)!r}: True or False wanted")
        if self.optimization_level not in OPTIMIZATION_LEVELS:
            raise UserError(
                f"optimization_level {self.optimization_level!r}: one of {', '.join(OPTIMIZATION_LEVELS)} wanted"
            )
        if self.prepack not in (None, True, False):
            raise UserError(f"prepack {self.prepack!r}: True, False or None wanted")
        if self.speculate and self.greedy_on_device:
            raise UserError("greedy_on_device takes one token a step, speculate several: choose one of them")


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
) -> onnxruntime.InferenceSession:
    """A session on exactly this provider (and the CPU provider behind it).

    Args:
        in_place: compute on weights as they lie, f32 on the file's own pages, instead of a repacked private copy: the
            session starts in a fraction of the time, and processes share one copy of f32.
        capture: runs become CUDA graphs, but for those that say otherwise.
        more: options of the provider.

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
    if not 0 < threads <= _MOST_THREADS:
        raise UserError(f"{threads} threads asked for; 1 to {_MOST_THREADS} are possible")
    settings.intra_op_num_threads = threads
    if provider == "cpu":
        settings.add_session_config_entry("session.prepack.enable_parallel", "1")
        # A thread that spins as it waits for its session's next run keeps a core from another session's.
        settings.add_session_config_entry("session.force_spinning_stop", "1")
        # A pattern is a block for each shape of input, kept: 10 MB more, and no faster.
        settings.enable_mem_pattern = False
    if in_place:
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
                f"{path}: {limit}, the limit given, are too few for it; raise --gpu-mem-limit"
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
        return f"{_NO_MEMORY}{wanted}; free some, or take a smaller model, dtype or --max-context"
    found = re.search(r"CU\w+ failure \d+: [^;]+", text)
    return found[0].strip() if found else text


def _mend() -> str:
    wheel = "onnxruntime-gpu" if sys.platform in ("linux", "win32") else "onnxruntime"
    return f"mend it with: pip uninstall -y onnxruntime onnxruntime-gpu && pip install '{wheel}>={MIN_ONNXRUNTIME}'"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
