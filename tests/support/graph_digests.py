"""A digest of every graph of every kind of export of every test configuration, part by part.

`python -m support.graph_digests` (with tests/ on PYTHONPATH) writes graph_digests.json anew, after a graph was
changed on purpose: its difference names the graphs and the parts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx_ir as ir

from qwen_onnx.checkpoints.config import QwenConfig, parse_config
from qwen_onnx.contract.quant import QuantConfig, QuantPlan
from qwen_onnx.exports.layouts.known import choose_layout
from qwen_onnx.exports.panels import misfit
from qwen_onnx.exports.plan import ExportKind, GraphPlan, build_planned, graph_plans
from support.checkpoints import CONFIGS

GOLDEN = Path(__file__).with_name("graph_digests.json")
POSITIONS = 64
Parts = dict[str, str]


def plans(config: QwenConfig) -> Iterator[tuple[str, GraphPlan]]:
    """Every graph of every kind of export, with the kind's name."""
    plain, _ = choose_layout("plain", "portable", "f32")
    kinds = {
        f"{dtype}{'' if packed else '-link'}": ExportKind(dtype, plain, packed=packed)
        for dtype in ("f32", "f16", "bf16")
        for packed in (True, False)
    }
    for dtype in ("f32", "f16"):
        kinds[f"portable-{dtype}"] = ExportKind(dtype, plain, portable=True, split=True)
    for bits in (4, 8):
        quant = QuantPlan(QuantConfig(bits, 32), QuantConfig(8, 16))
        kinds[f"int{bits}"] = ExportKind(f"int{bits}", plain, quant=quant)
    zero_points, eight = QuantConfig(4, 64, True, "F16"), QuantConfig(8, 32, scales="F16")
    mixed = QuantPlan(zero_points, zero_points, (("1.down", eight), ("0.qkv", eight)))
    kinds["int4-mixed"] = ExportKind("int4", plain, quant=mixed)
    for rows in (8, 16):
        if not misfit(config, rows):
            kinds[f"panels{rows}"] = ExportKind("f32", plain, panel_rows=rows)
    for name, kind in kinds.items():
        yield from ((name, plan) for plan in graph_plans(config, kind))


def parts(model: ir.Model) -> Parts:
    """The digest of each part of a graph; the order of nodes does not count, their names and wires do."""
    graph = model.graph
    nodes = [
        [
            node.domain,
            node.op_type,
            node.name,
            [None if value is None else value.name for value in node.inputs],
            [_value(value) for value in node.outputs],
            sorted((name, str(attribute.value)) for name, attribute in node.attributes.items()),
        ]
        for node in graph
    ]
    return {
        "nodes": _digest(sorted(json.dumps(node, default=str) for node in nodes)),
        "initializers": _digest(sorted(_value(value) for value in graph.initializers.values())),
        "inputs": _digest([_value(value) for value in graph.inputs]),
        "outputs": _digest([_value(value) for value in graph.outputs]),
        "opsets": _digest(sorted(graph.opset_imports.items())),
    }


def digests(name: str) -> dict[str, Parts]:
    """Of one of CONFIGS: its graphs, as CONFIG/KIND/FILE."""
    config = parse_config(CONFIGS[name])
    return {
        f"{name}/{kind}/{plan.file}": parts(build_planned(plan, config, POSITIONS))
        for kind, plan in plans(config)
    }


def golden() -> dict[str, Parts]:
    """What was recorded."""
    found: dict[str, Parts] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return found


def _value(value: ir.Value) -> list[str]:
    return [str(value.name), str(value.dtype), str(value.shape)]


def _digest(part: Any) -> str:
    return hashlib.sha256(json.dumps(part, default=str).encode()).hexdigest()[:12]


def main() -> None:
    """Write the file."""
    found = {graph: own for name in CONFIGS for graph, own in digests(name).items()}
    lines = [f"{json.dumps(graph)}: {json.dumps(own)}" for graph, own in found.items()]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
