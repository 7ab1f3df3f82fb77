"""Prefill and decode: one session, I/O bound to buffers that stay on the device; only logits come back."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.errors import NonFiniteLogitsError, UserError
from qwen_onnx.manifest import GraphSpec, Manifest, read_manifest
from qwen_onnx.runners.model.fixed_shape import FixedSteps
from qwen_onnx.runners.model.kv_cache import KVCache
from qwen_onnx.runners.model.open_graph import Scorer, open_graph
from qwen_onnx.runners.runtime.integrity import verify_texts
from qwen_onnx.runners.runtime.nvidia.engine_cache import DEFAULT_CAPACITY, Engine
from qwen_onnx.runners.runtime.providers import choose_provider
from qwen_onnx.runners.runtime.session import SessionOptions, import_onnxruntime

T = TypeVar("T")

PREFILL_CHUNK = 512
"""Most tokens of a prompt computed at a time."""
QUANTISED_CHUNK = 128
"""The same of int8 and int4 on a CPU: more at a time are no faster there, and take up to a third more memory."""

SCORED_PAIRS = PREFILL_CHUNK * 4096
"""Most pairs of new and cached tokens scored at a time, times the heads 4 bytes each: beyond 4,096 tokens in the
cache the chunks shrink, so that memory stays bounded whatever the prompt's length."""


class Runner:
    """An exported model, ready to compute logits.

    One graph with a free number of tokens serves prefill and decode, so the weights are in memory once.
    """

    def __init__(
        self,
        folder: Path,
        options: SessionOptions | None = None,
        *,
        max_context: int | None = None,
        prefill_chunk: int | None = None,
        for_scores: bool = False,
    ) -> None:
        """Open an exported folder.

        Args:
            prefill_chunk: most tokens of a prompt computed at a time; None: by what the export is.
            for_scores: open the `score` graph and no other, where there is one for the provider.

        Raises:
            UserError: not an export, damaged, or the provider does not start.
        """
        self.options = options = options or SessionOptions()
        self.folder, self.manifest = folder, read_manifest(folder)
        import_onnxruntime(at_least=self.manifest.min_onnxruntime)
        self.provider = choose_provider(options.provider, self.manifest)
        self.context_length = _context(self.manifest, max_context, self.provider)
        if prefill_chunk is None:
            in_blocks = self.manifest.quantised and self.provider == "cpu"
            prefill_chunk = QUANTISED_CHUNK if in_blocks else PREFILL_CHUNK
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk {prefill_chunk}: 1 or more wanted")
        self._prefill_chunk = min(prefill_chunk, self.context_length)
        verify_texts(folder, self.manifest)
        self._scorer: Runner | None = None
        self._opening = threading.Lock()
        self._open(options, for_scores=for_scores and self._has_scores)

    def _open(self, options: SessionOptions, *, for_scores: bool) -> None:
        self._opened = open_graph(
            self.folder,
            self.manifest,
            self.provider,
            options,
            context_length=self.context_length,
            prefill_chunk=self._prefill_chunk,
            for_scores=for_scores,
        )
        self._steps = self._opened.steps

    @property
    def compute_dtype(self) -> str:
        """What hidden states and cache are held in: float32, float16 or bfloat16."""
        return self._opened.cache_spec.dtype

    @property
    def arithmetic(self) -> str:
        """What products are computed in: int8 over quantised weights, else as `compute_dtype`."""
        return "int8" if self.manifest.quantised else self.compute_dtype

    @property
    def graph(self) -> GraphSpec:
        """The graph that runs."""
        return self._opened.graph

    @property
    def engine(self) -> Engine | None:
        """What TensorRT runs of it; None on other providers."""
        return self._opened.engine

    @property
    def captures(self) -> bool:
        """Decode steps are captured as CUDA graphs."""
        return isinstance(self._steps, FixedSteps) and self._steps.capture

    @property
    def chooses(self) -> bool:
        """The graph chooses the token: `prefill_greedy` and `decode_greedy` work."""
        return self._steps.chooses

    def describe(self) -> str:
        """How it computes, in a few words: provider, type, and what was chosen of CUDA."""
        words = [self.provider, self.compute_dtype]
        if self.provider != "cpu":
            words.append("TF32 on" if self.options.tf32 else "TF32 off")
        if self.provider == "cuda":
            words.append("CUDA graph" if self.captures else "no CUDA graph")
        if self.chooses:
            words.append("greedy on the device")
        return ", ".join(words)

    def new_cache(self, *, batch_size: int = 1) -> KVCache:
        """An empty cache for `batch_size` sequences; it grows up to the context length.

        Raises:
            UserError: it does not fit on the device.
        """
        return self._opened.new_cache(batch_size=batch_size, limit=self.context_length)

    def exclude(self, token_ids: NDArray[np.bool_]) -> None:
        """Ids, True here [vocab], that `prefill_greedy` and `decode_greedy` never choose."""
        if isinstance(self._steps, FixedSteps):
            self._steps.exclude(token_ids)

    def prefill(
        self,
        cache: KVCache,
        input_ids: NDArray[np.int64],
        attention_mask: NDArray[np.int64] | None = None,
    ) -> NDArray[np.float32]:
        """Append tokens to the cache, a chunk at a time; the f32 logits [batch, vocab] after the last one.

        Args:
            input_ids: int64 [batch, S].
            attention_mask: int64 [batch, S], 0 for padding on the left; None when nothing is padding.

        Raises:
            UserError: an id outside the embedding, or more tokens than the context holds; before any compute.
            NonFiniteLogitsError: the model computed NaN or infinity.
        """
        return self._append(cache, input_ids, attention_mask, self._finite_logits)

    def decode(self, cache: KVCache, input_ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Append one token a row, int64 [batch, 1]; the logits after it. Raises as `prefill` does."""
        return self._append(cache, input_ids, None, self._finite_logits)

    def prefill_greedy(
        self,
        cache: KVCache,
        input_ids: NDArray[np.int64],
        attention_mask: NDArray[np.int64] | None = None,
    ) -> NDArray[np.int64]:
        """As `prefill`, but the device chooses: the best ids, int64 [batch]. For `greedy_on_device` only."""
        return self._append(cache, input_ids, attention_mask, self._chosen)

    def decode_greedy(self, cache: KVCache, input_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """As `decode`, but the device chooses. Where the ids are those it chose last, nothing is copied to it."""
        return self._append(cache, input_ids, None, self._chosen)

    @property
    def scores(self) -> bool:
        """The graph puts out logits after several tokens: `score` works."""
        return self.graph.entry == "score"

    @property
    def _has_scores(self) -> bool:
        graphs = self.manifest.graphs
        return any(graph.entry == "score" and self.provider in graph.providers for graph in graphs)

    def scorer(self) -> Runner:
        """A runner whose `score` works: this one, or one of the same export, opened when first asked for.

        This one too where the export has no `score` graph for the provider: its `decode` gives the same logits.

        Raises:
            UserError: the graph is damaged, or does not load.
        """
        if self.scores or not self._has_scores:
            return self
        with self._opening:
            if self._scorer is None:
                scorer = copy.copy(self)
                scorer._open(dataclasses.replace(self.options, greedy_on_device=False), for_scores=True)
                self._scorer = scorer
        return self._scorer

    def score(self, cache: KVCache, input_ids: NDArray[np.int64], count: int) -> NDArray[np.float32]:
        """Append tokens, at most a chunk, in one step; f32 logits after the last `count`, [batch, count, vocab].

        Raises:
            ValueError: `scores` is False.
            UserError, NonFiniteLogitsError: as `prefill`.
        """
        steps = self._steps
        if not self.scores or not isinstance(steps, Scorer):
            raise ValueError("not opened with speculate or for_scores")
        if not 0 < count <= input_ids.shape[1] <= self.chunk(cache):
            raise ValueError(
                f"{input_ids.shape[1]} tokens, {count} logits: at most a chunk of tokens is possible"
            )
        found: list[NDArray[np.float32]] = []

        def advance(held: KVCache, new_ids: NDArray[np.int64], start: int) -> None:
            found.append(steps.score(held, new_ids, start, count))

        return self._append(cache, input_ids, None, lambda held: self._finite(held, found[0]), advance)

    def logits(self, cache: KVCache) -> NDArray[np.float32]:
        """What the last ids were chosen from on the device, f32 [batch, vocab]."""
        return self._steps.logits(cache)

    def _finite_logits(self, cache: KVCache) -> NDArray[np.float32]:
        return self._finite(cache, self._steps.logits(cache))

    def _finite(self, cache: KVCache, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        # The product is finite if all are, unless the logits are absurd, and takes a third of the time.
        if not np.isfinite(np.vdot(logits, logits)) and not np.isfinite(logits).all():
            cache.renew()
            raise NonFiniteLogitsError(_NOT_FINITE)
        return logits

    def _chosen(self, cache: KVCache) -> NDArray[np.int64]:
        if not isinstance(self._steps, FixedSteps):
            raise TypeError("only a FixedSteps chooses")
        token_ids = self._steps.chosen(cache)
        if (token_ids < 0).any():
            cache.renew()
            raise NonFiniteLogitsError(_NOT_FINITE)
        return token_ids

    def _append(
        self,
        cache: KVCache,
        input_ids: NDArray[np.int64],
        attention_mask: NDArray[np.int64] | None,
        read: Callable[[KVCache], T],
        advance: Callable[[KVCache, NDArray[np.int64], int], None] | None = None,
    ) -> T:
        """Tokens into the cache, a chunk at a time; what is to be read after the last one."""
        advance = advance or self._steps.advance
        if read == self._chosen and not self.chooses:
            raise ValueError("not opened with greedy_on_device")
        input_ids = np.ascontiguousarray(input_ids, np.int64)
        if input_ids.ndim != 2 or input_ids.shape[0] != cache.batch_size or not input_ids.shape[1]:
            raise ValueError(f"input_ids [{cache.batch_size}, S > 0] wanted, found {list(input_ids.shape)}")
        mask = None if attention_mask is None else np.asarray(attention_mask, np.int64)
        self._verify(cache, input_ids)
        done = 0
        while done < input_ids.shape[1]:
            chunk = slice(done, done + self.chunk(cache))
            start = cache.length
            try:
                of_chunk = None if mask is None else mask[:, chunk]
                cache.append(input_ids[:, chunk], of_chunk, self._opened.grow)
                advance(cache, input_ids[:, chunk], start)
                done = chunk.stop
                if done >= input_ids.shape[1]:
                    return read(cache)
            except BaseException:  # a Ctrl-C too, wherever it strikes: no slot is held that was not computed
                cache.truncate(start)
                raise
        raise AssertionError("a prompt has tokens")

    def chunk(self, cache: KVCache) -> int:
        """Most tokens that one step appends to this cache."""
        live = cache.batch_size * (cache.length + self._prefill_chunk)
        return max(1, min(self._prefill_chunk, SCORED_PAIRS // live))

    def _verify(self, cache: KVCache, input_ids: NDArray[np.int64]) -> None:
        low, high, vocab = int(input_ids.min()), int(input_ids.max()), self.manifest.vocab_size
        if low < 0 or high >= vocab:
            raise UserError(f"token id {low if low < 0 else high} is outside the embedding's {vocab} rows")
        if cache.length + input_ids.shape[1] > self.context_length:
            raise UserError(
                f"{cache.length + input_ids.shape[1]} tokens found, the context holds {self.context_length}"
            )


def _context(manifest: Manifest, max_context: int | None, provider: str) -> int:
    if max_context is None:
        held = manifest.context_length
        return min(held, DEFAULT_CAPACITY) if provider == "tensorrt" else held
    if type(max_context) is not int:
        raise UserError(f"max_context {max_context!r}: a whole number wanted, or None")
    if not 0 < max_context <= manifest.context_length:
        raise UserError(f"--max-context {max_context}: this export holds {manifest.context_length} positions")
    return max_context


_NOT_FINITE = (
    "the logits are not finite: the numbers overflowed on the way; try another dtype, or `qwen-onnx check`"
)
