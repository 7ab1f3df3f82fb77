"""Is this export what it should be? Its bytes, its graphs, its greedy ids here, its logits against float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np
import onnx
import safetensors
from numpy.typing import NDArray

from qwen_onnx.checkpoint import SIDE_FILES, Checkpoint, open_checkpoint
from qwen_onnx.config import QwenConfig, parse_config
from qwen_onnx.contract import (
    DTYPES,
    QUANTISED,
    QWEIGHT,
    SCALES,
    WEIGHTS_FILE,
    BlockPlan,
    Blocks,
    Golden,
    GraphSpec,
    Manifest,
    read_json,
    read_manifest,
    write_manifest,
)
from qwen_onnx.errors import UserError
from qwen_onnx.exporter import hash_file
from qwen_onnx.graph_plan import GraphPlan, graph_plans, quantised_plans
from qwen_onnx.graphs.build import verify
from qwen_onnx.hub import resolve_model
from qwen_onnx.info import load_graph, tensor_spec
from qwen_onnx.quantize import Scheme, dequantise
from qwen_onnx.reference import reference_logits
from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.chat_template import ChatTemplate
from qwen_onnx.runners.providers import choose_provider
from qwen_onnx.runners.runner import Runner
from qwen_onnx.runners.session import SessionOptions
from qwen_onnx.runners.stop_ids import stop_ids
from qwen_onnx.runners.tokenizer import TOKENIZER_FILE, Tokenizer
from qwen_onnx.safetensors_file import FLOAT_DTYPES, StoredTensor, read_header, same_bytes
from qwen_onnx.tolerances import logit_bound
from qwen_onnx.weights import PIECE, OutputTensor, converted, quantised, rotary_tensors

P = ParamSpec("P")

GOLDEN_TOKENS = 32
_GOLDEN_TEXT = "Count from one to five, then spell the word stone."
_REFERENCE_TOKENS = 48

# Mean KL divergence from float64, in nats, by the type computed in: what the table's rounding comes to in
# probabilities, with room for a deep model. A layer perturbed by a hundredth lies beyond it in f32 and f16.
KL_BOUNDS = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 2e-2, "int8": 3e-2}
_LEAST_EQUAL = 0.5  # of the golden ids, however near the others were


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was checked."""

    ok: bool
    text: str


def check_export(
    folder: Path, *, against: str | None = None, provider: str = "auto", tf32: bool = False
) -> Iterator[Finding]:
    """Check an export, a finding at a time; it is good when all of them are.

    Args:
        against: checkpoint (folder, Hub id or `tiny`) to compare weights and logits with.
        tf32: on CUDA, with factors of f32 products rounded; the bounds are those of f32 still.

    Raises:
        UserError: not an export at all, or the provider does not start.
    """
    manifest = read_manifest(folder)
    provider = choose_provider(provider, manifest)
    damaged = _damaged_files(folder, manifest)
    yield Finding(not damaged, f"files: {len(manifest.files)} as written" if not damaged else damaged[0])
    if damaged:
        return
    yield _finding(_check_manifest, folder, manifest)
    yield _finding(_check_plan, folder, manifest)
    yield from (_check_weights(folder / name) for name in manifest.files if name.endswith(".safetensors"))
    for graph in manifest.graphs:
        yield _finding(_check_graph, folder, graph)
    checkpoint = None if against is None else open_checkpoint(resolve_model(against).folder)
    if checkpoint is not None:
        fault = _foreign_weights(folder, manifest, checkpoint)
        yield Finding(fault is None, fault or f"weights: the checkpoint's, as {manifest.dtype}, bit for bit")
        if fault is not None:
            return
    try:
        chat = Chat(Runner(folder, SessionOptions(provider, tf32=tf32)))
    except UserError as error:
        yield Finding(False, str(error))
        return
    yield Finding(True, f"runs: {chat.runner.graph.file} on {chat.runner.describe()}")
    if checkpoint is not None:
        yield _finding(_check_logits, chat, manifest, checkpoint)
    if checkpoint is not None and manifest.quantised:
        yield _finding(_check_quality, chat, manifest, checkpoint)
    golden = _finding(check_golden, chat, manifest)
    if chat.runner.engine is not None:
        chat.runner.engine.mark(checked=golden.ok)
    yield golden


def _finding(check: Callable[P, Finding], *args: P.args, **kwargs: P.kwargs) -> Finding:
    """What the check finds; an export that cannot even be read or run is found to be bad."""
    try:
        return check(*args, **kwargs)
    except UserError as error:
        return Finding(False, str(error))


def _damaged_files(folder: Path, manifest: Manifest) -> list[str]:
    damaged = []
    for name, spec in manifest.files.items():
        path = folder / name
        if not path.is_file():
            damaged.append(f"files: {name} is missing")
        elif (size := path.stat().st_size) != spec.size:
            damaged.append(f"files: {name} has {size:,} bytes, {spec.size:,} were written")
        elif hash_file(path).sha256 != spec.sha256:
            damaged.append(f"files: {name} was changed, its sha256 differs")
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
            if place and place.get("location") not in manifest.files:
                return Finding(
                    False, f"manifest: {graph.file} reads {place.get('location')!r}, which it does not list"
                )
            if tensor.name == "rotary.cos" and tensor.dims[0] != manifest.context_length:
                return Finding(
                    False, f"manifest: context_length is not the {tensor.dims[0]} rows of the tables"
                )
    if unlisted := sorted({path.name for path in folder.iterdir()} & {*SIDE_FILES} - manifest.files.keys()):
        return Finding(False, f"manifest: {unlisted[0]} was added to the export")
    has_tokenizer = (folder / TOKENIZER_FILE).exists()
    tokenizer = Tokenizer.from_folder(folder) if has_tokenizer else None
    template = ChatTemplate.from_folder(folder) if has_tokenizer else None
    if sorted(stop_ids(folder, tokenizer, template)) != sorted(manifest.eos_token_ids):
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


def _plans(config: QwenConfig, manifest: Manifest) -> list[GraphPlan]:
    if manifest.dtype in QUANTISED:
        blocks = Blocks(QUANTISED[manifest.dtype], 32)  # whatever they are: the plans are the same
        return quantised_plans(config, BlockPlan(blocks, blocks))
    return graph_plans(config, manifest.dtype)


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
    return Finding(True, f"{graph.file}: valid ONNX, {len(model.graph.node)} nodes")


def _foreign_weights(folder: Path, manifest: Manifest, checkpoint: Checkpoint) -> str | None:
    """The first tensor of the export that is not the checkpoint's, converted; None when all are."""
    stored: dict[str, StoredTensor] = {}
    for name in manifest.files:
        if name.endswith(".safetensors"):
            stored |= read_header(folder / name)
    dtype = DTYPES.get(manifest.dtype, "F32")
    made = rotary_tensors(checkpoint.config, manifest.context_length)
    own: list[OutputTensor] = []
    for name, tensor in checkpoint.tensors.items():
        blocks = manifest.quantised.get(name)
        own += quantised(tensor, blocks) if blocks else [converted(tensor, dtype)]
    for wanted in [*own, *made]:
        found = stored.get(wanted.name)
        if found is None or (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
            return f"weights: {wanted.name} is not in the export as {wanted.dtype} {list(wanted.shape)}"
        if not same_bytes(found.chunks(PIECE), wanted.pieces()):
            return f"weights: {wanted.name} differs from the checkpoint's"
    return None


def _check_logits(chat: Chat, manifest: Manifest, checkpoint: Checkpoint) -> Finding:
    found, ids = _logits(chat, manifest)
    rounded = FLOAT_DTYPES[DTYPES.get(manifest.dtype, "F32")]
    stored = read_header(chat.runner.folder / WEIGHTS_FILE) if manifest.quantised else {}

    def read(name: str) -> NDArray[Any]:
        tensor = checkpoint.read(name)
        if (blocks := manifest.quantised.get(name)) is None:
            return tensor.astype(rounded, copy=False)
        stem = name.removesuffix("weight")
        integers, scales = stored[stem + QWEIGHT], stored[stem + SCALES].numpy()
        packed = np.memmap(integers.file, np.uint8, "r", integers.offset, integers.shape)
        return dequantise(packed, scales, tensor.shape[1], Scheme(blocks.bits, blocks.block_size))

    wanted = reference_logits(checkpoint.config, read, ids, last=len(found))
    return compare_logits(found, wanted, chat.runner.arithmetic, layers=manifest.num_hidden_layers)


def _check_quality(chat: Chat, manifest: Manifest, checkpoint: Checkpoint) -> Finding:
    """What quantising cost. It is for the user to judge, so that this is never bad."""
    found, ids = _logits(chat, manifest)
    wanted = reference_logits(checkpoint.config, checkpoint.read, ids, last=len(found))
    kl = float(np.mean(_kl(wanted, found.astype(np.float64))))
    agree = float((found.argmax(-1) == wanted.argmax(-1)).mean())
    return Finding(
        True,
        f"quality: against the checkpoint in float64 over {len(found)} positions of a fixed text: "
        f"top-1 agrees on {agree:.0%}, KL {kl:.1e}",
    )


def _logits(chat: Chat, manifest: Manifest) -> tuple[NDArray[np.float32], list[int]]:
    """The logits of the second half of a fixed text, [positions, vocab], and its ids; prefill and decode."""
    runner, ids = chat.runner, _golden_prompt(chat, manifest)
    ids = (ids * (1 + _REFERENCE_TOKENS // len(ids)))[: min(_REFERENCE_TOKENS, runner.context_length)]
    cache, half = runner.new_cache(), len(ids) // 2
    rows = [runner.prefill(cache, np.array([ids[: half + 1]]))]
    rows += [runner.decode(cache, np.array([[token_id]])) for token_id in ids[half + 1 :]]
    return np.concatenate(rows), ids


def compare_logits(
    found: NDArray[np.float32], wanted: NDArray[np.float64], dtype: str, *, layers: int
) -> Finding:
    """The verdict on logits [positions, vocab] computed in `dtype`, against float64 over the same weights."""
    bound = logit_bound(dtype, layers=layers, largest=float(np.abs(wanted).max()))
    kl_bound = KL_BOUNDS[dtype]
    error = float(np.abs(found - wanted).max())
    kl = float(np.mean(_kl(wanted, found.astype(np.float64))))
    best, rest = np.partition(wanted, -2, axis=-1)[:, -1], np.partition(wanted, -2, axis=-1)[:, -2]
    agree = found.argmax(-1) == wanted.argmax(-1)
    ok = error <= bound and kl <= kl_bound and bool(np.all(agree | (best - rest < 2 * bound)))
    text = (
        f"logits: against float64 over {len(wanted)} positions, {dtype}: top-1 agrees on {agree.mean():.0%}, "
        f"KL {max(kl, 0):.1e} (bound {kl_bound:.0e}), largest difference {error:.1e} (bound {bound:.1e})"
    )
    return Finding(ok, text)


def _kl(p_logits: NDArray[np.float64], q_logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """KL(p || q) of the softmax distributions, in nats, per row."""

    def log_softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
        x = x - x.max(-1, keepdims=True)
        shifted: NDArray[np.float64] = x - np.log(np.exp(x).sum(-1, keepdims=True))
        return shifted

    p, q = log_softmax(p_logits), log_softmax(q_logits)
    divergence: NDArray[np.float64] = (np.exp(p) * (p - q)).sum(-1)
    return divergence


def check_golden(chat: Chat, manifest: Manifest) -> Finding:
    """Greedy ids against the golden ones, as many as the context holds.

    Where there are none the CPU provider records them first; where the manifest's do not fit, for this once.
    """
    folder, provider, context = chat.runner.folder, chat.runner.provider, chat.runner.context_length
    golden = manifest.golden and manifest.golden.within(context)
    if golden is None:
        on_cpu = (
            chat if provider == "cpu" else Chat(Runner(folder, SessionOptions("cpu"), max_context=context))
        )
        prompt = _golden_prompt(on_cpu, manifest)[: max(1, context // 2)]
        if len(prompt) >= context:
            return Finding(True, f"golden ids: none, a context of {context} has no room for a prompt and one")
        golden = record_golden(on_cpu, prompt)
        kept = "made for this once"
        if manifest.golden is None and context == manifest.context_length:
            try:
                write_manifest(folder, dataclasses.replace(manifest, golden=golden))
                kept = "recorded"
            except OSError as error:  # a folder that may only be read is no fault of the export
                kept = f"not recorded ({error.strerror})"
        if provider == "cpu":
            return Finding(True, f"golden ids: {len(golden.token_ids)} {kept}, on the CPU provider")
    kind = "int8" if manifest.quantised else chat.runner.compute_dtype
    bound = logit_bound(kind, layers=manifest.num_hidden_layers, largest=0.0)
    return compare_golden(greedy_along(chat, golden), golden, bound, provider)


def greedy_along(chat: Chat, golden: Golden) -> Golden:
    """The greedy id at each golden step, given the golden ids before it: a near tie hides nothing after it."""
    total = len(golden.token_ids)
    ids: list[int] = []
    while len(ids) < total:
        prefix = [*golden.prompt_ids, *golden.token_ids[: len(ids)]]
        found = record_golden(chat, prefix, total - len(ids)).token_ids
        pairs = zip(found, golden.token_ids[len(ids) :], strict=False)
        parting = next((step for step, (a, b) in enumerate(pairs) if a != b), len(found) - 1)
        if parting < 0:  # this context is too short for more
            break
        ids += found[: parting + 1]
    return Golden(golden.prompt_ids, tuple(ids), golden.margins)


def compare_golden(found: Golden, golden: Golden, bound: float, provider: str) -> Finding:
    """Equal ids are good; so are a few others where the best two logits were nearer than twice the bound."""
    total = len(golden.token_ids)
    pairs = zip(found.token_ids, golden.token_ids, golden.margins, strict=False)
    parted = [(step, margin) for step, (a, b, margin) in enumerate(pairs) if a != b]
    if len(found.token_ids) < total:
        return Finding(False, f"golden ids: only {len(found.token_ids)} of {total} were made on {provider}")
    equal = f"golden ids: {total - len(parted)} of {total} equal on {provider}"
    if not parted:
        return Finding(True, equal)
    step, margin = max(parted, key=lambda part: part[1])
    if margin < 2 * bound and total - len(parted) >= _LEAST_EQUAL * total:
        return Finding(True, f"{equal}, the others at margins up to {margin:.2g}, within rounding")
    return Finding(False, f"{equal}; at step {step} the margin was {margin:.2g}: a mismatch")


def record_golden(chat: Chat, prompt_ids: list[int], count: int = GOLDEN_TOKENS) -> Golden:
    """Greedy ids after a prompt, past end tokens, and the margin of each choice."""
    count = min(count, chat.runner.context_length - len(prompt_ids))
    tokens = list(chat.generate(prompt_ids, max_new_tokens=count, ignore_eos=True, top_logits=2))
    margins = [token.top_logits[0][1] - token.top_logits[-1][1] for token in tokens]
    return Golden(tuple(prompt_ids), tuple(token.token_id for token in tokens), tuple(margins))


def _golden_prompt(chat: Chat, manifest: Manifest) -> list[int]:
    if manifest.golden is not None:
        return list(manifest.golden.prompt_ids)
    if chat.tokenizer is None:
        return [(7 * i + 1) % manifest.vocab_size for i in range(16)]
    try:
        prompt = [{"role": "user", "content": _GOLDEN_TEXT}] if chat.template else _GOLDEN_TEXT
        ids = chat.prompt_ids(prompt)
    except UserError:  # a template that wants more than one user message
        ids = chat.prompt_ids(_GOLDEN_TEXT)
    return ids[: max(1, manifest.context_length // 2)]
