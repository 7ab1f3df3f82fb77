"""Which runtimes run the portable export, and how far their logits lie from ours: a table in Markdown.

python tests/runtimes/matrix.py --work DIR [--only NAME,NAME] [--quick] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import tokenizers
from environments import RUNTIMES, NotInstalledError, Prepared, Runtime, prepare
from numpy.typing import NDArray

import qwen_onnx
from qwen_onnx.checks.tolerances import F16, logit_bound
from qwen_onnx.runners.model.kv_cache import KVCache
from qwen_onnx.runners.model.runner import Runner

NEAR = {"f32": 0.0, "f16": F16.bound}
"""Limits.near by dtype: in f32, ids never part."""
PARTS = ("prompt", "turn", "batch", "chunked")
TITLES = ("max. difference", "next turn", "padded batch", "in chunks")

# Whose answers have no near ties, so that f16 is compared to the end.
PROMPT = "My name is Ada."
TURN = "What is 9 plus 8?"
BATCH = ("My name is Ada.", "What is the capital of France?", "My name is Ada. What is my name?")
STEPS, BATCH_STEPS = 32, 16


class Expected(NamedTuple):
    """What our runner answers."""

    ids: list[int]
    logits: NDArray[np.float32]
    """[steps, vocab], from which the ids were chosen."""


class Verdict(NamedTuple):
    """On one row of ids, or on several."""

    ok: bool
    words: str
    compared: int
    """Steps before the ids parted."""


class Limits(NamedTuple):
    """What counts as the same answer."""

    near: float
    """Ids may part where our own logits of both are nearer than this."""
    apart: float
    """The largest |difference| of a logit."""


class Outcome(NamedTuple):
    """One runtime on one dtype."""

    version: str = ""
    verdicts: Mapping[str, Verdict] = MappingProxyType({})
    """Of PARTS, those that the script asks for; and of `logits`."""
    difference: float | None = None
    """The largest of a logit, as long as the ids are the same."""
    error: str = ""
    """Why there are no verdicts."""
    not_run: str = ""
    """Why it was not installed."""

    @property
    def ok(self) -> bool:
        """It ran, and every id was right."""
        return "prompt" in self.verdicts and all(verdict.ok for verdict in self.verdicts.values())

    @property
    def faults(self) -> list[str]:
        """What is wrong, a line each."""
        parts = [
            f"{part}: {' '.join(verdict.words.split())}"
            for part, verdict in self.verdicts.items()
            if not verdict.ok
        ]
        return [line for line in (self.not_run, self.error, *parts) if line]


class Subject:
    """`tiny` in one dtype: its exports, what runtimes are asked, and what our runner answers."""

    def __init__(self, work: Path, dtype: str) -> None:
        self.dtype, self._work = dtype, work / dtype
        self._made: set[Path] = set()
        # In f32 from graphs that have nothing in common with the portable one; in f16 those would compute in f32.
        folder = self.export("plain", target="onnxruntime" if dtype == "f32" else "portable")
        runner = qwen_onnx.load(folder, provider="cpu").runner
        self._cases = _cases(folder, runner)
        self.expected = _expected(runner, self._cases)
        largest = max(float(np.abs(row.logits).max()) for rows in self.expected.values() for row in rows)
        apart = logit_bound(self._cases["dtype"], layers=self._cases["layers"], largest=largest)
        self.limits = Limits(NEAR[dtype], apart)

    def export(self, layout: str, target: str = "portable") -> Path:
        """The folder of one layout, made anew once: the work folder may hold an older one."""
        folder = self._work / f"{layout}-{target}"
        if folder not in self._made:
            qwen_onnx.export("tiny", folder, dtype=self.dtype, target=target, layout=layout, force=True)
            self._made.add(folder)
        return folder

    def run(self, runtime: Runtime) -> Outcome:
        """Install it, run its script on its layout, and compare."""
        try:
            prepared = prepare(runtime)
        except NotInstalledError as error:
            return Outcome(not_run=str(error))
        work = self._work / f"run-{runtime.name}"
        work.mkdir(exist_ok=True)
        asked, result = work / "cases.json", work / "result.json"
        result.unlink(missing_ok=True)
        folder = self.export(runtime.layout)
        model = next(folder.rglob("model*.onnx")).relative_to(folder)
        asked.write_text(json.dumps(self._cases | {"folder": str(folder), "model": model.as_posix()}))
        with (work / "log").open("w+b") as log:
            if error := _run(prepared, [asked, result], runtime.seconds, log):
                return Outcome(error=error)
        return compare(json.loads(result.read_text(encoding="utf-8")), work, self.expected, self.limits)


def _run(prepared: Prepared, files: list[Path], seconds: int, log: BinaryIO) -> str:
    """Run the script to its end; what went wrong, in one line."""
    process = subprocess.Popen(
        [*prepared.command, *map(str, files)],
        cwd=prepared.folder,
        env=prepared.variables,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        if process.wait(seconds) == 0:
            return ""
    except subprocess.TimeoutExpired:
        return f"not done after {seconds} s"
    finally:
        _end(process)
    log.seek(0)
    lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {process.returncode}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """What it started too, a browser or compilers, when it was cut short."""
    if process.poll() is None:
        if os.name == "nt":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def compare(
    result: dict[str, Any], folder: Path, expected: dict[str, list[Expected]], limits: Limits
) -> Outcome:
    """A RESULT.json, which lies in `folder`, against what our runner answers."""
    verdicts = {}
    for part in PARTS:
        if part in result.get("errors", {}):
            verdicts[part] = Verdict(False, result["errors"][part], 0)
        elif result[part] is not None:
            found = result[part] if part == "batch" else [result[part]]
            verdicts[part] = compare_rows(found, expected[part], limits.near)
    prompt = verdicts.setdefault("prompt", Verdict(False, "no ids", 0))
    if prompt.compared < len(expected["prompt"][0].ids):
        verdicts.pop("turn", None)  # it answers another conversation
    difference = None
    if result["logits"] is not None:
        wanted = expected["prompt"][0].logits
        # What is missing is NaN; what is too much is not looked at.
        found = np.full_like(wanted, np.nan)
        values = np.fromfile(folder / result["logits"], "<f4")[: found.size]
        found.ravel()[: len(values)] = values
        same = prompt.compared + 1  # where they part, what came before is still the same
        difference = float(np.abs(found[:same] - wanted[:same]).max())
        if not difference <= limits.apart:  # nor NaN
            words = f"{difference:.1e} apart, {limits.apart:.1e} allowed"
            verdicts["logits"] = Verdict(False, words, prompt.compared)
    return Outcome(result["version"], verdicts, difference)


def compare_rows(found: Sequence[Sequence[int]], wanted: Sequence[Expected], near: float) -> Verdict:
    """The worst of all rows."""
    if len(found) != len(wanted):
        return Verdict(False, f"{len(found)} rows found, {len(wanted)} wanted", 0)
    rows = [compare_ids(*row, near) for row in zip(found, wanted, strict=True)]
    return min(rows, key=lambda row: (row.ok, row.compared))


def compare_ids(found: Sequence[int], wanted: Expected, near: float) -> Verdict:
    """Ids must be ours; where they part, our own logits of both must be nearer than `near`."""
    if len(found) != len(wanted.ids):
        return Verdict(False, f"{len(found)} ids found, {len(wanted.ids)} wanted", 0)
    for step, (mine, theirs) in enumerate(zip(wanted.ids, found, strict=True)):
        if theirs != mine:
            logits = wanted.logits[step]
            margin = logits[mine] - logits[theirs] if 0 <= theirs < len(logits) else np.inf
            return Verdict(bool(margin < near), f"parts at step {step}, margin {margin:.2g}", step)
    return Verdict(True, "yes", len(found))


def _cases(folder: Path, runner: Runner) -> dict[str, Any]:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    def ids(text: str) -> list[int]:
        asked = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        return tokenizer.encode(asked, add_special_tokens=False).ids

    manifest = runner.manifest
    return {
        "layers": manifest.num_hidden_layers,
        "kv_heads": manifest.num_key_value_heads,
        "head_dim": manifest.head_dim,
        "dtype": {"f32": "float32", "f16": "float16"}[manifest.dtype],
        "prompt": ids(PROMPT),
        "steps": STEPS,
        "turn": ids(TURN),
        "turn_steps": STEPS,
        "batch": [ids(text) for text in BATCH],
        "pad": 0,
        "batch_steps": BATCH_STEPS,
        "eos": list(manifest.eos_token_ids),
    }


def _expected(runner: Runner, cases: dict[str, Any]) -> dict[str, list[Expected]]:
    """By PARTS, a row each: every row alone, without padding and in one piece."""

    def greedy(cache: KVCache, ids: list[int], steps: int) -> Expected:
        chosen, seen = [], []
        logits = runner.prefill(cache, np.array([ids]))
        for _ in range(steps):
            seen.append(logits[0])
            chosen.append(int(logits.argmax()))
            logits = runner.decode(cache, np.array([chosen[-1:]]))
        return Expected(chosen, np.stack(seen))

    cache = runner.new_cache()
    prompt = greedy(cache, cases["prompt"], cases["steps"])
    turn = greedy(cache, cases["turn"], cases["turn_steps"])
    batch = [greedy(runner.new_cache(), ids, cases["batch_steps"]) for ids in cases["batch"]]
    return {"prompt": [prompt], "turn": [turn], "batch": batch, "chunked": [prompt]}


INTRODUCTION = """# Runtimes

The bundled model, exported with `--target portable` and run elsewhere; made by `python tests/runtimes/matrix.py`.
Greedy ids are compared with those of our own runner: 32 after a prompt, 32 after a next turn over the same cache,
16 in each row of a left-padded batch of three, 32 after the same prompt in two chunks. In f32 every id must be the
same; in f16 they may part at a near tie, which is then said. The difference is the largest of a logit. What is empty
was not asked.
"""


def markdown(runtimes: Sequence[Runtime], table: dict[str, dict[str, Outcome]]) -> str:
    """Outcomes by runtime and dtype."""
    head = ["runtime", "version", *(title for dtype in NEAR for title in (dtype, *TITLES)), "needs"]
    lines, faults = [head, ["---"] * len(head)], []
    for runtime in runtimes:
        outcomes = table[runtime.name]
        row = [runtime.name, next((found.version for found in outcomes.values() if found.version), "")]
        for dtype in NEAR:
            row += _cells(outcomes[dtype])
            faults += [f"- {runtime.name}, {dtype}, {line}" for line in outcomes[dtype].faults]
        lines.append([*row, runtime.needs])
    rows = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join(
        [INTRODUCTION, *rows, *(["", "What failed or was not run:", "", *faults] if faults else []), ""]
    )


def _cells(outcome: Outcome) -> list[str]:
    if outcome.not_run or outcome.error:
        return ["not run" if outcome.not_run else "**no**", *[""] * len(TITLES)]
    cells = {part: verdict.words if verdict.ok else "**no**" for part, verdict in outcome.verdicts.items()}
    difference = "" if outcome.difference is None else f"{outcome.difference:.1e}"
    prompt, *others = (cells.get(part, "") for part in PARTS)
    return [prompt, difference, *others]


def main() -> int:
    """Write the table; 1 when a runtime failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for exports and results")
    parser.add_argument(
        "--only", type=lambda names: names.split(","), help="names of runtimes, comma between"
    )
    parser.add_argument("--quick", action="store_true", help="only what CI runs")
    parser.add_argument("--out", type=Path, help="the Markdown file to write; default stdout")
    options = parser.parse_args()
    known = {runtime.name: runtime for runtime in RUNTIMES}
    if unknown := set(options.only or ()) - set(known):
        parser.error(f"{', '.join(sorted(unknown))}: not among {', '.join(known)}")
    chosen = [known[name] for name in options.only or known if known[name].quick or not options.quick]

    options.work.mkdir(parents=True, exist_ok=True)
    subjects = {dtype: Subject(options.work.resolve(), dtype) for dtype in NEAR}
    table: dict[str, dict[str, Outcome]] = {}
    for runtime in chosen:
        table[runtime.name] = outcomes = {dtype: subject.run(runtime) for dtype, subject in subjects.items()}
        for dtype, outcome in outcomes.items():
            print(f"{runtime.name} {dtype}:", ", ".join(_cells(outcome)), *outcome.faults, file=sys.stderr)
    if options.out:
        options.out.write_text(markdown(chosen, table), encoding="utf-8")
    else:
        print(markdown(chosen, table))
    ran = [outcome for outcomes in table.values() for outcome in outcomes.values() if not outcome.not_run]
    return 0 if all(outcome.ok for outcome in ran) else 1


if __name__ == "__main__":
    sys.exit(main())
