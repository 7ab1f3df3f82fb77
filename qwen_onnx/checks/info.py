"""What an export is: its manifest, each graph's inputs, outputs and operators, and the sizes of its files."""

from __future__ import annotations

import collections
from pathlib import Path

import onnx

from qwen_onnx.checks.known_runtimes import describe_runtimes
from qwen_onnx.contract.manifest import GraphSpec, Manifest, TensorSpec, is_weights, read_manifest
from qwen_onnx.contract.quant import QuantConfig
from qwen_onnx.errors import UserError, counted, printable
from qwen_onnx.exports.quality import beyond, in_words


def describe(folder: Path, *, graphs: bool = False) -> str:
    """The text of `qwen-onnx info`: one screen, and with `graphs` what each file and graph is.

    Raises:
        UserError: not an export; or, with `graphs`, a graph that is missing or unreadable.
    """
    manifest = read_manifest(folder)
    lines = _summary(manifest)
    if graphs:
        lines += ["", "files", *(f"  {spec.size:>15,}  {name}" for name, spec in manifest.files.items())]
        for graph in manifest.graphs:
            runtimes = (f"  {line}" for line in describe_runtimes(manifest, graph))
            lines += ["", *_describe_graph(folder, graph), *runtimes]
    else:
        lines.append("`--graphs` shows files, inputs, outputs, operators, and what runs each graph")
    return "\n".join(map(printable, lines))


def _summary(manifest: Manifest) -> list[str]:
    golden = len(manifest.golden.token_ids) if manifest.golden else "none yet; `qwen-onnx check` records them"
    sizes = {name: spec.size for name, spec in manifest.files.items()}
    weights = sum(size for name, size in sizes.items() if is_weights(name))
    entries: dict[str, list[str]] = {}
    for graph in manifest.graphs:
        for provider in graph.providers:
            entries.setdefault(provider, []).append(graph.entry)
    return [
        f"model      {manifest.model_id}" + (f" at {manifest.revision}" if manifest.revision else ""),
        f"kind       {manifest.architecture}, {manifest.num_hidden_layers} layers, "
        f"{manifest.num_key_value_heads} key/value heads of {manifest.head_dim}, vocabulary {manifest.vocab_size}",
        f"dtype      {manifest.dtype}",
        *_describe_quantization(manifest),
        f"target     {manifest.target}"
        + (f", laid out for {manifest.layout}" if manifest.layout != "plain" else "")
        + (f", panels of {manifest.panel_rows} rows" if manifest.panel_rows else ""),
        f"context    {counted(manifest.context_length, 'token')}",
        *(
            f"{'cache' if not number else '':<10} {cache.slot_bytes:,} bytes a token in {cache.dtype}, "
            f"on {' and '.join(_providers_of(manifest, name))}"
            for number, (name, cache) in enumerate(manifest.caches.items())
        ),
        f"end tokens {', '.join(map(str, manifest.eos_token_ids)) or 'none'}",
        f"size       {sum(sizes.values()):,} bytes in {len(sizes)} files, weights {weights:,}",
        *(
            f"{'graphs' if not number else '':<10} {provider}: {', '.join(dict.fromkeys(own))}"
            for number, (provider, own) in enumerate(entries.items())
        ),
        f"needs      ONNX Runtime {manifest.min_onnxruntime} or newer"
        + (" in our runner" if manifest.target == "portable" else ""),
        f"made with  {', '.join(f'{name} {version}' for name, version in manifest.packages.items())}",
        f"golden ids {golden}",
    ]


def _providers_of(manifest: Manifest, cache: str) -> list[str]:
    """Where graphs take this cache."""
    own = (provider for graph in manifest.graphs if graph.cache == cache for provider in graph.providers)
    return list(dict.fromkeys(own))


def _describe_quantization(manifest: Manifest) -> list[str]:
    """How matrices are quantized, where they are."""
    formats: dict[QuantConfig, list[str]] = {}
    for name, quant in manifest.quantized.items():
        formats.setdefault(quant, []).append(name)
    lines = [
        f"quantized  {len(names)} matrices to {quant.bits} bits in blocks of {quant.block_size}"
        f"{' with zero points' if quant.zero_points else ''}, {names[0]} first"
        for quant, names in formats.items()
    ]
    if (own := manifest.calibration) is not None:
        text = "the package's own text" if own.text == "auto" else own.text
        lines.append(f"calibrated on {own.tokens:,} tokens of {text}")
    if manifest.quality is not None:
        lost = beyond(manifest.dtype, manifest.quality)
        lines.append(f"quality    {in_words(manifest.quality)}" + (f"; {lost}" if lost else ""))
    return lines


def _describe_graph(folder: Path, graph: GraphSpec) -> list[str]:
    opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in graph.opsets.items())
    lines = [f"{graph.file}: {graph.entry}, {graph.lowering}, {opsets}, for {' and '.join(graph.providers)}"]
    lines += [f"  in   {_describe_tensor(spec)}" for spec in _folded(graph.inputs)]
    lines += [f"  out  {_describe_tensor(spec)}" for spec in _folded(graph.outputs)]
    for domain, counts in _op_counts(folder / graph.file).items():
        listed = ", ".join(f"{op} {count}" for op, count in counts.most_common())
        lines.append(f"  {counted(sum(counts.values()), 'node')} of {domain or 'ai.onnx'}: {listed}")
    return lines


def _folded(specs: tuple[TensorSpec, ...]) -> list[TensorSpec]:
    """One line for the cache of all layers: they differ by the layer's number only."""
    folded: dict[str, TensorSpec] = {}
    for spec in specs:
        name = ".".join("N" if part.isdigit() else part for part in spec.name.split("."))
        folded.setdefault(name, TensorSpec(name, spec.dtype, spec.shape))
    return list(folded.values())


def _describe_tensor(spec: TensorSpec) -> str:
    return f"{spec.name}: {spec.dtype} [{', '.join(map(str, spec.shape))}]"


def _op_counts(path: Path) -> dict[str, collections.Counter[str]]:
    counts: dict[str, collections.Counter[str]] = {}
    for node in load_graph(path).graph.node:
        counts.setdefault(node.domain, collections.Counter())[node.op_type] += 1
    return counts


def tensor_spec(value: onnx.ValueInfoProto) -> TensorSpec:
    """A graph's input or output, as the manifest writes it."""
    kind = value.type.tensor_type
    name = onnx.TensorProto.DataType.Name(kind.elem_type).lower()
    shape = tuple(dim.dim_param or dim.dim_value for dim in kind.shape.dim)
    return TensorSpec(value.name, "float32" if name == "float" else name, shape)


def load_graph(path: Path) -> onnx.ModelProto:
    """A graph without its weights.

    Raises:
        UserError: the file is missing or not ONNX.
    """
    try:
        return onnx.load(path, load_external_data=False)
    except FileNotFoundError:
        raise UserError(
            f"{path}: missing; an export's files belong together, copy or export it again"
        ) from None
    except Exception as error:  # protobuf's exceptions are the implementation's own
        raise UserError(f"{path}: not an ONNX file ({error})") from None
