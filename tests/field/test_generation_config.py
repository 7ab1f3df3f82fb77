"""L1: whatever generation_config.json says, the export runs; what is not followed is said as it is made."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

import qwen_onnx
from qwen_onnx.options import made
from qwen_onnx.runners.sampling.generation_config import read_generation_config
from qwen_onnx.runners.sampling.params import merged
from qwen_onnx.runners.sampling.request import Request
from support.command import command

pytestmark = pytest.mark.thorough

TINY = Path(qwen_onnx.__file__).parent / "tiny"
CAPITAL = ("-p", "What is the capital of France?", "--provider", "cpu")


def tiny(folder: Path, generation: dict[str, Any] | None, config: dict[str, Any] | None = None) -> Path:
    """A copy of the bundled model whose files say this too; None: it has no generation_config.json."""
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.md", "golden.json", "__*"))
    path = folder / "generation_config.json"
    if generation is None:
        path.unlink()
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | generation))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (config or {})))
    return folder


def in_force(folder: Path) -> Request:
    return made(Request, merged(read_generation_config(folder).given, {}))


FOLLOWED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"do_sample": True, "top_k": -1}, {"do_sample": True, "top_k": 0}),
    ({"do_sample": True, "top_k": 20.0}, {"do_sample": True, "top_k": 20}),
    ({"do_sample": True, "top_k": 1e300}, {"do_sample": True, "top_k": int(1e300)}),
    ({"do_sample": True, "top_p": 1.5}, {"do_sample": True, "top_p": 1.0}),
    ({"do_sample": True, "top_p": 1}, {"do_sample": True, "top_p": 1}),
    ({"do_sample": True, "temperature": 0}, {"do_sample": False}),
    ({"do_sample": True, "temperature": 0.0, "top_k": 1}, {"do_sample": False, "top_k": 1}),
    ({"max_new_tokens": 32.0, "min_new_tokens": 1.0}, {"max_new_tokens": 32, "min_new_tokens": 1}),
    ({"stop_strings": "END"}, {"stop": ("END",)}),
    ({"repetition_penalty": 1}, {}),
]


@pytest.mark.parametrize(("file", "wanted"), FOLLOWED, ids=str)
def test_l1_values_are_read_as_transformers_and_vllm_do(
    file: dict[str, Any], wanted: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(file))
    assert in_force(tmp_path) == Request(**wanted)
    assert read_generation_config(tmp_path).ignored == ()


MEANS_NOTHING: list[dict[str, Any]] = [
    {"top_k": -5},
    {"top_k": 2.5},
    {"top_k": True},
    {"top_p": "0.8"},
    {"top_p": -0.1},
    {"min_p": 3},
    {"temperature": "hot"},
    {"temperature": -1},
    {"temperature": math.nan},
    {"temperature": math.inf},
    {"repetition_penalty": 0},
    {"repetition_penalty": [1.1]},
    {"do_sample": "true"},
    {"max_new_tokens": 0},
    {"max_new_tokens": -1},
    {"min_new_tokens": -1},
    {"stop_strings": [""]},
    {"stop_strings": 3},
    {"presence_penalty": 7},
    {"num_beams": 4},
    {"bad_words_ids": [[5]]},
    {"a_new_one\x1b[31m": [1]},
]


@pytest.mark.parametrize("file", MEANS_NOTHING, ids=str)
def test_l1_what_cannot_be_followed_is_named_and_left_out(file: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(file))
    (name,) = file
    (line,) = read_generation_config(tmp_path).ignored
    assert line.startswith(name.replace("\x1b", "\\x1b") + " ")
    assert line.isprintable()
    assert in_force(tmp_path) == Request()


def test_l1_each_value_is_named_at_export_and_none_stops_a_command(tmp_path: Path) -> None:
    """All of them together: the export says so in one line, and answers as the bundled model does."""
    file = {key: value for values in MEANS_NOTHING for key, value in values.items()}
    ran = command("export", tiny(tmp_path / "m", file), tmp_path / "out")
    assert ran.code == 0
    (note,) = [line for line in ran.err.split("\n") if "not followed" in line]
    assert "top_k True (a whole number of 0 or more wanted)" in note
    assert "13 in all" in note
    assert note.isprintable()
    assert command("run", tmp_path / "out", *CAPITAL).out == "The capital of France is Paris.\n"
    assert command("run", tmp_path / "out", *CAPITAL, "--greedy").out == "The capital of France is Paris.\n"
    assert command("check", tmp_path / "out", "--provider", "cpu").code == 0


@pytest.mark.parametrize("file", [values for values, _ in FOLLOWED[:6]], ids=str)
def test_l1_an_export_runs_whatever_the_file_says(file: dict[str, Any], tmp_path: Path) -> None:
    """And says nothing of what it follows."""
    ran = command("export", tiny(tmp_path / "m", file), tmp_path / "out")
    assert (ran.code, "note" in ran.err) == (0, False)
    greedy = command("run", tmp_path / "out", *CAPITAL, "--greedy")
    assert (greedy.code, greedy.out) == (0, "The capital of France is Paris.\n")
    assert command("run", tmp_path / "out", *CAPITAL, "--seed", 1).code == 0


def test_l1_config_json_is_asked_where_there_is_no_generation_config(tmp_path: Path) -> None:
    """As transformers, which then takes no notice of what is no key of generation."""
    legacy = {"do_sample": True, "temperature": 0.7, "top_k": -1, "num_beams": 3}
    folder = tiny(tmp_path / "m", None, legacy)
    assert in_force(folder) == Request(do_sample=True, temperature=0.7)
    assert read_generation_config(folder).ignored == ("num_beams 3",)
    assert in_force(tiny(tmp_path / "both", {"repetition_penalty": 1.5}, legacy)) == Request(
        repetition_penalty=1.5
    )


@pytest.mark.transformers
def test_l1_transformers_asks_config_json_too(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    from transformers import AutoModelForCausalLM

    folder = tiny(tmp_path / "m", None, {"do_sample": True, "temperature": 0.7, "top_k": 9})
    theirs = AutoModelForCausalLM.from_pretrained(folder).generation_config
    ours = in_force(folder)
    assert (theirs.do_sample, theirs.temperature, theirs.top_k) == (True, 0.7, 9)
    assert (ours.do_sample, ours.temperature, ours.top_k) == (True, 0.7, 9)
