"""A folder is published whole or not at all, whatever ends the process, and nothing else is ever touched."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qwen_onnx.errors import UserError
from qwen_onnx.exports.publish import temporary_folders
from qwen_onnx.exports.publish.staging import discard, recover, staged_folder, sweep
from qwen_onnx.exports.publish.temporary_folders import hold, temporary_name
from support.patience import PATIENCE
from support.staging import NEW, OLD, publish, tree, under, write

CHILD = """
import os, shutil, signal, sys
from pathlib import Path
from qwen_onnx.errors import UserError
from qwen_onnx.exports.publish.staging import staged_folder

out, force, killed_at, manifest = Path(sys.argv[1]), sys.argv[2] == "force", sys.argv[3], sys.argv[4]
rename, rmtree, renames = os.rename, shutil.rmtree, []

def counted_rename(source, target, **more):
    renames.append(target)
    if killed_at == f"rename {len(renames)}":
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, target, **more)

def deadly_rmtree(path, **more):
    if killed_at == "rmtree":
        os.kill(os.getpid(), signal.SIGKILL)
    rmtree(path, **more)

os.rename, shutil.rmtree = counted_rename, deadly_rmtree
try:
    with staged_folder(out, force=force) as folder:
        (folder / "export.json").write_text(manifest)
        (folder / "weights").write_text("new")
        print("staged", flush=True)
        if killed_at == "body":
            os.kill(os.getpid(), signal.SIGKILL)
        if killed_at == "when told":
            sys.stdin.readline()
except UserError as error:
    sys.exit(f"error: {error}")
"""


def child(out: Path, *, force: bool = False, killed_at: str = "never") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(out), "force" if force else "", killed_at, NEW["export.json"]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class TestPublishing:
    @pytest.mark.parametrize(
        "name", ["out", "mein Modell ü 模型", ".hidden", "a[1]*?", "two\nlines", "x" * 230, "é" * 127]
    )
    def test_out_appears_whole_and_alone(self, tmp_path: Path, name: str) -> None:
        out = tmp_path / name
        with staged_folder(out) as folder:
            assert folder.parent == out.parent
            assert folder.name.startswith(".")
            write(folder, NEW)
            assert not out.exists()
        assert tree(tmp_path) == under(name, NEW)
        publish(out, force=True)
        assert tree(tmp_path) == under(name, NEW)

    @pytest.mark.parametrize("length", range(215, 226))
    def test_a_long_name_is_in_the_temporary_one_as_long_as_both_fit(
        self, length: int, tmp_path: Path
    ) -> None:
        out = tmp_path / ("x" * (length - 2) + "é")  # of two bytes
        folder = temporary_name(out, "new")
        assert (out.name in folder.name) is (length <= 220)
        folder.mkdir()
        assert [found.path for found in temporary_folders.find_temporaries(tmp_path, out)] == [folder]

    def test_a_name_too_long_is_one_line(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="File name too long"):
            publish(tmp_path / ("x" * 256))
        assert tree(tmp_path) == {}

    def test_a_null_byte_is_one_line(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="cannot be used as a folder"):
            publish(tmp_path / "a\0b")

    def test_the_folder_has_the_permissions_of_any_new_folder(self, tmp_path: Path) -> None:
        (tmp_path / "plain").mkdir()
        publish(tmp_path / "out")
        assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode

    def test_an_empty_folder_is_filled_without_force(self, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        publish(tmp_path / "out")
        assert tree(tmp_path) == under("out", NEW)

    def test_force_replaces_an_earlier_export_whole(self, tmp_path: Path) -> None:
        write(tmp_path / "out", OLD)
        publish(tmp_path / "out", force=True)
        assert tree(tmp_path) == under("out", NEW)

    def test_missing_parents_are_made(self, tmp_path: Path) -> None:
        publish(tmp_path / "a" / "b" / "out")
        assert tree(tmp_path) == under("a/b/out", NEW)

    def test_a_link_to_a_folder_stays_a_link(self, tmp_path: Path) -> None:
        write(tmp_path / "elsewhere" / "real", OLD)
        (tmp_path / "out").symlink_to(tmp_path / "elsewhere" / "real")
        publish(tmp_path / "out", force=True)
        assert (tmp_path / "out").is_symlink()
        assert tree(tmp_path / "elsewhere") == under("real", NEW)

    def test_a_relative_out(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        publish(Path("out"))
        publish(Path("deeper/../out"), force=True)
        assert tree(tmp_path) == under("out", NEW)


class TestFailing:
    @pytest.mark.parametrize(
        "error", [KeyboardInterrupt(), ValueError("x"), BrokenPipeError(errno.EPIPE, "x")]
    )
    @pytest.mark.parametrize("force", [False, True])
    def test_an_error_in_the_block_leaves_everything_as_it_was(
        self, tmp_path: Path, error: BaseException, force: bool
    ) -> None:
        out = tmp_path / "made" / "too" / "out"
        if force:
            write(out, OLD)
        before = tree(tmp_path)

        def fail() -> None:
            with staged_folder(out, force=force) as folder:
                write(folder, NEW)
                raise error

        with pytest.raises(type(error)):
            fail()
        assert tree(tmp_path) == before
        assert out.parent.exists() == force

    def test_a_parent_that_others_use_meanwhile_stays(self, tmp_path: Path) -> None:
        def fail() -> None:
            with staged_folder(tmp_path / "a" / "b" / "out"):
                write(tmp_path / "a", {"theirs": "x"})
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fail()
        assert tree(tmp_path) == {"a/theirs": "x"}

    def test_a_full_disk_is_named_by_the_final_path(self, tmp_path: Path) -> None:
        out = tmp_path / "out"
        with pytest.raises(UserError) as caught, staged_folder(out) as folder:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder / "weights"))
        assert str(caught.value) == f"{out / 'weights'}: No space left on device"
        with pytest.raises(UserError) as caught, staged_folder(out):
            raise OSError(errno.ENOSPC, "No space left on device")  # as write() raises it
        assert str(caught.value) == f"{out}: No space left on device"
        assert tree(tmp_path) == {}

    @pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
    def test_what_the_disk_refuses_at_the_start(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        def mkdir(path: str, mode: int = 0o777) -> None:
            raise OSError(code, os.strerror(code), str(path))

        monkeypatch.setattr(os, "mkdir", mkdir)
        with pytest.raises(UserError) as caught:
            publish(tmp_path / "out")
        assert str(caught.value) == f"{tmp_path / 'out'}: {os.strerror(code)}"

    @pytest.mark.parametrize("failing", [1, 2])
    def test_a_rename_that_fails_leaves_the_old_export(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
    ) -> None:
        write(tmp_path / "out", OLD)
        rename, calls = os.rename, []

        def refusing(source: Path, target: Path) -> None:
            calls.append(source)
            if len(calls) == failing:
                raise PermissionError(errno.EACCES, "Permission denied", str(source), None, str(target))
            rename(source, target)

        monkeypatch.setattr(os, "rename", refusing)
        with pytest.raises(UserError, match="Permission denied") as caught:
            publish(tmp_path / "out", force=True)
        assert str(caught.value) == f"{tmp_path / 'out'}: Permission denied"
        assert tree(tmp_path) == under("out", OLD)

    def test_out_filled_by_somebody_else_meanwhile_is_left_to_them(self, tmp_path: Path) -> None:
        with (
            pytest.raises(UserError, match="not empty and not an earlier export"),
            staged_folder(tmp_path / "out", force=True),
        ):
            write(tmp_path / "out", {"theirs": "x"})
        assert tree(tmp_path) == {"out/theirs": "x"}


class TestKilled:
    """SIGKILL at each stage; the next run finds what is left."""

    def kill(self, out: Path, *, force: bool, at: str) -> None:
        process = child(out, force=force, killed_at=at)
        process.communicate(timeout=PATIENCE)
        assert process.returncode == -signal.SIGKILL

    @pytest.mark.parametrize("at", ["body", "rename 1"])
    @pytest.mark.parametrize("force", [False, True])
    def test_before_the_swap_out_is_untouched(self, tmp_path: Path, force: bool, at: str) -> None:
        out = tmp_path / "out"
        if force:
            write(out, OLD)
        before = tree(tmp_path)
        self.kill(out, force=force, at=at)
        [left] = [path for path in tmp_path.iterdir() if path != out]
        assert tree(left) == NEW
        assert recover(out) == [f"removed {left.name}, left by an export that was killed"]
        assert tree(tmp_path) == before
        assert recover(out) == []

    @pytest.mark.parametrize("emptied", [False, True])
    def test_between_the_renames_the_old_export_comes_back(self, tmp_path: Path, emptied: bool) -> None:
        out = tmp_path / "out"
        write(out, OLD)
        self.kill(out, force=True, at="rename 2")
        assert not out.exists()
        if emptied:
            out.mkdir()
        removed, put_back = recover(out)
        assert "removed .out.new-" in removed
        assert put_back == "put back out, displaced by an export that was killed"
        assert tree(tmp_path) == under("out", OLD)

    def test_after_the_swap_the_new_export_stays(self, tmp_path: Path) -> None:
        out = tmp_path / "out"
        write(out, OLD)
        self.kill(out, force=True, at="rmtree")
        [note] = recover(out)
        assert note.endswith("which out has replaced")
        assert tree(tmp_path) == under("out", NEW)

    def test_the_next_export_recovers_by_itself(self, tmp_path: Path) -> None:
        out = tmp_path / "out"
        write(out, OLD)
        self.kill(out, force=True, at="rename 2")
        with pytest.raises(UserError, match="holds an earlier export"):
            publish(out)  # which is the one put back
        assert tree(tmp_path) == under("out", OLD)
        self.kill(out, force=True, at="rename 2")
        publish(out, force=True)
        assert tree(tmp_path) == under("out", NEW)

    def test_a_displaced_export_is_kept_when_something_else_took_its_place(self, tmp_path: Path) -> None:
        out = tmp_path / "out"
        write(out, OLD)
        self.kill(out, force=True, at="rename 2")
        write(out, {"theirs": "x"})
        _, kept = recover(out)
        assert kept.startswith("kept .out.old-")
        assert sorted(tree(tmp_path).values()) == sorted([*OLD.values(), "x"])

    def test_only_folders_of_this_name_are_swept(self, tmp_path: Path) -> None:
        theirs = [
            temporary_name(tmp_path / name, "new")
            for name in ("out2", "xout", "out.new", ".out.new-1-00000000", "OUT")
        ]
        theirs += [tmp_path / name for name in (".out.new-1-xyz", ".out.new", "out.new-1-00000000")]
        for folder in theirs:
            write(folder, NEW)
        (tmp_path / ".out.new-1-00000000").write_text("a file")
        (tmp_path / ".out.new-1-00000001").symlink_to(theirs[0])
        before = tree(tmp_path)
        assert recover(tmp_path / "out") == []
        assert tree(tmp_path) == before
        sweep(tmp_path)
        assert [folder.exists() for folder in theirs] == [False] * 5 + [True] * 3

    def test_nothing_to_recover(self, tmp_path: Path) -> None:
        assert recover(tmp_path / "no" / "such" / "parent") == []
        assert tree(tmp_path) == {}


class TestTwoAtOnce:
    def test_the_second_is_refused_and_the_first_finishes(self, tmp_path: Path) -> None:
        out = tmp_path / "out"
        first = child(out, killed_at="when told")
        assert first.stdout is not None
        assert first.stdout.readline() == "staged\n"
        for attempt in (publish, recover):
            with pytest.raises(UserError, match="another export to it is running"):
                attempt(out)
        publish(tmp_path / "another")
        sweep(tmp_path)
        _, err = first.communicate("go\n", timeout=PATIENCE)
        assert (first.returncode, err) == (0, "")
        assert tree(tmp_path) == under("out", NEW) | under("another", NEW)

    def test_of_several_starters_one_wins_and_none_breaks_it(self, tmp_path: Path) -> None:
        starters = [child(tmp_path / "out") for _ in range(4)]
        ends = [(process.communicate(timeout=PATIENCE)[1], process.returncode) for process in starters]
        assert sorted(code for _, code in ends) == [0, 1, 1, 1]
        for line, code in ends:
            assert code == 0 or line.startswith(f"error: {tmp_path / 'out'}: ")
            assert line.count("\n") == code
        assert tree(tmp_path) == under("out", NEW)

    def test_a_starter_waits_while_another_looks_around(self, tmp_path: Path) -> None:
        with hold(tmp_path, wait=True):
            waiting = child(tmp_path / "out")
            with pytest.raises(subprocess.TimeoutExpired):
                waiting.wait(0.5)
            assert tree(tmp_path) == {}
        assert waiting.wait(PATIENCE) == 0
        waiting.communicate()

    @pytest.mark.parametrize("missing", ["module", "support"])
    def test_where_folders_cannot_be_locked_the_pid_decides(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
    ) -> None:
        def flock(descriptor: int, operation: int) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        if missing == "module":
            monkeypatch.setattr(temporary_folders, "fcntl", None)
        else:
            monkeypatch.setattr("fcntl.flock", flock)
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        for pid in (ended.pid, 10**12):
            dead = tmp_path / f".out.new-{pid}-00000000"
            write(dead, NEW)
            assert recover(tmp_path / "out") == [f"removed {dead.name}, left by an export that was killed"]
        running = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        write(tmp_path / f".out.new-{running.pid}-00000000", NEW)
        with pytest.raises(UserError, match="another export to it is running"):
            publish(tmp_path / "out")
        publish(tmp_path / "other")
        assert (tmp_path / "other").is_dir()
        running.communicate(b"\n")
        assert running.returncode == 0  # it was not disturbed


class TestDiscarding:
    def test_it_goes(self, tmp_path: Path) -> None:
        write(tmp_path / "out", OLD)
        discard(tmp_path / "out")
        assert tree(tmp_path) == {}

    def test_half_removed_it_no_longer_looks_like_an_export(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(path: Path) -> None:
            raise KeyboardInterrupt

        write(tmp_path / "out", OLD)
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", interrupted)
            with pytest.raises(KeyboardInterrupt):
                discard(tmp_path / "out")
        assert not (tmp_path / "out").exists()
        sweep(tmp_path)
        assert tree(tmp_path) == {}
