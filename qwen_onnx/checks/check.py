"""Is this export what it should be? Its bytes, its graphs, its greedy ids here, its logits against float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import ParamSpec

import onnx
import safetensors

from qwen_onnx.checkpoints.checkpoint import Checkpoint, open_checkpoint, side_files
from qwen_onnx.checkpoints.config import QwenConfig, parse_config
from qwen_onnx.checkpoints.hub import resolve_model
from qwen_onnx.checkpoints.safetensors_file import StoredTensor, read_header, same_bytes
from qwen_onnx.checks.constants import check_constants
from qwen_onnx.checks.golden import Finding, check_golden
from qwen_onnx.checks.info import load_graph, tensor_spec
from qwen_onnx.checks.known_runtimes import verify_runtime
from qwen_onnx.checks.logits import check_logits, check_quality, exported_weights
from qwen_onnx.checks.runtimes import check_runtime
from qwen_onnx.contract import DTYPES, QUANTIZED
from qwen_onnx.contract.json_file import read_json
from qwen_onnx.contract.manifest import GraphSpec, Manifest, is_weights, read_manifest
from qwen_onnx.contract.quant import QuantConfig, QuantPlan
from qwen_onnx.errors import UserError, counted
from qwen_onnx.exports.graph_file import verify
from qwen_onnx.exports.layouts.known import choose_layout
from qwen_onnx.exports.plan import ExportKind, GraphPlan, graph_plans
from qwen_onnx.exports.quality import MOST_LOST, relative_error
from qwen_onnx.exports.weights import PIECE, OutputTensor, rotary_tensors, stored_as
from qwen_onnx.exports.writer import hash_file
from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.options import OPTIMIZATION_LEVELS, SessionOptions
from qwen_onnx.runners.runtime.providers import choose_provider
from qwen_onnx.runners.text.eos_ids import eos_ids
from qwen_onnx.runners.text.template.chat_template import ChatTemplate
from qwen_onnx.runners.text.tokenizer import TOKENIZER_FILE, Tokenizer

P = ParamSpec("P")


def check_export(
    folder: Path,
    options: SessionOptions | None = None,
    *,
    against: str | None = None,
    runtime: str | None = None,
) -> Iterator[Finding]:
    """Check an export, a finding at a time; it is good when all of them are.

    Args:
        options: the provider; with TF32 the bounds are those of f32 still.
        against: checkpoint (folder, Hub id or `tiny`) to compare weights and logits with.
        runtime: have this one of MODULES choose the greedy ids too.

    Raises:
        UserError: not an export at all, or the provider does not start, or the runtime is not known.
    """
    manifest = read_manifest(folder)
    if runtime is not None:
        verify_runtime(runtime, manifest)
    options = options or SessionOptions()
    choose_provider(options.provider, manifest)
    checkpoint = None if against is None else open_checkpoint(resolve_model(against).folder)
    damaged = _damaged_files(folder, manifest)
    yield Finding(not damaged, f"files: {len(manifest.files)} as written" if not damaged else damaged[0])
    if damaged:
        return
    yield _finding(_check_manifest, folder, manifest)
    yield _finding(_check_plan, folder, manifest)
    yield from (_check_weights(folder / name) for name in manifest.files if is_weights(name))
    yield from check_constants(folder, manifest)
    for graph in manifest.graphs:
        yield _finding(_check_graph, folder, graph)
    if checkpoint is not None:
        fault = _foreign_weights(folder, manifest, checkpoint)
        how = "calibrated, each matrix near its own" if manifest.calibration else "bit for bit"
        yield Finding(fault is None, fault or f"weights: the checkpoint's, as {manifest.dtype}, {how}")
        if fault is not None:
            return
    try:
        chat = Chat(Runner(folder, options))
    except UserError as error:
        yield Finding(False, str(error))
        return
    yield Finding(True, f"runs: {chat.runner.graph.file} on {chat.runner.describe()}")
    if checkpoint is not None:
        yield _finding(check_logits, chat, manifest, checkpoint)
    if checkpoint is not None and manifest.quantized:
        yield from check_quality(chat, manifest, checkpoint)
    golden = _finding(check_golden, chat, manifest)
    if not golden.ok:
        golden = _with_cause(golden, chat, manifest)
    if chat.runner.engine is not None:
        chat.runner.engine.mark(checked=golden.ok)
    yield golden
    if runtime is not None:
        yield _finding(check_runtime, chat, manifest, runtime)


def _finding(check: Callable[P, Finding], *args: P.args, **kwargs: P.kwargs) -> Finding:
    """What the check finds; an export that cannot even be read or run is found to be bad."""
    try:
        return check(*args, **kwargs)
    except UserError as error:
        return Finding(False, str(error))


def _with_cause(found: Finding, chat: Chat, manifest: Manifest) -> Finding:
    """The golden ids that differ, and whether they are right once ONNX Runtime rewrites less of the graph."""
    folder, options = chat.runner.folder, chat.runner.options
    for level in [*OPTIMIZATION_LEVELS][-2::-1]:
        less = dataclasses.replace(options, optimization_level=level)
        try:
            right = check_golden(Chat(Runner(folder, less)), manifest).ok
        except UserError:
            right = False
        if right:
            return Finding(False, f"{found.text}; right with --optimization-level {level}")
    return Finding(False, f"{found.text}; no less with all of ONNX Runtime's optimizations off")


def _damaged_files(folder: Path, manifest: Manifest) -> list[str]:
    damaged = []
    for name, spec in manifest.files.items():
        path = folder / name
        try:
            if not path.is_file():
                damaged.append(f"files: {name} is missing")
            elif (size := path.stat().st_size) != spec.size:
                damaged.append(f"files: {name} has {size:,} bytes, {spec.size:,} were written")
            elif hash_file(path).sha256 != spec.sha256:
                damaged.append(f"files: {name} was changed, its sha256 differs")
        except OSError as error:
            damaged.append(f"files: {name} cannot be read ({error.strerror or error})")
    return damaged


def _check_manifest(folder: Path, manifest: Manifest) -> Finding:
    """What the manifest says of graphs, tables and end tokens is what they say themselves."""
    for graph in manifest.graphs:
        model = load_graph(folder / graph.file).graph
        for said, held in ((graph.inputs, model.input), (graph.outputs, model.output)):
            if [*said] != [tensor_spec(value) for value in held]:
                return Finding(False, f"manifest: {graph.file} has other inputs or outputs than it says")
        for tensor in model.initializer:
            place = {entry.key: entry.value for entry in tensor.external_data}
            if place and _beside(graph, place.get("location", "")) not in manifest.files:
                return Finding(
                    False, f"manifest: {graph.file} reads {place.get('location')!r}, which it does not list"
                )
            if tensor.name == "rotary.cos" and tensor.dims[0] != manifest.context_length:
                return Finding(
                    False, f"manifest: context_length is not the {tensor.dims[0]} rows of the tables"
                )
    if unlisted := sorted({*side_files(folder)} - manifest.files.keys()):
        return Finding(False, f"manifest: {unlisted[0]} was added to the export")
    has_tokenizer = (folder / TOKENIZER_FILE).exists()
    tokenizer = Tokenizer.from_folder(folder) if has_tokenizer else None
    template = ChatTemplate.from_folder(folder) if has_tokenizer else None
    if sorted(eos_ids(folder, tokenizer, template)) != sorted(manifest.eos_token_ids):
        return Finding(False, "manifest: eos_token_ids are not those of its config files and template")
    return Finding(True, "manifest: as its graphs, tables and config files say")


def _check_plan(folder: Path, manifest: Manifest) -> Finding:
    """Which graph serves which provider is what an export of this dtype has."""
    config = parse_config(read_json(folder / "config.json"))
    wanted = {
        (plan.file, plan.entry, plan.lowering.name, plan.providers) for plan in _plans(config, manifest)
    }
    found = {(graph.file, graph.entry, graph.lowering, graph.providers) for graph in manifest.graphs}
    if odd := sorted(wanted ^ found):
        file = odd[0][0]
        return Finding(False, f"graphs: {file} is missing, or not for the providers that it is made for")
    providers = sorted({provider for graph in manifest.graphs for provider in graph.providers})
    return Finding(True, f"graphs: {len(found)}, for {', '.join(providers)}")


def _beside(graph: GraphSpec, location: str) -> str:
    """The file that a graph means by the location of its weights."""
    return (PurePosixPath(graph.file).parent / location).as_posix()


def _plans(config: QwenConfig, manifest: Manifest) -> list[GraphPlan]:
    """Those of an export of this kind."""
    layout, _ = choose_layout(manifest.layout, manifest.target, manifest.dtype)
    quant = None
    if manifest.dtype in QUANTIZED:
        some = QuantConfig(QUANTIZED[manifest.dtype], 32)  # whatever it is: the graphs are the same
        quant = QuantPlan(some, some)
    kind = ExportKind(
        manifest.dtype,
        layout,
        portable=manifest.target == "portable",
        split=any(graph.entry == "decode" for graph in manifest.graphs),
        quant=quant,
        panel_rows=manifest.panel_rows,
    )
    return graph_plans(config, kind)


def _check_weights(path: Path) -> Finding:
    """Other programs read the file through the format's own library."""
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            return Finding(
                True, f"{path.name}: {len(file.keys())} tensors, as the safetensors library reads it"
            )
    except (safetensors.SafetensorError, OSError) as error:
        return Finding(False, f"{path.name}: the safetensors library does not read it ({error})")


def _check_graph(folder: Path, graph: GraphSpec) -> Finding:
    model = load_graph(folder / graph.file)
    try:
        verify(model)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        return Finding(False, f"{graph.file}: {str(error).splitlines()[0]}")
    return Finding(True, f"{graph.file}: valid ONNX, {counted(len(model.graph.node), 'node')}")


def _foreign_weights(folder: Path, manifest: Manifest, checkpoint: Checkpoint) -> str | None:
    """The first tensor of the export that is not the checkpoint's, converted; None when all are."""
    stored: dict[str, StoredTensor] = {}
    for name in manifest.files:
        if is_weights(name):
            stored |= read_header(folder / name)
    dtype = DTYPES.get(manifest.dtype, "F32")
    made = rotary_tensors(checkpoint.config, manifest.context_length)
    own: list[OutputTensor] = []
    read = exported_weights(folder, manifest, checkpoint)
    for name, tensor in checkpoint.tensors.items():
        quant = manifest.quantized.get(name)
        if quant is not None and manifest.calibration is not None:
            # What rounding one column lost, others make up for: nobody can say the bytes, but how far they may be.
            if (lost := relative_error(read(name), tensor)) > MOST_LOST[quant.bits]:
                return f"weights: {name} differs from the checkpoint's by {lost:.0%}"
            continue
        own += stored_as(tensor, dtype, quant=quant, panel_rows=manifest.panel_rows)
    for wanted in [*own, *made]:
        found = stored.get(wanted.name)
        if found is None or (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
            return f"weights: {wanted.name} is not in the export as {wanted.dtype} {list(wanted.shape)}"
        if not same_bytes(found.chunks(PIECE), wanted.pieces()):
            return f"weights: {wanted.name} differs from the checkpoint's"
    return None
