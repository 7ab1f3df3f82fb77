"""An export killed at any point of its life: the old state or the whole new one, at the latest after the next run."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qwen_onnx.contract.manifest import read_manifest
from qwen_onnx.exports.publish.staging import recover
from qwen_onnx.exports.writer import hash_file
from support.checkpoints import QWEN2, write_checkpoint
from support.exporting import export_model
from support.patience import PATIENCE
from support.text_fixtures import write_folder

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(sys.platform == "win32", reason="signals are another thing there"),
]

POINTS = 50
# Counts what it does to files below a folder, and dies before the step that it is told.
CHILD = """
import os, signal, sys
from pathlib import Path
import qwen_onnx.exports.exporter as exporter
from qwen_onnx.exports.options import ExportOptions
model, out, force, link, last = sys.argv[1:]
parent, steps = str(Path(out).parent) + "/", 0

def step(*_):
    global steps
    steps += 1
    if steps == int(last):
        os.kill(os.getpid(), signal.SIGKILL)

def hook(event, arguments):
    if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        return
    if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "shutil.copyfile"):
        if any(isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(parent) for path in arguments[:2]):
            step()

print("begun", flush=True)
sys.addaudithook(hook)
exporter.export_model(model, Path(out), ExportOptions(force=force == "force", link=link == "link"), progress=step)
print(steps)
"""


@dataclasses.dataclass(frozen=True)
class Place:
    """A model, and a folder that exports of it go to."""

    model: Path
    out: Path

    def start(self, *, force: bool, link: bool, last: int = 0) -> subprocess.Popen[str]:
        arguments = [
            str(self.model),
            str(self.out),
            "force" if force else "",
            "link" if link else "",
            str(last),
        ]
        run = [sys.executable, "-c", CHILD, *arguments]
        process = subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        return process

    def state(self) -> dict[str, bytes]:
        """Everything beside the model."""
        below = self.out.parent
        return {
            str(path.relative_to(below)): path.read_bytes() for path in below.rglob("*") if path.is_file()
        }

    def holds_new(self) -> bool:
        if not (self.out / "export.json").exists():
            return False
        manifest = read_manifest(self.out)
        return manifest.dtype == "f32" and all(
            hash_file(self.out / name) == spec for name, spec in manifest.files.items()
        )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("killed")
    write_checkpoint(folder / "model", QWEN2 | {"vocab_size": 400}, shards=2)
    write_folder(folder / "model", {"tokenizer_config.json": {"eos_token": "<|im_end|>"}})
    (folder / "to").mkdir()
    return Place(folder / "model", folder / "to" / "out")


def test_fifty_points(place: Place) -> None:
    """The earlier export or the new one is there whole, nothing else is left, and the checkpoint is as it was."""
    rng, killed, kinds = random.Random(0), 0, {"old": 0, "new": 0, "displaced": 0}
    checkpoint = {path: path.read_bytes() for path in place.model.iterdir()}
    first = place.start(force=False, link=False)
    began = time.perf_counter()
    steps = int(first.communicate(timeout=PATIENCE)[0])
    duration = time.perf_counter() - began
    assert steps > 30
    for point in itertools.count():
        if killed == POINTS:
            break
        force, link = rng.random() < 0.7, rng.random() < 0.3
        by_step = rng.random() < 0.7
        prepare(place, earlier=force)
        before = place.state()
        process = place.start(force=force, link=link, last=rng.randrange(1, steps + 5) if by_step else 0)
        if not by_step:
            time.sleep(rng.random() * duration * 0.9)
            process.kill()
        _, err = process.communicate(timeout=PATIENCE)
        assert process.returncode in (0, -signal.SIGKILL), err
        assert point < 3 * POINTS, "hardly any of them comes in time"
        killed += process.returncode != 0
        where = f"point {point}: force {force}, link {link}, by step {by_step}"
        found = "new" if place.holds_new() else "old" if kept(place.state(), before) else "displaced"
        kinds[found] += 1
        if found == "displaced":  # between two renames: there for the next run
            assert force, where
            assert not place.out.exists(), where
        recover(place.out)
        assert place.holds_new() or place.state() == before, where
        assert {path.name for path in place.out.parent.iterdir()} <= {"out"}, where
        export_model(str(place.model), place.out, force=True)
        assert place.holds_new(), where
        assert {path.name for path in place.out.parent.iterdir()} == {"out"}, where
        assert {path: path.read_bytes() for path in place.model.iterdir()} == checkpoint, where
    print(f"{steps} steps; {killed} killed of {point}; found right after: {kinds}")
    assert min(kinds["old"], kinds["new"]) > 0


def prepare(place: Place, *, earlier: bool) -> None:
    """Nothing there, or an earlier export."""
    for path in place.out.parent.rglob("*"):
        if path.is_file():
            path.unlink()
    if place.out.exists():
        place.out.rmdir()
    if earlier:
        export_model(str(place.model), place.out, dtype="bf16")


def kept(now: dict[str, bytes], before: dict[str, bytes]) -> bool:
    """What was there is there, beside what the killed run left."""
    return all(now.get(name) == content for name, content in before.items())


def test_every_step_is_counted(place: Place) -> None:
    """So that the test above kills in the middle: the third step leaves no export, and something to be removed."""
    prepare(place, earlier=False)
    process = place.start(force=False, link=False, last=3)
    assert process.wait(PATIENCE) == -signal.SIGKILL
    process.communicate()
    assert not place.out.exists()
    assert os.listdir(place.out.parent)  # noqa: PTH208
    assert recover(place.out)
