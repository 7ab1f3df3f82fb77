"""Exports of random checkpoints, and their graph files fed by hand: nothing of the runner is in between."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from qwen_onnx import contract
from qwen_onnx.checkpoints.checkpoint import open_checkpoint
from qwen_onnx.checkpoints.config import QwenConfig
from qwen_onnx.checkpoints.safetensors_file import read_header
from qwen_onnx.contract.manifest import GraphSpec, TensorSpec, read_manifest
from qwen_onnx.reference import reference_logits
from qwen_onnx.runners.model.kv_cache import KVCache
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.options import SessionOptions
from support.checkpoints import CONFIGS, RawConfig, write_checkpoint
from support.exporting import export_model
from support.tolerances import OF_TYPE

IDS = np.random.default_rng(11).integers(0, 320, (3, 160))
"""Token ids below every test configuration's vocab_size, a row for each sequence of a batch."""

ON_CPU = SessionOptions(provider="cpu", threads=1)
"""One thread: the matrices are tiny."""


def past_names(layers: int) -> list[str]:
    """Inputs that hold the cache, layer by layer, key before value."""
    return [f"past_key_values.{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]


def present_names(layers: int) -> list[str]:
    """Outputs that hold the cache with the new tokens in it, in the order of `past_names`."""
    return [f"present.{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]


class Exported:
    """One export: where it lies, and the logits that it must compute."""

    def __init__(self, checkpoint: Path, folder: Path, dtype: str) -> None:
        self.checkpoint, self.folder, self.dtype = checkpoint, folder, dtype
        self.config: QwenConfig = open_checkpoint(checkpoint).config
        self.manifest = read_manifest(folder)
        self._wanted: dict[bytes, np.ndarray] = {}
        self._sessions: dict[Path, onnxruntime.InferenceSession] = {}

    @functools.cached_property
    def tensors(self) -> dict[str, np.ndarray]:
        """The weights as exported: what was lost by rounding them is not the graph's fault."""
        files = sorted(self.folder.glob("*.safetensors"))
        found = {name: tensor.numpy() for file in files for name, tensor in read_header(file).items()}
        rows = {"lm_head": self.config.vocab_size, "model.embed_tokens": self.config.vocab_size}
        return {
            name: from_panels(values)[: rows.get(name.removesuffix(".weight"))]
            if values.ndim == 3
            else values
            for name, values in found.items()
        }

    def wanted(self, ids: np.ndarray) -> np.ndarray:
        """The reference's logits, float64 [S, V]. A prefix has the logits of the whole."""
        key = np.asarray(ids, np.int64).tobytes()
        if key not in self._wanted:
            self._wanted[key] = reference_logits(self.config, self.tensors.__getitem__, ids)
        return self._wanted[key]

    def graph(self, entry: str, lowering: str = "static") -> GraphSpec:
        """The first graph that the manifest has of `entry` in this lowering, whatever provider it is meant for.

        Prompts of `static-grouped`, which has none, go to `static-capture`, whose cache is alike.
        """
        if lowering == "static-grouped" and entry != "decode":
            lowering = "static-capture"
        for spec in self.manifest.graphs:
            if (spec.entry, spec.lowering) == (entry, lowering):
                return spec
        raise LookupError(f"{self.folder} has no {lowering} graph for {entry}")

    def path(self, entry: str, lowering: str = "static") -> Path:
        return self.folder / self.graph(entry, lowering).file

    def cache_spec(self, entry: str, lowering: str = "static") -> TensorSpec:
        """One of the graph's cache inputs: all are alike, of the type that it computes in."""
        return next(spec for spec in self.graph(entry, lowering).inputs if len(spec.shape) == 4)

    def session(self, entry: str, lowering: str = "static") -> onnxruntime.InferenceSession:
        """The graph on the CPU provider."""
        path = self.path(entry, lowering)
        if path not in self._sessions:
            self._sessions[path] = open_on_cpu(path)
        return self._sessions[path]


def from_panels(values: np.ndarray) -> np.ndarray:
    """[panels, in, rows of a panel] -> [out, in], as --weights-order panels stores a matrix."""
    return np.concatenate(list(values.swapaxes(1, 2)))


def export_random(
    folder: Path,
    raw: RawConfig | str,
    dtype: str = "f32",
    weights_order: str = "checkpoint",
    **overrides: Any,
) -> Exported:
    """Write random weights of a configuration, changed by `overrides`, and export them."""
    raw = {**(CONFIGS[raw] if isinstance(raw, str) else raw), **overrides}
    write_checkpoint(folder / "checkpoint", raw)
    return export_checkpoint(folder / "checkpoint", folder / "export", dtype, weights_order=weights_order)


def export_checkpoint(
    checkpoint: Path, out: Path, dtype: str, *, weights_order: str = "checkpoint", link: bool = False
) -> Exported:
    export_model(str(checkpoint), out, dtype=dtype, weights_order=weights_order, link=link)
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


def run_bound(
    session: onnxruntime.InferenceSession, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]
) -> None:
    """Run over the arrays' own memory; an array that is input and output is written in place."""
    from_numpy = onnxruntime.OrtValue.ortvalue_from_numpy
    binding = session.io_binding()
    for name, array in inputs.items():
        binding.bind_ortvalue_input(name, from_numpy(array))
    for name, array in outputs.items():
        assert array.flags.c_contiguous, "ONNX Runtime would write to a copy"
        binding.bind_ortvalue_output(name, from_numpy(array))
    session.run_with_iobinding(binding)


class DirectCache:
    """Cache buffers as arrays, given by hand to the graphs of `static` or `static-capture`.

    In `static`, before each step, the slots at or beyond the live length are NaN, and so are those that the step
    writes: neither may be read. Slots that only the mask hides (a ragged row ends before the longest) hold a large
    number. `static-capture` reads every slot, and multiplies what may not be looked at by zero: there, all of these
    hold a large number.
    """

    def __init__(
        self,
        exported: Exported,
        batch_size: int,
        *,
        capacity: int = 160,
        bound: bool = True,
        lowering: str = "static",
    ) -> None:
        """`bound`: past and present are the same buffer, as a runner has them; else new arrays each step."""
        self.exported, self.bound, self.lowering, self.capacity = exported, bound, lowering, capacity
        layers, spec = exported.manifest.num_hidden_layers, exported.cache_spec("prefill", lowering)
        self.past, self.present = past_names(layers), present_names(layers)
        self.tolerance = OF_TYPE[spec.dtype]
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
        after: int = 1,
    ) -> np.ndarray:
        """[B, S] tokens under a mask [B, T] of all live slots -> logits f32 [B, V] of each row's last token.

        `after` is the mask of the slots that are not live, where the graph asks for it.
        """
        write_indices = np.asarray(write_indices, np.int64)
        queries, live = input_ids.shape[1], attention_mask.shape[1]
        slots = write_indices[:, None] + np.arange(queries)
        if position_ids is None:
            counted = np.maximum(np.cumsum(attention_mask, axis=1) - 1, 0)
            position_ids = np.take_along_axis(counted, np.minimum(slots, live - 1), axis=1)
        sliced = self.lowering == "static"
        for buffer in self.buffers:
            np.nan_to_num(buffer, copy=False, nan=50.0)  # left from before, when fewer slots were live
            buffer[:, :, live:] = np.nan if sliced else 1e3
            for row, own in enumerate(slots):
                buffer[row][:, own] = np.nan if sliced else -1e3
        if not sliced:
            beyond = ((0, 0), (0, self.capacity - live))
            attention_mask = np.pad(attention_mask, beyond, constant_values=after)
        inputs = {
            contract.INPUT_IDS: np.ascontiguousarray(input_ids, np.int64),
            contract.ATTENTION_MASK: np.ascontiguousarray(attention_mask, np.int64),
            contract.POSITION_IDS: np.ascontiguousarray(position_ids, np.int64),
            contract.WRITE_INDICES: write_indices,
        }
        session = self.exported.session(entry or ("decode" if queries == 1 else "prefill"), self.lowering)
        inputs |= dict(zip(self.past, self.buffers, strict=True))
        if self.bound:
            logits = np.empty((len(input_ids), 1, self.exported.config.vocab_size), np.float32)
            run_bound(
                session,
                inputs,
                {contract.LOGITS: logits, **dict(zip(self.present, self.buffers, strict=True))},
            )
        else:
            logits, *self.buffers = session.run([contract.LOGITS, *self.present], inputs)
        for buffer in self.buffers:
            assert np.isfinite(buffer[:, :, :live]).all(), "a live slot of the cache is not finite"
        assert logits.dtype == np.float32
        assert logits.shape == (len(input_ids), 1, self.exported.config.vocab_size)
        return logits[:, 0]


class ContribCache:
    """Cache buffers as arrays, given by hand to the `contrib` graphs of an f16 export.

    A row's tokens lie from slot 0 on. Before each step, the slots that are not live are NaN, those that the step
    writes too; after it, those that it has no business with still are.
    """

    def __init__(
        self,
        exported: Exported,
        batch_size: int,
        *,
        capacity: int = 128,
        bound: bool = True,
        unread: float = np.nan,
    ) -> None:
        """`bound`: as in DirectCache. `unread`: what stands in place of NaN."""
        self.exported, self.bound, self.unread, self.capacity = exported, bound, unread, capacity
        layers, spec = exported.manifest.num_hidden_layers, exported.cache_spec("prefill", "contrib")
        self.past, self.present = past_names(layers), present_names(layers)
        shape = (batch_size, int(spec.shape[1]), capacity, int(spec.shape[3]))
        self.buffers = [np.full(shape, unread, spec.dtype) for _ in self.past]
        self.lengths = np.zeros(batch_size, np.int64)

    def prefill(self, row: int, ids: np.ndarray) -> np.ndarray:
        """Tokens [S] of one row, in views of the buffers -> logits f32 [V] of the last one."""
        live = int(self.lengths[row]) + len(ids)
        return self.step("prefill", slice(row, row + 1), ids[None], total=live)[0]

    def decode(self, ids: np.ndarray, *, total: int | None = None) -> np.ndarray:
        """One token of each row [B] -> logits f32 [B, V]. `total`: in place of the capacity."""
        return self.step("decode", slice(0, len(ids)), ids[:, None], total=total or self.capacity)

    def step(self, entry: str, rows: slice, input_ids: np.ndarray, *, total: int) -> np.ndarray:
        self.lengths[rows] += input_ids.shape[1]
        inputs: dict[str, np.ndarray] = {
            contract.INPUT_IDS: np.ascontiguousarray(input_ids, np.int64),
            contract.SEQLENS_K: (self.lengths[rows] - 1).astype(np.int32),
            contract.TOTAL_SEQUENCE_LENGTH: np.array(total, np.int32),
        }
        session = self.exported.session(entry, "contrib")
        views = [buffer[rows] for buffer in self.buffers]
        inputs |= dict(zip(self.past, views, strict=True))
        if self.bound:
            logits = np.empty((len(input_ids), 1, self.exported.config.vocab_size), np.float32)
            run_bound(
                session, inputs, {contract.LOGITS: logits, **dict(zip(self.present, views, strict=True))}
            )
        else:
            logits, *made = session.run([contract.LOGITS, *self.present], inputs)
            for view, array in zip(views, made, strict=True):
                for own, new, length in zip(view, array, self.lengths[rows], strict=True):
                    own[:, :length] = new[:, :length]  # the rest is zeros
        for buffer in self.buffers:
            for row, length in zip(buffer, self.lengths, strict=True):
                assert np.isfinite(row[:, :length]).all(), "a live slot of the cache is not finite"
                assert np.array_equal(
                    row[:, length:], np.full_like(row[:, length:], self.unread), equal_nan=True
                )
        assert logits.dtype == np.float32
        return logits[:, 0]


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
