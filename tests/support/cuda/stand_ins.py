"""Stand-ins for the CUDA libraries: ONNX Runtime's own CUDA provider runs over them on a machine with no GPU.

Placement, optimization, binding, capture and the order of calls are ONNX Runtime's. Kernels compute nothing, so that
what a graph computes is whatever lay in the buffer, and no time means anything.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import mmap
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from support.patience import PATIENCE

RUNTIME = Path(__file__).parent / "runtime.c"
LIBRARY = "libqwen_stand_ins.so"
"""All of them are this one library under many names, so that they share what they count."""

CUDART = "libcudart.so.13"
"""runtime.c answers in the structures of this version."""

CUDNN = ("libcudnn.so.9", "libcudnn.so")
"""The provider links to no cuDNN: it opens the library, and looks up each function, by name."""

MAKES_HANDLE = re.compile(
    r"cuda(Stream|Event)Create\w*|cudaMemPoolCreate|cublas(Lt)?Create\w*|cublasLt\w+Create|cudnnCreate\w*"
)
"""Functions that write a new handle to their first argument."""

COMPUTES = re.compile(
    r"cublas[SDCZH](gemm|gemv|geam|getr[fi]|copy|scal)\w*|cublasGemm\w+|cublasLtMat(mul|rixTransform)"
    r"|cudnn(AddTensor|ReduceTensor|BackendExecute|FindConvolutionForwardAlgorithmEx)"
    r"|cudnn\w+Forward(Inference|Training)?"
)
"""Functions of the libraries that have the device compute something."""

EQUAL_IS_FINE = """import qwen_onnx.runners.model.logits_model as logits_model
logits_model._some_row_is_equal = lambda logits: False
logits_model.LogitsModel._first_chosen = logits_model.LogitsModel._chosen"""


@dataclasses.dataclass(frozen=True)
class Counts:
    """What was asked of the device so far; the difference of two is what was asked in between."""

    kernel_launches: int
    library_calls: int
    """Of cuBLAS and cuDNN, that compute."""
    graph_launches: int
    captured: int
    """Launches, library calls, copies and fills that a capture recorded; they are in no other field."""
    captures: int
    """Captured graphs made ready to launch."""
    illegal_during_capture: int
    """What a driver would refuse while it captures, or replay wrongly."""
    mallocs: int
    """Of device memory, as `frees`."""
    frees: int
    host_mallocs: int
    copies: int
    bytes_to_device: int
    bytes_to_host: int
    bytes_on_device: int
    """Copied from the device to itself."""
    memsets: int
    synchronizations: int
    bytes_allocated: int
    """Of device memory, now."""
    peak_bytes: int

    def __sub__(self, before: Counts) -> Counts:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(before), strict=True)
        return Counts(*(now - then for now, then in pairs))


def counts() -> Counts:
    """In a program that runs over the stand-ins: what was asked of the device so far."""
    library = ctypes.CDLL(LIBRARY)
    fields = [field.name for field in dataclasses.fields(Counts)]
    counted = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, "stand_in_count_names")))
    if counted.decode().split() != fields:
        raise RuntimeError(f"runtime.c counts {counted.decode()}and not {' '.join(fields)}")
    return Counts(*(ctypes.c_longlong * len(fields)).in_dll(library, "stand_in_counts"))


def unavailable() -> str | None:
    """Why there can be no stand-ins here; None when there can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "the stand-ins for CUDA are written for Linux on x86-64"
    if missing := [tool for tool in ("gcc", "nm", "readelf") if shutil.which(tool) is None]:
        return f"the stand-ins for CUDA need {' and '.join(missing)}"
    if not (provider := _provider()).exists():
        return f"this onnxruntime has no {provider.name}: install onnxruntime-gpu"
    if CUDART not in (needed := _needed(provider)):
        return f"{provider.name} needs {', '.join(needed)}: the stand-ins are of {CUDART}"
    return None


def compile_into(folder: Path) -> None:
    """Make in `folder` a stand-in for each CUDA library that the provider links to or opens."""
    provider = _provider()
    needed = _needed(provider)
    versions: dict[str, list[str]] = {}
    for line in _output("nm", "-D", "--undefined-only", provider).splitlines():
        name, _, version = line.split()[-1].partition("@")
        if version in needed or (not version and name.startswith("cu")):
            versions.setdefault(version or CUDART, []).append(name)
    names = {*_named_for_cudnn(provider)}.union(*versions.values())
    (folder / "generated.c").write_text(_generated(names))
    del versions[CUDART]  # everything that no other library has
    script = "".join(f"{library} {{ global: {'; '.join(own)}; }};\n" for library, own in versions.items())
    (folder / "versions.map").write_text(f"{script}{CUDART} {{ global: *; }};\n")
    # -w: the parameters that a stand-in has no use for.
    linking = [
        "-shared",
        "-fPIC",
        f"-Wl,-soname,{LIBRARY}",
        "-Wl,--version-script=versions.map",
        "-ldl",
        "-pthread",
    ]
    command = ["gcc", "-w", "-O1", "-o", LIBRARY, str(RUNTIME), "generated.c", *linking]
    compiled = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if compiled.returncode:
        raise RuntimeError(f"gcc does not compile the stand-ins for CUDA:\n{compiled.stderr}")
    for name in (*needed, *CUDNN):
        (folder / name).symlink_to(LIBRARY)


def run(
    folder: Path,
    program: str,
    *arguments: object,
    trace: Path | None = None,
    env: Mapping[str, str] = {},
    timeout: float = PATIENCE,
) -> subprocess.CompletedProcess[str]:
    """Run a Python program over the stand-ins in `folder`; `import cuda_stand_ins` works in it.

    `trace` gets a line `name amount` for each thing asked of the device, kernels by their mangled name. What was
    asked during a capture has `captured:` or `illegal:` before its name. In `env`, or in os.environ as it goes:
    QWEN_STAND_IN_FAIL_MALLOC_ABOVE=N has a cudaMalloc fail that would pass N bytes in all, QWEN_STAND_IN_FILL=N fills
    new device memory with a byte other than 255, which is NaN (a runner may refuse NaN, and nothing is computed).
    """
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("CUDA_VISIBLE_DEVICES", None)  # conftest.py hides every device
    if trace is not None:
        environment["QWEN_STAND_IN_TRACE"] = str(trace)
    if "QWEN_STAND_IN_FILL" in env:  # then all logits are that byte, and nobody is to mind
        program = f"{EQUAL_IS_FINE}\n{program}"
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=environment | dict(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
    )


def demangled(names: Collection[str]) -> dict[str, str]:
    """Each name as C++ source has it; as it is where there is no c++filt."""
    if shutil.which("c++filt") is None:
        return {name: name for name in names}
    run = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return dict(zip(names, run.stdout.splitlines(), strict=True))


def _provider() -> Path:
    found = importlib.util.find_spec("onnxruntime")
    folder = Path(found.origin).parent if found and found.origin else Path()
    return folder / "capi" / "libonnxruntime_providers_cuda.so"


def _output(*command: object) -> str:
    return subprocess.check_output([*map(str, command)], text=True)


def _needed(provider: Path) -> list[str]:
    """The CUDA libraries that it links to."""
    return re.findall(r"\(NEEDED\).*\[(libcu[^]]+)\]", _output("readelf", "-d", provider))


def _named_for_cudnn(provider: Path) -> set[str]:
    with provider.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return {name.decode() for name in re.findall(rb"\0(cudnn[A-Z]\w+)(?=\0)", data)}


def _generated(names: Iterable[str]) -> str:
    """Weak functions: one of the same name in runtime.c is taken instead."""
    lines = ["int stand_in_new_handle(void **);", "int stand_in_library_call(const char *);"]
    for name in sorted(names):
        if MAKES_HANDLE.fullmatch(name):
            parameters, result = "void **handle", "stand_in_new_handle(handle)"
        elif COMPUTES.fullmatch(name):
            parameters, result = "void", f'stand_in_library_call("{name}")'
        else:
            parameters, result = "void", "0"
        lines.append(f"__attribute__((weak)) int {name}({parameters}) {{ return {result}; }}")
    return "\n".join(lines) + "\n"
