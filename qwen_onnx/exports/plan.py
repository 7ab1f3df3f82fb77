"""Which graphs an export has, and whether a checkpoint's tensors are the ones they need."""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from qwen_onnx.checkpoints.checkpoint import Checkpoint
from qwen_onnx.checkpoints.config import QwenConfig
from qwen_onnx.contract import DTYPES, BlockPlan
from qwen_onnx.errors import UserError
from qwen_onnx.exports.layouts.layout import Layout
from qwen_onnx.graphs.build import build_decoder, build_grow, build_probe, build_shrink, parameters
from qwen_onnx.graphs.contrib import ContribLowering
from qwen_onnx.graphs.grouped import GroupedLowering
from qwen_onnx.graphs.lowering import Lowering
from qwen_onnx.graphs.panels import PanelCaptureLowering, PanelGroupedLowering, PanelLowering
from qwen_onnx.graphs.portable import PortableLowering
from qwen_onnx.graphs.quantised import (
    QuantisedCaptureLowering,
    QuantisedContribLowering,
    QuantisedGroupedLowering,
    QuantisedLowering,
)
from qwen_onnx.graphs.state import Precision
from qwen_onnx.graphs.static import CaptureLowering, StaticLowering
from qwen_onnx.manifest import GraphSpec, TensorSpec

_PLAUSIBLE_LAYERS = 200  # the largest Qwen has 80; so few graphs are built in a moment
_IR_DTYPES = {"f32": ir.DataType.FLOAT, "f16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}


class GraphPlan(NamedTuple):
    """A graph file to be written."""

    file: str
    entry: str
    lowering: Lowering
    precision: Precision
    providers: tuple[str, ...]


def quantised_plans(config: QwenConfig, blocks: BlockPlan) -> list[GraphPlan]:
    """The graph files of an int8 or int4 export: its activations are f32 on the CPU, f16 on CUDA."""
    plain, capture = QuantisedLowering(), QuantisedCaptureLowering()
    fused = _fused(config, QuantisedContribLowering())
    of_cpu = {"prefill": fused or plain, "decode": fused or plain, "greedy": fused or capture, "grow": plain}
    of_cuda = {**dict.fromkeys(of_cpu, fused or capture), "grow": plain}
    f32, f16 = (
        Precision(ir.DataType.FLOAT, kind, blocks) for kind in (ir.DataType.FLOAT, ir.DataType.FLOAT16)
    )
    return [
        *(GraphPlan(f"{entry}.onnx", entry, of_cpu[entry], f32, ("cpu",)) for entry in of_cpu),
        GraphPlan("decode.grouped.onnx", "decode", QuantisedGroupedLowering(), f32, ("cpu",)),
        GraphPlan("score.onnx", "score", of_cpu["prefill"], f32, ("cpu",)),
        *(GraphPlan(f"{entry}.cuda.onnx", entry, of_cuda[entry], f16, ("cuda",)) for entry in of_cuda),
    ]


def panel_plans(panel_rows: int) -> list[GraphPlan]:
    """The graph files of an f32 export for processors whose panels have so many rows."""
    f32 = Precision(ir.DataType.FLOAT, ir.DataType.FLOAT, panel_rows=panel_rows)
    lowerings = {
        "prefill": PanelLowering(), "decode": PanelGroupedLowering(), "greedy": PanelCaptureLowering(),
        "score": PanelLowering(), "grow": PanelLowering(), "probe": PanelLowering(),
    }  # fmt: skip
    return [
        GraphPlan(f"{entry}.onnx", entry, lowering, f32, ("cpu",)) for entry, lowering in lowerings.items()
    ]


def plain_plan() -> GraphPlan:
    """A graph whose parameters are the checkpoint's own tensors, of their shapes."""
    f32 = Precision(ir.DataType.FLOAT, ir.DataType.FLOAT)
    return GraphPlan("prefill.onnx", "prefill", StaticLowering(), f32, ())


def graph_plans(config: QwenConfig, dtype: str, *, packed: bool = True) -> list[GraphPlan]:
    """The graph files of an export.

    f16 and bf16 have twins for the CPU, which compute in f32 over the same weights: the CPU provider cannot
    multiply bf16, and multiplies f16 in f32 anyway, rounding in between for nothing. f32 has graphs of its own for
    CUDA, whose fused attention knows no f32.

    Args:
        packed: the weights file holds side by side what some graphs read as one matrix.
    """
    kind = _IR_DTYPES[dtype]
    static, capture, portable = StaticLowering(), CaptureLowering(), PortableLowering()
    own, on_cpu = Precision(kind, kind), Precision(kind, ir.DataType.FLOAT)
    of_cpu = {"prefill": static, "decode": static, "greedy": capture, "grow": static}
    if dtype == "f32":
        both = ("cpu", "cuda")
        return [
            *(GraphPlan(f"{entry}.onnx", entry, static, own, ("cpu",)) for entry in ("prefill", "decode")),
            GraphPlan("decode.grouped.onnx", "decode", GroupedLowering(), own, ("cpu",)),
            *(
                GraphPlan(f"{entry}.cuda.onnx", entry, capture, own, ("cuda",))
                for entry in ("prefill", "decode")
            ),
            *(GraphPlan(f"{entry}.onnx", entry, of_cpu[entry], own, both) for entry in ("greedy", "grow")),
            GraphPlan("score.onnx", "score", static, own, ("cpu",)),
            *_of_tensorrt(portable, own),
        ]
    of_cuda = {
        **dict.fromkeys(of_cpu, _fused(config, ContribLowering(packed=packed)) or capture),
        "grow": static,
    }
    return [
        *(GraphPlan(f"{entry}.onnx", entry, of_cuda[entry], own, ("cuda",)) for entry in of_cuda),
        *(GraphPlan(f"{entry}.cpu.onnx", entry, of_cpu[entry], on_cpu, ("cpu",)) for entry in of_cpu),
        GraphPlan("score.cpu.onnx", "score", static, on_cpu, ("cpu",)),
        *_of_tensorrt(portable, own),
    ]


def portable_plans(dtype: str, layout: Layout, *, split: bool) -> list[GraphPlan]:
    """The graph files of an export for any runtime: one for all, and one that only our runner needs.

    Args:
        split: a graph of any number of tokens and one of single tokens too, for runtimes that compile shapes.
    """
    portable, own = PortableLowering(), Precision(_IR_DTYPES[dtype], _IR_DTYPES[dtype])
    entries = {"model": "prefill", **({"prefill": "prefill", "decode": "decode"} if split else {})}
    everywhere = ("cpu", "cuda", "tensorrt")
    return [
        GraphPlan(layout.graph_file(stem, dtype), entry, portable, own, everywhere)
        for stem, entry in {**entries, "shrink": "shrink"}.items()
    ]


def _fused(config: QwenConfig, lowering: ContribLowering) -> ContribLowering | None:
    """GroupQueryAttention rotates heads of such sizes only; every published Qwen has 64 or 128."""
    return lowering if config.head_dim % 16 == 0 else None


def _of_tensorrt(portable: Lowering, precision: Precision) -> list[GraphPlan]:
    return [
        GraphPlan("prefill.tensorrt.onnx", "prefill", portable, precision, ("tensorrt",)),
        GraphPlan("shrink.tensorrt.onnx", "shrink", portable, precision, ("tensorrt",)),
    ]


def build_planned(plan: GraphPlan, config: QwenConfig, positions: int) -> ir.Model:
    """The graph of one plan, its weights declared and not loaded."""
    if plan.entry == "grow":
        return build_grow(config, plan.precision.hidden)
    if plan.entry == "probe":
        return build_probe()
    if plan.entry == "shrink":
        return build_shrink(config, plan.precision.hidden)
    return build_decoder(
        config,
        plan.precision,
        plan.lowering,
        positions=positions,
        single=plan.entry == "decode",
        greedy=plan.entry == "greedy",
        score=plan.entry == "score",
    )


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
