"""A doctor's report as text, for people."""

from __future__ import annotations

import sys

from qwen_onnx.doctor.examine import NOT_FOUND, Package, Report, Runtime
from qwen_onnx.errors import printable
from qwen_onnx.runners.runtime.nvidia.driver import Driver
from qwen_onnx.runners.runtime.nvidia.libraries import Library

_WIDTH = 12
# By name, as pyproject.toml's extra `cuda` has them: nobody here owns the name qwen-onnx on an index.
_CUDA_PACKAGES = {
    "13": "nvidia-cublas nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cudnn-cu13 nvidia-cufft nvidia-curand",
    "12": "nvidia-cublas-cu12 nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12 nvidia-cudnn-cu12 "
    "nvidia-cufft-cu12 nvidia-curand-cu12",
}


def describe(report: Report) -> str:
    """The text of `qwen-onnx doctor`; its last line is the verdict."""
    installed = [package for package in report.packages if package.fault is None and package.version]
    lines = [
        _line("qwen-onnx", report.version),
        _line("Python", f"{report.python}, {report.executable}"),
        _line("platform", f"{report.platform}, {report.cores} cores"),
        _line("packages", ", ".join(f"{package.name} {package.version}" for package in installed)),
        *(_line("", _broken(package)) for package in report.packages if package not in installed),
        *_runtime(report.runtime),
        _line("driver", _driver(report.driver, report.runtime)),
        *_gpus(report),
        "",
        *_libraries(report),
        "",
        "providers, each tried with a session of one node",
        *(
            f"  {trial.provider:<18} {'starts' if trial.fault is None else 'does not start: ' + trial.fault}"
            for trial in report.trials
        ),
        "",
        f"verdict: {report.verdict}",
    ]
    return "\n".join(map(printable, lines))


def _line(label: str, text: str) -> str:
    return f"{label:<{_WIDTH}} {text}".rstrip()


def _broken(package: Package) -> str:
    if package.version is None:
        return f"{package.name} is missing"
    return f"{package.name} {package.version} cannot be imported: {package.fault}"


def _runtime(runtime: Runtime) -> list[str]:
    if runtime.fault is not None:
        lines = [_line("onnxruntime", runtime.fault)]
    else:
        cuda = f"for CUDA {runtime.cuda_version}" if runtime.cuda_version else "without CUDA"
        lines = [_line("onnxruntime", f"{runtime.build} {runtime.version}, built {cuda}")]
    if len(runtime.distributions) > 1:
        wheel = "onnxruntime" if sys.platform == "darwin" else "onnxruntime-gpu"
        lines += [
            _line("", f"{' and '.join(runtime.distributions)} overwrite each other; keep one:"),
            _line("", f"pip uninstall -y onnxruntime onnxruntime-gpu && pip install {wheel}"),
        ]
    return lines


def _driver(driver: Driver, runtime: Runtime) -> str:
    told = [f"NVIDIA {driver.version}"] if driver.version else []
    if driver.cuda_version:
        told.append(f"for CUDA {driver.cuda_version} and older")
    if driver.fault is not None:
        told.append(driver.fault)
    wanted = runtime.cuda_version
    if driver.cuda_version and wanted and _major(driver.cuda_version) < _major(wanted):
        told.append(f"too old for the CUDA {wanted} of this onnxruntime: update the NVIDIA driver")
    return ", ".join(told)


def _gpus(report: Report) -> list[str]:
    texts = [
        f"{gpu.name}, compute capability {gpu.compute_capability}, {gpu.memory / 2**30:.1f} GiB"
        for gpu in report.gpus
    ]
    if report.visible_devices is not None:
        texts.append(f"CUDA_VISIBLE_DEVICES={report.visible_devices} hides any other")
    return [_line("" if number else "GPU", text) for number, text in enumerate(texts or ["none"])]


def _libraries(report: Report) -> list[str]:
    lines = ["libraries of the CUDA provider"]
    lines += [f"  {_library(library)}" for library in report.libraries]
    missing = any(library.fault for library in report.libraries)
    if packages := _CUDA_PACKAGES.get((report.runtime.cuda_version or "13").partition(".")[0]):
        lines += [f"  for a GPU, what is missing comes with: pip install {packages}"] if missing else []
    if not report.libraries:
        lines.append(f"  {report.libraries_fault or 'none: this onnxruntime is built without CUDA'}")
    lines.append("library of the TensorRT provider")
    if report.tensorrt is None:
        return [*lines, f"  {report.libraries_fault or 'none for this system'}"]
    return [*lines, f"  {_library(report.tensorrt)}"]


def _library(library: Library) -> str:
    if library.fault is None:
        return f"{library.name:<18} {library.version or 'version unknown'}, {library.path or 'path unknown'}"
    use = "" if library.needed else " (only few operators need it)"
    why = library.fault.removeprefix(f"{library.name}: ")
    return f"{library.name:<18} missing{use}" + ("" if why == NOT_FOUND else f": {why}")


def _major(version: str) -> int:
    number = version.partition(".")[0]
    return int(number) if number.isdigit() else 0
