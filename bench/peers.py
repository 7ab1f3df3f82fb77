"""Decode, TTFT, load and memory beside llama.cpp, onnxruntime-genai and transformers, on one random checkpoint.

python bench/peers.py --rounds 5 --table RESULTS.md

Everything is made here: the checkpoint of the 0.5B shape, our exports, GGUF files and onnxruntime-genai's model of
the same weights, and a virtual environment for the peers (--env), where llama.cpp is compiled for this processor. The
engines take turns, a process each, and the ratios are those of each round. Takes some 6 GB of disk and, after ten
minutes of compiling, two to three minutes a round.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from checkpoint import QWEN_05B, parameter_count, write_checkpoint

from qwen_onnx import export
from qwen_onnx.checks.machine import describe_machine, read_bandwidth
from qwen_onnx.runners.runtime.machine import physical_cores

HERE = Path(__file__).parent
TINY = HERE.parent / "qwen_onnx" / "tiny"
PACKAGES = ["torch==2.13.0", "transformers", "gguf", "onnx", "onnx-ir", "onnxscript", "onnxruntime-genai"]


class Entry(NamedTuple):
    """A row of the table."""

    name: str
    engine: str
    path: str
    bars: tuple[tuple[str, float], ...] = ()
    """Rows that its decode is held against, and by how much it should be faster."""


ENTRIES = [
    Entry(
        "qwen-onnx f32, --weights-order panels",
        "ours",
        "f32-panels",
        (("onnxruntime-genai f32", 1.2), ("llama.cpp f32", 0.95)),
    ),
    Entry("llama.cpp f32", "llama_cpp", "f32.gguf"),
    Entry("onnxruntime-genai f32", "genai", "genai-fp32"),
    Entry("qwen-onnx f32", "ours", "f32", (("llama.cpp f32", 0.95),)),
    Entry("qwen-onnx f32, repacked", "ours_prepacked", "f32"),
    Entry("transformers f32", "transformers", "model"),
    Entry("qwen-onnx int8", "ours", "int8", (("llama.cpp q8_0", 1.1),)),
    Entry("llama.cpp q8_0", "llama_cpp", "q8_0.gguf"),
    Entry("qwen-onnx int4", "ours", "int4", (("llama.cpp q4_0", 1.2), ("onnxruntime-genai int4", 1.5))),
    Entry("llama.cpp q4_0", "llama_cpp", "q4_0.gguf"),
    Entry("onnxruntime-genai int4", "genai", "genai-int4"),
    Entry("qwen-onnx int4, --head-bits 8", "ours", "int4-head8", (("llama.cpp q4_0", 1.0),)),
]
COLUMNS = {
    "tokens_per_s": ("decode, tokens/s", 1), "ttft_128_ms": ("TTFT of 128, ms", 0),
    "ttft_512_ms": ("TTFT of 512, ms", 0), "load_s": ("load, s", 2), "anonymous_mb": ("anonymous, MB", 0),
}  # fmt: skip


def make_environment(folder: Path) -> Path:
    """A virtual environment with the peers; its Python. Made once."""
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        venv.create(folder, with_pip=True)
        install = [str(python), "-m", "pip", "install", "-q"]
        subprocess.run([*install, *PACKAGES], check=True)
        native = os.environ | {"CMAKE_ARGS": "-DGGML_NATIVE=ON"}  # the wheels know no AVX2
        subprocess.run(
            [*install, "--no-binary", "llama-cpp-python", "llama-cpp-python"], env=native, check=True
        )
        (folder / "complete").touch()
    return python


def make_models(work: Path, python: Path) -> None:
    """The checkpoint and what each engine reads, as far as they are not there yet."""
    model = work / "model"
    if not model.exists():
        write_checkpoint(model, QWEN_05B)
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(TINY / file, model)  # onnxruntime-genai's builder wants one; any will do
    # Random weights gain nothing by a calibration, and its blocks are as fast with any numbers in them.
    calibrated = {"calibrate": "none", "block_size": 128, "head_block_size": 64}
    for name, options in {
        "f32": {"dtype": "f32"}, "f32-panels": {"dtype": "f32", "weights_order": "panels"},
        "int8": {"dtype": "int8"},
        "int4": {"dtype": "int4", **calibrated}, "int4-head8": {"dtype": "int4", "head_bits": 8, **calibrated},
    }.items():  # fmt: skip
        if not (work / name).exists():
            export(model, work / name, **options)  # type: ignore[arg-type]
    for kind in ("f32", "q8_0", "q4_0"):
        if not (out := work / f"{kind}.gguf").exists():
            quiet([str(python), str(HERE / "peers_gguf.py"), str(model), str(out), kind])
    for kind in ("fp32", "int4"):
        if not (out := work / f"genai-{kind}").exists():
            more = ["--extra_options", "int4_block_size=32"] if kind == "int4" else []
            quiet(
                [
                    str(python),
                    "-m",
                    "onnxruntime_genai.models.builder",
                    "-m",
                    str(model),
                    "-i",
                    str(model),
                    "-o",
                    str(out),
                    "-p",
                    kind,
                    "-e",
                    "cpu",
                    "-c",
                    str(work / "cache"),
                    *more,
                ]
            )


def quiet(command: list[str]) -> None:
    """Run it; what it prints is shown only if it fails."""
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{ran.stderr[-2000:]}")


def measure(entry: Entry, work: Path, python: Path, threads: int) -> dict[str, float]:
    """One engine once."""
    own = sys.executable if entry.engine.startswith("ours") else str(python)
    command = [own, str(HERE / "peers_child.py"), entry.engine, str(work / entry.path), str(threads)]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        sys.exit(f"{entry.name} failed:\n{ran.stderr[-2000:]}")
    found: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return found


def bits(work: Path, path: str) -> float:
    """Of the file that holds the weights, for each parameter."""
    files = {"model": "model.safetensors", "genai": "model.onnx.data"}
    at = work / path
    if at.is_dir():
        at /= files.get(path.partition("-")[0], "weights.safetensors")
    return 8 * at.stat().st_size / parameter_count(QWEN_05B)


def table(rounds: dict[str, list[dict[str, float]]], work: Path) -> Iterator[str]:
    """Medians, with the lowest and highest of all rounds."""
    yield "| | bits a parameter | " + " | ".join(title for title, _ in COLUMNS.values()) + " |"
    yield "|---|---" + "|---" * len(COLUMNS) + "|"
    for entry in ENTRIES:
        if entry.name not in rounds:
            continue
        cells = []
        for key, (_, digits) in COLUMNS.items():
            values = [found[key] for found in rounds[entry.name]]
            low, high = min(values), max(values)
            cells.append(f"{statistics.median(values):,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})")
        yield f"| {entry.name} | {bits(work, entry.path):.2f} | {' | '.join(cells)} |"


def ratios(rounds: dict[str, list[dict[str, float]]]) -> Iterator[str]:
    """Each of our rows against the peers of its kind: median of the rounds' ratios; above 1 is faster."""
    yield "| | against | decode | TTFT of 128 | TTFT of 512 | wanted of decode |"
    yield "|---|---|---|---|---|---|"
    for entry in ENTRIES:
        for other, bar in entry.bars:
            if entry.name not in rounds or other not in rounds:
                continue
            pairs = list(zip(rounds[entry.name], rounds[other], strict=True))

            def ratio(key: str, pairs: list[tuple[dict[str, float], dict[str, float]]] = pairs) -> str:
                up = key == "tokens_per_s"
                values = [a[key] / b[key] if up else b[key] / a[key] for a, b in pairs]
                return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"

            cells = " | ".join(ratio(key) for key in ("tokens_per_s", "ttft_128_ms", "ttft_512_ms"))
            yield f"| {entry.name} | {other} | {cells} | {bar} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cache = Path.home() / ".cache" / "qwen-onnx-peers"
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--env", type=Path, default=cache / "env", help="virtual environment of the peers")
    parser.add_argument("--work", type=Path, default=cache / "models", help="checkpoint and models")
    parser.add_argument("--only", default="", help="rows whose name holds one of these, comma-separated")
    parser.add_argument("--table", type=Path, help="write the tables here too")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    python = make_environment(options.env)
    make_models(options.work, python)
    wanted = [part.strip() for part in options.only.split(",") if part.strip()]
    entries = [e for e in ENTRIES if not wanted or any(part in e.name for part in wanted)]
    rounds: dict[str, list[dict[str, float]]] = {entry.name: [] for entry in entries}
    bandwidths = [read_bandwidth(options.threads)]
    for number in range(options.rounds):
        for entry in entries:
            rounds[entry.name].append(measure(entry, options.work, python, options.threads))
        bandwidths.append(read_bandwidth(options.threads))
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    listed = subprocess.run([str(python), "-m", "pip", "freeze"], capture_output=True, text=True).stdout
    names = ("llama_cpp_python", "onnxruntime", "transformers", "torch=")
    peers = ", ".join(line for line in listed.splitlines() if line.startswith(names))
    lines = [
        f"{describe_machine()}, {options.threads} threads, {options.rounds} rounds; {peers}. Memory was read at "
        f"{statistics.median(bandwidths):.1f} GB/s ({min(bandwidths):.1f} to {max(bandwidths):.1f}).",
        "", *table(rounds, options.work), "", *ratios(rounds),
    ]  # fmt: skip
    print("\n".join(lines))
    if options.table:
        options.table.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
