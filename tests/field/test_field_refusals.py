"""M7: errors come before work, in one line, with an exit code by one rule; Ctrl-C shows no traceback."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qwen_onnx import export
from qwen_onnx.cli.main import FAILED, INTERRUPTED, USAGE
from support.chats import copy_export, endless, endless_checkpoint, tiny
from support.command import child, command
from support.patience import PATIENCE

pytestmark = pytest.mark.thorough

SECONDS = 0.5
"""Of CPU that a refusal may take, beyond what the command's own imports do."""
START = "import qwen_onnx.cli.run, qwen_onnx.cli.open_model, qwen_onnx.cli.score\n"
HI = ("-p", "Hi", "--provider", "cpu")
REFUSED = {
    "bound": ("run", "EXPORT", *HI, "--temperature=-1"),
    "conflict": ("run", "EXPORT", *HI, "--prompt-ids", "1"),
    "greedy": ("run", "EXPORT", *HI, "--greedy", "--top-k", "5"),
    "regex": ("run", "EXPORT", *HI, "--regex", "("),
    "schema": ("run", "EXPORT", *HI, "--json-schema", "/nope"),
    "tools": ("run", "EXPORT", *HI, "--tools", "/nope"),
    "batch": ("run", "EXPORT", "--batch", "/nope"),
    "model": ("run", "/nope", *HI),
    "context": ("run", "EXPORT", *HI, "--max-context", "99999"),
    "damaged": ("run", "DAMAGED", *HI),
    "thinking": ("run", "DAMAGED", *HI, "--think"),
    "no tools": ("run", "DAMAGED", *HI, "--tools", "TOOLS"),
    "no such template": ("run", "DAMAGED", *HI, "--chat-template", "nope"),
    "no template": ("run", "BARE", *HI),
    "no tokenizer": ("run", "IDS ONLY", *HI),
    "no text to score": ("score", "IDS ONLY", "TOOLS"),
    "long prompt": ("run", "DAMAGED", "-p", "long " * 4000, "--provider", "cpu"),
    "long for this context": ("run", "DAMAGED", *HI, "--max-context", "5"),
    "id": ("run", "DAMAGED", "--prompt-ids", "1,99999", "--provider", "cpu"),
    "info": ("info", "/nope"),
    "against": ("check", "EXPORT", "--against", "/nope"),
    "against export": ("check", "EXPORT", "--against", "EXPORT"),
    "runtime": ("check", "EXPORT", "--runtime", "x"),
    "bench": ("bench", "EXPORT", "--new-tokens", "0"),
    "score": ("score", "EXPORT", "/nope"),
    "checkpoint": ("export", "/nope"),
    "llama": ("export", "LLAMA"),
    "cut": ("export", "CUT"),
    "folder": ("export", "tiny", "PHOTOS"),
    "split": ("export", "tiny", "out", "--split"),
    "dtype": ("export", "tiny", "out", "--target", "portable", "--dtype", "int4"),
    "panels": ("export", "tiny", "out", "--weights-order", "panels", "--target", "portable"),
    "positions": ("export", "tiny", "out", "--max-context", "99999"),
    "block size": ("export", "tiny", "out", "--block-size", "32"),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("refusals")
    (root / "photos").mkdir()
    (root / "photos" / "a.jpg").touch()
    damaged = copy_export(tiny(), root / "damaged")
    (damaged / "weights.safetensors").write_bytes(bytes(10))
    model = copy_export(endless_checkpoint(), root / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": ""}))
    bare = export(model, root / "bare", check=False).folder
    (model / "tokenizer.json").unlink()
    ids_only = export(model, root / "ids only", check=False).folder
    for folder in (bare, ids_only):
        (folder / "weights.safetensors").write_bytes(bytes(10))
    (root / "tools.json").write_text('[{"type": "function", "function": {"name": "f"}}]')
    llama, cut = (copy_export(endless_checkpoint(), root / name) for name in ("llama", "cut"))
    (llama / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    weights = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    found = {"EXPORT": tiny(), "DAMAGED": damaged, "LLAMA": llama, "CUT": cut, "PHOTOS": root / "photos"}
    found |= {"BARE": bare, "IDS ONLY": ids_only, "TOOLS": root / "tools.json"}
    return {name: str(path) for name, path in found.items()}


WORDS = {
    "thinking": "has no switch for thinking", "no tools": "shows no tools", "no such template": "'nope'",
    "no template": "no chat template", "no tokenizer": "no tokenizer; give ids", "no text to score": "no text",
    "long prompt": "the context holds 2,048", "long for this context": "the context holds 5", "id": "99999",
}  # fmt: skip
"""What is found before the weights, which are damaged, are looked at."""


def cpu_of(process: subprocess.Popen[bytes]) -> float:
    """CPU seconds of a process that ends."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime


@functools.cache
def start() -> float:
    spent = []
    for _ in range(2):
        with child(program=START + "raise SystemExit", stdout=subprocess.DEVNULL) as process:
            spent.append(cpu_of(process))
    return max(spent)


@pytest.mark.skipif(sys.platform == "win32", reason="CPU time is counted otherwise there")
@pytest.mark.parametrize("case", REFUSED)
def test_m7_a_refusal_comes_before_work(case: str, places: dict[str, str], tmp_path: Path) -> None:
    """No library that makes graphs is imported for it, and it takes little more than to start."""
    arguments = [places.get(word, word) for word in REFUSED[case]]
    program = (
        "import atexit, sys\n"
        "heavy = {'onnxscript', 'onnx', 'onnx_ir'}\n"
        "atexit.register(lambda: print('imported', *sorted(heavy & sys.modules.keys()), file=sys.stderr))\n"
    )
    with child(*arguments, program=program, cwd=tmp_path) as process:
        spent = cpu_of(process)
        assert process.stderr is not None
        line, imported = process.stderr.read().decode().splitlines()
    assert process.returncode == FAILED
    assert line.startswith("error: ")
    assert WORDS.get(case, "") in line
    assert imported == "imported"
    assert spent < start() + SECONDS
    assert list(tmp_path.iterdir()) == []


def test_m7_what_to_compare_with_is_looked_for_before_anything_is_hashed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from qwen_onnx import UserError
    from qwen_onnx.checks import check

    monkeypatch.setattr(check, "hash_file", pytest.fail)
    with pytest.raises(UserError, match="/nope: no such folder"):
        list(check.check_export(tiny(), against="/nope"))


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("run", "EXPORT", "--nonsense"), USAGE),
        (("run", "EXPORT", "--threads=x"), USAGE),
        (("run", "a", "b"), USAGE),
        (("nonsense",), USAGE),
        (("info",), USAGE),
        (("run", "EXPORT", "--threads=0", *HI), FAILED),
        (("cache", "rm"), FAILED),
        (("info", "/nope"), FAILED),
        (("info", "EXPORT"), 0),
    ],
)
def test_m7_exit_codes_follow_one_rule(arguments: tuple[str, ...], code: int) -> None:
    """2: the command line cannot be read; 1: what it says cannot be done. Either in one line."""
    ran = command(*(str(tiny()) if word == "EXPORT" else word for word in arguments))
    assert ran.code == code
    if code:
        [line] = ran.err.splitlines()
        assert line.startswith("error: ")
        assert line.endswith("--help") == (code == USAGE)


AT_IMPORT = """
import sys, signal
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals are another thing there")
@pytest.mark.parametrize(
    "module",
    [
        "qwen_onnx.cli.terminal.output", "typer", "rich.console", "qwen_onnx.cli.commands", "qwen_onnx.cli.run",
        "numpy", "onnxruntime", "tokenizers", "jinja2", "qwen_onnx.runners.chat",
    ],
)  # fmt: skip
def test_m7_ctrl_c_during_imports_is_no_traceback(module: str) -> None:
    with child(
        "run", endless(), *HI, "--max-new-tokens", 2, program=AT_IMPORT.format(name=module)
    ) as process:
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (INTERRUPTED, b"", b""), module


@pytest.mark.skipif(sys.platform == "win32", reason="signals are another thing there")
@pytest.mark.parametrize(
    "module", ["qwen_onnx.exports.exporter", "onnx", "onnxscript", "onnx_ir", "ml_dtypes"]
)
def test_m7_ctrl_c_while_the_exporter_is_imported_leaves_nothing(module: str, tmp_path: Path) -> None:
    with child("export", "tiny", program=AT_IMPORT.format(name=module), cwd=tmp_path) as process:
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (INTERRUPTED, b"", b""), module
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="signals are another thing there")
def test_m7_main_imports_nothing_before_it_can_catch_ctrl_c() -> None:
    code = (
        "import sys; before = set(sys.modules); import qwen_onnx.cli.main; print(*set(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name for name in done.stdout.split() if not name.startswith("_")}
    assert {name for name in loaded if name.startswith("qwen_onnx")} == {
        "qwen_onnx", "qwen_onnx.errors", "qwen_onnx.cli", "qwen_onnx.cli.main",
    }  # fmt: skip
    assert not loaded & {"typer", "rich", "numpy", "json", "pathlib"}


def test_m7_ctrl_c_that_python_would_drop_comes_again() -> None:
    program = """
import signal
class Dropping:
    def __del__(self): signal.raise_signal(signal.SIGINT)
import qwen_onnx.cli.main as module
def run():
    Dropping()
    while True: pass
module._run = run
"""
    with child(program=program) as process:
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (INTERRUPTED, b"", b"")
    assert signal.getsignal(signal.SIGINT) is not None
