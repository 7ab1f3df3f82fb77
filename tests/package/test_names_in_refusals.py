"""A refusal calls an option what its reader calls it: a flag, a keyword, or a key of a batch's line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from qwen_onnx import ExportOptions, Request, SessionOptions, UserError, export, load
from qwen_onnx.cli import commands  # noqa: F401 - whose flags NAMES has then
from qwen_onnx.cli.flags import NAMES
from qwen_onnx.errors import naming, option
from qwen_onnx.options import declared
from support.chats import endless, tiny
from support.command import command

FLAG = re.compile(r"--[a-z]")
SCHEMA = {"type": "object", "bogus": 1}


def refusal(**options: Any) -> str:
    """In Python, of a model that is opened and asked so."""
    own = {name: options.pop(name) for name in [*options] if name in declared(SessionOptions)}
    with pytest.raises(UserError) as caught:
        next(load(endless(), **{"provider": "cpu", "threads": 1, **own}).generate([1, 2], **options))
    return str(caught.value)


@pytest.mark.parametrize(
    ("flags", "options", "said"),
    [
        (["--logit-bias", "5=200"], {"logit_bias": {5: 200.0}}, "{logit_bias} 200.0 of 5: "),
        (["--logit-bias=-5=1"], {"logit_bias": {-5: 1}}, "{logit_bias} of -5: a token id wanted"),
        (["--logit-bias", "9999=1"], {"logit_bias": {9999: 1}}, "{logit_bias} of 9999: the id names no token"),
        (["--regex", "("], {"regex": "("}, "{regex} cannot be used: unclosed group"),
        (["--regex", "a" * 5000], {"regex": "a" * 5000}, "{regex} of 5,000 characters"),
        (["--regex", "a", "--json-schema", "ok"], {"regex": "a", "json_schema": {}}, "{json_schema} and {regex} are"),
        (["--json-schema", "bogus"], {"json_schema": SCHEMA}, "{json_schema}FILE: no draft knows the keyword"),
        (["--json-schema", "broken"], {"json_schema": "{"}, "{json_schema}FILE is not JSON"),
        (["--json-schema", "nope"], {"json_schema": {"type": "nope"}}, "{json_schema} cannot be used: Invalid type"),
        (["--speculate", "--temperature", "1"], {"speculate": True, "temperature": 1.0}, "{speculate} is greedy"),
        (["--speculate", "--regex", "a"], {"speculate": True, "regex": "a"}, "{json_schema} or {regex}; "),
        (
            ["--speculate", "--greedy-on-device"], {"speculate": True, "greedy_on_device": True},
            "{greedy_on_device} takes one token a step, {speculate} several",
        ),
        (["--max-context", "9999"], {"max_context": 9999}, "{max_context,9999}: this export holds"),
        (["--max-context", "0"], {"max_context": 0}, "{max_context} 0: a whole number of 1 or more wanted"),
        (["--temperature=-1"], {"temperature": -1.0}, "{temperature} -1.0: a number of 0 or more wanted"),
        (["--top-k=-1"], {"top_k": -1}, "{top_k} -1: "),
    ],
)  # fmt: skip
def test_a_command_names_flags_and_python_keywords(
    flags: list[str], options: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = {"ok": "{}", "bogus": json.dumps(SCHEMA), "broken": "{", "nope": '{"type": "nope"}'}
    for name, text in texts.items():
        Path(name).write_text(text)
    file = f" {flags[-1]}" if "FILE" in said else ""

    def spelled(found: re.Match[str]) -> str:
        return option(*found[1].split(","))

    in_python = re.sub(r"\{([\w,]+)\}", spelled, said.replace("FILE", ""))
    assert in_python.replace("='9999'", "=9999") in refusal(**options)
    assert not FLAG.search(refusal(**options))
    with naming(NAMES):
        by_flags = re.sub(r"\{([\w,]+)\}", spelled, said.replace("FILE", file))
    assert by_flags in command("run", endless(), "--prompt-ids", "1,2", "--provider", "cpu", *flags).error


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("regex", "(", "regex cannot be used"),
        ("json_schema", SCHEMA, "json_schema: no draft knows"),
        ("top_k", -1, "top_k -1: "),
        ("enable_thinking", False, "no switch for thinking (enable_thinking=False)"),
    ],
)
def test_a_line_of_a_batch_is_refused_by_its_keys(key: str, value: object, said: str, tmp_path: Path) -> None:
    (tmp_path / "in").write_text(json.dumps({"prompt": "Hi", key: value}))
    ran = command("run", tiny(), "--batch", tmp_path / "in", "--provider", "cpu")
    error = json.loads(ran.out)["error"]
    assert said in error
    assert not FLAG.search(error)


def test_a_chat_is_refused_by_its_settings() -> None:
    """`/set` has names of its own; what it does not set has its flag still."""
    script = "/set top_k -1\n/set think on\n"
    ran = command("run", tiny(), "--provider", "cpu", stdin=script, terminal=True)
    assert "error: top_k -1: " in ran.err
    assert "no switch for thinking (think)" in ran.err


@pytest.mark.parametrize(
    ("options", "flags", "in_python", "by_flag"),
    [
        (
            {"weights_order": "panels", "dtype": "f16"}, "--weights-order panels --dtype f16",
            "weights_order='panels' is for f32", "--weights-order panels is for f32",
        ),
        (
            {"weights_order": "panels", "link": True}, "--weights-order panels --link",
            "link: weights_order='panels' writes", "--link: --weights-order panels writes",
        ),
        ({"block_size": 32}, "--block-size 32", "block_size is for int8", "--block-size is for int8"),
        ({"split": True}, "--split", "split is for target='portable'", "--split is for --target portable"),
        (
            {"layout": "optimum", "target": "onnxruntime"}, "--layout optimum --target onnxruntime",
            "layout='optimum' is made of target='portable'",
            "--layout optimum is made of --target portable",
        ),
        (
            {"target": "portable", "dtype": "bf16"}, "--target portable --dtype bf16",
            "target='portable' is for f32 and f16", "--target portable is for f32 and f16",
        ),
        (
            {"revision": "main"}, "--revision main",
            "revision='main' is for models on the Hub", "--revision main is for models on the Hub",
        ),
        ({"max_context": 10**6}, "--max-context 1000000", "max_context=1000000: 1 to", "--max-context 1000000: 1 to"),
        ({}, "", "force=True to replace it", "--force to replace it"),
    ],
)  # fmt: skip
def test_exports_are_refused_likewise(
    options: dict[str, Any], flags: str, in_python: str, by_flag: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    if not options:
        export("tiny", out)
    with pytest.raises(UserError) as caught:
        export("tiny", out, **options)
    assert in_python in str(caught.value)
    assert not FLAG.search(str(caught.value))
    assert by_flag in command("export", "tiny", out, *flags.split()).error


def test_each_option_with_a_flag_is_known_by_it() -> None:
    for kind in (Request, SessionOptions, ExportOptions):
        for name, known in declared(kind).items():
            assert (name in NAMES) == (known.panel is not None), name
    with naming({"check": "--check/--no-check", "stop": "--stop", "prompt": "--prompt -p"}):
        assert [option("check"), option("check", False), option("check", True)] == [
            "--check",
            "--no-check",
            "--check",
        ]
        assert [option("stop", "x"), option("prompt"), option("other", 5)] == [
            "--stop x",
            "--prompt",
            "other=5",
        ]
        with naming({"check": None}):
            assert option("check", False) == "check=False"
    assert option("stop") == "stop"
