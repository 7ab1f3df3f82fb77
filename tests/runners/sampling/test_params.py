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
from qwen_onnx.runners.sampling.generation_config import GenerationDefaults, read_defaults
from qwen_onnx.runners.sampling.params import Sampling, SamplingOptions, in_force

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


def defaults(folder: Path, values: dict[str, Any]) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps(values), encoding="utf-8")
    return read_defaults(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("temperature", "min_p", "repetition_penalty", "frequency_penalty")
          for value in ("1", True, math.nan, math.inf, 10**400, [1], 1j)),
        ("temperature", -0.1), ("top_p", -0.1), ("top_p", 1.1), ("min_p", -0.1), ("min_p", 1.1),
        ("repetition_penalty", 0), ("repetition_penalty", -1.0), ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1), ("top_k", -1), ("top_k", 2.0), ("top_k", True), ("seed", -1),
        ("seed", 2**64), ("seed", "1"), ("do_sample", 1), ("do_sample", "yes"),
        ("logit_bias", [1]), ("logit_bias", {"1": 1.0}), ("logit_bias", {-1: 1.0}), ("logit_bias", {True: 1.0}),
        ("logit_bias", {1: math.nan}), ("logit_bias", {1: 100.5}), ("logit_bias", {1: None}),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named(name: str, value: object) -> None:
    """NaN or a text that is compared and passes; an error of NumPy's in the middle of an answer."""
    with pytest.raises(UserError, match=f"^{name}") as raised:
        SamplingOptions(**{name: value})
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
    assert getattr(SamplingOptions(**{name: value}), name) == value


def test_options_are_frozen_and_copy_their_bias() -> None:
    """A bias that changes while an answer is made."""
    bias = {1: 2.0}
    options = SamplingOptions(logit_bias=bias)
    bias[1] = 3.0
    assert options.logit_bias == {1: 2.0}
    assert hash(options) == hash(SamplingOptions())
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.top_k = 3  # type: ignore[misc]


def test_everything_in_the_file_is_in_force(tmp_path: Path) -> None:
    """Hidden defaults, or defaults dropped (E7 in docs/faults.md)."""
    more = {"min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -1, "max_new_tokens": 2048,
            "min_new_tokens": 3, "stop_strings": ["END", "\n\n"]}  # fmt: skip
    found = defaults(tmp_path, {**QWEN, **more})
    assert in_force(SamplingOptions(), found.sampling) == Sampling(
        do_sample=True, temperature=0.7, top_k=20, top_p=0.8, min_p=0.1, repetition_penalty=1.1,
        presence_penalty=0.5, frequency_penalty=-1,
    )  # fmt: skip
    assert (found.max_new_tokens, found.min_new_tokens, found.stop) == (2048, 3, ("END", "\n\n"))
    assert found.ignored == ()


def test_a_file_that_says_nothing_is_greedy(tmp_path: Path) -> None:
    """No file, an empty one, nulls: as transformers, which then sets do_sample to False."""
    wanted = GenerationDefaults()
    assert read_defaults(tmp_path) == wanted
    assert defaults(tmp_path, {}) == wanted
    assert defaults(tmp_path, dict.fromkeys([*QWEN, "max_new_tokens", "stop_strings"])) == wanted
    assert in_force(SamplingOptions(), wanted.sampling) == Sampling()
    assert Sampling().plain


def test_do_sample_false_is_greedy_with_the_penalty(tmp_path: Path) -> None:
    found = in_force(SamplingOptions(), defaults(tmp_path, {**QWEN, "do_sample": False}).sampling)
    assert not found.do_sample
    assert found.repetition_penalty == 1.1
    assert not found.plain


def test_what_is_not_supported_is_named_and_what_does_nothing_is_not(tmp_path: Path) -> None:
    """An answer unlike that of transformers, and no word of why."""
    found = defaults(tmp_path, {**QWEN, "num_beams": 4, "no_repeat_ngram_size": 0, "typical_p": 0.9,
                                "length_penalty": 1.0, "use_cache": True, "a_new_one": [1]})  # fmt: skip
    assert found.ignored == ("num_beams 4", "typical_p 0.9", "a_new_one [1]")


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": "hot"},
        {"top_p": 7},
        {"max_new_tokens": 2.5},
        {"min_new_tokens": -1},
        {"stop_strings": 3},
    ],
    ids=str,
)
def test_a_wrong_value_in_the_file_names_file_and_key(values: dict[str, Any], tmp_path: Path) -> None:
    (name,) = values
    with pytest.raises(UserError, match=rf"generation_config\.json: {name.removesuffix('_strings')}"):
        defaults(tmp_path, values)


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
    """One value given, and the others are lost; a neutral value taken for none."""
    file = defaults(tmp_path, QWEN).sampling
    before = in_force(SamplingOptions(), file)
    assert in_force(SamplingOptions(**asked), file) == dataclasses.replace(before, **changes)


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
    """`temperature does nothing` (E7 in docs/faults.md), since the file says do_sample false."""
    assert in_force(SamplingOptions(**asked), SamplingOptions(do_sample=False)).do_sample == draws


def test_greedy_leaves_nothing_of_the_file(tmp_path: Path) -> None:
    """Golden ids and benchmarks that hang on a repetition penalty."""
    file = defaults(tmp_path, {**QWEN, "presence_penalty": 1.0, "frequency_penalty": 1.0}).sampling
    assert in_force(SamplingOptions.greedy(), file).plain


def test_the_values_are_described() -> None:
    assert Sampling(do_sample=True, temperature=0.7, logit_bias={5: -1.0}).describe() == (
        "sampling, temperature 0.7, top_k 0, top_p 1, min_p 0, repetition_penalty 1, presence_penalty 0, "
        "frequency_penalty 0, logit_bias 5=-1, seed none"
    )
    assert Sampling(temperature=0.7).describe() == (
        "greedy, repetition_penalty 1, presence_penalty 0, frequency_penalty 0, logit_bias none"
    )


def test_the_package_hands_them_out() -> None:
    assert qwen_onnx.SamplingOptions is SamplingOptions
    assert "SamplingOptions" in qwen_onnx.__all__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        qwen_onnx.nothing  # noqa: B018
