"""An exported folder, opened on a provider: prefill and decode over a cache that stays on the device."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

from qwen_onnx.contract.cache_spec import CacheSpec
from qwen_onnx.contract.manifest import GraphSpec, Manifest, read_manifest
from qwen_onnx.errors import UserError, option
from qwen_onnx.runners.model.logits_model import PREFILL_CHUNK, LogitsModel
from qwen_onnx.runners.model.open_graph import open_graph
from qwen_onnx.runners.runtime.integrity import verify_texts
from qwen_onnx.runners.runtime.nvidia.engine_cache import DEFAULT_CAPACITY, Engine
from qwen_onnx.runners.runtime.optimizers import verify_optimizers
from qwen_onnx.runners.runtime.options import SessionOptions
from qwen_onnx.runners.runtime.providers import choose_provider
from qwen_onnx.runners.runtime.session import import_onnxruntime

QUANTIZED_CHUNK = 128
"""Most tokens of a prompt computed at a time by int8 and int4 on a CPU: more are no faster there, and take up to a
third more memory."""


class Runner(LogitsModel):
    """An exported model, ready to compute logits.

    One graph with a free number of tokens serves prefill and decode, so the weights are in memory once.
    """

    def __init__(
        self,
        folder: Path,
        options: SessionOptions | None = None,
        *,
        prefill_chunk: int | None = None,
        for_scores: bool = False,
        lean: bool = False,
    ) -> None:
        """Open an exported folder.

        Args:
            prefill_chunk: most tokens of a prompt computed at a time; None: by what the export is.
            for_scores: open the `score` graph and no other, where there is one for the provider.
            lean: for a few tokens in little memory; see open_session.

        Raises:
            UserError: not an export, damaged, or the provider does not start.
        """
        self.options = options = options or SessionOptions()
        self.folder, self.manifest = folder, read_manifest(folder)
        import_onnxruntime(at_least=self.manifest.min_onnxruntime)
        verify_optimizers(options.disabled_optimizers)
        self.provider = choose_provider(options.provider, self.manifest)
        context_length = context_of(self.manifest, options.max_context, self.provider)
        if prefill_chunk is None:
            in_blocks = self.manifest.quantized and self.provider == "cpu"
            prefill_chunk = QUANTIZED_CHUNK if in_blocks else PREFILL_CHUNK
        verify_texts(folder, self.manifest)
        self._scorer: Runner | None = None
        self._opening = threading.Lock()
        self.graph, executor, self.engine = open_graph(
            folder,
            self.manifest,
            self.provider,
            options,
            context_length=context_length,
            prefill_chunk=min(prefill_chunk, context_length),
            for_scores=for_scores and self._has_scores,
            lean=lean,
        )
        super().__init__(
            executor,
            vocab_size=self.manifest.vocab_size,
            context_length=context_length,
            prefill_chunk=prefill_chunk,
        )

    graph: GraphSpec
    """The graph that runs."""
    engine: Engine | None
    """What TensorRT runs of it; None on other providers."""

    @property
    def cache_spec(self) -> CacheSpec:
        """What its caches hold."""
        return self.executor.memory.spec

    @property
    def compute_dtype(self) -> str:
        """What hidden states and cache are held in: float32, float16 or bfloat16."""
        return self.cache_spec.dtype

    @property
    def arithmetic(self) -> str:
        """What products are computed in: int8 over quantized weights, else as `compute_dtype`."""
        return "int8" if self.manifest.quantized else self.compute_dtype

    @property
    def captures(self) -> bool:
        """Decode steps are captured as CUDA graphs."""
        return self.executor.capture

    def describe(self) -> str:
        """How it computes, in a few words: provider, type, and what was chosen of CUDA."""
        words = [self.provider, self.compute_dtype]
        if self.manifest.quantized:
            words[1:1] = [f"{self.manifest.dtype} weights"]
        if self.provider != "cpu":
            words.append("TF32 on" if self.options.tf32 else "TF32 off")
        if self.provider == "cuda":
            words.append("CUDA graph" if self.captures else "no CUDA graph")
        if self.chooses:
            words.append("greedy on the device")
        return ", ".join(words)

    def verify_batch_size(self, batch_size: int) -> None:
        """See LogitsModel.verify_batch_size."""
        if self.engine is not None and batch_size != 1:
            raise UserError(
                f"a batch of {batch_size}: engines of TensorRT are built for 1; use {option('provider', 'cuda')}"
            )

    @property
    def _has_scores(self) -> bool:
        graphs = self.manifest.graphs
        return any(graph.entry == "score" and self.provider in graph.providers for graph in graphs)

    def scorer(self) -> Runner:
        """A runner whose `score` works: this one, or one of the same export, opened when first asked for.

        This one too where the export has no `score` graph for the provider: its `decode` gives the same logits.

        Raises:
            UserError: the export is damaged, or does not load.
        """
        if self.scores or not self._has_scores:
            return self
        with self._opening:
            if self._scorer is None:
                options = dataclasses.replace(self.options, provider=self.provider, greedy_on_device=False)
                self._scorer = Runner(
                    self.folder, options, prefill_chunk=self._prefill_chunk, for_scores=True
                )
        return self._scorer


def context_of(manifest: Manifest, max_context: int | None, provider: str) -> int:
    """Most tokens of a cache on this provider.

    Raises:
        UserError: more are asked for than the export has positions.
    """
    if max_context is None:
        held = manifest.context_length
        return min(held, DEFAULT_CAPACITY) if provider == "tensorrt" else held
    if max_context > manifest.context_length:
        raise UserError(
            f"{option('max_context', max_context)}: this export holds {manifest.context_length} positions"
        )
    return max_context
