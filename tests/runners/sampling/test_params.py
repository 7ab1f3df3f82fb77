"""What may be asked of the choice of tokens, what generation_config.json adds, and what is then in force."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qwen_onnx
from qwen_onnx import UserError
from qwen_onnx.options import declared, given, made
from qwen_onnx.runners.sampling.generation_config import GenerationConfig, read_generation_config
from qwen_onnx.runners.sampling.params import GREEDY, SamplingParams, merged
from qwen_onnx.runners.sampling.request import PLAIN, Request

QWEN = {  # as Qwen2.5-0.5B-Instruct has it
    "bos_token_id": 151643,
    "pad_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "repetition_penalty": 1.1,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "transformers_version": "4.37.0",
}


def config(folder: Path, values: dict[str, Any]) -> GenerationConfig:
    (folder / "generation_config.json").write_text(json.dumps(values), encoding="utf-8")
    return read_generation_config(folder)


def in_force(defaults: GenerationConfig, **asked: Any) -> Request:
    """As `Chat.request`."""
    return made(Request, merged(defaults.given, given(Request, asked)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("temperature", "min_p", "repetition_penalty", "frequency_penalty")
          for value in ("1", True, math.nan, math.inf, 10**400, [1], 1j)),
        ("temperature", -0.1), ("top_p", -0.1), ("top_p", 1.1), ("min_p", -0.1), ("min_p", 1.1),
        ("repetition_penalty", 0), ("repetition_penalty", -1.0), ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1), ("top_k", -1), ("top_k", 2.0), ("top_k", True), ("seed", -1),
        ("seed", 2**64), ("seed", "1"), ("do_sample", 1), ("do_sample", "yes"),
        *(("logit_bias", {token_id: 1.0}) for token_id in ("x", "-1", "", "05", "\u0663", "9" * 5000)),
        ("logit_bias", [1]), ("logit_bias", {-1: 1.0}), ("logit_bias", {True: 1.0}),
        ("logit_bias", {1: math.nan}), ("logit_bias", {1: 100.5}), ("logit_bias", {1: None}),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named(name: str, value: object) -> None:
    """Before anything is computed, in one line that says what is wanted."""
    for kind in (SamplingParams, Request):
        with pytest.raises(UserError, match=f"^{name}") as raised:
            kind(**{name: value})
        assert "\n" not in str(raised.value)
        assert "wanted" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0), ("temperature", 1e300), ("top_k", 0), ("top_k", 10**12), ("top_p", 0), ("top_p", 1),
        ("min_p", 0.0), ("min_p", 1), ("repetition_penalty", 1e-3), ("presence_penalty", -2), ("seed", 0),
        ("seed", 2**64 - 1), ("logit_bias", {}), ("logit_bias", {5: -100, 7: 100.0}), ("temperature", np.float64(1)),
    ],
)  # fmt: skip
def test_the_limits_are_allowed(name: str, value: object) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_options_are_frozen_and_copy_their_bias() -> None:
    """What is asked for stays what it is while an answer is made."""
    bias = {1: 2.0}
    options = SamplingParams(logit_bias=bias)
    bias[1] = 3.0
    assert options.logit_bias == {1: 2.0}
    assert hash(options) == hash(SamplingParams())
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.top_k = 3  # type: ignore[misc]


def test_everything_in_the_file_is_in_force(tmp_path: Path) -> None:
    more = {"min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -1, "max_new_tokens": 2048,
            "min_new_tokens": 3, "stop_strings": ["END", "\n\n"]}  # fmt: skip
    found = config(tmp_path, {**QWEN, **more})
    assert in_force(found) == Request(
        do_sample=True, temperature=0.7, top_k=20, top_p=0.8, min_p=0.1, repetition_penalty=1.1,
        presence_penalty=0.5, frequency_penalty=-1, max_new_tokens=2048, min_new_tokens=3, stop=("END", "\n\n"),
    )  # fmt: skip
    assert found.ignored == ()


def test_a_file_that_says_nothing_is_greedy(tmp_path: Path) -> None:
    """No file, an empty one, nulls: as transformers, which then sets do_sample to False."""
    wanted = GenerationConfig()
    assert read_generation_config(tmp_path) == wanted
    assert config(tmp_path, {}) == wanted
    assert config(tmp_path, dict.fromkeys([*QWEN, "max_new_tokens", "stop_strings"])) == wanted
    found = in_force(wanted)
    assert found == Request()
    assert found.plain
    assert (found.max_new_tokens, found.min_new_tokens, found.stops) == (None, 0, ())


def test_do_sample_false_is_greedy_with_the_penalty(tmp_path: Path) -> None:
    found = in_force(config(tmp_path, {**QWEN, "do_sample": False}))
    assert not found.do_sample
    assert found.repetition_penalty == 1.1
    assert not found.plain


def test_what_is_not_supported_is_named_and_what_does_nothing_is_not(tmp_path: Path) -> None:
    """Namely what would make another answer in transformers."""
    found = config(tmp_path, {**QWEN, "num_beams": 4, "no_repeat_ngram_size": 0, "typical_p": 0.9,
                              "length_penalty": 1.0, "use_cache": True, "a_new_one": [1]})  # fmt: skip
    assert found.ignored == ("num_beams 4", "typical_p 0.9", "a_new_one [1]")


@pytest.mark.parametrize(
    ("asked", "changes"),
    [
        ({}, {}),
        ({"temperature": 0.2}, {"temperature": 0.2}),
        ({"top_p": 1.0, "seed": 4}, {"top_p": 1.0, "seed": 4}),
        ({"repetition_penalty": 1.0}, {"repetition_penalty": 1.0}),
        ({"temperature": 0.0}, {"do_sample": False, "temperature": 1.0}),
        ({"do_sample": False}, {"do_sample": False}),
        ({"temperature": 0.0, "top_k": 5}, {"do_sample": False, "temperature": 1.0, "top_k": 5}),
    ],
    ids=str,
)
def test_what_is_asked_for_overrides_the_file(
    asked: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    """Value by value: the others stay the file's; a neutral value is a value."""
    file = config(tmp_path, QWEN)
    assert in_force(file, **asked) == dataclasses.replace(in_force(file), **changes)


def test_none_leaves_a_value_to_the_file(tmp_path: Path) -> None:
    file = config(tmp_path, {**QWEN, "stop_strings": ["END"]})
    assert in_force(file, **dict.fromkeys(declared(Request))) == in_force(file)
    assert in_force(file, stop=None).stops == ("END",)
    assert in_force(file, stop=()).stops == ()


@pytest.mark.parametrize(
    ("asked", "draws"),
    [
        ({"temperature": 0.7}, True), ({"top_k": 5}, True), ({"top_p": 0.5}, True), ({"min_p": 0.1}, True),
        ({"do_sample": True}, True), ({"seed": 1}, False), ({"repetition_penalty": 1.5}, False),
        ({"temperature": 0.7, "do_sample": False}, False), ({"do_sample": True, "temperature": 0}, False),
    ],
    ids=str,
)  # fmt: skip
def test_who_asks_for_sampling_gets_it(asked: dict[str, Any], draws: bool) -> None:
    """Though the file says do_sample false."""
    assert in_force(GenerationConfig({"do_sample": False}), **asked).do_sample == draws


@pytest.mark.parametrize("asked", [GREEDY, PLAIN], ids=["greedy", "plain"])
def test_greedy_leaves_nothing_of_the_file(asked: dict[str, Any], tmp_path: Path) -> None:
    """Golden ids and benchmarks do not depend on a repetition penalty."""
    file = config(tmp_path, {**QWEN, "presence_penalty": 1.0, "frequency_penalty": 1.0})
    assert in_force(file, **asked).plain


def test_the_values_are_described() -> None:
    drawn = SamplingParams(do_sample=True, temperature=0.7, logit_bias={5: -1.0})
    assert drawn.describe() == (
        "sampling, temperature 0.7, top_k 0, top_p 1, min_p 0, repetition_penalty 1, presence_penalty 0, "
        "frequency_penalty 0, logit_bias 5=-1, seed none"
    )
    assert SamplingParams(temperature=0.7).describe() == (
        "greedy, repetition_penalty 1, presence_penalty 0, frequency_penalty 0, logit_bias none"
    )


def test_the_package_hands_them_out() -> None:
    assert qwen_onnx.SamplingParams is SamplingParams
    assert qwen_onnx.Request is Request
    assert {"Request", "SamplingParams"} <= set(qwen_onnx.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        qwen_onnx.nothing  # noqa: B018
