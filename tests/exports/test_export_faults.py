"""Exports that the system, or another program, gets in the way of: one line, and nothing lost or left."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qwen_onnx.contract.manifest import read_manifest
from qwen_onnx.exports.writer import hash_file
from support.checkpoints import QWEN2, write_checkpoint
from support.command import child, command
from support.exporting import export_model
from support.marks import but_first
from support.patience import PATIENCE
from support.refusals import refused
from support.text_fixtures import write_folder

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="users, limits and mounts are another thing there"
)

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SAY_PLENTY = "import shutil; shutil.disk_usage = lambda folder: shutil._ntuple_diskusage(2**60, 0, 2**60)"


def write_model(folder: Path) -> Path:
    write_checkpoint(folder, QWEN2 | {"vocab_size": 400}, shards=2)
    return write_folder(folder, {"tokenizer_config.json": {"eos_token": "<|im_end|>", "chat_template": "x"}})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
    }


def assert_whole(out: Path) -> None:
    for name, spec in read_manifest(out).files.items():
        assert hash_file(out / name) == spec


def error_of(process: subprocess.Popen[bytes]) -> str:
    """What a command that was refused said: one line."""
    out, err = process.communicate(timeout=PATIENCE)
    line = err.decode().removesuffix("\n")
    assert line.isprintable(), line
    assert (process.returncode, out) == (1, b"")
    assert line.startswith("error: ")
    return line


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[str | None]:
    """A disk of `size` bytes at `folder`; where none can be mounted, Python that limits files to so many instead."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if (
        os.getuid() == 0
        and shutil.which("mount")
        and subprocess.run(mount, capture_output=True).returncode == 0
    ):
        try:
            yield None
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=True)
    else:
        yield f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size // 4}, {size // 4}))"


@pytest.mark.parametrize("share", [0.3, 0.8, 0.97])
@pytest.mark.thorough
def test_a_disk_that_is_full(share: float, model: Path, tmp_path: Path) -> None:
    """Whichever file the disk ends in, one line says so and nothing stays."""
    whole = export_model(str(model), tmp_path / "whole").folder
    size = sum(path.stat().st_size for path in whole.iterdir())
    with small_disk(tmp_path / "disk", int(size * share)) as limit:
        out = tmp_path / "disk" / "out"
        with child("export", model, out, program=f"{SAY_PLENTY}\n{limit or ''}") as process:
            line = error_of(process)
        assert "No space left on device" in line or "File too large" in line
        assert str(out) in line
        assert list((tmp_path / "disk").iterdir()) == []


@pytest.mark.parametrize("limit", [1_000, 60_000])
@pytest.mark.thorough
def test_files_that_may_not_grow(limit: int, model: Path, tmp_path: Path) -> None:
    """With --force the earlier export stays."""
    out = tmp_path / "here" / "out"
    export_model(str(model), out, dtype="bf16")
    before = snapshot(tmp_path / "here")
    program = f"{SAY_PLENTY}\nimport resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
    with child("export", model, out, "--force", program=program) as process:
        assert "File too large" in error_of(process)
    assert snapshot(tmp_path / "here") == before


NOBODY = 65534


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Without root's rights, where this is root."""
    if os.getuid() != 0:
        yield
        return
    groups = os.getgroups()
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, 0)
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)
        os.setgroups(groups)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that everyone can reach, unlike pytest's own, with a model and its export that is nobody's."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        monkeypatch.chdir(folder)
        # By the command, so that all is imported: another user may not read the installation.
        assert command("export", write_model(folder / "model"), folder / "to" / "export").code == 0
        assert command("run", folder / "to" / "export", *IDS).code == 0
        if os.getuid() == 0:
            for path in (folder, *folder.rglob("*")):
                os.chown(path, NOBODY, NOBODY)
        yield folder
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)


IDS = ("--prompt-ids", "1,2", "--max-new-tokens", 2, "--provider", "cpu", "--threads", 1)


@pytest.mark.parametrize(
    "what", ["to", "model", f"model/{SECOND}", "model/config.json", "model/tokenizer.json"]
)
@pytest.mark.thorough
def test_no_permission(what: str, place: Path) -> None:
    """Nothing is left behind, and the earlier export stays."""
    before, mode = snapshot(place), (place / what).stat().st_mode
    for out in ("to/out", "to/new/out", "to/export"):
        (place / what).chmod(0o555 if what == "to" else 0o000)
        with as_nobody():
            line = command("export", place / "model", place / out, "--force").error
        assert str(place / what) in line
        (place / what).chmod(mode)
        assert snapshot(place) == before


def test_no_permission_to_read_an_export(place: Path) -> None:
    """`run`, `check` and `info` name the file."""
    out = place / "to" / "export"
    for what in ("weights.safetensors", "prefill.onnx", "export.json", "tokenizer.json"):
        mode = (out / what).stat().st_mode
        (out / what).chmod(0o000)
        with as_nobody():
            assert str(out / what) in command("run", out, *IDS).error
            checked, described = command("check", out), command("info", out, "--graphs")
        (out / what).chmod(mode)
        assert what in checked.out + checked.err
        assert checked.code == 1
        if what.startswith(("prefill", "export")):
            assert str(out / what) in described.error


def rewrite(path: Path) -> None:
    """Other bytes, as many."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    os.utime(path, ns=(1, 1))  # clocks of file systems are coarse, and this test is fast
    path.write_bytes(content)


def replace(path: Path) -> None:
    """Another file of the same name, size and time."""
    status = path.stat()
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("change", but_first([rewrite, replace, lambda path: path.unlink()]))
@pytest.mark.parametrize("name", [FIRST, "config.json", "tokenizer.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("dtype", but_first(["f32", "int8"]))
def test_a_checkpoint_that_changes_meanwhile(
    change: Callable[[Path], None], name: str, dtype: str, model: Path, tmp_path: Path
) -> None:
    """A training run may write it in place: no export holds weights of two states."""
    changed = []

    def spoil(done: int, total: int) -> None:
        if 2 * done > total and not changed:
            changed.append(name)
            change(model / name)

    refused(export_model, str(model), tmp_path / "out", dtype=dtype, progress=spoil, mentions=(model / name,))
    assert changed
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_is_not_read_may_change(model: Path, tmp_path: Path) -> None:
    """A training run may write its log beside the checkpoint."""
    (model / "trainer.log").write_text("step 1")
    (model / "optimizer.safetensors").write_bytes(b"x")

    def write(done: int, total: int) -> None:
        (model / "trainer.log").write_text(f"step {done}")
        rewrite(model / "optimizer.safetensors")

    export_model(str(model), tmp_path / "out", progress=write)
    export_model(str(model), tmp_path / "linked", link=True, progress=write)
    assert_whole(tmp_path / "out")


@pytest.mark.thorough
def test_two_exports_to_one_folder(model: Path, tmp_path: Path) -> None:
    """The second is refused, and the first ends whole."""
    out = tmp_path / "here" / "out"
    (tmp_path / "here").mkdir()
    export_model(str(model), out, dtype="bf16")
    # The first one says when it writes; then the second begins.
    program = "import sys, qwen_onnx.exports.exporter as e\nreal = e.Writer.write_weights\n" \
        "def slow(*a):\n    print('writing', file=sys.stderr, flush=True); sys.stdin.readline(); return real(*a)\n" \
        "e.Writer.write_weights = slow"  # fmt: skip
    with child("export", model, out, "--force", program=program, stdin=subprocess.PIPE) as first:
        assert first.stderr is not None
        assert first.stderr.readline() == b"writing\n"
        with child("export", model, out, "--force") as second:
            assert "another export to it is running" in error_of(second)
        _, err = first.communicate(b"go\n", timeout=PATIENCE)
        assert (first.returncode, err) == (0, b"")
    assert_whole(out)
    assert read_manifest(out).dtype == "f32"
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["out"]


@pytest.mark.thorough
def test_two_exports_begun_at_once(model: Path, tmp_path: Path) -> None:
    """One of them is refused."""
    with (
        child("export", model, tmp_path / "out") as first,
        child("export", model, tmp_path / "out") as second,
    ):
        ends = [process.communicate(timeout=PATIENCE) for process in (first, second)]
    assert sorted(process.returncode for process in (first, second)) == [0, 1], ends
    assert all(b"Traceback" not in err for _, err in ends)
    assert_whole(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
