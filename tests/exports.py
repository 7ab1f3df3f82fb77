"""Exports of random checkpoints, and their graph files fed by hand: nothing of the runner is in between."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from checkpoints import CONFIGS, RawConfig, write_checkpoint

from qwen_onnx import contract
from qwen_onnx.checkpoint import open_checkpoint
from qwen_onnx.config import QwenConfig
from qwen_onnx.exporter import export_model
from qwen_onnx.reference import reference_logits
from qwen_onnx.runners.kv_cache import KVCache
from qwen_onnx.runners.runner import Runner
from qwen_onnx.runners.session import SessionOptions
from qwen_onnx.safetensors_file import read_header

IDS = np.random.default_rng(11).integers(0, 320, (3, 160))
"""Token ids below every test configuration's vocab_size, a row for each sequence of a batch."""

ON_CPU = SessionOptions("cpu", threads=1)
"""One thread: the matrices are tiny."""


class Exported:
    """One export: where it lies, and the logits that it must compute."""

    def __init__(self, checkpoint: Path, folder: Path, dtype: str) -> None:
        self.checkpoint, self.folder, self.dtype = checkpoint, folder, dtype
        self.config: QwenConfig = open_checkpoint(checkpoint).config
        self.manifest = contract.read_manifest(folder)
        self._wanted: dict[bytes, np.ndarray] = {}

    @functools.cached_property
    def tensors(self) -> dict[str, np.ndarray]:
        """The weights as exported: what was lost by rounding them is not the graph's fault."""
        return {
            name: tensor.numpy() for name, tensor in read_header(self.folder / "weights.safetensors").items()
        }

    def wanted(self, ids: np.ndarray) -> np.ndarray:
        """The reference's logits, float64 [S, V]. A prefix has the logits of the whole."""
        key = np.asarray(ids, np.int64).tobytes()
        if key not in self._wanted:
            self._wanted[key] = reference_logits(self.config, self.tensors.__getitem__, ids)
        return self._wanted[key]

    def graph(self, entry: str) -> contract.GraphSpec:
        """The graph of `prefill`, `decode` or `grow` that is run on the CPU provider here.

        For f16 its own and not the runner's twin of it: the provider runs it too, and no GPU is here that would.
        """
        return self.manifest.graph(entry, "cuda" if self.dtype == "f16" else "cpu")

    def path(self, entry: str) -> Path:
        return self.folder / self.graph(entry).file

    @functools.cached_property
    def sessions(self) -> dict[str, onnxruntime.InferenceSession]:
        return {entry: open_on_cpu(self.path(entry)) for entry in ("prefill", "decode")}


def export_random(folder: Path, raw: RawConfig | str, dtype: str = "f32", **overrides: Any) -> Exported:
    """Write random weights of a configuration, changed by `overrides`, and export them."""
    raw = {**(CONFIGS[raw] if isinstance(raw, str) else raw), **overrides}
    write_checkpoint(folder / "checkpoint", raw)
    return export_checkpoint(folder / "checkpoint", folder / "export", dtype)


def export_checkpoint(checkpoint: Path, out: Path, dtype: str) -> Exported:
    export_model(str(checkpoint), out, dtype=dtype)
    return Exported(checkpoint, out, dtype)


def open_on_cpu(path: Path, **settings: Any) -> onnxruntime.InferenceSession:
    """One thread, as above. `settings` are attributes of onnxruntime.SessionOptions."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry(
        "session.disable_prepacking", "1"
    )  # as the runner for f32: sums in its order
    options.log_severity_level = 3  # the warnings about TensorScatter are asked for where they matter
    for name, value in settings.items():
        setattr(options, name, value)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def decode_all(runner: Runner, cache: KVCache, ids: np.ndarray) -> list[np.ndarray]:
    """The logits [B, V] after each of the tokens [B, S], given one by one."""
    return [runner.decode(cache, ids[:, slot : slot + 1]) for slot in range(ids.shape[1])]


class DirectCache:
    """Cache buffers as arrays, given to the graphs by hand.

    Before each step the slots at or beyond the live length are NaN, and so are those that the step writes: neither
    may be read. Slots that only the mask hides (a ragged row ends before the longest) hold a large number.
    """

    def __init__(
        self, exported: Exported, batch_size: int, *, capacity: int = 160, bound: bool = True
    ) -> None:
        """`bound`: past and present are the same buffer, as a runner has them; else new arrays each step."""
        self.exported, self.bound = exported, bound
        layers, spec = (
            exported.manifest.num_hidden_layers,
            exported.graph("prefill").inputs[4],
        )
        self.past, self.present = contract.past_names(layers), contract.present_names(layers)
        shape = (batch_size, int(spec.shape[1]), capacity, int(spec.shape[3]))
        self.buffers = [np.zeros(shape, spec.dtype) for _ in self.past]

    def step(
        self,
        input_ids: np.ndarray,
        attention_mask: np.ndarray,
        write_indices: Sequence[int] | np.ndarray,
        *,
        entry: str | None = None,
        position_ids: np.ndarray | None = None,
    ) -> np.ndarray:
        """[B, S] tokens under a mask [B, T] of all live slots -> logits f32 [B, V] of each row's last token."""
        write_indices = np.asarray(write_indices, np.int64)
        queries, live = input_ids.shape[1], attention_mask.shape[1]
        slots = write_indices[:, None] + np.arange(queries)
        if position_ids is None:
            counted = np.maximum(np.cumsum(attention_mask, axis=1) - 1, 0)
            position_ids = np.take_along_axis(counted, np.minimum(slots, live - 1), axis=1)
        for buffer in self.buffers:
            np.nan_to_num(buffer, copy=False, nan=50.0)  # left from before, when fewer slots were live
            buffer[:, :, live:] = np.nan
            for row, own in enumerate(slots):
                buffer[row][:, own] = np.nan
        feeds = {
            contract.INPUT_IDS: np.ascontiguousarray(input_ids, np.int64),
            contract.ATTENTION_MASK: np.ascontiguousarray(attention_mask, np.int64),
            contract.POSITION_IDS: np.ascontiguousarray(position_ids, np.int64),
            contract.WRITE_INDICES: write_indices,
        }
        session = self.exported.sessions[entry or ("decode" if queries == 1 else "prefill")]
        logits = self._run_bound(session, feeds) if self.bound else self._run(session, feeds)
        for buffer in self.buffers:
            assert np.isfinite(buffer[:, :, :live]).all(), "a live slot of the cache is not finite"
        assert logits.dtype == np.float32
        assert logits.shape == (len(input_ids), 1, self.exported.config.vocab_size)
        return logits[:, 0]

    def _run(self, session: onnxruntime.InferenceSession, feeds: dict[str, np.ndarray]) -> np.ndarray:
        feeds = feeds | dict(zip(self.past, self.buffers, strict=True))
        logits, *self.buffers = session.run([contract.LOGITS, *self.present], feeds)
        return logits

    def _run_bound(self, session: onnxruntime.InferenceSession, feeds: dict[str, np.ndarray]) -> np.ndarray:
        from_numpy = onnxruntime.OrtValue.ortvalue_from_numpy
        logits = np.empty((len(self.buffers[0]), 1, self.exported.config.vocab_size), np.float32)
        binding = session.io_binding()
        for name, array in feeds.items():
            binding.bind_ortvalue_input(name, from_numpy(array))
        for past, present, buffer in zip(self.past, self.present, self.buffers, strict=True):
            binding.bind_ortvalue_input(past, from_numpy(buffer))
            binding.bind_ortvalue_output(present, from_numpy(buffer))
        binding.bind_ortvalue_output(contract.LOGITS, from_numpy(logits))
        session.run_with_iobinding(binding)
        return logits


class LeftPadded:
    """A batch of sequences that end together: row r begins after `pads[r]` slots of padding."""

    def __init__(self, cache: DirectCache, pads: Sequence[int], ids: np.ndarray = IDS) -> None:
        self.cache, self.pads, self.ids = cache, np.asarray(pads), ids
        self.length = 0

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Slots `start` to `stop`; padding is a token like any other, so that looking at it would show."""
        return np.stack(
            [
                np.concatenate([np.full(pad, 7), row])[start:stop]
                for pad, row in zip(self.pads, self.ids, strict=False)
            ]
        )

    def step(self, queries: int, *, entry: str | None = None) -> np.ndarray:
        start, self.length = self.length, self.length + queries
        mask = (np.arange(self.length) >= self.pads[:, None]).astype(np.int64)
        writes = np.full(len(self.pads), start)
        return self.cache.step(self.tokens(start, self.length), mask, writes, entry=entry)

    def wanted(self, row: int) -> np.ndarray | None:
        """The reference's logits after the row's last token; None while it has none."""
        made = self.length - self.pads[row]
        context = self.cache.exported.config.context_length
        return self.cache.exported.wanted(self.ids[row][:context])[made - 1] if made > 0 else None
