"""Whether the tests notice: small faults are planted in a copy of the code, one at a time, and the tests run.

python tests/mutants/run.py [--count 120] [--seed 0] [--only graphs] [--planted] [--full]

First the tests run once, under coverage, so that each fault meets the tests that execute its line, the most specific
first. What no test notices is printed, and is a failure unless explained.json says why it changes nothing. Digests of
graphs are left out: they say that a graph changed, not that it is wrong.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import hashlib
import json
import os
import queue
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from coverage import CoverageData
from mutations import Mutation, mutations
from planted import PLANTED

ROOT = Path(__file__).parents[2]
EXPLAINED = Path(__file__).with_name("explained.json")
ROOMS = {
    "graphs": 0.3, "runners/model": 0.15, "runners/sampling": 0.12, "runners": 0.13,
    "qwen_onnx/exports": 0.15, "qwen_onnx/checkpoints": 0.08, "qwen_onnx": 0.07,
}  # fmt: skip
"""Where the faults are planted, as shares: a file belongs to the longest of these paths."""
LEFT_OUT = ["--deselect", "tests/graphs/test_golden_graphs.py"]
CPU_SECONDS = 900
"""Of one process: a fault that never ends counts as noticed."""


def listed() -> list[str]:
    """All files of the working tree that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).exists()]


def sources() -> list[str]:
    """Python files of the package."""
    rooms = ("graphs/", "runners/", "qwen_onnx/")
    return [path for path in listed() if path.startswith(rooms) and path.endswith(".py")]


def chosen(count: int, seed: int, only: str) -> list[Mutation]:
    """So many mutations, the same for the same seed, by the shares of ROOMS."""
    draw = random.Random(seed)
    by_room = collections.defaultdict(list)
    for path in sources():
        room = max((room for room in ROOMS if path.startswith(f"{room}/")), key=len)
        by_room[room] += mutations(ROOT, path)
    found = []
    for room, share in ROOMS.items():
        if room.startswith(only):
            found += draw.sample(by_room[room], min(len(by_room[room]), round(count * share)))
    return found


class Copy:
    """A clone of the working tree to plant faults in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in listed():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)

    def pytest(self, *arguments: object, limit: int = 0) -> subprocess.CompletedProcess[str]:
        """The tests over this copy, and not over what is installed."""
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, arguments)],
            cwd=self.folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL,
            preexec_fn=lambda: limit and resource.setrlimit(resource.RLIMIT_CPU, (limit, limit)),
        )  # fmt: skip


def covering(copy: Copy) -> CoverageData:
    """Which tests execute which lines; kept for the next time, as long as no line of Python changes."""
    digest = hashlib.sha256()
    for name in listed():
        if name.endswith(".py") and not name.startswith("tests/mutants/"):
            digest.update((ROOT / name).read_bytes())
    kept = ROOT / ".venv" / f"mutants-{digest.hexdigest()[:16]}.coverage"
    if not kept.exists():
        done = copy.pytest("-n", "auto", "--cov=.", "--cov-context=test", "--cov-report=", *LEFT_OUT)
        if done.returncode:
            sys.exit(f"the tests fail without a fault:\n{done.stdout[-3000:]}")
        shutil.copy(copy.folder / ".coverage", kept)
    data = CoverageData(str(kept))
    data.read()
    return data


class Tests:
    """The tests of a line, from the map."""

    def __init__(self, data: CoverageData) -> None:
        self._lines: dict[str, dict[int, list[str]]] = {}
        paths = sources()
        self._weights: collections.Counter[str] = collections.Counter()
        for path in data.measured_files():
            by_line = data.contexts_by_lineno(path)
            short = next((p for p in paths if path.endswith(f"/{p}") or path == p), None)
            if short is not None:
                self._lines[short] = by_line
            for contexts in by_line.values():
                self._weights.update(contexts)

    def of(self, mutation: Mutation, text: str) -> list[str]:
        """Those that execute fewest other lines come first; after a shared fixture all tests of its file."""
        by_line = self._lines.get(mutation.path, {})
        last = mutation.line + text[mutation.start : mutation.end].count("\n")
        contexts = {each for line in range(mutation.line, last + 1) for each in by_line.get(line, ()) if each}
        if not contexts:  # executed when the file is imported: whatever is in it may hang on it
            contexts = {each for found in by_line.values() for each in found if each}
        ordered = sorted(contexts, key=lambda each: self._weights[each])
        tests = [each.partition("|")[0] for each in ordered if not each.endswith("|setup")]
        files = [each.partition("::")[0] for each in ordered if each.endswith("|setup")]
        return [*dict.fromkeys(tests), *dict.fromkeys(files)]


def noticed(copy: Copy, mutation: Mutation, tests: list[str], *, full: bool) -> bool:
    """Whether a test fails with this fault."""
    path = copy.folder / mutation.path
    original = path.read_text(encoding="utf-8")
    path.write_text(mutation.apply(original), encoding="utf-8")
    try:
        if tests and copy.pytest("-x", *tests, *LEFT_OUT, limit=CPU_SECONDS).returncode != 0:
            return True
        return full and copy.pytest("-x", *LEFT_OUT, limit=CPU_SECONDS).returncode != 0
    finally:
        path.write_text(original, encoding="utf-8")


def planted() -> Iterable[tuple[str, Mutation]]:
    """Faults that once went unnoticed."""
    for name, path, old, new in PLANTED:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{name}: {path} has this {text.count(old)} times: {old}"
        start = text.index(old)
        line = text.count("\n", 0, start) + 1
        yield name, Mutation(path, line, start, start + len(old), old, new)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="faults of this room only, as graphs or runners/sampling")
    parser.add_argument("--planted", action="store_true", help="the known faults of planted.py only")
    parser.add_argument("--full", action="store_true", help="all tests for what the covering ones let pass")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    explained = json.loads(EXPLAINED.read_text(encoding="utf-8"))
    faults = list(planted())
    if not options.planted:
        faults += [("", each) for each in chosen(options.count, options.seed, options.only)]
    with tempfile.TemporaryDirectory() as folder:
        copies: queue.Queue[Copy] = queue.Queue()
        for number in range(options.jobs):
            copies.put(Copy(Path(folder) / str(number)))
        first = copies.get()
        tests = Tests(covering(first))
        copies.put(first)

        def run(name: str, mutation: Mutation) -> tuple[str, str, bool]:
            text = (ROOT / mutation.path).read_text(encoding="utf-8")
            copy = copies.get()
            try:
                found = noticed(copy, mutation, tests.of(mutation, text), full=options.full)
            finally:
                copies.put(copy)
            return name, mutation.key(text), found

        survivors, known = [], 0
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            for done in concurrent.futures.as_completed([pool.submit(run, *fault) for fault in faults]):
                name, key, found = done.result()
                label = "noticed" if found else "explained" if key in explained else "SURVIVED"
                print(f"{label:9} {name}{': ' if name else ''}{key}", flush=True)
                known += label == "explained"
                survivors += [key] if label == "SURVIVED" else []
    print(f"{len(faults)} faults, {known} explained, {len(survivors)} survivors")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
