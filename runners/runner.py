"""Prefill and decode: one session, I/O bound to buffers that stay on the device; only logits come back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen_onnx import contract
from qwen_onnx.contract import Manifest, read_manifest
from qwen_onnx.errors import NonFiniteLogitsError, UserError
from qwen_onnx.runners.kv_cache import KVCache
from qwen_onnx.runners.session import (
    SessionOptions,
    choose_provider,
    first_line,
    import_onnxruntime,
    open_session,
    verify_sizes,
)

PREFILL_CHUNK = 512
"""Most tokens of a prompt computed at a time."""

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
        prefill_chunk: int = PREFILL_CHUNK,
    ) -> None:
        """Open an exported folder.

        Raises:
            UserError: not an export, damaged, or the provider does not start.
        """
        options = options or SessionOptions()
        self.folder, self.manifest = folder, read_manifest(folder)
        self._ort_value = import_onnxruntime(at_least=self.manifest.min_onnxruntime).OrtValue
        self.provider = choose_provider(options.provider, self.manifest, folder)
        self.context_length = _context(self.manifest, max_context)
        graph = self.manifest.graph("prefill", self.provider)
        grow = self.manifest.graph("grow", self.provider)
        verify_sizes(folder, self.manifest, graph)
        # Weights of another type are cast to f32 copies at load anyway: there is nothing to map.
        mapped = self.provider == "cpu" and self.manifest.dtype == "f32"
        self._session = open_session(folder / graph.file, self.provider, options, map_weights=mapped)
        one_thread = dataclasses.replace(options, threads=1)
        self._grow_session = open_session(folder / grow.file, self.provider, one_thread)
        self._device = "cpu" if self.provider == "cpu" else "cuda"
        self._prefill_chunk = prefill_chunk
        layers = self.manifest.num_hidden_layers
        self._past, self._present = contract.past_names(layers), contract.present_names(layers)
        self._cache_spec = next(spec for spec in graph.inputs if spec.name == self._past[0])

    @property
    def compute_dtype(self) -> str:
        """What hidden states and cache are held in: float32, float16 or bfloat16."""
        return self._cache_spec.dtype

    def new_cache(self, *, batch_size: int = 1) -> KVCache:
        """An empty cache for `batch_size` sequences; it grows up to the context length."""
        return KVCache(
            self._cache_spec, len(self._past), self._device, batch_size=batch_size, limit=self.context_length
        )

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
        input_ids = np.ascontiguousarray(input_ids, np.int64)
        if input_ids.ndim != 2 or input_ids.shape[0] != cache.batch_size or not input_ids.shape[1]:
            raise ValueError(f"input_ids [{cache.batch_size}, S > 0] wanted, found {list(input_ids.shape)}")
        mask = np.ones_like(input_ids) if attention_mask is None else np.asarray(attention_mask, np.int64)
        self._verify(cache, input_ids)
        start = 0
        while start < input_ids.shape[1]:
            chunk = slice(start, start + self._chunk(cache))
            logits = self._step(cache, input_ids[:, chunk], mask[:, chunk])
            start = chunk.stop
        return _finite(logits)

    def decode(self, cache: KVCache, input_ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Append one token a row, int64 [batch, 1]; the logits after it. Raises as `prefill` does."""
        input_ids = np.ascontiguousarray(input_ids, np.int64)
        self._verify(cache, input_ids)
        return _finite(self._step(cache, input_ids, np.ones_like(input_ids)))

    def _chunk(self, cache: KVCache) -> int:
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

    def _step(
        self, cache: KVCache, input_ids: NDArray[np.int64], mask: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        start = cache.length
        try:
            cache.append(input_ids, mask, self._grow)
            return self._compute(cache, input_ids, start)
        except BaseException:  # a Ctrl-C too, wherever it strikes: no slot is held that was not computed
            cache.truncate(start)
            raise

    def _compute(self, cache: KVCache, input_ids: NDArray[np.int64], start: int) -> NDArray[np.float32]:
        batch, mask = cache.batch_size, cache.mask
        # A row's positions count its own tokens; padding gets some valid row of the tables.
        seen = mask[:, :start].sum(axis=1, keepdims=True)
        positions = np.maximum(seen + np.cumsum(mask[:, start:], axis=1) - 1, 0)
        feeds = {
            contract.INPUT_IDS: np.ascontiguousarray(input_ids),
            contract.ATTENTION_MASK: np.ascontiguousarray(mask),
            contract.POSITION_IDS: positions,
            contract.WRITE_INDICES: np.full(batch, start, np.int64),
        }
        logits = np.empty((batch, 1, self.manifest.vocab_size), np.float32)
        binding = self._bound(cache)
        for name, array in feeds.items():
            binding.bind_ortvalue_input(name, self._ort_value.ortvalue_from_numpy(array))
        binding.bind_ortvalue_output(contract.LOGITS, self._ort_value.ortvalue_from_numpy(logits))
        _run(self._session, binding)
        return logits[:, 0]

    def _bound(self, cache: KVCache) -> Any:
        """The cache's buffers bound as past and present, once until they are replaced by larger ones."""
        if cache.binding is None:
            cache.binding = self._session.io_binding()
            for past, present, buffer in zip(self._past, self._present, cache.buffers, strict=True):
                cache.binding.bind_ortvalue_input(past, buffer)
                cache.binding.bind_ortvalue_output(present, buffer)  # the same buffer: written in place
        return cache.binding

    def _grow(self, small: Any, large: Any) -> None:
        binding = self._grow_session.io_binding()
        binding.bind_ortvalue_input(contract.GROW_FROM, small)
        binding.bind_ortvalue_input(contract.GROW_INTO, large)
        binding.bind_ortvalue_output(contract.GROW_RESULT, large)
        _run(self._grow_session, binding)


def _context(manifest: Manifest, max_context: int | None) -> int:
    if max_context is None:
        return manifest.context_length
    if not 0 < max_context <= manifest.context_length:
        raise UserError(f"--max-context {max_context}: this export holds {manifest.context_length} positions")
    return max_context


def _run(session: Any, binding: Any) -> None:
    try:
        session.run_with_iobinding(binding)
    except Exception as error:  # ONNX Runtime's exceptions share no base class
        raise UserError(f"ONNX Runtime failed: {first_line(error)}") from None


def _finite(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    if not np.isfinite(logits).all():
        raise NonFiniteLogitsError(
            "the logits are not finite: the numbers overflowed on the way; try another dtype, or `qwen-onnx check`"
        )
    return logits
