"""Where ONNX Runtime's CUDA provider places the nodes of a graph, and whether it would capture it."""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
from collections import Counter
from pathlib import Path

from support.cuda import stand_ins as cuda_stand_ins

PROGRAM = """
import json, sys
import onnx, onnxruntime

def start(options, provider_options):
    options.log_severity_level = 0
    providers = [("CUDAExecutionProvider", provider_options)]
    return onnxruntime.InferenceSession(model, options, providers=providers)

model, optimized, capture = sys.argv[1], sys.argv[2], sys.argv[3] == "True"
options = onnxruntime.SessionOptions()
options.optimized_model_filepath = optimized
start(options, {})

def nodes(graph):
    for node in graph.node:
        yield node.op_type
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from nodes(inner)

print(json.dumps(list(nodes(onnx.load(optimized, load_external_data=False).graph))))
if capture:
    print("captured:", file=sys.stderr, flush=True)
    try:
        start(onnxruntime.SessionOptions(), {"enable_cuda_graph": "1"})
    except Exception as error:
        print(error, file=sys.stderr)
"""

NODE = re.compile(r"VerifyEachNodeIsAssignedToAnEp\]\s+(\w+) \((.*)\)")
GROUP = re.compile(
    r"VerifyEachNodeIsAssignedToAnEp\]\s+(?:All nodes|Node\(s\)) placed on \[(\w+)\]\. Number of nodes: (\d+)"
)
VERDICT = re.compile(r"This session (will|cannot) use the graph capture feature")


@dataclasses.dataclass(frozen=True)
class Placement:
    """The nodes that run, after every optimization, the copies that ONNX Runtime adds among them."""

    cuda: Counter[str]
    """How many of each op."""
    cpu: list[tuple[str, str]]
    """Op and name of each node."""
    memcpy: int
    """Copies between the CPU and the device, which are on neither list."""
    casts: int
    """On the device."""
    capture_accepted: bool | None
    """By the provider's own check when it is started for capture; None when that was not asked."""


def place(folder: Path, model_path: Path, *, capture: bool) -> Placement:
    """`folder`: of the stand-ins.

    The nodes are those of the optimized graph, which ONNX Runtime saves without their providers; which are on the CPU
    is in its log. Its record of assignments (`get_provider_graph_assignment_info`) is made before fusions and copies.
    """
    with tempfile.TemporaryDirectory(
        dir=model_path.parent
    ) as beside:  # weights are found from the graph's folder
        run = cuda_stand_ins.run(folder, PROGRAM, model_path, Path(beside) / "optimized.onnx", capture)
    if run.returncode:
        raise RuntimeError(f"{model_path.name} does not start on the stand-ins:\n{run.stderr[-4000:]}")
    log, _, capture_log = run.stderr.partition("\ncaptured:\n")
    ops = Counter(json.loads(run.stdout.splitlines()[-1]))
    cpu = _placed_on_cpu(log, ops.total())
    ops.subtract(op for op, _ in cpu)
    memcpy = sum(ops.pop(op, 0) for op in ("MemcpyFromHost", "MemcpyToHost"))
    verdict = VERDICT.search(capture_log)
    if capture and not verdict:
        raise RuntimeError(f"no word of capture in the log:\n{capture_log[-4000:]}")
    accepted = verdict[1] == "will" if verdict else None
    return Placement(+ops, cpu, memcpy, ops["Cast"], accepted)


def _placed_on_cpu(log: str, total: int) -> list[tuple[str, str]]:
    """The log has the nodes of each provider, but only their number when one has all."""
    groups = {name: int(number) for name, number in GROUP.findall(log)}
    if sum(groups.values()) != total:
        raise RuntimeError(f"the log places {groups}, the optimized graph has {total} nodes")
    if set(groups) == {"CPUExecutionProvider"}:
        raise RuntimeError("every node is on the CPU, and the log does not name them")
    cpu: list[tuple[str, str]] = []
    inside = False
    for line in log.splitlines():
        if group := GROUP.search(line):
            inside = group[1] == "CPUExecutionProvider"
        elif inside and (node := NODE.search(line)):
            cpu.append((node[1], node[2]))
    if len(cpu) != groups.get("CPUExecutionProvider", 0):
        raise RuntimeError(f"the log names {len(cpu)} of the nodes on the CPU: {groups}")
    return cpu
