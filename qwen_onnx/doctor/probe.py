"""One question of `qwen-onnx doctor`, answered in a process of its own, where a library may print, hang or crash.

Run as `python -m qwen_onnx.doctor.probe SUBJECT ARGUMENT...`; each answer is one marked line on stdout.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator
from typing import Any

from qwen_onnx.errors import UserError
from qwen_onnx.runners.runtime.nvidia.driver import driver, gpus
from qwen_onnx.runners.runtime.nvidia.libraries import cuda_libraries, tensorrt_library
from qwen_onnx.runners.runtime.providers import missing_library, run_one_node
from qwen_onnx.runners.runtime.session import SILENT, first_line, import_onnxruntime

MARK = "qwen-onnx doctor: "


def start_fault(provider: str) -> str | None:
    """Why a session of one node does not start and compute on this provider; None when it does."""
    missing = None
    try:
        # What pip installed is loaded on the way, and a fault named here says more than the session's own.
        missing = None if provider == "cpu" else missing_library(provider)
        if (found := run_one_node(provider)) != [3.0, -4.0]:
            raise UserError(f"it computes 1.5 + 1.5 and -2 + -2 as {found}")
    except Exception as error:  # ONNX Runtime's exceptions share no base class
        return missing or first_line(error)
    return None


def answers(subject: str, *arguments: str) -> Iterator[tuple[str, Any]]:
    """Names and JSON values that answer a question, one at a time: a crash takes only what follows.

    Args:
        subject: `runtime`; `libraries` of the CUDA version given, if any; `driver`; `trial` of the provider
            given; `imports` of the modules given.
        arguments: of the subject.
    """
    if subject == "runtime":
        ort = import_onnxruntime()
        yield "build", getattr(ort, "package_name", "") or "onnxruntime"
        yield "version", ort.__version__
        yield "cuda_version", getattr(ort, "cuda_version", "") or ""
    elif subject == "libraries":
        yield "libraries", [dataclasses.asdict(found) for found in cuda_libraries(*arguments)]
        tensorrt = tensorrt_library()
        yield "tensorrt", None if tensorrt is None else dataclasses.asdict(tensorrt)
    elif subject == "driver":
        yield "driver", dataclasses.asdict(driver())
        yield "gpus", [dataclasses.asdict(gpu) for gpu in gpus()]
    elif subject == "trial":
        yield "fault", start_fault(*arguments)
    elif subject == "imports":
        for module in arguments:
            try:
                importlib.import_module(module)
            except Exception as error:
                yield module, f"{type(error).__name__}: {first_line(error)}"
            else:
                yield module, None


def main() -> None:
    """Print the answers; what fails before them is one line on stderr and exit code 1."""
    try:
        if "trial" in sys.argv:  # of its complaints the exception is told, once
            import_onnxruntime().set_default_logger_severity(SILENT)
        for name, value in answers(*sys.argv[1:]):
            # A line of its own, whatever a library printed before it without ending its line.
            print(f"\n{MARK}{json.dumps([name, value])}", flush=True)
    except Exception as error:
        print(first_line(error), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
