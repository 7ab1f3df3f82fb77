"""What can be refused without a model's weights is refused before they are opened."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import pytest

from qwen_onnx import export
from qwen_onnx.contract.manifest import is_weights
from support.chats import copy_export, endless, write_chat_checkpoint
from support.command import command
from support.damage import forge

TEMPLATES = {"base": None, "bare": "{% for message in messages %}{{ message.content }}{% endfor %}"}
HI = ("-p", "Hi")


@functools.cache
def without_weights(kind: str) -> Path:
    """An export whose weights are gone: whatever opens them says so."""
    folder = Path(tempfile.mkdtemp(prefix="qwen-onnx-tests-"))
    if kind in TEMPLATES:
        write_chat_checkpoint(folder / "base", template=TEMPLATES[kind])
        export(folder / "base", folder / "made")
    source = folder / "made" if kind in TEMPLATES else endless()
    found = copy_export(source, folder / "out")
    if kind == "ids only":
        (found / "tokenizer.json").unlink()
        manifest = json.loads((found / "export.json").read_text())
        del manifest["files"]["tokenizer.json"]
        (found / "export.json").write_text(json.dumps(manifest))
        forge(found)
    for file in found.iterdir():
        if is_weights(file.name):
            file.unlink()
    return found


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tools.json").write_text('[{"name": "f"}]')
    Path("lines").write_text('{"prompt": "Hi"}\n')
    Path("number.json").write_text('{"type": "nope"}')
    Path("long").write_text("word " * 3000)
    Path("short").write_text("")


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("how", [HI, ("--batch", "lines"), ()])
@pytest.mark.parametrize(
    ("kind", "arguments", "said"),
    [
        ("chat", ("--think",), "no switch for thinking (--think)"),
        ("bare", ("--tools", "tools.json"), "shows no tools to the model (--tools)"),
        ("chat", ("--chat-template", "nope"), "chat template 'nope'"),
        ("chat", ("--logit-bias", "399=1"), "--logit-bias of 399: the id names no token"),
        ("chat", ("--max-context", "9999"), "--max-context 9999: this export holds 4096"),
        ("chat", ("--json-schema", "number.json"), "--json-schema cannot be used"),
        ("chat", ("--regex", "("), "--regex cannot be used"),
        ("chat", ("--speculate", "--temperature", "1"), "--speculate is greedy"),
        ("base", (), "no chat template; use --raw"),
        ("ids only", (), "no tokenizer; give ids with --prompt-ids"),
        ("ids only", ("--raw",), "no tokenizer; give ids with --prompt-ids"),
    ],
)
def test_options_that_the_model_has_no_use_for(
    kind: str, arguments: tuple[str, ...], said: str, how: tuple[str, ...]
) -> None:
    """Of one prompt, of a batch, and of a chat."""
    asked = ("run", without_weights(kind), "--provider", "cpu", *how, *arguments)
    assert said in command(*asked, terminal=True).error


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--prompt-ids", "5,400"), "token id 400 is outside the embedding's 400 rows"),
        (("--prompt-ids=-1",), "token id -1 is outside"),
        (("--raw", "-p", ""), "the prompt is empty"),
        (("-p", "word " * 9000), "the context holds 4,096 with the answer"),
        (("-p", "word", "--max-context", "34"), "the context holds 34 with the answer"),
        (("--prompt-ids", "5,6,7,8", "--max-context", "4"), "the prompt has 4 tokens, the context holds 4"),
        (("-p", "\udcff"), "-p: not UTF-8"),
        (("--batch", "lines", "--speculate"), "--speculate is for one prompt at a time"),
        (("--batch", "lines", "--greedy-on-device"), "--greedy-on-device is for one prompt at a time"),
    ],
)
def test_prompts_that_cannot_be_answered(arguments: tuple[str, ...], said: str) -> None:
    assert said in command("run", without_weights("chat"), "--provider", "cpu", *arguments).error


@pytest.mark.usefixtures("files")
def test_texts_that_have_no_score() -> None:
    assert "0 tokens found, 2 or more wanted" in command("score", without_weights("chat"), "short").error
    error = command("score", without_weights("ids only"), "long").error
    assert error.endswith("has no tokenizer.json: no text; Chat.score, in Python, takes ids")
    for asked in (("run", without_weights("chat"), *HI), ("score", without_weights("chat"), "long")):
        assert "weights.safetensors: missing" in command(*asked, "--provider", "cpu").error.replace(
            " is ", ": "
        )
