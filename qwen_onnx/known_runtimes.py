"""Which programs take a graph, as far as they were tried: docs/runtimes.md has what was measured."""

from __future__ import annotations

from qwen_onnx.contract import GraphSpec, Manifest

_ORT = "ONNX Runtime (Python, Node, web)"
_OTHERS = "OpenVINO, tract, IREE, TVM, MNN, tinygrad and onnx2torch"
_ANY = f"{_ORT}, onnxruntime-genai, optimum, transformers.js, {_OTHERS}, onnx's reference evaluator"
_OWN_NAMES = "its inputs are not those that onnxruntime-genai, optimum and transformers.js feed"

TAKEN = {
    "portable": (_ANY, ""),
    "static": (f"{_ORT}, onnx's reference evaluator", f"{_OTHERS} know no TensorScatter; {_OWN_NAMES}"),
    "contrib": (_ORT, f"{_OTHERS} do not know com.microsoft, or not all of it; {_OWN_NAMES}"),
}
"""By lowering: what takes it, and why others do not."""


def describe_runtimes(manifest: Manifest, graph: GraphSpec) -> str:
    """One line: which runtimes take this graph of an export, and which do not."""
    if graph.entry in ("grow", "shrink"):
        return f"runs in {_ORT}; others do without it"
    if "com.microsoft" in graph.opsets:
        taken, refused = TAKEN["contrib"]
    elif graph.lowering == "portable":
        taken, refused = TAKEN["portable"]
    else:
        taken, refused = TAKEN["static"]
    bf16 = [spec.name for spec in graph.inputs if spec.dtype == "bfloat16"]
    if bf16 and "cpu" not in graph.providers:
        taken = "ONNX Runtime on CUDA"
        refused = "few runtimes multiply bf16 on a CPU, ONNX Runtime is not one of them"
    return f"runs in {taken}" + (f"; not elsewhere: {refused}" if refused else "")
