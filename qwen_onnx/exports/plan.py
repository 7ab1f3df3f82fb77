"""Which graphs an export has, and how each is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import onnx_ir as ir

from qwen_onnx.checkpoints.config import QwenConfig
from qwen_onnx.contract.cache_spec import CacheSpec, ResizeKey, StateSpec
from qwen_onnx.contract.manifest import GraphSpec, TensorSpec
from qwen_onnx.contract.quant import QuantPlan
from qwen_onnx.exports.layouts.layout import Layout
from qwen_onnx.graphs import lowerings
from qwen_onnx.graphs.build import build_decoder, build_probe, build_resize_cache, build_truncate_cache
from qwen_onnx.graphs.cache import Precision
from qwen_onnx.graphs.lowerings import Lowering

_FLOAT, _FLOAT16 = ir.DataType.FLOAT, ir.DataType.FLOAT16
_IR_DTYPES = {"f32": _FLOAT, "f16": _FLOAT16, "bf16": ir.DataType.BFLOAT16}
_CPU, _CUDA, _TENSORRT = ("cpu",), ("cuda",), ("tensorrt",)
_F32 = Precision(_FLOAT, _FLOAT)


@dataclasses.dataclass(frozen=True)
class ExportKind:
    """What decides which graphs an export has, beside the model."""

    dtype: str
    layout: Layout
    portable: bool = False
    """For any runtime."""
    split: bool = False
    """Portable: a graph of any number of tokens and one of single tokens too, for runtimes that compile shapes."""
    quant: QuantPlan | None = None
    panel_rows: int | None = None
    packed: bool = True
    """The weights file holds side by side what some graphs read as one matrix."""


class GraphPlan(NamedTuple):
    """A graph file to be written."""

    file: str
    entry: str
    lowering: Lowering
    precision: Precision
    providers: tuple[str, ...]
    state: StateSpec | None = None
    """Of `grow` and `shrink`: one of the state tensors that it resizes."""

    def cache(self, config: QwenConfig) -> CacheSpec | None:
        """The state tensors of a decoder; None of what is none."""
        if self.entry in ("grow", "shrink", "probe"):
            return None
        return self.lowering.cache.spec(config, self.precision)


def graph_plans(config: QwenConfig, kind: ExportKind) -> list[GraphPlan]:
    """The graph files of an export."""
    if kind.portable:
        return [*_portable_plans(config, kind)]
    if kind.panel_rows:
        return [*_panel_plans(config, kind.panel_rows)]
    if kind.quant:
        return [*_quantized_plans(config, kind.quant)]
    return [*(_f32_plans(config) if kind.dtype == "f32" else _half_plans(config, kind))]


def _f32_plans(config: QwenConfig) -> Iterator[GraphPlan]:
    """CUDA has graphs of its own: its fused attention knows no f32."""
    static, capture = lowerings.STATIC, lowerings.CAPTURE
    yield GraphPlan("prefill.onnx", "prefill", static, _F32, _CPU)
    yield GraphPlan("decode.onnx", "decode", static, _F32, _CPU)
    yield GraphPlan("decode.grouped.onnx", "decode", lowerings.GROUPED, _F32, _CPU)
    yield GraphPlan("prefill.cuda.onnx", "prefill", capture, _F32, _CUDA)
    yield GraphPlan("decode.cuda.onnx", "decode", capture, _F32, _CUDA)
    yield GraphPlan("greedy.onnx", "greedy", capture, _F32, _CPU + _CUDA)
    yield from _resizing(config, GraphPlan("grow.onnx", "grow", static, _F32, _CPU + _CUDA))
    yield GraphPlan("score.onnx", "score", static, _F32, _CPU)
    yield from _tensorrt_plans(config, _F32)


def _half_plans(config: QwenConfig, kind: ExportKind) -> Iterator[GraphPlan]:
    """f16 and bf16 have twins for the CPU, which compute in f32 over the same weights.

    The CPU provider cannot multiply bf16, and multiplies f16 in f32 anyway, rounding in between for nothing.
    """
    own = Precision(_IR_DTYPES[kind.dtype], _IR_DTYPES[kind.dtype])
    on_cpu = Precision(own.weights, _FLOAT)
    static, capture = lowerings.STATIC, lowerings.CAPTURE
    contrib = lowerings.CONTRIB if kind.packed else lowerings.CONTRIB_LINKED
    fused = contrib if _rotates(config) else capture
    yield from (
        GraphPlan(f"{entry}.onnx", entry, fused, own, _CUDA) for entry in ("prefill", "decode", "greedy")
    )
    yield from _resizing(config, GraphPlan("grow.onnx", "grow", static, own, _CUDA))
    yield GraphPlan("prefill.cpu.onnx", "prefill", static, on_cpu, _CPU)
    yield GraphPlan("decode.cpu.onnx", "decode", static, on_cpu, _CPU)
    yield GraphPlan("greedy.cpu.onnx", "greedy", capture, on_cpu, _CPU)
    yield from _resizing(config, GraphPlan("grow.cpu.onnx", "grow", static, on_cpu, _CPU))
    yield GraphPlan("score.cpu.onnx", "score", static, on_cpu, _CPU)
    yield from _tensorrt_plans(config, own)


def _tensorrt_plans(config: QwenConfig, precision: Precision) -> Iterator[GraphPlan]:
    portable = lowerings.PORTABLE
    yield GraphPlan("prefill.tensorrt.onnx", "prefill", portable, precision, _TENSORRT)
    shrink = GraphPlan("shrink.tensorrt.onnx", "shrink", portable, precision, _TENSORRT)
    yield from _resizing(config, shrink)


def _quantized_plans(config: QwenConfig, quant: QuantPlan) -> Iterator[GraphPlan]:
    """Activations are f32 on the CPU, f16 on CUDA."""
    f32, f16 = (Precision(_FLOAT, hidden, quant) for hidden in (_FLOAT, _FLOAT16))
    static, capture, contrib = lowerings.BLOCKS_STATIC, lowerings.BLOCKS_CAPTURE, lowerings.BLOCKS_CONTRIB
    on_cpu = contrib if _rotates(config) else static
    fixed = contrib if _rotates(config) else capture
    yield GraphPlan("prefill.onnx", "prefill", on_cpu, f32, _CPU)
    yield GraphPlan("decode.onnx", "decode", on_cpu, f32, _CPU)
    yield GraphPlan("greedy.onnx", "greedy", fixed, f32, _CPU)
    yield from _resizing(config, GraphPlan("grow.onnx", "grow", static, f32, _CPU))
    yield GraphPlan("decode.grouped.onnx", "decode", lowerings.BLOCKS_GROUPED, f32, _CPU)
    yield GraphPlan("score.onnx", "score", on_cpu, f32, _CPU)
    for entry in ("prefill", "decode", "greedy"):
        yield GraphPlan(f"{entry}.cuda.onnx", entry, fixed, f16, _CUDA)
    yield from _resizing(config, GraphPlan("grow.cuda.onnx", "grow", static, f16, _CUDA))


def _panel_plans(config: QwenConfig, panel_rows: int) -> Iterator[GraphPlan]:
    """For processors whose panels have so many rows."""
    f32, static = Precision(_FLOAT, _FLOAT, panel_rows=panel_rows), lowerings.PANELS_STATIC
    yield GraphPlan("prefill.onnx", "prefill", static, f32, _CPU)
    yield GraphPlan("decode.onnx", "decode", lowerings.PANELS_GROUPED, f32, _CPU)
    yield GraphPlan("greedy.onnx", "greedy", lowerings.PANELS_CAPTURE, f32, _CPU)
    yield GraphPlan("score.onnx", "score", static, f32, _CPU)
    yield from _resizing(config, GraphPlan("grow.onnx", "grow", static, f32, _CPU))
    yield GraphPlan("probe.onnx", "probe", static, f32, _CPU)


def _portable_plans(config: QwenConfig, kind: ExportKind) -> Iterator[GraphPlan]:
    """One graph for all, and one that only our runner needs."""
    portable, own = lowerings.PORTABLE, Precision(_IR_DTYPES[kind.dtype], _IR_DTYPES[kind.dtype])
    everywhere = _CPU + _CUDA + _TENSORRT
    entries = {"model": "prefill", **({"prefill": "prefill", "decode": "decode"} if kind.split else {})}
    for stem, entry in entries.items():
        yield GraphPlan(kind.layout.graph_file(stem, kind.dtype), entry, portable, own, everywhere)
    shrink = kind.layout.graph_file("shrink", kind.dtype)
    yield from _resizing(config, GraphPlan(shrink, "shrink", portable, own, everywhere))


def _resizing(config: QwenConfig, plan: GraphPlan) -> Iterator[GraphPlan]:
    """The plan for each type and shape of state tensors with slots: the first under its own name, others numbered."""
    kinds: dict[ResizeKey, StateSpec] = {}
    for state in plan.lowering.cache.spec(config, plan.precision).states:
        if state.slot_axis is not None:
            kinds.setdefault(state.resize_key, state)
    for number, state in enumerate(kinds.values()):
        file = plan.file.replace(".onnx", f".{number}.onnx") if number else plan.file
        yield plan._replace(file=file, state=state)


def _rotates(config: QwenConfig) -> bool:
    """GroupQueryAttention rotates heads of such sizes only; every published Qwen has 64 or 128."""
    return config.head_dim % 16 == 0


def build_planned(plan: GraphPlan, config: QwenConfig, positions: int) -> ir.Model:
    """The graph of one plan, its weights declared and not loaded."""
    if plan.entry == "probe":
        return build_probe()
    if plan.state is not None:
        return (build_resize_cache if plan.entry == "grow" else build_truncate_cache)(plan.state)
    return build_decoder(
        config,
        plan.precision,
        plan.lowering,
        positions=positions,
        single=plan.entry == "decode",
        greedy=plan.entry == "greedy",
        score=plan.entry == "score",
    )


def checkpoint_plan() -> GraphPlan:
    """A graph whose parameters are the checkpoint's own tensors, of their shapes."""
    return GraphPlan("prefill.onnx", "prefill", lowerings.STATIC, _F32, ())


def graph_spec(plan: GraphPlan, model: ir.Model, cache: str | None) -> GraphSpec:
    """What the manifest says of a graph, and of its cache by name."""

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
        specs(list(graph.inputs)), specs(list(graph.outputs)), cache,
    )  # fmt: skip
