"""Runs fuzz cases in processes of their own: one that dies or hangs is a fault of its case, not the run's end."""

from __future__ import annotations

import collections
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from qwen_onnx import export
from support.checkpoints import QWEN2, write_checkpoint
from support.fuzz.targets import TARGETS
from support.text_fixtures import QWEN25_LIKE, write_folder

HERE = Path(__file__).parent
CORPUS = HERE / "corpus.json"
"""Numbers of cases that once were faults, by target: they are run first, always."""
SMALL = {
    "hidden_size": 16, "intermediate_size": 2048, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip

Case = tuple[str, int]


class Result(NamedTuple):
    """What became of a case."""

    target: str
    number: int
    outcome: str
    """`right`, `refused` or `fault`."""
    detail: str
    seconds: float

    def __str__(self) -> str:
        return f"[{json.dumps(self.target)}, {self.number}]: {self.detail}"


def make_base(folder: Path) -> Path:
    """The files that the cases are made of."""
    write_checkpoint(folder / "checkpoint", {**QWEN2, "vocab_size": 400, **SMALL}, shards=2)
    texts = {"eos_token": "<|im_end|>", "chat_template": QWEN25_LIKE}
    write_folder(folder / "checkpoint", {"tokenizer_config.json": texts})
    export(folder / "checkpoint", folder / "export")
    return folder


def choose_cases(count: int, first: int = 0) -> list[Case]:
    """So many, in the targets' proportions, mixed; and all of the corpus before them."""
    whole = sum(cases for _, cases in TARGETS.values())
    chosen = [
        (target, first + number)
        for target, (_, cases) in TARGETS.items()
        for number in range(max(50, -(-cases * count // whole)))
    ]
    random.Random(0).shuffle(chosen)
    return [*corpus(), *chosen]


def corpus() -> list[Case]:
    return [
        (target, number) for target, numbers in json.loads(CORPUS.read_text()).items() for number in numbers
    ]


def run_cases(cases: Sequence[Case], base: Path, *, processes: int = 1) -> list[Result]:
    """All of them, in so many processes at a time."""
    shares = [list(cases[start::processes]) for start in range(processes)]
    with ThreadPoolExecutor(processes) as pool:
        ran = pool.map(lambda share: _run_share(share, base), shares)
        return [result for share in ran for result in share]


def _run_share(cases: list[Case], base: Path) -> list[Result]:
    results: list[Result] = []
    deaths = 0
    while len(results) < len(cases) and deaths < 20:
        with tempfile.TemporaryDirectory(dir=base, ignore_cleanup_errors=True) as scratch:
            results += _run_process(cases[len(results) :], base, Path(scratch))
        deaths += 1
    return results


def _run_process(cases: list[Case], base: Path, scratch: Path) -> list[Result]:
    """Results of the first cases, up to one that the process did not live to tell of."""
    results: list[Result] = []
    own = scratch / "base"
    own.mkdir()
    for name in ("checkpoint", "export"):
        (own / name).symlink_to(base / name)
    (own / "scratch" / "tmp").mkdir(parents=True)
    said = scratch / "stderr"
    with said.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "support.fuzz.worker", str(own)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
            env=_environment(own / "scratch"),
        )  # fmt: skip
        with process, ThreadPoolExecutor(1) as beside:
            assert process.stdin is not None
            assert process.stdout is not None
            beside.submit(_give, process, cases)
            begun: Case | None = None
            for line in process.stdout:
                told = json.loads(line)
                if "begun" in told:
                    begun = tuple(told["begun"])
                    continue
                assert begun is not None
                results.append(Result(*begun, told["outcome"], told["detail"], told["seconds"]))
                begun = None
    if begun is not None or len(results) < len(cases):
        end = f"the process ended with {process.returncode}: {said.read_text(errors='replace')[-3000:]}"
        results.append(Result(*(begun or cases[len(results)]), "fault", end, 0.0))
    return results


def _give(process: subprocess.Popen[str], cases: Iterable[Case]) -> None:
    assert process.stdin is not None
    try:
        with process.stdin as stdin:
            stdin.writelines(json.dumps(case) + "\n" for case in cases)
    except BrokenPipeError:  # it died; its case says so
        pass


def _environment(scratch: Path) -> dict[str, str]:
    """Nothing of a case reaches the network, the user's caches, or a temporary folder of others."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(scratch / "hub"),
        "QWEN_ONNX_CACHE": str(scratch / "cache"),
        "HOME": str(scratch),
        "TMPDIR": str(scratch / "tmp"),
    }


def summary(results: Iterable[Result]) -> str:
    """A line for each target."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    slowest: dict[str, float] = collections.defaultdict(float)
    for result in results:
        counts[result.target][result.outcome] += 1
        slowest[result.target] = max(slowest[result.target], result.seconds)
    lines = []
    for target in TARGETS:
        count = counts[target]
        lines.append(
            f"{target:<18} {count.total():>6}: {count['right']} right, {count['refused']} refused, "
            f"{count['fault']} faults, slowest {slowest[target]:.2f} s"
        )
    return "\n".join(lines)
