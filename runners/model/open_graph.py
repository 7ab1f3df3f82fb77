"""Opens an export's graph for a provider, as the executor that its lowering asks for."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from qwen_onnx.contract import LOWERINGS
from qwen_onnx.contract.cache_spec import ResizeKey
from qwen_onnx.contract.manifest import GraphSpec, Manifest, is_weights
from qwen_onnx.errors import UserError, option
from qwen_onnx.runners.model.buffers import CacheMemory
from qwen_onnx.runners.model.executors.executor import Executor
from qwen_onnx.runners.model.executors.fixed_shape import FixedShape
from qwen_onnx.runners.model.executors.growing import Growing
from qwen_onnx.runners.model.executors.inputs import step_inputs
from qwen_onnx.runners.model.executors.live_slice import LiveSlice
from qwen_onnx.runners.model.executors.two_graphs import LongContext, TwoGraphs
from qwen_onnx.runners.runtime.integrity import verify_graph
from qwen_onnx.runners.runtime.machine import free_memory
from qwen_onnx.runners.runtime.nvidia.engine_cache import Engine, open_engine
from qwen_onnx.runners.runtime.nvidia.libraries import cuda_libraries
from qwen_onnx.runners.runtime.options import SessionOptions
from qwen_onnx.runners.runtime.panels import verify_panels
from qwen_onnx.runners.runtime.session import open_session

_DEVICES = {"cpu": "cpu", "cuda": "cuda", "tensorrt": "cuda"}
"""Where a provider's OrtValues lie."""


class Opened(NamedTuple):
    """A graph ready to run."""

    graph: GraphSpec
    executor: Executor
    engine: Engine | None
    """On TensorRT."""


@dataclasses.dataclass(frozen=True)
class Export:
    """An exported folder on one provider, and how its graphs are to be opened."""

    folder: Path
    manifest: Manifest
    provider: str
    options: SessionOptions
    lean: bool = False
    """See open_session."""

    def open(self, graph: GraphSpec, *, in_place: bool = False, capture: bool = False) -> Any:
        """A session of one of its graphs, verified; see `open_session`.

        Raises:
            UserError: it is damaged, or does not load.
        """
        verify_graph(self.folder, self.manifest, graph)
        path = self.folder / graph.file
        return open_session(
            path, self.provider, self.options, in_place=in_place, capture=capture, lean=self.lean
        )

    def resizing(self, entry: str) -> dict[ResizeKey, Any]:
        """Sessions of the graphs that resize state tensors (`grow` or `shrink`), by resize_key."""
        # One node: not worth a second thread, nor an engine of TensorRT.
        options = dataclasses.replace(self.options, threads=1)
        plain = dataclasses.replace(self, provider=_DEVICES[self.provider], options=options)
        self.manifest.graph(entry, self.provider)  # which says so where there is none
        found = {}
        for graph in self.manifest.graphs:
            if graph.entry == entry and self.provider in graph.providers:
                tensor = graph.inputs[0]
                fixed = tuple(size if isinstance(size, int) else None for size in tensor.shape)
                found[tensor.dtype, fixed] = plain.open(graph)
        return found

    def memory(
        self,
        graph: GraphSpec,
        resize_sessions: Mapping[ResizeKey, Any] = MappingProxyType({}),
        *,
        keep: bool = False,
        tight: bool = False,
        starts_empty: bool = False,
    ) -> CacheMemory:
        """Of the caches of a graph; see CacheMemory."""
        spec, device = self.manifest.caches[graph.cache or ""], _DEVICES[self.provider]
        return CacheMemory(spec, device, resize_sessions, keep=keep, tight=tight, starts_empty=starts_empty)


def open_graph(
    folder: Path,
    manifest: Manifest,
    provider: str,
    options: SessionOptions,
    *,
    context_length: int,
    prefill_chunk: int,
    for_scores: bool = False,
    lean: bool = False,
) -> Opened:
    """The graph of an export that serves prefill and decode on a provider that was seen to start.

    Args:
        for_scores: the `score` graph alone, though others are faster for single tokens.
        lean: see open_session.

    Raises:
        UserError: the export has none, is damaged, or does not load.
    """
    _verify_options(manifest, provider, options)
    verify_panels(folder, manifest)
    entry = (
        "greedy" if options.greedy_on_device else "score" if options.speculate or for_scores else "prefill"
    )
    graph, export = manifest.graph(entry, provider), Export(folder, manifest, provider, options, lean)
    given = LOWERINGS[graph.lowering].cache
    if given == "grown":
        return _open_growing(export, graph, context_length=context_length, prefill_chunk=prefill_chunk)
    if options.prepack is False and manifest.quantized:
        raise UserError(
            f"{option('prepack', False)}: {manifest.dtype} weights are computed with as ONNX Runtime packs them only"
        )
    if provider == "cuda" and graph.entry == "greedy" and (fault := _cudnn_fault()):
        raise UserError(f"{option('greedy_on_device')} needs cuDNN for its argmax: {fault}; or leave it out")
    grouped = None if for_scores else _own_decode(manifest, provider)
    executor = (_open_live_slice if given == "live" else _open_fixed)(export, graph, grouped)
    return Opened(graph, executor, None)


def _verify_options(manifest: Manifest, provider: str, options: SessionOptions) -> None:
    if options.speculate and provider != "cpu":
        raise UserError(f"{option('speculate')} is for the CPU, not {provider}; leave it out")
    if options.speculate and manifest.quantized:
        raise UserError(
            f"{option('speculate')}: the activations of {manifest.dtype} round otherwise when several tokens go at "
            "once, so that the answer could be another; use an export in f32, f16 or bf16"
        )


def _open_growing(export: Export, graph: GraphSpec, *, context_length: int, prefill_chunk: int) -> Opened:
    if export.provider == "tensorrt":
        verify_graph(export.folder, export.manifest, graph)
        session, engine = open_engine(
            export.folder, export.manifest, graph, export.options,
            capacity=context_length, prefill_chunk=prefill_chunk,
        )  # fmt: skip
    else:
        in_place = export.provider == "cpu" and export.options.prepack is False
        session, engine = export.open(graph, in_place=in_place), None
    memory, shrink = export.memory(graph, starts_empty=True), export.resizing("shrink")
    return Opened(graph, Growing(session, memory, shrink, vocab_size=export.manifest.vocab_size), engine)


def _open_live_slice(export: Export, graph: GraphSpec, grouped: GraphSpec | None) -> Executor:
    """Of `static` graphs; where weights are mapped, single tokens go through the grouped graph over the same file."""
    manifest = export.manifest
    in_place = export.provider == "cpu" and not manifest.quantized and not export.options.prepack
    # f16 and bf16 become f32 copies, once, in any case: a second session would hold them again.
    decode = grouped if in_place and manifest.dtype == "f32" else None
    # Side by side: most of what a session of mapped weights takes is one thread's work on the graph.
    with concurrent.futures.ThreadPoolExecutor(1) as beside:
        of_decode = beside.submit(export.open, decode, in_place=True) if decode else None
        session = export.open(graph, in_place=in_place)
    resize, vocab_size = export.resizing("grow"), manifest.vocab_size
    # A step of the grouped graph reads all slots: few should be empty.
    memory = export.memory(graph, resize, tight=decode is not None)
    prefill = LiveSlice(session, memory, vocab_size=vocab_size, keeps_binding=decode is None)
    if of_decode is None:
        return prefill
    assert decode is not None
    inputs = step_inputs(decode.lowering, on_cpu=True)
    single = FixedShape(
        of_decode.result(), memory, inputs, vocab_size=vocab_size, capture=False, chooses=False
    )
    return TwoGraphs(prefill, single)


def _open_fixed(export: Export, graph: GraphSpec, grouped: GraphSpec | None) -> Executor:
    """Of `static-capture` and `contrib` graphs; beside the latter the grouped one, once a context is long."""
    manifest, options = export.manifest, export.options
    on_cpu, chooses = export.provider == "cpu", graph.entry == "greedy"
    capture = export.provider == "cuda" and options.cuda_graph
    in_place = on_cpu and not manifest.quantized and not options.prepack
    session = export.open(graph, in_place=in_place, capture=capture)
    alone = grouped is None or chooses
    memory = export.memory(graph, export.resizing("grow"), keep=alone, tight=not alone)

    def fixed_shape(own: Any, spec: GraphSpec) -> FixedShape:
        return FixedShape(
            own,
            memory,
            step_inputs(spec.lowering, on_cpu=on_cpu),
            vocab_size=manifest.vocab_size,
            capture=capture,
            chooses=chooses,
        )

    short = fixed_shape(session, graph)
    if grouped is None or chooses:
        return short

    def open_long() -> FixedShape | None:
        weights = sum(spec.size for name, spec in manifest.files.items() if is_weights(name))
        if free_memory() < 2 * weights:
            return None
        return fixed_shape(export.open(grouped), grouped)

    return LongContext(short, open_long)


def _cudnn_fault() -> str | None:
    """Why cuDNN does not load; of our operators ArgMax alone needs it, so CUDA starts without."""
    return next((library.fault for library in cuda_libraries() if "cudnn" in library.name), None)


def _own_decode(manifest: Manifest, provider: str) -> GraphSpec | None:
    """The graph of single tokens, where they have one of another lowering than prompts: it is faster for them."""
    prompts = manifest.graph("prefill", provider).lowering
    found = (graph for graph in manifest.graphs if graph.entry == "decode" and provider in graph.providers)
    return next((graph for graph in found if graph.lowering != prompts), None)
