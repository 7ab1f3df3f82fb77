"""Opens a graph on the TensorRT provider: a cached engine where there is one, else one is built now."""

from __future__ import annotations

import collections
import dataclasses
import os
import time
from pathlib import Path
from typing import Any, Literal

from qwen_onnx.contract.manifest import GraphSpec, Manifest, is_weights
from qwen_onnx.errors import UserError, option
from qwen_onnx.runners.runtime.nvidia.driver import gpus
from qwen_onnx.runners.runtime.nvidia.libraries import tensorrt_library
from qwen_onnx.runners.runtime.nvidia.tensorrt import (
    Profile,
    default_engine_cache,
    engine_folder,
    engine_stamps,
    engine_state,
    profile,
    tensorrt_options,
)
from qwen_onnx.runners.runtime.options import SessionOptions
from qwen_onnx.runners.runtime.session import import_onnxruntime, open_session

_CHECKED = "checked"
"""A file in an engine's folder."""

DEFAULT_CAPACITY = 4096
"""Tokens of an engine's cache where no context is asked for: TensorRT plans memory for the longest."""


@dataclasses.dataclass(frozen=True)
class Engine:
    """What TensorRT runs of a graph."""

    folder: Path
    """Of its files; deleting it means building again."""
    state: Literal["cached", "built", "none"]
    checked: bool
    """It was seen to choose the tokens that it should."""
    seconds: float
    """That opening took."""
    nodes: dict[str, int]
    """ONNX Runtime's provider names, and how many nodes each was given."""

    def mark(self, *, checked: bool) -> None:
        """Remember for later starts whether it was seen to choose the right tokens.

        Raises:
            UserError: the file system refuses.
        """
        try:
            if checked:
                (self.folder / _CHECKED).touch()
            else:
                (self.folder / _CHECKED).unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"{error.filename or self.folder}: {error.strerror or error}") from None

    def describe(self) -> str:
        """One line for people."""
        shared = ", ".join(f"{name} {count}" for name, count in sorted(self.nodes.items()))
        return f"engine: {self.state} in {self.seconds:.1f} s; nodes: {shared}; {self.folder}"


def open_engine(
    folder: Path,
    manifest: Manifest,
    graph: GraphSpec,
    options: SessionOptions,
    *,
    capacity: int,
    prefill_chunk: int,
) -> tuple[Any, Engine]:
    """A session on TensorRT (and CUDA for what it does not take), its engine kept on disk.

    Raises:
        UserError: it does not start, or no engine came of it.
    """
    shapes = profile(graph.inputs, capacity=capacity, prefill_chunk=prefill_chunk)
    home = _home(manifest, graph, shapes, tf32=options.tf32)
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{home}: {error.strerror or error}; QWEN_ONNX_ENGINES names another place") from None
    if not options.tf32:
        # TensorRT rounds the factors of f32 products unless this says no, and asks when it is loaded.
        os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    before, started = engine_stamps(home), time.perf_counter()
    session = open_session(folder / graph.file, "tensorrt", options, more=tensorrt_options(home, shapes))
    seconds = time.perf_counter() - started
    state = engine_state(before, engine_stamps(home))
    if state == "none":
        instead = option("provider", "cuda")
        raise UserError(f"{folder / graph.file}: TensorRT took no part of the graph; use {instead}")
    engine = Engine(home, state, (home / _CHECKED).exists(), seconds, _nodes(session))
    if state == "built" and engine.checked:  # which was said of another
        engine.mark(checked=False)
        engine = dataclasses.replace(engine, checked=False)
    return session, engine


def _home(manifest: Manifest, graph: GraphSpec, shapes: Profile, *, tf32: bool) -> Path:
    found = gpus()
    if not found:
        raise UserError("provider tensorrt cannot start: the driver shows no GPU; see `qwen-onnx doctor`")
    library = tensorrt_library()
    weights = {name: spec.sha256 for name, spec in manifest.files.items() if is_weights(name)}
    return engine_folder(
        default_engine_cache() / ("tf32" if tf32 else "exact"),
        graph_sha256=manifest.files[graph.file].sha256,
        weights_sha256=weights,
        tensorrt_version=(library and library.version) or "unknown",
        gpu=found[0].name,
        compute_capability=found[0].compute_capability,
        onnxruntime_version=import_onnxruntime().__version__,
        profile=shapes,
    )


def _nodes(session: Any) -> dict[str, int]:
    counts: collections.Counter[str] = collections.Counter()
    for part in session.get_provider_graph_assignment_info():
        counts[part.ep_name] += len(part.get_nodes())
    return dict(counts)
