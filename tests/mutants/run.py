"""Whether the tests notice: small faults are planted in a copy of the code, one at a time, and the tests run.

python tests/mutants/run.py [--count 120] [--seed 0] [--only graphs] [--most 600] [--planted] [--full]

First the tests run once, under coverage, so that each fault meets the tests that execute its line, the most specific
first, until one fails. What no test notices is printed, and is a failure unless explained.json says why it changes
nothing. Digests of graphs are left out: they say that a graph changed, not that it is wrong.
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
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

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
WHICH = [
    "-m", "not transformers and not slow and not huge and not runtimes and not fuzz and not soak and not docs",
    "--deselect", "tests/graphs/test_golden_graphs.py",
]  # fmt: skip
"""The tests: those of `make test` and the thorough ones."""
LONGEST_TEST_S = 300
"""A fault that never ends counts as noticed."""
CPU_SECONDS = 3600
"""Of one process, and of what it leaves behind."""


def listed() -> list[str]:
    """All files of the working tree that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).exists()]


def sources() -> list[str]:
    """Python files of the package."""
    rooms = ("graphs/", "runners/", "qwen_onnx/")
    return [path for path in listed() if path.startswith(rooms) and path.endswith(".py")]


def chosen(count: int, seed: int, only: tuple[str, ...]) -> list[Mutation]:
    """Of so many mutations, the same for the same seed, by the shares of ROOMS, those of these paths."""
    draw = random.Random(seed)
    by_room = collections.defaultdict(list)
    for path in sources():
        room = max((room for room in ROOMS if path.startswith(f"{room}/")), key=len)
        by_room[room] += mutations(ROOT, path)
    found = []
    for room, share in ROOMS.items():
        found += draw.sample(by_room[room], min(len(by_room[room]), round(count * share)))
    return [each for each in found if each.path.startswith(only)]


class Copy:
    """A clone of the working tree to plant faults in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in listed():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)

    def pytest(self, *arguments: str, limit: int = 0) -> subprocess.CompletedProcess[str]:
        """The tests over this copy, and not over what is installed."""
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        ends = ["-o", f"faulthandler_timeout={LONGEST_TEST_S}", "-o", "faulthandler_exit_on_timeout=true"]
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *ends,
             *arguments],
            cwd=self.folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL,
            preexec_fn=lambda: limit and resource.setrlimit(resource.RLIMIT_CPU, (limit, limit)),
        )  # fmt: skip


def tests_of(copy: Copy) -> list[str]:
    """Names of all tests."""
    done = copy.pytest("--collect-only", *WHICH)
    return [line for line in done.stdout.splitlines() if "::" in line]


def covering(copy: Copy) -> CoverageData:
    """Which tests execute which lines; kept for the next time, as long as no line of the package changes."""
    digest = hashlib.sha256()
    for name in sources():
        digest.update((ROOT / name).read_bytes())
    kept = ROOT / ".venv" / f"mutants-{digest.hexdigest()[:16]}.coverage"
    if not kept.exists():
        done = copy.pytest("-n", "auto", "--cov=.", "--cov-context=test", "--cov-report=", *WHICH)
        if done.returncode:
            sys.exit(f"the tests fail without a fault:\n{done.stdout[-3000:]}")
        shutil.copy(copy.folder / ".coverage", kept)
    data = CoverageData(str(kept))
    data.read()
    return data


class Tests:
    """The tests of a line, from the map."""

    def __init__(self, data: CoverageData, names: list[str]) -> None:
        """`names`: of all tests that there are; pytest would take another for an error, which looks like noticing."""
        self._names, self._of_file = set(names), collections.defaultdict(list)
        for name in names:
            self._of_file[name.partition("::")[0]].append(name)
        self._lines: dict[str, dict[int, list[str]]] = {}
        paths = sources()
        self._weights: collections.Counter[str] = collections.Counter()
        for path in data.measured_files():
            by_line = data.contexts_by_lineno(path)
            short = next((p for p in paths if path.endswith(f"/{p}") or path == p), None)
            if short is not None:
                self._lines[short] = by_line
            for contexts in by_line.values():
                self._weights.update(each.partition("|")[0] for each in contexts)
        self._new = self._names.difference(self._weights)  # since the map was drawn

    def of(self, mutation: Mutation, text: str) -> list[str]:
        """Those of the folder named like the code's come first, of these one of each function, and of these the one
        that executes fewest other lines; before all, tests in that folder that the map does not know. Last come,
        after a shared fixture, all tests of its file.
        """
        by_line = self._lines.get(mutation.path, {})
        last = mutation.line + text[mutation.start : mutation.end].count("\n")
        contexts = {each for line in range(mutation.line, last + 1) for each in by_line.get(line, ()) if each}
        if not contexts:  # executed when the file is imported: whatever is in it may hang on it
            contexts = {each for found in by_line.values() for each in found if each}
        of_fixtures = {each.partition("::")[0] for each in contexts if each.endswith("|setup")}
        known = {each.partition("|")[0] for each in contexts} & self._names
        # Of a file that is only executed as a copy elsewhere, or in processes of its own, nothing is on the map.
        unmapped = self._new if contexts else self._names
        new = {name for name in unmapped if name.startswith(_folder(mutation.path))}
        own = self._ordered(mutation.path, known | new)
        of_files = {name for file in of_fixtures for name in self._of_file[file]}
        return [*own, *self._ordered(mutation.path, of_files.difference(own))]

    def _ordered(self, path: str, names: set[str]) -> list[str]:
        folder = _folder(path)
        seen: collections.Counter[str] = collections.Counter()
        keyed = []
        for name in sorted(names, key=lambda each: (self._weights[each], each)):
            function = name.partition("[")[0]
            keyed.append((not name.startswith(folder), seen[function], len(keyed), name))
            seen[function] += 1
        return [name for *_, name in sorted(keyed)]


def _folder(path: str) -> str:
    """Where the tests of this file are, as a rule."""
    return f"tests/{path.removeprefix('qwen_onnx/').partition('/')[0]}/"


class Answer(NamedTuple):
    """What the tests say of a fault."""

    by: str
    """The test that noticed it; empty if none did."""
    met: int
    """How many tests it was to meet."""
    seconds: float


def asked(copy: Copy, mutation: Mutation, tests: list[str], *, full: bool) -> Answer:
    """Whether a test fails with this fault."""
    path = copy.folder / mutation.path
    original = path.read_text(encoding="utf-8")
    path.write_text(mutation.apply(original), encoding="utf-8")
    begin = time.monotonic()
    by = ""
    try:
        for names in [tests] * bool(tests) + [[]] * full:
            done = copy.pytest("-x", *WHICH, *names, limit=CPU_SECONDS)
            if done.returncode not in (0, 5):  # 5: no tests
                failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR "))]
                by = failed[0].split(" - ")[0] if failed else f"exit status {done.returncode}"
                break
    finally:
        path.write_text(original, encoding="utf-8")
    return Answer(by, len(tests), time.monotonic() - begin)


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
    parser.add_argument(
        "--only", nargs="+", default=[""], help="of these paths only, as graphs runners/sampling"
    )
    parser.add_argument(
        "--most", type=int, default=600, help="tests that one fault meets; 0 for all of its line"
    )
    parser.add_argument("--planted", action="store_true", help="the known faults of planted.py only")
    parser.add_argument("--full", action="store_true", help="all tests for what the covering ones let pass")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    only = tuple(options.only)
    explained = json.loads(EXPLAINED.read_text(encoding="utf-8"))
    faults = [] if options.planted else [("", each) for each in chosen(options.count, options.seed, only)]
    faults += [fault for fault in planted() if fault[1].path.startswith(only)]
    with tempfile.TemporaryDirectory() as folder:
        copies: queue.Queue[Copy] = queue.Queue()
        for number in range(options.jobs):
            copies.put(Copy(Path(folder) / str(number)))
        first = copies.get()
        tests = Tests(covering(first), tests_of(first))
        copies.put(first)

        def run(name: str, mutation: Mutation) -> tuple[str, str, Answer, int]:
            text = (ROOT / mutation.path).read_text(encoding="utf-8")
            covered = tests.of(mutation, text)
            copy = copies.get()
            try:
                answer = asked(copy, mutation, covered[: options.most or None], full=options.full)
            finally:
                copies.put(copy)
            return name, mutation.key(text), answer, len(covered)

        counts: collections.Counter[str] = collections.Counter()
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            for done in concurrent.futures.as_completed([pool.submit(run, *fault) for fault in faults]):
                name, key, answer, covered = done.result()
                label = "noticed" if answer.by else "explained" if key in explained else "SURVIVED"
                counts[label] += 1
                said = answer.by or f"{answer.met} of {covered} tests that execute it"
                print(
                    f"{label:9} {name}{': ' if name else ''}{key}\n          {said}, {answer.seconds:.0f} s",
                    flush=True,
                )
    print(
        f"{len(faults)} faults, {counts['noticed']} noticed, {counts['explained']} explained,"
        f" {counts['SURVIVED']} survivors"
    )
    sys.exit(bool(counts["SURVIVED"]))


if __name__ == "__main__":
    main()
