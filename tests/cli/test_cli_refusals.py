"""What a user gets wrong is one line on stderr that names it: exit code 1, nothing on stdout, no traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from qwen_onnx.exports.cached.folder import list_exports
from qwen_onnx.runners.runtime import providers
from support.chats import copy_export, endless, write_chat_checkpoint
from support.command import command

HI = ("-p", "Hi", "--provider", "cpu")


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        (("--prompt-ids", "1,x"), ["--prompt-ids '1,x'", "1,2,3"]),
        (("--prompt-ids", ""), ["--prompt-ids ''", "1,2,3"]),
        (("--prompt-ids", "1,,2"), ["1,2,3"]),
        (("--prompt-ids", "1.5"), ["1,2,3"]),
        (("--prompt-ids", "5,400"), ["400", "400 rows"]),
        (("--prompt-ids=-1",), ["-1", "400 rows"]),
        (("--prompt-ids", "5", "-p", "Hi"), ["-p", "--prompt-ids"]),
        (("--raw", "-p", ""), ["empty"]),
        (("--raw", "-p", "Hi", "--system", "x"), ["--system", "--raw"]),
        (("--prompt-ids", "5", "--system", "x"), ["--system", "--prompt-ids"]),
        (("-p", "\udcff"), ["-p: not UTF-8 (byte 0)"]),
        (("-p", "Hi", "--system", "a\udcff"), ["--system: not UTF-8 (byte 1)"]),
        (("-p", "a\ud800"), ["-p: not UTF-8"]),
        (("-p", "Hi", "--max-context", "0"), ["--max-context 0: a whole number of 1 or more wanted"]),
        (("-p", "Hi", "--max-context", "5000"), ["--max-context 5000", "4096"]),
        (("-p", "Hi", "--provider", "metal"), ["provider 'metal': one of auto, cpu, cuda, tensorrt wanted"]),
        (("-p", "Hi", "--dtype", "f16"), ["holds f32", "--dtype f16"]),
        (("-p", "Hi", "--dtype", "int2"), ["'int2'", "f32, f16, bf16, int8, int4"]),
        (("-p", "Hi", "--threads", "9999999999999"), ["threads", "1 to 1024"]),
        (("-p", "Hi", "--revision", "main"), ["--revision main"]),
    ],
)
def test_wrong_options(arguments: tuple[str, ...], mentions: list[str]) -> None:
    """One line names what is wrong, and what is wanted."""
    line = command("run", endless(), *arguments).error
    for wanted in mentions:
        assert wanted in line


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("--max-new-tokens=-1", "--max-new-tokens -1: a whole number of 0 or more wanted"),
        ("--threads=0", "--threads 0: a whole number from 1 to 1024 wanted"),
        ("--top-logits=-1", "--top-logits -1: a whole number of 0 or more wanted"),
        ("--gpu-mem-limit=-1", "--gpu-mem-limit -1: a whole number from 1 to 8796093022207 wanted"),
        ("--disable-optimizer=", "--disable-optimizer '': a string or a list of them, none empty, wanted"),
    ],
)
def test_numbers_out_of_range_are_refused_with_the_range(option: str, line: str) -> None:
    assert command("run", endless(), "-p", "Hi", option).error == f"error: {line}"


@pytest.mark.parametrize("option", ["--nonsense", "--threads=x"])
def test_what_is_no_option_and_what_is_no_number_are_usage_errors(option: str) -> None:
    ran = command("run", endless(), "-p", "Hi", option)
    assert (ran.code, ran.out) == (2, "")
    [line] = ran.err.splitlines()
    assert line.startswith("error: ")
    assert option.partition("=")[0] in line
    assert line.endswith("; see qwen-onnx run --help")


@pytest.mark.parametrize(("context", "fits"), [(34, False), (35, False), (36, True)])
def test_a_prompt_longer_than_the_context_names_both_numbers(context: int, fits: bool) -> None:
    """The prompt of 35 tokens needs one position more than its own, else nothing could follow it."""
    ran = command("run", endless(), *HI, "--max-context", context, "--max-new-tokens", 1)
    assert (ran.code == 0) == fits
    if not fits:
        assert "35 tokens" in ran.error
        assert f"holds {context}" in ran.error


def test_bytes_that_are_no_text() -> None:
    assert "stdin: not utf-8 (byte 0)" in command("run", endless(), stdin=b"\xff\xfe").error


def test_json_wants_one_prompt() -> None:
    assert "-p, --prompt-ids or a pipe" in command("run", endless(), "--json", terminal=True).error


@pytest.mark.parametrize("arguments", [("run", "/nope", *HI), ("export", "/nope")])
def test_a_path_that_is_not_there(arguments: tuple[str, ...]) -> None:
    """A path is never asked for on the Hub."""
    assert command(*arguments).error == "error: /nope: no such folder"


@pytest.mark.parametrize("name", ["info", "check"])
def test_a_folder_that_is_no_export(name: str, tmp_path: Path) -> None:
    assert "/nope: no such folder" in command(name, "/nope").error
    assert "export.json is missing" in command(name, tmp_path).error


def test_a_model_without_a_chat_template_names_raw(tmp_path: Path) -> None:
    write_chat_checkpoint(tmp_path / "base", template=None)
    ran = command("export", tmp_path / "base", tmp_path / "out")
    assert "no chat template; use `run --raw`" in ran.err
    for settings in ({"stdin": "Hi"}, {"terminal": True}):
        assert "no chat template; use --raw" in command("run", tmp_path / "out", **settings).error
    assert "no chat template; use --raw" in command("run", tmp_path / "out", *HI).error
    ran = command("run", tmp_path / "out", *HI, "--raw", "--max-new-tokens", 2)
    assert (ran.code, ran.err) == (0, "")


@pytest.mark.parametrize(
    ("damage", "mentions"),
    [
        (lambda folder: (folder / "weights.safetensors").unlink(), ["weights.safetensors", "missing"]),
        (lambda folder: (folder / "prefill.onnx").unlink(), ["prefill.onnx", "missing"]),
        (
            lambda folder: (folder / "weights.safetensors").write_bytes(bytes(10)),
            ["weights.safetensors", "10 bytes found", "wanted"],
        ),
        (lambda folder: (folder / "export.json").write_text("{"), ["export.json", "not valid JSON"]),
        (lambda folder: (folder / "export.json").write_text("{}"), ["export.json", "format_version None"]),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), ["tokenizer.json", "2 bytes found"]),
    ],
)
def test_a_damaged_export_names_the_file(
    damage: Callable[[Path], Any], mentions: list[str], tmp_path: Path
) -> None:
    folder = copy_export(endless(), tmp_path / "copy")
    damage(folder)
    line = command("run", folder, *HI).error
    for wanted in mentions:
        assert wanted in line


@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_a_provider_that_cannot_start_names_what_is_missing(provider: str, tmp_path: Path) -> None:
    """Nothing falls back to the CPU, and no model is exported before the provider is refused."""
    fault = "libx.so.1: cannot open shared object file"
    with mock.patch.object(providers, "missing_library", return_value=fault):
        for model in (endless(), "tiny"):
            line = command("run", model, "-p", "Hi", "--provider", provider, "--cache-dir", tmp_path).error
            assert f"provider {provider} cannot start: {fault}" in line
        assert command("check", endless(), "--provider", provider).code == 1
    assert list_exports(tmp_path) == []


@pytest.mark.skipif(providers.missing_library("cuda") is None, reason="CUDA starts here")
@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_without_a_gpu_the_real_answer_is_one_line(provider: str) -> None:
    assert (
        f"provider {provider} cannot start: "
        in command("run", endless(), "-p", "x", "--provider", provider).error
    )


def test_tensorrt_without_a_gpu_or_a_graph(tmp_path: Path) -> None:
    """Where its libraries load, a GPU that is missing, or a graph that is, is still refused at once."""
    bare = copy_export(endless(), tmp_path / "bare")
    manifest = json.loads((bare / "export.json").read_text())
    manifest["graphs"] = [graph for graph in manifest["graphs"] if "tensorrt" not in graph["providers"]]
    (bare / "export.json").write_text(json.dumps(manifest))
    with mock.patch.object(providers, "missing_library", return_value=None):
        for folder, words in (
            (endless(), "the driver shows no GPU"),
            (bare, "has no prefill graph for tensorrt"),
        ):
            assert words in command("run", folder, "-p", "Hi", "--provider", "tensorrt").error


def test_an_unknown_dtype_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    line = command("run", "tiny", *HI, "--dtype", "int2", "--cache-dir", tmp_path / "cache").error
    assert "'int2': one of f32, f16, bf16, int8, int4 wanted" in line
    assert (
        "f32, f16, bf16, int8, int4" in command("export", "tiny", tmp_path / "out", "--dtype", "int2").error
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("model", ["~no-such-user-here", "x" * 300, "a\0b"])
@pytest.mark.parametrize("verb", ["run", "export"])
def test_names_that_no_folder_can_have(verb: str, model: str) -> None:
    """They are refused in one line, which does not blame stdout."""
    line = command(verb, model).error
    assert "stdout" not in line
    assert "traceback" not in line.lower()
