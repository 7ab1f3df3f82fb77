"""export.json: what an exported folder says of itself, and what no export can say."""

from __future__ import annotations

import dataclasses
import functools
import json
import reprlib
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from qwen_onnx.contract import (
    EXPORT_DTYPES,
    INPUT_IDS,
    LAYOUTS,
    OF_ENTRY,
    STEP_INPUTS,
    TARGETS,
    Blocks,
    past_names,
)
from qwen_onnx.errors import UserError
from qwen_onnx.json_file import read_json

T = TypeVar("T")
FORMAT_VERSION = 2
MIN_ONNXRUNTIME = "1.31"
MANIFEST_FILE = "export.json"


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A graph input or output."""

    name: str
    dtype: str
    """int64, float32, float16 or bfloat16."""
    shape: tuple[int | str, ...]
    """A name stands for a length that may differ from run to run."""


@dataclasses.dataclass(frozen=True)
class GraphSpec:
    """One .onnx file of an export."""

    file: str
    entry: str
    """`prefill` (any number of tokens), `decode` (one token), `greedy` (any number, and the choice of the next),
    `score` (any number, and logits after as many as asked for), `grow` (a cache buffer into a
    larger one), `shrink` (the first slots of a cache), `probe` (tells this processor's panels)."""
    lowering: str
    providers: tuple[str, ...]
    """Short names (`cpu`, `cuda`, `tensorrt`) of the providers this file is meant for."""
    opsets: dict[str, int]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclasses.dataclass(frozen=True)
class FileSpec:
    """Size in bytes and sha256, lower-case hex."""

    size: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Golden:
    """Greedy ids recorded on the CPU provider, computing in f32, for `check` to compare other machines with."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    margins: tuple[float, ...]
    """Best logit minus second best, at each step: how near each choice was."""

    def within(self, context_length: int) -> Golden | None:
        """As much of it as so many positions hold; None when the prompt leaves no room for an id."""
        room = context_length - len(self.prompt_ids)
        if room < 1:
            return None
        return dataclasses.replace(self, token_ids=self.token_ids[:room], margins=self.margins[:room])


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of export.json."""

    format_version: int
    model_id: str
    revision: str | None
    architecture: str
    dtype: str
    """f32, f16 or bf16: of the weights, and of the cache where the graph computes in it; or int8 or int4."""
    vocab_size: int
    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int
    context_length: int
    """Rows of the rotary tables: no position at or beyond it can be computed."""
    eos_token_ids: tuple[int, ...]
    min_onnxruntime: str
    packages: dict[str, str]
    graphs: tuple[GraphSpec, ...]
    files: dict[str, FileSpec]
    quantised: dict[str, Blocks]
    """What was done to which of the checkpoint's matrices; all else is f32 then."""
    golden: Golden | None = None
    target: str = "onnxruntime"
    """One of TARGETS."""
    layout: str = "plain"
    """One of LAYOUTS."""
    panel_rows: int | None = None
    """8 or 16 in layout `cpu`: matrices [out, in] lie as [out / panel_rows, in, panel_rows]."""
    samples: dict[str, str] = dataclasses.field(default_factory=dict)
    """Of each weights file, sha256 of pages spread over it: a runner compares them, as hashing all takes too long."""

    def graph(self, entry: str, provider: str) -> GraphSpec:
        """The graph that serves `entry` on `provider`.

        Raises:
            UserError: the export has none.
        """
        for graph in self.graphs:
            if graph.entry == entry and provider in graph.providers:
                return graph
        known = sorted({provider for graph in self.graphs for provider in graph.providers})
        raise UserError(
            f"this export has no {entry} graph for {provider}; it has graphs for {', '.join(known)}"
        )


def read_manifest(folder: Path) -> Manifest:
    """Read export.json.

    Raises:
        UserError: not an export, of another format version, or malformed.
    """
    path = folder / MANIFEST_FILE
    try:
        is_folder, is_export = folder.is_dir(), path.is_file()
        is_odd = not is_export and path.exists()  # as a pipe, which would be waited for
    except OSError as error:  # a name too long, or a folder that may not be looked into
        raise UserError(f"{folder}: {error.strerror or error}") from None
    if not is_folder:
        raise UserError(f"{folder}: no such export folder; make one with `qwen-onnx export`")
    if is_odd:
        raise UserError(f"{path}: not a file")
    # Of a Triton repository, or of a model in it; no deeper, for this may be anybody's home folder.
    inside = (next(folder.glob(f"{at}1/export/{MANIFEST_FILE}"), None) for at in ("", "*/"))
    if not is_export and (found := next(filter(None, inside), None)):
        raise UserError(f"{folder}: not an export itself; the one for Triton in it is {found.parent}")
    if not is_export:
        raise UserError(
            f"{folder}: not an export, {MANIFEST_FILE} is missing; make one with `qwen-onnx export`"
        )
    raw = read_json(path)
    if raw.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"{path}: format_version {raw.get('format_version')!r} found, this version reads {FORMAT_VERSION}; "
            "export the model again"
        )
    try:
        manifest = from_json(Manifest, raw)
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(f"{path}: malformed ({error}); export the model again") from None
    if fault := _fault(manifest):
        raise UserError(f"{path}: {fault}; export the model again")
    for name in [*manifest.files, *(graph.file for graph in manifest.graphs)]:
        if not _lies_inside(name):
            raise UserError(f"{path}: {name!r} is not the name of a file in the export")
    return manifest


def _lies_inside(name: str) -> bool:
    """A file of the export, or of a folder in it: whatever the system, never one outside."""
    parts = name.split("/")
    plain = all(part not in ("", ".", "..") and Path(part).name == part for part in parts)
    return plain and name.isprintable() and not set(name) & {"\\", ":"}


def is_weights(name: str) -> bool:
    """Whether a file of an export holds tensors, in the safetensors format whatever its name."""
    return name.endswith(".safetensors") or ".onnx_data" in name


_MOST_LAYERS = 10_000  # no model has a tenth of it, and names are made for each


def _fault(manifest: Manifest) -> str | None:
    """What no export says of itself, in words; None when there is nothing."""
    for field in ("vocab_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "context_length"):
        if not 0 < getattr(manifest, field) < 2**31:
            return f"{field} is {getattr(manifest, field)}"
    if manifest.num_hidden_layers > _MOST_LAYERS:
        return f"num_hidden_layers is {manifest.num_hidden_layers}"
    for field, known in (("dtype", EXPORT_DTYPES), ("target", TARGETS), ("layout", LAYOUTS)):
        if getattr(manifest, field) not in known:
            return f"{field} is {getattr(manifest, field)!r}"
    if manifest.panel_rows not in ((8, 16) if manifest.layout == "cpu" else (None,)):
        return f"panel_rows is {manifest.panel_rows} in layout {manifest.layout}"
    if manifest.layout == "cpu" and manifest.dtype != "f32":
        return f"layout cpu is in {manifest.dtype}"
    cache = set(past_names(manifest.num_hidden_layers))
    for graph in manifest.graphs:
        of_cache = [spec.shape for spec in graph.inputs if spec.name in cache]
        if any(len(shape) != 4 for shape in of_cache):
            return f"{graph.file} has a cache that is not [batch, heads, slots, size]"
        own = (manifest.num_key_value_heads, manifest.head_dim)
        if any((shape[1], shape[3]) != own for shape in of_cache):
            return f"{graph.file} has a cache that is not of {own[0]} heads of {own[1]}"
        if graph.entry in ("grow", "shrink", "probe"):
            continue
        names = {spec.name for spec in graph.inputs}
        if cache != {name for name in names if name.startswith("past_key_values.")}:
            return f"{graph.file} has no cache of {manifest.num_hidden_layers} layers"
        if graph.lowering not in STEP_INPUTS:
            return f"{graph.file} is of lowering {graph.lowering!r}, which this version does not know"
        if names - cache - {INPUT_IDS} != STEP_INPUTS[graph.lowering] | OF_ENTRY.get(graph.entry, set()):
            return f"{graph.file} has not the inputs of lowering {graph.lowering}"
    if (golden := manifest.golden) is not None:
        ids = (*golden.prompt_ids, *golden.token_ids)
        if not golden.prompt_ids or not golden.token_ids or len(golden.margins) != len(golden.token_ids):
            return "its golden ids are not a prompt, ids and a margin for each"
        if not all(0 <= token_id < manifest.vocab_size for token_id in ids):
            return "its golden ids are outside the vocabulary"
    return None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write export.json, whole or not at all."""
    path = folder / MANIFEST_FILE
    beside = path.with_suffix(".json.new")
    beside.write_text(json.dumps(dataclasses.asdict(manifest), indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def from_json(kind: type[T], value: object) -> T:
    """A JSON value as the dataclass `kind`, every field of it checked against its annotation.

    Raises:
        TypeError: a field is missing or of another type.
    """
    built: T = _build(kind, value)
    return built


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """A manifest has a thousand small objects of few kinds."""
    return typing.get_type_hints(kind)


def _build(kind: Any, value: Any) -> Any:
    """A JSON value as the annotated type: dataclasses, tuples, dicts, optionals, unions and scalars."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise TypeError(f"{kind} wants an object, found {reprlib.repr(value)}")
        hints = _hints(typing.cast(Any, kind))
        return kind(**{name: _build(hints[name], value[name]) for name in hints if name in value})  # type: ignore[operator]
    if origin is tuple:
        if not isinstance(value, list):
            raise TypeError(f"a list is wanted, found {reprlib.repr(value)}")
        return tuple(_build(args[0], item) for item in value)
    if origin is dict:
        if not isinstance(value, dict):
            raise TypeError(f"an object is wanted, found {reprlib.repr(value)}")
        return {key: _build(args[1], item) for key, item in value.items()}
    if origin is types.UnionType:
        if value is None and types.NoneType in args:
            return None
        kinds = [arg for arg in args if arg is not types.NoneType]
        if len(kinds) == 1:
            return _build(kinds[0], value)
        kind = tuple(kinds)
    elif kind is float:
        kind = (int, float)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{kind} wanted, found {reprlib.repr(value)}")
    return value
