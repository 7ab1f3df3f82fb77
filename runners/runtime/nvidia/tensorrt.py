"""ONNX Runtime's TensorRT provider: shape ranges, options, and where its engines lie. Needs no TensorRT itself."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import platformdirs

from qwen_onnx.contract import BATCH, PAST, PAST_AND_NEW, SEQUENCE
from qwen_onnx.contract.manifest import TensorSpec
from qwen_onnx.errors import UserError

ENGINES_VARIABLE = "QWEN_ONNX_ENGINES"

_PREFIX = "qwen"
_SHAPE_OPTIONS = {
    "minimum": "trt_profile_min_shapes",
    "optimum": "trt_profile_opt_shapes",
    "maximum": "trt_profile_max_shapes",
}

Shapes = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Profile:
    """The shapes one engine serves, and the one it is tuned for: name to shape, dynamic inputs only."""

    minimum: Shapes
    optimum: Shapes
    maximum: Shapes


def profile(
    inputs: Sequence[TensorSpec], *, capacity: int, prefill_chunk: int, batch_size: int = 1
) -> Profile:
    """Shape ranges that no run leaves, so that no run rebuilds the engine; tuned for decode.

    Args:
        inputs: of a graph whose cache grows; every name in a shape is `batch_size`, `sequence_length`,
            `past_sequence_length`, or the sum of the last two.
        capacity: most tokens that the cache may hold when a run starts.
        prefill_chunk: most new tokens in one run.
        batch_size: of every run.

    Raises:
        UserError: a number below 1, or a dimension of another name.
    """
    limits = {"capacity": capacity, "prefill chunk": prefill_chunk, "batch size": batch_size}
    for name, number in limits.items():
        if number < 1:
            raise UserError(f"TensorRT shape ranges: a {name} of {number} found, 1 or more wanted")
    return Profile(
        minimum=_shapes(inputs, batch_size=batch_size, past=0, new=1),
        # Rounded up: an empty cache is never the shape to tune for.
        optimum=_shapes(inputs, batch_size=batch_size, past=(capacity + 1) // 2, new=1),
        maximum=_shapes(inputs, batch_size=batch_size, past=capacity, new=prefill_chunk),
    )


def profile_options(profile: Profile) -> dict[str, str]:
    """The three shape options, as `name:1x2x3,name:1x2`.

    Raises:
        UserError: an input's name holds a character of that syntax.
    """
    return {option: _spell(getattr(profile, field)) for field, option in _SHAPE_OPTIONS.items()}


def engine_folder(
    cache: Path,
    *,
    graph_sha256: str,
    weights_sha256: Mapping[str, str],
    tensorrt_version: str,
    gpu: str,
    compute_capability: str,
    onnxruntime_version: str,
    profile: Profile,
) -> Path:
    """Where in `cache` the engines for exactly this lie; any change gives another folder.

    The name's start is for people, its hash tells folders apart: `trt10.13.2-sm9.0-NVIDIA-H200-1f0c...`.
    ONNX Runtime's own file names do not depend on the weights: two fine-tunes would share an engine.

    Args:
        cache: of all engines, see `default_engine_cache`.
        graph_sha256: of the .onnx file.
        weights_sha256: file name to hash, of every file with weights.
        tensorrt_version: as its library says.
        gpu: the driver's name of it, any characters.
        compute_capability: such as `9.0`.
        onnxruntime_version: as its module says.
        profile: that the engine is built with.
    """
    key = {
        "graph": graph_sha256,
        "weights": dict(weights_sha256),
        "tensorrt": tensorrt_version,
        "gpu": gpu,
        "compute_capability": compute_capability,
        "onnxruntime": onnxruntime_version,
        "profile": {field: dict(getattr(profile, field)) for field in _SHAPE_OPTIONS},
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    # The first part is ours: no name is hidden, or reserved by Windows.
    parts = [f"trt{_plain(tensorrt_version)}", f"sm{_plain(compute_capability)}", _plain(gpu), digest]
    return cache / "-".join(part for part in parts if part)


def tensorrt_options(folder: Path, profile: Profile, *, workspace: int | None = None) -> dict[str, str]:
    """Options of the TensorRT provider: engines and timings kept in `folder`, shapes within `profile`.

    None of them names a precision: it is the graph's. `trt_load_user_initializer` is not among them:
    ONNX Runtime's Python binding refuses it.

    Args:
        folder: must exist when the session opens; ONNX Runtime makes no parent folders.
        profile: of every dynamic input.
        workspace: most bytes of scratch memory per engine; None leaves it to TensorRT.

    Raises:
        UserError: a workspace below 1, or a folder whose name the provider cannot open.
    """
    if workspace is not None and workspace < 1:
        raise UserError(f"a TensorRT workspace of {workspace} bytes found, 1 or more wanted")
    path = _native(folder)
    # True, never 1: the Python binding takes no other spelling.
    options = {
        "trt_engine_cache_enable": "True",
        "trt_engine_cache_path": path,
        "trt_engine_cache_prefix": _PREFIX,
        "trt_timing_cache_enable": "True",
        "trt_timing_cache_path": path,
        **profile_options(profile),
    }
    if workspace is not None:
        options["trt_max_workspace_size"] = str(workspace)
    return options


def engine_stamps(folder: Path) -> dict[Path, tuple[int, int]]:
    """Every engine file in `folder`, by name, with its size in bytes and time of change in nanoseconds.

    Raises:
        UserError: the folder cannot be read; one that does not exist holds none.
    """
    try:
        found = sorted(path for path in folder.iterdir() if path.suffix == ".engine" and path.is_file())
        status = {path: path.stat() for path in found}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"{error.filename or folder}: {error.strerror}") from None
    return {path: (entry.st_size, entry.st_mtime_ns) for path, entry in status.items()}


def cached_engines(folder: Path) -> list[Path]:
    """The engine files in `folder`, by name.

    Raises:
        UserError: the folder cannot be read; one that does not exist holds none.
    """
    return list(engine_stamps(folder))


def engine_state(
    before: Mapping[Path, tuple[int, int]], after: Mapping[Path, tuple[int, int]]
) -> Literal["cached", "built", "none"]:
    """What a session did, from `engine_stamps` before it opened and after.

    An engine that was written anew under its old name was built; `none`: TensorRT left no engine at all.
    """
    if not after:
        return "none"
    return "cached" if all(before.get(path) == stamp for path, stamp in after.items()) else "built"


def default_engine_cache() -> Path:
    """The folder of all engines: $QWEN_ONNX_ENGINES, else the system's place for caches."""
    if named := os.environ.get(ENGINES_VARIABLE):
        return Path(named).expanduser()
    return platformdirs.user_cache_path("qwen-onnx", appauthor=False) / "engines"


def _shapes(inputs: Sequence[TensorSpec], *, batch_size: int, past: int, new: int) -> Shapes:
    lengths = {BATCH: batch_size, SEQUENCE: new, PAST: past, PAST_AND_NEW: past + new}
    shapes: dict[str, tuple[int, ...]] = {}
    for spec in inputs:
        named = [length for length in spec.shape if isinstance(length, str)]
        if unknown := [length for length in named if length not in lengths]:
            raise UserError(
                f"input {spec.name}: dimension {unknown[0]!r} found, one of {', '.join(lengths)} wanted"
            )
        # A fixed input in the list would be counted as a changed profile, and the engine built at each start.
        if named:
            shapes[spec.name] = tuple(
                lengths[length] if isinstance(length, str) else length for length in spec.shape
            )
    return shapes


def _spell(shapes: Shapes) -> str:
    if wrong := [name for name in shapes if not name or set(name) & set(":,")]:
        raise UserError(f"input {wrong[0]!r}: a name without ':' and ',' wanted, for TensorRT's shape ranges")
    return ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes.items())


def _native(folder: Path) -> str:
    """The folder's absolute name, in the encoding that the provider's C++ reads it in."""
    path = str(folder.absolute())
    try:
        # On Windows it reads UTF-8 as the code page's: the engine is lost, and built at each start.
        path.encode("ascii" if sys.platform == "win32" else "utf-8")
    except UnicodeEncodeError:
        raise UserError(
            f"{path!r}: the TensorRT provider cannot open this name; set {ENGINES_VARIABLE} to a plain one"
        ) from None
    return path


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text)[:40].strip("-.")
