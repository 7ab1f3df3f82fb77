"""Which graphs an export has, and whether a checkpoint's tensors are the ones they need."""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from qwen_onnx.checkpoint import Checkpoint
from qwen_onnx.config import QwenConfig
from qwen_onnx.contract import DTYPES, GraphSpec, TensorSpec
from qwen_onnx.errors import UserError
from qwen_onnx.graphs.build import build_decoder, build_grow, parameters
from qwen_onnx.graphs.lowering import Lowering
from qwen_onnx.graphs.state import Precision
from qwen_onnx.graphs.static import StaticLowering

_PLAUSIBLE_LAYERS = 200  # the largest Qwen has 80; so few graphs are built in a moment
_IR_DTYPES = {"f32": ir.DataType.FLOAT, "f16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}


class GraphPlan(NamedTuple):
    """A graph file to be written."""

    file: str
    entry: str
    lowering: Lowering
    precision: Precision
    providers: tuple[str, ...]


def graph_plans(dtype: str) -> list[GraphPlan]:
    """The graph files of an export.

    f16 and bf16 have twins for the CPU, which compute in f32 over the same weights: the CPU provider cannot
    multiply bf16, and multiplies f16 in f32 anyway, rounding in between for nothing.
    """
    kind = _IR_DTYPES[dtype]
    static = StaticLowering()
    own, entries = Precision(kind, kind), ("prefill", "decode", "grow")
    if dtype == "f32":
        return [GraphPlan(f"{entry}.onnx", entry, static, own, ("cpu", "cuda")) for entry in entries]
    on_cpu = Precision(kind, ir.DataType.FLOAT)
    return [
        *(GraphPlan(f"{entry}.onnx", entry, static, own, ("cuda",)) for entry in entries),
        *(GraphPlan(f"{entry}.cpu.onnx", entry, static, on_cpu, ("cpu",)) for entry in entries),
    ]


def build_planned(plan: GraphPlan, config: QwenConfig, positions: int) -> ir.Model:
    """The graph of one plan, its weights declared and not loaded."""
    if plan.entry == "grow":
        return build_grow(config, plan.precision.hidden, plan.lowering)
    single = plan.entry == "decode"
    return build_decoder(config, plan.precision, plan.lowering, positions=positions, single=single)


def verify_depth(checkpoint: Checkpoint) -> None:
    """config.json does not say more layers than there can be, before graphs are built of what it says.

    Raises:
        UserError: with both numbers.
    """
    layers, tensors = checkpoint.config.num_hidden_layers, len(checkpoint.tensors)
    if layers > max(tensors, _PLAUSIBLE_LAYERS):
        raise UserError(
            f"{checkpoint.folder}: config.json says {layers} layers, there are {tensors} tensors in all; "
            "incomplete download?"
        )


def match_tensors(model: ir.Model, checkpoint: Checkpoint, made: set[str]) -> None:
    """Every parameter but the `made` ones has its tensor, of its shape and a float type, and none is left over.

    Raises:
        UserError: naming the file and the tensor.
    """
    wanted = {name: value for name, value in parameters(model).items() if name not in made}
    found = checkpoint.tensors
    if missing := sorted(wanted.keys() - found.keys()):
        raise UserError(f"{checkpoint.folder}: {len(missing)} tensors are missing: {_some(missing)}")
    if surplus := sorted(found.keys() - wanted.keys()):
        file = found[surplus[0]].file
        raise UserError(
            f"{file}: {len(surplus)} tensors that config.json does not describe: {_some(surplus)}"
        )
    for name, value in wanted.items():
        tensor, shape = found[name], tuple(value.shape.numpy()) if value.shape else ()
        if tensor.shape != shape:
            raise UserError(
                f"{tensor.file}: tensor {name} has shape {list(tensor.shape)}, config.json wants {list(shape)}"
            )
        if tensor.dtype not in DTYPES.values():
            raise UserError(f"{tensor.file}: tensor {name} is {tensor.dtype}; wanted F32, F16 or BF16")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def graph_spec(plan: GraphPlan, model: ir.Model) -> GraphSpec:
    """What the manifest says of a graph."""

    def specs(values: list[ir.Value]) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(
                value.name or "",
                ir.DataType(value.dtype or 0).numpy().name,
                tuple(dim if isinstance(dim, int) else str(dim) for dim in value.shape or ()),
            )
            for value in values
        )

    graph = model.graph
    return GraphSpec(
        plan.file, plan.entry, plan.lowering.name, plan.providers, dict(graph.opset_imports),
        specs(list(graph.inputs)), specs(list(graph.outputs)),
    )  # fmt: skip
