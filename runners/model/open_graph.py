"""Opens a graph of an export as the kind of steps that its lowering asks for."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from qwen_onnx import contract
from qwen_onnx.errors import UserError
from qwen_onnx.manifest import GraphSpec, Manifest, TensorSpec, is_weights
from qwen_onnx.runners.model.binding import CacheNames, run_bound
from qwen_onnx.runners.model.fixed_shape import FixedSteps
from qwen_onnx.runners.model.growing import GrowingCache, GrowingSteps
from qwen_onnx.runners.model.inputs import CaptureFeeds, ContribFeeds, Feeds
from qwen_onnx.runners.model.kv_cache import KVCache
from qwen_onnx.runners.model.live_slice import SlicedSteps
from qwen_onnx.runners.model.two_graphs import LongSteps, PhasedSteps
from qwen_onnx.runners.runtime.free_memory import free_memory
from qwen_onnx.runners.runtime.integrity import verify_graph
from qwen_onnx.runners.runtime.nvidia.engine_cache import Engine, open_engine
from qwen_onnx.runners.runtime.nvidia.libraries import cuda_libraries
from qwen_onnx.runners.runtime.panels import verify_panels
from qwen_onnx.runners.runtime.session import SessionOptions, open_session

DEVICES = {"cpu": "cpu", "cuda": "cuda", "tensorrt": "cuda"}
"""Where a provider's OrtValues lie."""


class Steps(Protocol):
    """Tokens in, logits out."""

    chooses: bool
    """The graph ends in the choice of the token: this is a FixedSteps."""

    def advance(self, cache: KVCache, input_ids: NDArray[np.int64], start: int) -> None:
        """Compute tokens [batch, S], which the cache counts from slot `start` on."""

    def logits(self, cache: KVCache) -> NDArray[np.float32]:
        """The f32 logits [batch, vocab] after the step just made with this cache."""


@runtime_checkable
class Scorer(Protocol):
    """Steps of a `score` graph."""

    def score(
        self, cache: KVCache, input_ids: NDArray[np.int64], start: int, count: int
    ) -> NDArray[np.float32]:
        """As `advance`, for tokens without padding; the logits after the last `count`, [batch, count, vocab]."""


@dataclasses.dataclass(frozen=True)
class Opened:
    """A graph ready to run."""

    graph: GraphSpec
    steps: Steps
    engine: Engine | None
    """On TensorRT."""
    grow_session: Any
    """None where the cache grows by itself."""
    device: str
    """`cpu` or `cuda`, as OrtValues name it."""

    @property
    def cache_spec(self) -> TensorSpec:
        """The first cache input; all are alike."""
        return next(spec for spec in self.graph.inputs if spec.name.startswith("past_key_values."))

    def new_cache(self, *, batch_size: int, limit: int) -> KVCache:
        """An empty cache for this graph.

        Raises:
            UserError: it does not fit on the device, or is a batch that an engine was not built for.
        """
        if self.engine is not None and batch_size != 1:
            raise UserError(
                f"a batch of {batch_size}: engines of TensorRT are built for 1; use --provider cuda"
            )
        count = sum(spec.name.startswith("past_key_values.") for spec in self.graph.inputs)
        # A step of these reads all slots on the CPU: few should be empty.
        tight = isinstance(self.steps, PhasedSteps | LongSteps)
        kind = GrowingCache if isinstance(self.steps, GrowingSteps) else KVCache
        idle = self.steps.idle if isinstance(self.steps, FixedSteps) else None
        return kind(
            self.cache_spec, count, self.device, batch_size=batch_size, limit=limit, idle=idle, tight=tight
        )

    def grow(self, small: Any, large: Any) -> None:
        """Copy a cache buffer into the front of a larger one, on the device."""
        binding = self.grow_session.io_binding()
        binding.bind_ortvalue_input(contract.GROW_FROM, small)
        binding.bind_ortvalue_input(contract.GROW_INTO, large)
        binding.bind_ortvalue_output(contract.GROW_RESULT, large)
        run_bound(self.grow_session, binding)


def _cudnn_fault() -> str | None:
    """Why cuDNN does not load; of our operators ArgMax alone needs it, so CUDA starts without."""
    return next((library.fault for library in cuda_libraries() if "cudnn" in library.name), None)


def _grouped_decode(manifest: Manifest, provider: str) -> GraphSpec | None:
    """The graph of single tokens that is faster for them than that of prompts."""
    found = (graph for graph in manifest.graphs if graph.lowering == "static-grouped")
    return next((graph for graph in found if provider in graph.providers), None)


def open_graph(
    folder: Path,
    manifest: Manifest,
    provider: str,
    options: SessionOptions,
    *,
    context_length: int,
    prefill_chunk: int,
    for_scores: bool = False,
) -> Opened:
    """The graph of an export that serves prefill and decode on a provider that was seen to start.

    Args:
        for_scores: the `score` graph alone, though others are faster for single tokens.

    Raises:
        UserError: the export has none, is damaged, or does not load.
    """
    if options.speculate and provider != "cpu":
        raise UserError(f"--speculate is for the CPU, not {provider}; leave it out")
    if options.speculate and manifest.quantised:
        raise UserError(
            f"--speculate: the activations of {manifest.dtype} round otherwise when several tokens go at once, so "
            "that the answer could be another; use an export in f32, f16 or bf16"
        )
    verify_panels(folder, manifest)
    entry = (
        "greedy" if options.greedy_on_device else "score" if options.speculate or for_scores else "prefill"
    )
    graph = manifest.graph(entry, provider)
    verify_graph(folder, manifest, graph)
    names, vocab_size = CacheNames.of(manifest.num_hidden_layers), manifest.vocab_size
    device = DEVICES[provider]
    one_thread = dataclasses.replace(options, threads=1)
    if graph.lowering == "portable":
        if provider == "tensorrt":
            session, engine = open_engine(
                folder, manifest, graph, options, capacity=context_length, prefill_chunk=prefill_chunk
            )
        else:
            session, engine = open_session(folder / graph.file, provider, options), None
        # One node: not worth an engine.
        shrink_graph = manifest.graph("shrink", provider)
        verify_graph(folder, manifest, shrink_graph)
        shrink = open_session(folder / shrink_graph.file, device, one_thread)
        growing = GrowingSteps(session, shrink, names, device=device, vocab_size=vocab_size)
        return Opened(graph, growing, engine, None, device)

    if options.prepack is False and manifest.quantised:
        raise UserError(
            f"--no-prepack: {manifest.dtype} weights are computed with as ONNX Runtime packs them only"
        )
    in_place = provider == "cpu" and not manifest.quantised and not options.prepack
    mapped = in_place and manifest.dtype == "f32"  # f16 and bf16 become f32 copies, once, in any case
    capture = provider == "cuda" and options.cuda_graph
    if provider == "cuda" and graph.entry == "greedy" and (fault := _cudnn_fault()):
        raise UserError(f"--greedy-on-device needs cuDNN for its argmax: {fault}; or leave it out")
    grouped = None if for_scores else _grouped_decode(manifest, provider)
    decode = grouped if mapped and graph.lowering == "static" else None
    # Side by side: most of what a session of mapped weights takes is one thread's work on the graph.
    with concurrent.futures.ThreadPoolExecutor(1) as beside:
        of_decode = None
        if decode is not None:
            verify_graph(folder, manifest, decode)
            of_decode = beside.submit(open_session, folder / decode.file, provider, options, in_place=True)
        session = open_session(folder / graph.file, provider, options, in_place=in_place, capture=capture)
    grow_graph = manifest.graph("grow", provider)
    verify_graph(folder, manifest, grow_graph)
    grow = open_session(folder / grow_graph.file, provider, one_thread)
    feeds: dict[str, Feeds] = {
        "static-capture": CaptureFeeds(),
        "static-grouped": CaptureFeeds(),
        "contrib": ContribFeeds(fixed=provider != "cpu"),
    }
    steps: Steps
    if graph.lowering == "static":
        steps = sliced = SlicedSteps(session, names, vocab_size=vocab_size, keeps_binding=decode is None)
        if decode is not None and of_decode is not None:
            fixed = FixedSteps(
                of_decode.result(), names, feeds[decode.lowering], device=device, vocab_size=vocab_size,
                capture=False, chooses=False,
            )  # fmt: skip
            steps = PhasedSteps(sliced, fixed)
    elif graph.lowering in feeds:

        def fixed_steps(own: Any, spec: GraphSpec) -> FixedSteps:
            return FixedSteps(
                own, names, feeds[spec.lowering], device=device, vocab_size=vocab_size, capture=capture,
                chooses=spec.entry == "greedy",
            )  # fmt: skip

        steps = short = fixed_steps(session, graph)
        if grouped is not None and not short.chooses:

            def open_long() -> FixedSteps | None:
                weights = sum(spec.size for name, spec in manifest.files.items() if is_weights(name))
                if free_memory() < 2 * weights:
                    return None
                verify_graph(folder, manifest, grouped)
                return fixed_steps(open_session(folder / grouped.file, provider, options), grouped)

            steps = LongSteps(short, open_long)
    else:
        raise UserError(f"{graph.file}: lowering {graph.lowering!r} is not known to this version")
    return Opened(graph, steps, None, grow, device)
