"""export.json: what an exported folder says of itself, and what no export can say."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from qwen_onnx import contract
from qwen_onnx.contract import EXPORT_DTYPES, INPUT_IDS, LAYOUTS, LOWERINGS, OF_ENTRY, TARGETS
from qwen_onnx.contract.cache_spec import CacheSpec
from qwen_onnx.contract.json_file import from_json, read_json
from qwen_onnx.contract.old_formats import from_format_2
from qwen_onnx.contract.quant import Calibration, Quality, QuantConfig
from qwen_onnx.errors import UserError

FORMAT_VERSION = 3
MIN_ONNXRUNTIME = "1.31"
MANIFEST_FILE = "export.json"
RESIZING = ("grow", "shrink")
"""Entries that change the size of a state tensor."""
_MOST_LAYERS = 10_000  # no model has a tenth of it, and names are made for each


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
    cache: str | None = None
    """Of the manifest's `caches`, the one that it takes in and puts out; None of graphs that are no decoder."""


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
    caches: dict[str, CacheSpec]
    """By name, the state tensors of decoders; graphs of one cache work on the same buffers."""
    files: dict[str, FileSpec]
    quantized: dict[str, QuantConfig]
    """What was done to which of the checkpoint's matrices; all else is f32 then."""
    calibration: Calibration | None = None
    quality: Quality | None = None
    golden: Golden | None = None
    target: str = "onnxruntime"
    """One of TARGETS."""
    layout: str = "plain"
    """One of LAYOUTS."""
    panel_rows: int | None = None
    """8 or 16 where matrices [out, in] lie in panels, as [out / panel_rows, in, panel_rows]."""
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
        raise UserError(f"this export has no {entry} graph for {provider}, but for {', '.join(known)}")


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
    try:
        raw = read_json(path)
    except UserError as error:  # of a copy that ended early
        raise UserError(f"{error}; export the model again") from None
    if raw.get("format_version") not in (2, FORMAT_VERSION):
        raise UserError(
            f"{path}: format_version {raw.get('format_version')!r} found, this version reads 2 and "
            f"{FORMAT_VERSION}; export the model again"
        )
    try:
        manifest = from_json(Manifest, raw if raw["format_version"] == FORMAT_VERSION else from_format_2(raw))
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, UserError) as error:
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
    if (manifest.panel_rows is not None) != any(graph.entry == "probe" for graph in manifest.graphs):
        return f"panel_rows is {manifest.panel_rows}, with or without a probe of panels"
    if manifest.panel_rows not in (None, 8, 16):
        return f"panel_rows is {manifest.panel_rows}"
    if manifest.panel_rows and manifest.dtype != "f32":
        return f"its matrices are in panels and in {manifest.dtype}"
    for graph in manifest.graphs:
        if fault := _graph_fault(manifest, graph):
            return f"{graph.file} {fault}"
    if (golden := manifest.golden) is not None:
        ids = (*golden.prompt_ids, *golden.token_ids)
        if not golden.prompt_ids or not golden.token_ids or len(golden.margins) != len(golden.token_ids):
            return "its golden ids are not a prompt, ids and a margin for each"
        if not all(0 <= token_id < manifest.vocab_size for token_id in ids):
            return "its golden ids are outside the vocabulary"
    return None


def _graph_fault(manifest: Manifest, graph: GraphSpec) -> str | None:
    """What no graph of an export says of its cache and inputs."""
    if graph.entry in (*RESIZING, "probe"):
        return None
    cache = manifest.caches.get(graph.cache or "")
    if cache is None:
        return f"has a cache {graph.cache!r}, which the export does not describe"
    if {state.layer for state in cache.states} != set(range(manifest.num_hidden_layers)):
        return f"has no cache of {manifest.num_hidden_layers} layers"
    heads = (manifest.num_key_value_heads, manifest.head_dim)
    attended = [state for state in cache.states if state.kind == "full_attention"]
    if attended and not any(tuple(filter(None, state.fixed_sizes)) == heads for state in attended):
        return f"has a cache that is not of {heads[0]} heads of {heads[1]}"
    inputs = {spec.name: (spec.dtype, spec.shape) for spec in graph.inputs}
    outputs = {spec.name for spec in graph.outputs}
    for spec in (*graph.inputs, *graph.outputs):
        if spec.name in (contract.LOGITS, contract.LOGIT_BIAS) and spec.shape[-1:] != (manifest.vocab_size,):
            return f"has {spec.name} of {[*spec.shape]}, and the export a vocab_size of {manifest.vocab_size}"
    if contract.LOGITS not in outputs:
        return "puts out no logits"
    for state in cache.states:
        if inputs.pop(state.past, None) != (state.dtype, state.shape) or state.present not in outputs:
            return f"has another {state.past} than its cache"
    if (lowering := LOWERINGS.get(graph.lowering)) is None:
        return f"is of lowering {graph.lowering!r}, which this version does not know"
    if inputs.keys() - {INPUT_IDS} != lowering.inputs | OF_ENTRY.get(graph.entry, set()):
        return f"has not the inputs of lowering {graph.lowering}"
    return None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write export.json, whole or not at all."""
    path = folder / MANIFEST_FILE
    beside = path.with_suffix(".json.new")
    beside.write_text(json.dumps(dataclasses.asdict(manifest), indent=1) + "\n", encoding="utf-8")
    beside.replace(path)
