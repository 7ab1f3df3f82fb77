"""O3: nothing that a checkpoint, an export or a model says is a command to the terminal."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import qwen_onnx
from qwen_onnx.cli.terminal import output
from qwen_onnx.contract.manifest import MANIFEST_FILE
from support.chats import tiny, write_chat_checkpoint
from support.command import child, command
from support.patience import PATIENCE
from support.repl import CTRL_D, ScriptedChat, talk
from support.terminal import Terminal

PACKAGE = Path(qwen_onnx.__file__).parent
TITLE = "\x1b]0;owned\x07"
"""Sets the title of a terminal's window."""
OWN_PROCESS = "doctor/probe.py"
"""Its stdout is read by `doctor`, and reaches nobody."""
WAYS = {"cli/terminal/output.py", "cli/terminal/encoding.py", OWN_PROCESS}
TO_STREAMS = {
    "sys.stdout", "sys.stderr", "sys.__stdout__", "sys.__stderr__", "os.write", "typer.echo", "typer.secho",
    "typer.confirm", "typer.prompt", "warnings.warn",
}  # fmt: skip
LOOKED_AT = {"isatty", "fileno", "flush", "reconfigure"}
DRAWS = {"cli/terminal/bar.py": "stderr=True", "cli/chat/line_reader.py": "stdout=sys.stderr"}
"""Libraries that draw: the bar's words are ours, and prompt_toolkit shows `^[` for what is typed or completed."""


def ways_round(source: str) -> Iterator[str]:
    """What reaches stdout or stderr without the one function."""
    tree = ast.parse(source)
    looked_at = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in LOOKED_AT
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "print":
            yield "print"
        elif isinstance(node, ast.Attribute) and id(node) not in looked_at:
            text = ast.unparse(node)
            if text in TO_STREAMS:
                yield text
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("rich", "click"):
            yield from (
                f"{node.module}.{alias.name}" for alias in node.names if alias.name in ("Console", "print")
            )
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "input" and node.args:
            yield "input with a prompt"


def test_o3_no_print_goes_round_the_one_function() -> None:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if ways := sorted(set(ways_round(path.read_text(encoding="utf-8")))):
            found[name] = ways
    assert found.keys() == WAYS | DRAWS.keys(), found
    for name, allowed in DRAWS.items():
        source = (PACKAGE / name).read_text(encoding="utf-8")
        assert len([*ways_round(source)]) == source.count(allowed) == 1, name


@pytest.mark.parametrize(
    "line",
    [
        "print(1)", "sys.stderr.write(1)", "out = sys.stdout", "typer.echo(1)", "from rich import print",
        "from rich.console import Console", "os.write(1, b'')", "input('> ')",
    ],
)  # fmt: skip
def test_o3_each_way_round_is_found(line: str) -> None:
    assert [*ways_round(f"import os, sys, typer\n{line}")]
    assert not [*ways_round("import sys\nsys.stdout.isatty()\ninput()")]


@pytest.mark.parametrize("way", [output.tell, output.show, output.think, output.quote])
def test_o3_no_character_is_a_command(way: object, capsys: pytest.CaptureFixture[str]) -> None:
    every = "".join(map(chr, [*range(0xA0), 0x202E, 0x2066]))
    assert callable(way)
    way(f"a{every}b")
    way("a\nOK: the export is what it should be")
    told = "".join(capsys.readouterr())
    assert all(c.isprintable() or c in "\n\t" for c in told)
    if way in (output.tell, output.show):
        assert len(told.splitlines()) == 2, "one line became several"


@pytest.mark.skipif(sys.platform == "win32", reason="no such file names there")
def test_o3_names_and_keys_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder's name, odd files and keys of its files come up in what each command says."""
    monkeypatch.chdir(tmp_path)
    folder = write_chat_checkpoint(tmp_path / f"model{TITLE}")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, f"key{TITLE}": 1}))
    (folder / "generation_config.json").write_text(json.dumps({f"key{TITLE}": 1, "num_beams": 4}))
    (folder / f"model{TITLE}.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    made = command("export", folder)
    [export] = tmp_path.glob("model*-f32")
    cache = ("--cache-dir", tmp_path / "cache")
    short = ("--provider", "cpu", "--max-new-tokens", 2)
    ran = [
        made,
        command("info", export, "--graphs"),
        command("check", export, "--provider", "cpu", "--against", folder),
        command("run", export, "-p", "Hi", *short, "-v", "--stats"),
        command("run", folder, "-p", "Hi", *short, *cache),
        command("run", export, *short, stdin="Hi\n/params\n/stats\n", terminal=True),
        command("score", export, "-", "--tokens", stdin="Hi"),
        command("cache", "ls", *cache),
    ]
    for each in ran:
        assert each.code == 0, each.err
        assert "\x1b" not in each.out + each.err
        assert "\x07" not in each.out + each.err
    assert "\\x1b]0;owned\\x07" in made.out
    assert "\\x1b]0;owned\\x07" in made.err


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest | {"model_id": TITLE},
        lambda manifest: manifest | {"packages": {TITLE: TITLE}},
        lambda manifest: manifest | {"dtype": TITLE},
        lambda manifest: manifest | {"files": {**manifest["files"], TITLE: {"size": 1, "sha256": "0" * 64}}},
        lambda manifest: manifest | {TITLE: 1},
    ],
)
def test_o3_strings_of_a_manifest(change: object, tmp_path: Path) -> None:
    from support.chats import copy_export

    folder = copy_export(tiny(), tmp_path / "export")
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    assert callable(change)
    (folder / MANIFEST_FILE).write_text(json.dumps(change(manifest)))
    for ran in (
        command("info", folder, "--graphs"),
        command("check", folder, "--provider", "cpu"),
        command("run", folder, "--max-new-tokens", 2, stdin="Hi\n/stats\n", terminal=True),
    ):
        assert "\x1b" not in ran.out + ran.err


def test_o3_the_name_of_a_function_that_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    call = json.dumps({"name": f"f{TITLE}\nx", "arguments": {}})
    talk(ScriptedChat(f"<tool_call>\n{call}\n</tool_call>"), "Hi", CTRL_D, tools=tools)
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert "(calls f\\x1b]0;owned\\x07 x; give its result with /tool)" in err


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals there")
def test_o3_an_answer_on_a_terminal_and_in_a_pipe() -> None:
    """A terminal gets no command; a pipe gets every character."""
    said = f"a{TITLE}\x9b2Jb\tc"
    program = f"from qwen_onnx.cli.terminal.output import answer\nanswer({said!r})\nraise SystemExit"
    with child(program=program, environment={"PYTHONUTF8": "1"}) as process:
        out, _ = process.communicate(timeout=PATIENCE)
        assert out.decode() == f"{said}\n"
    ours, theirs = os.openpty()
    with child(program=program, stdout=theirs, stderr=subprocess.DEVNULL) as process:
        os.close(theirs)
        terminal = Terminal(ours)
        terminal.wait_for(b"a\\x1b]0;owned\\x07\\x9b2Jb")
        assert process.wait(PATIENCE) == 0
    os.close(ours)


def test_o3_a_crash_of_ours_shows_what_a_file_says_harmlessly() -> None:
    program = (
        f"import qwen_onnx.cli.main as module\ndef fail(): raise ValueError({TITLE!r})\nmodule._run = fail"
    )
    with child(program=program) as process:
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert b"Traceback" in err
    assert b"\x1b" not in err
