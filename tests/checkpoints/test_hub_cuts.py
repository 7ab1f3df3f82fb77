"""A network that is cut while `export` downloads: the old state or the complete new one, and a rerun succeeds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from support.checkpoints import QWEN2, write_checkpoint
from support.hub_server import LISTING, NO_ANSWER, Hub, serve
from support.text_fixtures import QWEN25_LIKE, write_folder

MODEL = "org/small"
FIRST, LAST = (f"model-0000{shard}-of-00002.safetensors" for shard in (1, 2))

# huggingface_hub waits a second and longer between its tries; here nothing waits.
CHILD = """
import contextlib, io, json, sys, time
time.sleep = lambda seconds: None
from qwen_onnx.cli.main import main
for line in sys.stdin:
    sys.argv, code = ["qwen-onnx", *json.loads(line)], 0
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as leaving:
            code = leaving.code
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""


class User(NamedTuple):
    """Someone who exports from the Hub, in one process for all of these tests: its imports take longest."""

    hub: Hub
    process: subprocess.Popen[str]
    cache: Path
    files: dict[str, bytes]

    def export(self, out: Path, *options: str) -> tuple[int, str, list[str]]:
        """The exit code, stdout, and the lines of stderr that are ours."""
        arguments = ["export", MODEL, str(out), "--target", "portable", *options]
        assert self.process.stdin
        assert self.process.stdout
        print(json.dumps(arguments), file=self.process.stdin, flush=True)
        code, told, noise = json.loads(self.process.stdout.readline())
        assert "Traceback" not in noise
        return code, told, [line for line in noise.splitlines() if line.startswith("error:")]


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    folder = tmp_path_factory.mktemp("hub")
    write_checkpoint(folder / "checkpoint", {**QWEN2, "vocab_size": 400}, shards=2)
    settings = {"tokenizer_config.json": {"eos_token": "<|im_end|>", "chat_template": QWEN25_LIKE}}
    write_folder(folder / "checkpoint", settings)
    files = {path.name: path.read_bytes() for path in (folder / "checkpoint").iterdir()}
    clean = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("HF_") and "proxy" not in key.lower()
    }
    with serve(Hub({MODEL: files})) as hub:
        environment = {**clean, "HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home")}
        with subprocess.Popen(
            [sys.executable, "-c", CHILD],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            yield User(hub, process, folder / "home", files)
            process.kill()


@pytest.fixture
def forgetful(user: User) -> User:
    """With an empty Hub cache, and a server that is well."""
    shutil.rmtree(user.cache, ignore_errors=True)
    user.hub.severed.clear()
    user.hub.requests.clear()
    return user


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def undisturbed(user: User, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    assert user.export(out)[0] == 0
    return contents(out)


PLACES: list[tuple[str, float | None]] = [
    *((LISTING, place) for place in (None, 0.5)),
    *((name, 0.5) for name in ("tokenizer.json", "model.safetensors.index.json")),
    *(("config.json", place) for place in (None, 1.0)),
    *((FIRST, place) for place in (None, 0.0, 0.5, 1.0)),
    (LAST, 0.5),
]
"""What is cut, and where: before any reply, or after a part of it; 1.0 is a byte before its end."""


@pytest.mark.parametrize(("name", "place"), PLACES)
@pytest.mark.thorough
def test_a_cut_leaves_nothing_and_a_rerun_succeeds(
    name: str, place: float | None, undisturbed: dict[str, bytes], forgetful: User, tmp_path: Path
) -> None:
    """Half a file is taken for a whole one by nobody, and the next run succeeds."""
    hub, size = forgetful.hub, len(forgetful.files.get(name, b"." * 200))
    hub.severed[name] = NO_ANSWER if place is None else min(int(place * size), size - 1)
    code, out, errors = forgetful.export(tmp_path / "out")
    assert (code, out) == (1, "")
    [line] = errors
    assert line.startswith(f"error: {MODEL}: ")
    assert "run the same command again" in line
    assert list(tmp_path.iterdir()) == []

    hub.severed.clear()
    hub.requests.clear()
    assert forgetful.export(tmp_path / "out")[0] == 0
    assert contents(tmp_path / "out") == undisturbed
    if name == LAST:  # what was finished is kept
        assert hub.fetched() == [LAST]


def test_a_cut_leaves_the_earlier_export(
    undisturbed: dict[str, bytes], forgetful: User, tmp_path: Path
) -> None:
    """--force removes nothing before the new export is there."""
    out = tmp_path / "out"
    assert forgetful.export(out, "--max-context", "64")[0] == 0
    earlier = contents(out)
    shutil.rmtree(forgetful.cache)
    forgetful.hub.severed[LAST] = 1000
    assert forgetful.export(out, "--force")[0] == 1
    assert contents(out) == earlier != undisturbed
    assert list(tmp_path.iterdir()) == [out]
    forgetful.hub.severed.clear()
    assert forgetful.export(out, "--force")[0] == 0
    assert contents(out) == undisturbed
