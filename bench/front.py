"""What bits buy: KL divergence, size and speed of our exports, llama.cpp's types and onnxruntime-genai's int4.

python bench/front.py MODEL --work FOLDER --png bench/front.png --table RESULTS.md

MODEL is a checkpoint with a tokenizer; that of `python tests/real/fetch.py FOLDER` is FOLDER/smollm2-moved. All files
are made of its weights. All predict the same held-out text, Python's documentation, in windows of 512 tokens, and are
compared with the checkpoint in f32. Speed is that of the same files, the engines in turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pydoc_data.topics
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from peers import HERE, Entry, make_environment, measure, quiet

from qwen_onnx import export
from qwen_onnx.checkpoints.checkpoint import open_checkpoint
from qwen_onnx.checks.machine import describe_machine
from qwen_onnx.contract.quant import Quality
from qwen_onnx.exports.quality import checkpoint_logits, compare, export_logits
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.machine import physical_cores
from qwen_onnx.runners.runtime.options import SessionOptions
from qwen_onnx.runners.text.tokenizer import Tokenizer

HELD_OUT = ("execmodel", "naming", "import")
"""Pages that are not in the package's calibration text, which has others."""
WINDOW, PIECE = 512, 128
OURS: dict[str, dict[str, Any]] = {
    "f32": {"dtype": "f32"},
    "int8": {"dtype": "int8"},
    "int4": {"dtype": "int4"},
    "int4 --head-bits 8": {"dtype": "int4", "head_bits": 8},
    "int4 --bits 6": {"dtype": "int4", "bits": 6.0},
    "int4 --calibrate none": {"dtype": "int4", "calibrate": "none"},
}
LLAMA = ("f32", "q8_0", "q5_0", "q4_1", "q4_0", "Q4_K_M", "IQ4_XS")
GENAI = "genai-int4"


class Row(NamedTuple):
    """One file."""

    name: str
    entry: Entry
    bits: float
    quality: Quality
    tokens_per_s: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--env", type=Path, default=Path.home() / ".cache" / "qwen-onnx-peers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    python = make_environment(options.env)
    entries = make_models(options.model, options.work, python)
    rows = measured(options.model, entries, options.work, python)
    for _ in range(options.rounds):
        for row in rows:
            found = measure(row.entry, options.work, python, physical_cores())
            row.tokens_per_s.append(found["tokens_per_s"])
    lines = [f"{describe_machine()}", "", *table(rows)]
    print("\n".join(lines))
    if options.table:
        options.table.write_text("\n".join(lines) + "\n")
    if options.png:
        draw(rows, options.png)


def make_models(model: Path, work: Path, python: Path) -> list[Entry]:
    """All that is compared, as far as it is not there yet."""
    entries = []
    for name, how in OURS.items():
        path = f"ours-{name.replace(' ', '').replace('--', '-')}"
        if not (work / path).exists():
            export(model, work / path, **how)
        entries.append(Entry(f"qwen-onnx {name}", "ours", path))
    plain = work / "f32.gguf"
    if not plain.exists():
        quiet([str(python), str(HERE / "peers_gguf.py"), str(model), str(plain), "f32"])
    for kind in LLAMA:
        out = work / f"{kind}.gguf"
        if not out.exists():
            quiet([str(python), str(HERE / "front_child.py"), "quantize", str(plain), str(out), kind])
        entries.append(Entry(f"llama.cpp {kind}", "llama_cpp", out.name))
    if not (work / GENAI).exists():
        builder = [str(python), "-m", "onnxruntime_genai.models.builder", "-p", "int4", "-e", "cpu"]
        quiet([*builder, "-i", str(model), "-o", str(work / GENAI), "-c", str(work / "cache")])
    return [*entries, Entry("onnxruntime-genai int4", "genai", GENAI)]


def measured(model: Path, entries: list[Entry], work: Path, python: Path) -> list[Row]:
    """Quality and size of each, no speed yet; what is in the folder already is not measured again."""
    checkpoint = open_checkpoint(model)
    weights = sum(int(np.prod(tensor.shape)) for tensor in checkpoint.tensors.values())
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in HELD_OUT)
    ids = np.array(Tokenizer.from_folder(model).encode(text), np.int64)
    windows = ids[: len(ids) // WINDOW * WINDOW].reshape(-1, WINDOW)
    np.save(work / "ids.npy", windows)
    wanted, logits = work / "wanted.f32", work / "found.f32"
    rows = []
    for entry in entries:
        path, kept = work / entry.path, work / f"{entry.path}.quality.json"
        if not kept.exists():
            if not wanted.exists():
                write(wanted, checkpoint_logits(checkpoint, windows))
            if entry.engine == "ours":
                found = export_logits(Runner(path, SessionOptions(provider="cpu")), windows)
            else:
                child = [str(python), str(HERE / "front_child.py"), entry.engine, str(path)]
                quiet([*child, str(work / "ids.npy"), str(logits)])
                found = pieces(logits, checkpoint.config.vocab_size)
            quality = compare(windows, pieces(wanted, checkpoint.config.vocab_size), found)
            kept.write_text(json.dumps(dataclasses.asdict(quality)))
        quality = Quality(**json.loads(kept.read_text()))
        rows.append(Row(entry.name, entry, 8 * size_of(path) / weights, quality, []))
        print(entry.name, f"KL {quality.kl:.4g}", file=sys.stderr, flush=True)
    for file in (wanted, logits):
        file.unlink(missing_ok=True)
    return rows


def write(path: Path, logits: Iterator[np.ndarray]) -> None:
    """All of them in a file: it is read once for each row of the table."""
    with path.open("wb") as file:
        for piece in logits:
            file.write(piece.tobytes())


def pieces(path: Path, vocab_size: int) -> Iterator[np.ndarray]:
    """Logits [PIECE, vocab_size] from a file."""
    mapped = np.memmap(path, np.float32, "r").reshape(-1, PIECE, vocab_size)
    yield from (np.asarray(piece) for piece in mapped)


def size_of(path: Path) -> int:
    """Bytes of the file or files that hold weights."""
    if path.is_file():
        return path.stat().st_size
    names = ("*.safetensors", "model.onnx.data")
    return sum(file.stat().st_size for name in names for file in path.glob(name))


def table(rows: list[Row]) -> Iterator[str]:
    """In Markdown."""
    count = rows[0].quality.positions
    yield f"{count:,} positions; perplexity of the checkpoint {rows[0].quality.checkpoint_perplexity:.2f}."
    yield ""
    yield "| | bits a weight | KL, nats | top-1 | perplexity | decode, tokens/s |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        speeds = row.tokens_per_s or [float("nan")]
        low, middle, high = min(speeds), statistics.median(speeds), max(speeds)
        yield (
            f"| {row.name} | {row.bits:.2f} | {max(row.quality.kl, 0):.2g} | {100 * row.quality.top1:.1f} % | "
            f"{row.quality.perplexity:.2f} | {middle:.0f} ({low:.0f} to {high:.0f}) |"
        )


def draw(rows: list[Row], png: Path) -> None:
    """KL against bits, and against tokens a second; f32, whose KL is nothing, is left out."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.6), sharey=True)
    styles = {
        "qwen-onnx": ("#c2410c", "o"),
        "llama.cpp": ("#1d4ed8", "s"),
        "onnxruntime-genai": ("#15803d", "^"),
    }
    for row in rows:
        engine, _, kind = row.name.partition(" ")
        if row.quality.kl < 1e-4:
            continue
        color, marker = styles[engine]
        for axes, x in ((left, row.bits), (right, statistics.median(row.tokens_per_s))):
            axes.scatter([x], [row.quality.kl], color=color, marker=marker, s=42, zorder=3)
            axes.annotate(
                kind, (x, row.quality.kl), xytext=(6, 4), textcoords="offset points", fontsize=8, color=color
            )
    for engine, (color, marker) in styles.items():
        left.scatter([], [], color=color, marker=marker, label=engine)
    left.set(xlabel="bits a weight, the whole file", ylabel="KL divergence from f32, nats", yscale="log")
    right.set(xlabel="decode, tokens/s")
    left.legend(frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.3, which="both")
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(png, dpi=110)


if __name__ == "__main__":
    main()
