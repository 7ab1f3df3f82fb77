"""Options that change nothing: refused where they are mistakes, named in a note where they are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwen_onnx import UserError, export, load
from qwen_onnx.runners.runtime.optimizers import KNOWN, verify_optimizers
from support.chats import tiny
from support.command import command

ASKED = ("-p", "What is 3 plus 4?", "--provider", "cpu")


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export("tiny", tmp_path_factory.mktemp("portable") / "out", target="portable").folder


@pytest.mark.parametrize(
    ("options", "note"),
    [
        (("--tf32",), "--tf32: changes nothing on cpu"),
        (
            ("--tf32", "--gpu-mem-limit", 100, "--no-cuda-graph"),
            "--no-cuda-graph, --tf32, --gpu-mem-limit: change nothing on cpu",
        ),
        (("--greedy-on-device",), "--greedy-on-device is for a GPU: on cpu there is no copy to save"),
        (("--prepack",), None),
        ((), None),
    ],
)
def test_options_of_a_gpu_are_named_on_a_cpu(options: tuple[object, ...], note: str | None) -> None:
    """The answer is the same."""
    ran = command("run", tiny(), *ASKED, *options)
    assert (ran.code, ran.out) == (0, "3 plus 4 is 7.\n")
    assert ran.err == (f"note: {note}\n" if note else "")


def test_commands_that_open_several_sessions_say_it_once() -> None:
    ran = command("check", tiny(), "--provider", "cpu", "--tf32")
    assert ran.err.count("note: --tf32: changes nothing on cpu\n") == 1
    ran = command("bench", tiny("int8"), "--provider", "cpu", "--prepack", "--repeats", 1, "--new-tokens", 2)
    assert ran.err.count("note: --prepack changes nothing: int8 weights are always repacked\n") == 1


def test_prepack_where_weights_are_repacked_anyway(portable: Path) -> None:
    for folder, what in ((tiny("int4"), "int4 weights"), (portable, "weights of --target portable")):
        ran = command("run", folder, *ASKED, "--prepack", "--max-new-tokens", 1)
        assert ran.err.splitlines()[0] == f"note: --prepack changes nothing: {what} are always repacked"


def test_a_portable_export_can_leave_weights_as_they_are(
    portable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    entries: list[dict[str, str]] = []
    real = onnxruntime.SessionOptions.add_session_config_entry

    def note(self: object, name: str, value: str) -> None:
        entries.append({name: value})
        real(self, name, value)

    monkeypatch.setattr(onnxruntime.SessionOptions, "add_session_config_entry", note)
    assert command("run", portable, *ASKED, "--no-prepack").out == "3 plus 4 is 7.\n"
    assert {"session.disable_prepacking": "1"} in entries


@pytest.mark.parametrize(
    "name", ["foo", "SkipLayerNormFuson", "constantfolding", "\ud800", "LayerNormFusionOfNobody"]
)
def test_an_optimizer_that_there_is_not_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"^disabled_optimizers .*: no optimizer of ONNX Runtime, as \w+"):
        load(tiny(), provider="cpu", disabled_optimizers=("ConstantFolding", name))


def test_what_is_near_is_named_before_anything_is_exported(tmp_path: Path) -> None:
    asked = (
        "run",
        "tiny",
        *ASKED,
        "--cache-dir",
        tmp_path / "cache",
        "--disable-optimizer",
        "SkipLayerNormFuson",
    )
    assert "as SkipLayerNormFusion, " in command(*asked).error
    assert not (tmp_path / "cache").exists()


def test_known_optimizers_and_those_in_the_library_are_taken() -> None:
    """The last is none of the list."""
    verify_optimizers(KNOWN)
    assert "ClipQuantRewrite" not in KNOWN
    verify_optimizers(["ClipQuantRewrite"])
