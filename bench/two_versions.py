"""Two versions of this project in turn: speed, load, memory, export and start of each, and their ratios.

python bench/two_versions.py OTHER [--rounds 5] [--table RESULTS.md]

OTHER is a clone of another commit, installed in its own .venv (`make demo` there does that). Each version exports the
checkpoint of the 0.5B shape by itself and runs its own exports, a process each, in turn: A B, B A.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from checkpoint import QWEN_05B, write_checkpoint
from peers import COLUMNS

from qwen_onnx.checks.machine import describe_machine, read_bandwidth
from qwen_onnx.runners.runtime.machine import physical_cores

HERE = Path(__file__).parent
EXPORTS = {
    "f32": [], "f32-panels": ["--layout", "cpu"], "f16": ["--dtype", "f16"], "int8": ["--dtype", "int8"],
    "int4": ["--dtype", "int4"], "int4-128": ["--dtype", "int4", "--block-size", "128"],
}  # fmt: skip
"""Options as both versions know them."""
ROWS = {
    "f32": ("ours", "f32"), "f32, panels": ("ours", "f32-panels"), "f32, repacked": ("ours_prepacked", "f32"),
    "int8": ("ours", "int8"), "int4": ("ours", "int4"), "int4, --block-size 128": ("ours", "int4-128"),
}  # fmt: skip
Found = dict[str, float]


class Version(NamedTuple):
    """A clone and what it wrote."""

    name: str
    root: Path
    exports: Path

    @property
    def bin(self) -> Path:
        return self.root / ".venv" / "bin"

    def measure(self, engine: str, export: str, threads: int) -> Found:
        """Decode, TTFT, load and memory, in a process of its own."""
        child = self.root / "bench" / "peers_child.py"
        folder = self.exports / export
        found: Found = json.loads(
            run(self.bin / "python", child, engine, folder, threads)[1].splitlines()[-1]
        )
        return found

    def export(self, model: Path, name: str) -> Found:
        """Seconds and peak memory, as the summary says; and the whole process."""
        shutil.rmtree(self.exports / name, ignore_errors=True)
        seconds, text = run(self.bin / "qwen-onnx", "export", model, self.exports / name, *EXPORTS[name])
        made = re.search(r"made in ([\d.]+) s, peak memory ([\d,]+) MB", text)
        assert made, text
        return {"s": seconds, "peak, MB": float(made[2].replace(",", ""))}

    def start(self) -> Found:
        """Of a process, in ms."""
        tiny = self.exports / "tiny"
        if not tiny.exists():
            run(self.bin / "qwen-onnx", "export", "tiny", tiny)
        commands = {
            "import qwen_onnx": [self.bin / "python", "-c", "import qwen_onnx"],
            "run --help": [self.bin / "qwen-onnx", "run", "--help"],
            "one token of tiny": [self.bin / "qwen-onnx", "run", tiny, "-p", "Hi", "--max-new-tokens", 1],
        }
        return {name: 1e3 * run(*command)[0] for name, command in commands.items()}


def run(*command: object) -> tuple[float, str]:
    """Wall time and stdout."""
    began = time.perf_counter()
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stderr[-2000:]}")
    return time.perf_counter() - began, done.stdout


def lines(title: str, rounds: dict[str, list[tuple[Found, Found]]], digits: int = 2) -> Iterator[str]:
    """A row for each thing measured: both medians, and the median of the rounds' ratios."""
    yield from (f"| {title} | | before | after | after / before |", "|---|---|---|---|---|")
    for row, pairs in rounds.items():
        for key in pairs[0][0]:
            name = COLUMNS[key][0] if key in COLUMNS else key
            before, after = (statistics.median(pair[side][key] for pair in pairs) for side in (0, 1))
            ratio = sorted(new[key] / old[key] for old, new in pairs)
            middle = f"{statistics.median(ratio):.2f} ({ratio[0]:.2f} to {ratio[-1]:.2f})"
            yield f"| {row} | {name} | {before:,.{digits}f} | {after:,.{digits}f} | {middle} |"
    yield ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="a clone of another commit, with its .venv")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "qwen-onnx-two-versions")
    parser.add_argument("--table", type=Path, help="write the tables here too")
    options = parser.parse_args()
    model, bandwidths = options.work / "model", [read_bandwidth(options.threads)]
    for name in ("before", "after"):
        (options.work / name).mkdir(parents=True, exist_ok=True)
    if not model.exists():
        write_checkpoint(model, QWEN_05B)
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(HERE.parent / "qwen_onnx" / "tiny" / file, model)
    versions = (
        Version("before", options.other.resolve(), options.work / "before"),
        Version("after", HERE.parent.resolve(), options.work / "after"),
    )
    exports: dict[str, list[tuple[Found, Found]]] = {name: [] for name in EXPORTS}
    starts: list[tuple[Found, Found]] = []
    speeds: dict[str, list[tuple[Found, Found]]] = {row: [] for row in ROWS}
    for number in range(options.rounds):
        # Who comes first finds other pages in memory and other writes on their way: that changes from round to round.
        order = versions if number % 2 == 0 else versions[::-1]
        for name in EXPORTS:
            found = {version.name: version.export(model, name) for version in order}
            exports[name].append((found["before"], found["after"]))
        for _ in range(3):
            found = {version.name: version.start() for version in order}
            starts.append((found["before"], found["after"]))
        for row, (engine, export) in ROWS.items():
            found = {version.name: version.measure(engine, export, options.threads) for version in order}
            speeds[row].append((found["before"], found["after"]))
        bandwidths.append(read_bandwidth(options.threads))
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    text = "\n".join([
        f"{describe_machine()}, {options.threads} threads, {options.rounds} rounds. Memory was read at "
        f"{statistics.median(bandwidths):.1f} GB/s ({min(bandwidths):.1f} to {max(bandwidths):.1f}).",
        "", *lines("row", speeds), *lines("export", exports), *lines("start, ms", {"process": starts}, 0),
    ])  # fmt: skip
    print(text)
    if options.table:
        options.table.write_text(text + "\n")


if __name__ == "__main__":
    main()
