"""Which programs run a graph, as far as they were tried: docs/runtimes.md has the versions, and what came out.

To load is not enough: tinygrad reads any graph, and ends at the first operator that it lacks.
"""

from __future__ import annotations

import importlib

from qwen_onnx.contract.manifest import GraphSpec, Manifest
from qwen_onnx.errors import UserError
from qwen_onnx.runners.runtime.session import first_line

_ORT = ("ONNX Runtime in Python", "in Node", "in browsers")
_FEEDERS = ("onnxruntime-genai", "optimum", "transformers.js")
"""They feed what Hugging Face's exports take in, and no more."""
RUNTIMES = (
    *_ORT, *_FEEDERS, "OpenVINO", "tract", "IREE", "TVM", "MNN", "tinygrad", "onnx2torch", "onnx2pytorch", "nxrt",
    "onnx's reference evaluator",
)  # fmt: skip
STATIC = (*_ORT, "onnx2pytorch", "nxrt", "onnx's reference evaluator")
CONTRIB = (*_ORT, "nxrt")
PANELS = ("ONNX Runtime in Python", "in Node")
"""Where its kernels take panels of so many rows: `probe.onnx` tells."""


MODULES = {
    "onnxruntime": "onnxruntime",
    "onnxruntime-genai": "onnxruntime_genai",
    "openvino": "openvino",
    "tract": "tract",
}
"""Names for `check --runtime`, and the modules they are imported as."""


def runs_in(manifest: Manifest, graph: GraphSpec) -> tuple[str, ...]:
    """Of RUNTIMES, those that run this graph of an export."""
    if graph.lowering == "portable" and manifest.target == "portable" and graph.entry != "shrink":
        return RUNTIMES
    if graph.lowering == "portable":
        return tuple(name for name in RUNTIMES if name not in _FEEDERS)
    if manifest.panel_rows and graph.entry != "grow":
        return PANELS
    if "com.microsoft" not in graph.opsets:
        return STATIC
    # It has MatMulNBits, GatherBlockQuantized and GroupQueryAttention for f32, and neither FusedMatMul nor
    # TensorScatter. Scales must be initializers: those that a graph casts from f16 are not.
    scales = {config.scales for config in manifest.quantized.values()}
    in_f32 = scales == {"F32"} and graph.lowering == "contrib" and "cpu" in graph.providers
    return (*CONTRIB, "OpenVINO") if in_f32 else CONTRIB


def describe_runtimes(manifest: Manifest, graph: GraphSpec) -> list[str]:
    """Lines: which runtimes run this graph, which do not, and what to know of them."""
    if any(spec.dtype == "bfloat16" for spec in graph.inputs):
        return ["runs in ONNX Runtime on CUDA; few runtimes multiply bf16 on a CPU, ONNX Runtime not"]
    known = runs_in(manifest, graph)
    lines = [f"runs in {', '.join(known)}"]
    if manifest.panel_rows and graph.entry != "grow":
        lines.append(f"only on processors for which probe.onnx finds panels of {manifest.panel_rows} rows")
    if refused := [name for name in RUNTIMES if name not in known]:
        lines.append(f"not in {', '.join(refused)}")
    if {*_FEEDERS} <= {*known}:
        lines.append(f"{', '.join(_FEEDERS)} each want it in their own layout")
    if graph.lowering == "contrib" and "OpenVINO" in known:
        lines.append("OpenVINO takes one sequence at a time, and puts out a cache of the live length")
    return lines


def verify_runtime(name: str, manifest: Manifest) -> None:
    """Raise UserError where there is no such runtime to check with, or it is not installed, or has no graph here."""
    if name not in MODULES:
        raise UserError(f"--runtime {name!r} is not known; choose one of {', '.join(MODULES)}")
    if manifest.target != "portable":
        raise UserError(
            f"--runtime {name}: is for portable exports, made with --target portable; this is none"
        )
    try:
        importlib.import_module(MODULES[name])
    except ImportError as error:
        where = ", in an environment of its own: it brings another ONNX Runtime" if "genai" in name else ""
        raise UserError(f"--runtime {name}: {first_line(error)}; pip install {name}{where}") from None
