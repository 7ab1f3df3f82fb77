"""M2, M3: what a download takes is said before it begins, and asked where somebody can answer."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qwen_onnx import export
from qwen_onnx.checkpoints.checkpoint import open_checkpoint
from qwen_onnx.checkpoints.config import QwenConfig, parse_config
from qwen_onnx.checkpoints.hub import DEFAULT_MODEL
from qwen_onnx.cli.terminal import question
from qwen_onnx.contract import EXPORT_DTYPES
from qwen_onnx.contract.manifest import is_weights
from qwen_onnx.exports.cached.options import ModelOptions
from qwen_onnx.exports.cached.size import export_size, gigabytes
from qwen_onnx.exports.options import ExportOptions
from qwen_onnx.options import Options, declared, default_of
from support.chats import endless_checkpoint
from support.checkpoints import CONFIGS, write_checkpoint
from support.command import child, command
from support.field_hub import environment, of_checkpoint, on_the_hub
from support.hub_server import Hub, serve
from support.patience import PATIENCE
from support.terminal import CONTROLLING, Terminal

pytestmark = pytest.mark.thorough

README = Path(__file__).parents[2] / "README.md"
BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.parametrize("dtype", EXPORT_DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_m2_the_size_on_disk_is_that_of_the_weights_file(name: str, dtype: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", CONFIGS[name])
    made = export(tmp_path / "model", tmp_path / "out", dtype=dtype)
    written = sum(spec.size for file, spec in made.manifest.files.items() if is_weights(file))
    config = open_checkpoint(tmp_path / "model").config
    header = written - export_size(config, dtype).disk
    assert 0 < header < 20_000
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    slots = min(4096, config.context_length) * 2 * layers * heads * config.head_dim * 4
    of_f32 = export_size(config, "f32" if dtype in ("f16", "bf16") else dtype).disk
    assert export_size(config, dtype).memory == of_f32 + slots


def test_m2_sizes_are_those_of_the_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
    import sizes

    rows = dict(re.findall(r"^\| (Qwen[\w.-]+) \| [\d.]+ B \| (.+) \|$", README.read_text(), re.MULTILINE))
    assert rows.keys() == sizes.MODELS.keys()
    for model, cells in rows.items():
        config: QwenConfig = sizes.config_of(model)
        for dtype, cell in zip(("f32", "f16", "int8", "int4"), cells.split(" | "), strict=True):
            told = [float(part) for part in cell.split(" / ")]
            computed = [size / 1e9 for size in export_size(config, dtype, "cuda")]
            assert computed == pytest.approx(told, rel=0.02), (model, dtype)


def test_m2_sizes_are_told_in_three_figures() -> None:
    told = [gigabytes(size) for size in (15_231_000_000, 4_300_000_000, 987_654_321, 1_234_567, 147e9)]
    assert told == ["15.2 GB", "4.3 GB", "988 MB", "1.23 MB", "147 GB"]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve(Hub({"org/small": of_checkpoint(endless_checkpoint())})) as served:
        yield served


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("QWEN_ONNX_CACHE", str(tmp_path / "cache"))


def test_m2_disk_and_memory_are_told_before_the_first_byte(hub: Hub, tmp_path: Path) -> None:
    """In a pipe nobody can answer: it is said, and goes on. What is here already is not told of again."""
    weights = hub.repos["org/small"]["model.safetensors"]
    config = parse_config({**CONFIGS["qwen2"], "vocab_size": 400, "max_position_embeddings": 4096})
    ran = on_the_hub(
        hub, tmp_path, "run", "org/small", "-p", "Hi", "--provider", "cpu", "--max-new-tokens", "2"
    )
    assert ran.code == 0, ran.err
    first, as_f32, as_int4, *_ = ran.err.splitlines()
    cache = tmp_path / "hf" / "hub"
    assert first == f"org/small: {gigabytes(len(weights))} to download, to {cache}"
    for line, dtype in ((as_f32, "f32"), (as_int4, "int4")):
        size = export_size(config, dtype)
        assert line.split()[:3] == ["exported", "as", dtype]
        assert gigabytes(size.disk) in line
        assert f"{gigabytes(size.memory)} of memory" in line
    again = on_the_hub(
        hub, tmp_path, "run", "org/small", "-p", "Hi", "--provider", "cpu", "--max-new-tokens", "2"
    )
    assert (again.out, again.err) == (ran.out, "")


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals there")
@pytest.mark.parametrize(
    ("typed", "goes_on"), [(b"n\n", False), (b"\n", True), (b"Y\n", True), (b"\x04", False)]
)
def test_m3_a_terminal_is_asked(typed: bytes, goes_on: bool, hub: Hub, tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    settings = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True}
    env = {**environment(hub, tmp_path), "TERM": "dumb"}
    with child("export", "org/small", "out", program=CONTROLLING, environment=env, **settings) as process:
        os.close(theirs)
        terminal = Terminal(ours)
        terminal.wait_for(b"to download")
        terminal.wait_for(b"download it? [Y/n] ")
        assert "model.safetensors" not in hub.fetched()
        terminal.type(typed)
        terminal.wait_for(b"try: qwen-onnx run out" if goes_on else b"error: org/small: not downloaded")
        assert process.wait(PATIENCE) == (0 if goes_on else 1)
    os.close(ours)
    assert ("model.safetensors" in hub.fetched()) == goes_on
    assert Path("out").exists() == goes_on


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals there")
def test_m3_yes_skips_the_question(hub: Hub, tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    settings = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True}
    env = {**environment(hub, tmp_path), "TERM": "dumb"}
    with child("info", "org/small", "--yes", program=CONTROLLING, environment=env, **settings) as process:
        os.close(theirs)
        terminal = Terminal(ours)
        terminal.wait_for(b"to download")
        terminal.wait_for(b"golden ids")
        assert not terminal.has_come(b"[Y/n]")
        process.communicate(timeout=PATIENCE)
    os.close(ours)


def test_m3_nobody_to_ask_is_a_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(question.sys, "stdin", None)
    assert question.confirmed("?")


@pytest.mark.parametrize("verb", ["export", "run"])
def test_m3_without_a_model_the_default_is_named_first(verb: str, tmp_path: Path) -> None:
    with serve(Hub({DEFAULT_MODEL: of_checkpoint(endless_checkpoint())})) as hub:
        more = ("-p", "Hi", "--provider", "cpu", "--max-new-tokens", "2") if verb == "run" else ()
        ran = on_the_hub(hub, tmp_path, verb, *more)
    assert ran.code == 0, ran.err
    assert ran.err.splitlines()[0] == f"no model named: {DEFAULT_MODEL}, the default"
    assert ran.err.splitlines()[1].startswith(f"{DEFAULT_MODEL}: ")
    assert DEFAULT_MODEL in " ".join(command(verb, "--help").out.split())


def test_m2_a_download_to_compare_with_makes_no_export(hub: Hub, tmp_path: Path) -> None:
    export(endless_checkpoint(), "made")
    ran = on_the_hub(hub, tmp_path, "check", "made", "--provider", "cpu", "--against", "org/small")
    assert ran.code == 0, ran.err
    assert "to download, to " in ran.err.splitlines()[0]
    assert "exported as" not in ran.err


@pytest.mark.parametrize("kind", [ModelOptions, ExportOptions])
def test_m3_help_names_the_defaults_of_what_is_made(kind: type[Options]) -> None:
    for name, option in declared(kind).items():
        default = default_of(kind, name)
        if option.panel and default not in (None, False):
            wanted = "default on" if default is True else f"{default} (default)"
            assert wanted in option.help, name
