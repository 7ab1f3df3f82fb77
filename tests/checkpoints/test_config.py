"""parse_config: what it accepts, in every spelling in use, and that it refuses by name what it would ignore."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from qwen_onnx.checkpoints.config import QwenConfig, config_notes, parse_config
from qwen_onnx.checkpoints.rope import RopeScaling
from qwen_onnx.errors import UserError
from support.checkpoints import CONFIGS, QWEN2, QWEN2_YARN, QWEN2_YARN_NEW, QWEN3, RawConfig

# config.json of Qwen/Qwen2.5-0.5B-Instruct and Qwen/Qwen3-0.6B, without what says nothing of the graph.
QWEN2_5_0_5B: RawConfig = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
    "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 21,
    "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.43.1", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_0_6B: RawConfig = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
    "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip

YARN_4 = RopeScaling("yarn", 4.0, 32, 0.1 * math.log(4) + 1)


def without(raw: RawConfig, *keys: str) -> RawConfig:
    return {key: value for key, value in raw.items() if key not in keys}


def with_yarn(**options: Any) -> RawConfig:
    return {**QWEN2_YARN, "rope_scaling": {**QWEN2_YARN["rope_scaling"], **options}}


def refusal(raw: RawConfig) -> str:
    with pytest.raises(UserError) as caught:
        parse_config(raw)
    message = str(caught.value)
    assert message.startswith("config.json: ")
    assert "\n" not in message
    return message


# Published configurations.


def test_qwen2_5_0_5b() -> None:
    assert parse_config(QWEN2_5_0_5B) == QwenConfig(
        architecture="Qwen2ForCausalLM",
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        head_dim=64,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=None,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        qkv_bias=True,
        o_bias=False,
        qk_norm=False,
    )


def test_qwen3_0_6b() -> None:
    assert parse_config(QWEN3_0_6B) == QwenConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=None,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        qkv_bias=False,
        o_bias=False,
        qk_norm=True,
    )


def test_the_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse_config(QWEN2).head_dim = 8  # type: ignore[misc]


def test_reads_without_changing_what_it_reads() -> None:
    for raw in CONFIGS.values():
        before = json.dumps(raw)
        parse_config(raw)
        assert json.dumps(raw) == before


# Architectures.


@pytest.mark.parametrize(
    "model_type", ["qwen", "qwen2_moe", "qwen3_moe", "qwen3_5", "qwen2_vl", "llama", "Qwen2", "", None, 2, []]
)
def test_refuses_other_model_types(model_type: Any) -> None:
    """Also under the name of an architecture that is known: the two must agree."""
    for raw in (
        {**QWEN2, "model_type": model_type},
        without({**QWEN2, "model_type": model_type}, "architectures"),
    ):
        message = refusal(raw)
        assert repr(model_type) in message
        assert "Qwen2ForCausalLM and Qwen3ForCausalLM" in message


def test_refuses_a_missing_model_type() -> None:
    assert "model_type None" in refusal(without(QWEN2, "model_type"))
    assert "model_type None" in refusal({})


@pytest.mark.parametrize(
    "architecture",
    [
        "Qwen3ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen2ForSequenceClassification",
        "Qwen3Model",
        "LlamaForCausalLM",
    ],
)
def test_refuses_other_architectures(architecture: str) -> None:
    assert architecture in refusal({**QWEN2, "architectures": [architecture]})


def test_architectures_may_be_left_out() -> None:
    for raw in (
        without(QWEN2, "architectures"),
        {**QWEN2, "architectures": None},
        {**QWEN2, "architectures": []},
    ):
        assert parse_config(raw) == parse_config(QWEN2)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "moe_intermediate_size"])
def test_refuses_experts(key: str) -> None:
    assert f"{key} 8" in refusal({**QWEN2, key: 8})


@pytest.mark.parametrize("activation", ["gelu", "relu", None])
def test_refuses_other_activations(activation: Any) -> None:
    assert repr(activation) in refusal({**QWEN2, "hidden_act": activation})


# Sliding windows.


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 131_072, "use_sliding_window": False, "max_window_layers": 28},  # stock Qwen2.5-7B
        {"sliding_window": None, "use_sliding_window": False},  # stock Qwen3
        {"sliding_window": 16},  # use_sliding_window left out is false
        {"sliding_window": None, "use_sliding_window": True},
        {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3},  # no layer is windowed
        {"sliding_window": 16, "use_sliding_window": True},  # max_window_layers left out is 28
        {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 0},  # holds every position
        {"layer_types": ["full_attention"] * 3},
        {"layer_types": ["full_attention"] * 3, "sliding_window": 16, "use_sliding_window": True},
        {"layer_types": None},
    ],
)
def test_accepts_a_sliding_window_that_is_off(options: RawConfig) -> None:
    assert parse_config({**without(QWEN2, "use_sliding_window"), **options}) == parse_config(QWEN2)


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0},
        {"sliding_window": 127, "use_sliding_window": True, "max_window_layers": 2},
        {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": None},
        {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": "0"},
    ],
)
def test_refuses_a_sliding_window_that_is_on(options: RawConfig) -> None:
    message = refusal({**QWEN2, **options})
    assert f"window {options['sliding_window']}" in message
    assert "sliding windows are not supported" in message


def test_refuses_the_window_that_transformers_takes_when_none_is_given() -> None:
    raw = {**QWEN2, "use_sliding_window": True, "max_window_layers": 0, "max_position_embeddings": 8192}
    assert "window 4096" in refusal(raw)


def test_refuses_a_window_that_holds_the_pretrained_length_but_not_the_stretched_one() -> None:
    raw = {**QWEN2_YARN, "use_sliding_window": True, "max_window_layers": 0}
    assert "window 32" in refusal({**raw, "sliding_window": 32})
    assert parse_config({**raw, "sliding_window": 128}).context_length == 128


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        (["full_attention", "sliding_attention", "full_attention"], "sliding_attention"),
        (["full_attention", "linear_attention", "full_attention"], "linear_attention"),
        (["full_attention"] * 2, "3 names"),
        (["full_attention", "full_attention", 1], "'1'"),
        ("full_attention", "3 names"),
    ],
)
def test_refuses_layer_types_other_than_full_attention(kinds: Any, found: str) -> None:
    message = refusal({**QWEN2, "layer_types": kinds})
    assert "layer_types" in message
    assert found in message


# Heads.


def test_head_dim_of_its_own() -> None:
    assert parse_config(QWEN3).head_dim == 32  # hidden_size / heads is 16
    assert parse_config({**QWEN2, "head_dim": 10}).head_dim == 10


def test_head_dim_left_out() -> None:
    """Qwen2 divides; Qwen3 has a default of its own, so a quotient would build another model."""
    assert parse_config(QWEN2).head_dim == 16
    assert parse_config(without(QWEN3, "head_dim")).head_dim == 128


def test_head_dim_null_is_the_quotient() -> None:
    assert parse_config({**QWEN2, "head_dim": None}).head_dim == 16
    assert parse_config({**QWEN3, "head_dim": None}).head_dim == 16


def test_heads_need_not_divide_hidden_size_where_head_dim_is_given() -> None:
    raw = {**QWEN3, "num_attention_heads": 3, "num_key_value_heads": 1}
    assert parse_config(raw).head_dim == 32
    assert parse_config(without(raw, "head_dim")).head_dim == 128


def test_refuses_heads_that_do_not_divide() -> None:
    raw = {**QWEN2, "num_attention_heads": 6, "num_key_value_heads": 2}
    assert "hidden_size 64 is not a multiple of 6" in refusal(raw)
    raw = {**QWEN2, "num_key_value_heads": 3}
    assert "num_attention_heads 4 is not a multiple of num_key_value_heads 3" in refusal(raw)
    assert "num_key_value_heads 8" in refusal({**QWEN2, "num_key_value_heads": 8})


def test_refuses_an_odd_head_dim() -> None:
    assert "head_dim 15 is odd" in refusal({**QWEN2, "head_dim": 15})
    assert "head_dim 5 is odd" in refusal({**QWEN2, "hidden_size": 20})


def test_key_value_heads_null_are_the_heads() -> None:
    assert parse_config({**QWEN2, "num_key_value_heads": None}).num_key_value_heads == 4


def test_key_value_heads_left_out_are_32() -> None:
    """The default of transformers, whatever the number of heads: guessing "all" would build another model."""
    raw = without({**QWEN2, "num_attention_heads": 64, "head_dim": 2}, "num_key_value_heads")
    assert parse_config(raw).num_key_value_heads == 32
    assert "num_key_value_heads 32" in refusal(without(QWEN2, "num_key_value_heads"))


@pytest.mark.parametrize(
    ("attention_bias", "qkv_bias", "o_bias"),
    [(None, False, False), (False, False, False), (True, True, True)],
)
def test_biases_of_qwen3(attention_bias: bool | None, qkv_bias: bool, o_bias: bool) -> None:
    config = parse_config({**QWEN3, "attention_bias": attention_bias})
    assert (config.qkv_bias, config.o_bias) == (qkv_bias, o_bias)


def test_qwen2_has_its_biases_whatever_attention_bias_says() -> None:
    config = parse_config({**QWEN2, "attention_bias": False})
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == (True, False, False)


# Types and defaults.

INTEGERS = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]


@pytest.mark.parametrize("key", INTEGERS)
def test_refuses_a_missing_size(key: str) -> None:
    for raw in (without(QWEN2, key), {**QWEN2, key: None}):
        assert refusal(raw) == f"config.json: {key} is missing"


@pytest.mark.parametrize("key", [*INTEGERS, "num_key_value_heads", "head_dim", "max_position_embeddings"])
@pytest.mark.parametrize("value", [0, -2, 2.5, "64", True, [64], 2**31, math.nan])
def test_refuses_what_is_no_positive_whole_number(key: str, value: Any) -> None:
    message = refusal({**QWEN2, key: value})
    assert f"{key} wants a positive whole number" in message
    assert repr(value) in message


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}])
def test_a_base_that_is_passed_over_is_named(key: str, kind: RawConfig) -> None:
    """transformers takes the inner one; it is said which is used, and nothing where both are the same."""
    raw = {**QWEN2, "rope_theta": 5.0, key: {**kind, "rope_theta": 1e6}}
    assert parse_config(raw).rope_theta == 1e6
    note = f"config.json: rope_theta 5.0 is passed over: {key} has 1000000.0, which transformers takes, too"
    assert [line for line in config_notes(raw) if "passed over" in line] == [note]
    for same in ({**raw, "rope_theta": 1e6}, {**raw, key: kind}):
        assert not [line for line in config_notes(same) if "passed over" in line]


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
@pytest.mark.parametrize("value", [0, -1e-6, "1e-6", True, [], math.nan, math.inf, 10**400])
def test_refuses_what_is_no_positive_number(key: str, value: Any) -> None:
    assert f"{key} wants a positive number" in refusal({**QWEN2, key: value})


@pytest.mark.parametrize("key", ["tie_word_embeddings", "use_sliding_window", "attention_bias"])
@pytest.mark.parametrize("value", [0, 1, "true", []])
def test_refuses_what_is_no_boolean(key: str, value: Any) -> None:
    """A string "false" would count as true."""
    assert f"{key} wants true or false, found {value!r}" in refusal({**QWEN3, key: value})


def test_defaults() -> None:
    config = parse_config(
        without(
            QWEN2,
            "rms_norm_eps",
            "rope_theta",
            "max_position_embeddings",
            "tie_word_embeddings",
            "hidden_act",
        )
    )
    assert config.rms_norm_eps == 1e-6
    assert config.rope_theta == 10_000.0
    assert config.max_position_embeddings == 32_768
    assert config.tie_word_embeddings is False


# Rope.


def test_yarn_is_the_same_in_every_spelling() -> None:
    spellings = [
        QWEN2_YARN,
        QWEN2_YARN_NEW,
        {**QWEN2_YARN, "rope_scaling": {**without(QWEN2_YARN["rope_scaling"], "type"), "rope_type": "yarn"}},
        with_yarn(rope_type="yarn"),
        {**QWEN2_YARN, "rope_parameters": QWEN2_YARN["rope_scaling"]},
        {**QWEN2_YARN, "rope_parameters": None},
        {**QWEN2_YARN_NEW, "rope_scaling": None},
        {**QWEN2_YARN_NEW, "rope_theta": 5.0},  # the inner one counts
        with_yarn(factor=4),
        with_yarn(partial_rotary_factor=1.0),
    ]
    for raw in spellings:
        config = parse_config(raw)
        assert (config.rope_theta, config.rope_scaling) == (10_000.0, YARN_4)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": None},
        {"rope_parameters": None},
        {"rope_scaling": {}},
        {"rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
        {"rope_parameters": {"rope_theta": 10_000}},
    ],
)
def test_default_rope_in_every_spelling(rope: RawConfig) -> None:
    assert parse_config({**QWEN2, **rope}) == parse_config(QWEN2)


def test_linear_rope() -> None:
    config = parse_config({**QWEN2, "rope_scaling": {"type": "linear", "factor": 2}})
    assert config.rope_scaling == RopeScaling("linear", 2.0, 128)
    assert config.context_length == 128


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"beta_fast": 16, "beta_slow": 2.5}, {"beta_fast": 16.0, "beta_slow": 2.5}),
        ({"beta_fast": None, "beta_slow": None}, {}),
        ({"truncate": False}, {"truncate": False}),
        ({"attention_factor": 1.25}, {"attention_factor": 1.25}),
        ({"attention_factor": None}, {}),
        ({"mscale": 0.7}, {}),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, {"attention_factor": 1.0}),
        (
            {"mscale": 2.0, "mscale_all_dim": 1.0},
            {"attention_factor": 1.2772588722239781 / 1.1386294361119891},
        ),
        ({"mscale": 2.0, "mscale_all_dim": 1.0, "attention_factor": 1.5}, {"attention_factor": 1.5}),
        ({"factor": 1.0}, {"factor": 1.0, "attention_factor": 1.0}),
        ({"factor": 0.5}, {"factor": 0.5, "attention_factor": 1.0}),
    ],
)
def test_yarn_options(options: RawConfig, changes: RawConfig) -> None:
    scaling = parse_config(with_yarn(**options)).rope_scaling
    want = dataclasses.replace(YARN_4, **changes)
    assert scaling is not None
    assert scaling.attention_factor == pytest.approx(want.attention_factor, rel=1e-15)
    assert dataclasses.replace(scaling, attention_factor=want.attention_factor) == want


def test_yarn_counts_from_max_position_embeddings_where_the_original_length_is_not_given() -> None:
    raw = {**QWEN2, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    scaling = parse_config(raw).rope_scaling
    assert scaling is not None
    assert scaling.original_max_position_embeddings == 128


def test_the_original_length_outside_the_rope_dictionary_counts() -> None:
    scaling = parse_config({**QWEN2_YARN, "original_max_position_embeddings": 16}).rope_scaling
    assert scaling is not None
    assert scaling.original_max_position_embeddings == 16


def test_yarn_factor_null_is_the_ratio_of_the_lengths() -> None:
    scaling = parse_config({**with_yarn(factor=None), "max_position_embeddings": 96}).rope_scaling
    assert scaling is not None
    assert scaling.factor == 3.0
    assert scaling.attention_factor == pytest.approx(0.1 * math.log(3) + 1, rel=1e-15)


@pytest.mark.parametrize(
    ("raw", "length"),
    [
        (QWEN2, 128),
        (QWEN2_YARN, 128),
        ({**QWEN2_YARN, "max_position_embeddings": 128}, 128),  # as transformers 5 asks for it
        ({**QWEN2_YARN, "max_position_embeddings": 256}, 256),
        (with_yarn(factor=2.5), 80),
        (with_yarn(factor=0.5), 32),
    ],
)
def test_context_length(raw: RawConfig, length: int) -> None:
    """The stretched length is never multiplied twice, and never below what the config promises."""
    assert parse_config(raw).context_length == length


@pytest.mark.parametrize(
    "rope_type", ["dynamic", "llama3", "longrope", "mrope", "su", "ntk", "YaRN", None, 4, []]
)
@pytest.mark.parametrize("spelling", ["type", "rope_type"])
def test_refuses_other_rope_types(rope_type: Any, spelling: str) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        message = refusal({**QWEN2, key: {spelling: rope_type, "factor": 4.0}})
        assert f"{key} has rope_type {rope_type!r}" in message


@pytest.mark.parametrize(
    ("rope", "unknown"),
    [
        ({"type": "default", "mrope_section": [16, 24, 24]}, "mrope_section"),
        ({"mrope_section": [16, 24, 24]}, "mrope_section"),
        ({"type": "default", "factor": 2.0}, "factor"),
        ({"type": "linear", "factor": 2.0, "beta_fast": 32}, "beta_fast"),
        ({**QWEN2_YARN["rope_scaling"], "mrope_section": [16, 24, 24]}, "mrope_section"),
        ({**QWEN2_YARN["rope_scaling"], "short_factor": [1.0]}, "short_factor"),
        ({**QWEN2_YARN["rope_scaling"], "low_freq_factor": 1.0}, "low_freq_factor"),
        ({**QWEN2_YARN["rope_scaling"], "Factor": 2.0}, "Factor"),
        ({"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}, "full_attention"),
    ],
)
def test_refuses_rope_keys_nobody_reads(rope: RawConfig, unknown: str) -> None:
    message = refusal({**QWEN2, "rope_scaling": rope})
    assert unknown in message
    assert "not supported" in message


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"factor": 0}, "factor"),
        ({"factor": "4"}, "factor"),
        ({"factor": math.inf}, "factor"),
        ({"original_max_position_embeddings": 32.5}, "original_max_position_embeddings"),
        ({"attention_factor": -1.0}, "attention_factor"),
        ({"beta_fast": True}, "beta_fast"),
        ({"beta_slow": []}, "beta_slow"),
        ({"mscale": "1", "mscale_all_dim": 1.0}, "mscale"),
        ({"truncate": 1}, "truncate"),
        ({"rope_theta": -1}, "rope_theta"),
    ],
)
def test_refuses_rope_values_of_the_wrong_type(options: RawConfig, key: str) -> None:
    message = refusal(with_yarn(**options))
    assert message.startswith(f"config.json: rope_scaling: {key} wants ")
    assert repr(options[key]) in message


def test_refuses_linear_rope_without_a_factor() -> None:
    assert "factor is missing" in refusal({**QWEN2, "rope_scaling": {"type": "linear"}})


@pytest.mark.parametrize("value", ["yarn", 4, [], True])
def test_refuses_rope_that_is_no_object(value: Any) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        assert f"{key} wants an object or null" in refusal({**QWEN2, key: value})


def test_refuses_two_rope_dictionaries_that_disagree() -> None:
    raw = {**QWEN2_YARN, "rope_parameters": {**QWEN2_YARN["rope_scaling"], "factor": 2.0}}
    assert "disagree" in refusal(raw)


@pytest.mark.parametrize("base", [None, 10_000.0, 1_000_000.0])
@pytest.mark.parametrize("inside", [False, True])
def test_a_base_that_two_dictionaries_say_is_one(base: float | None, inside: bool) -> None:
    """Whichever it is; 10,000 where nothing says more."""
    plain = {key: value for key, value in QWEN2_YARN.items() if key != "rope_theta"}
    said = {} if base is None else {"rope_theta": base}
    plain |= {"rope_scaling": {**plain["rope_scaling"], **said}} if inside else said
    for other in (10_000.0, 1_000_000.0):
        raw = {**plain, "rope_parameters": {"rope_type": "default", "rope_theta": other}}
        if other == (base or 10_000.0):
            assert parse_config(raw) == parse_config(plain)
            assert parse_config(raw).rope_theta == other
        else:
            assert f"rope_theta {other!r}, which nobody reads" in refusal(raw)


def test_refuses_two_rope_types_that_disagree() -> None:
    """transformers silently takes rope_type."""
    message = refusal(with_yarn(rope_type="default"))
    assert "'yarn'" in message
    assert "'default'" in message
    refusal({**QWEN2, "rope_scaling": {"type": "mrope", "rope_type": "default"}})


@pytest.mark.parametrize("value", [0.5, 0, "1", [1]])
def test_refuses_partial_rotation(value: Any) -> None:
    assert "partial_rotary_factor" in refusal({**QWEN2, "partial_rotary_factor": value})
    assert "partial_rotary_factor" in refusal(with_yarn(partial_rotary_factor=value))
    assert parse_config({**QWEN2, "partial_rotary_factor": 1.0}) == parse_config(QWEN2)


# Against transformers.

DEFAULTS = ["rms_norm_eps", "rope_theta", "max_position_embeddings", "tie_word_embeddings", "hidden_act"]
SHARED_FIELDS = [
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings",
]  # fmt: skip


@pytest.mark.transformers
@pytest.mark.parametrize(
    "raw",
    [
        *CONFIGS.values(),
        QWEN2_5_0_5B,
        QWEN3_0_6B,
        without(QWEN2, *DEFAULTS),
        without(QWEN3, *DEFAULTS, "attention_bias", "use_sliding_window"),
        without(QWEN3, "head_dim"),
        {**QWEN2, "num_key_value_heads": None},
        without({**QWEN2, "num_attention_heads": 64, "hidden_size": 128}, "num_key_value_heads"),
        {**QWEN2_YARN_NEW, "rope_theta": 5.0},
        {**QWEN2_YARN, "original_max_position_embeddings": 16},
        {**QWEN2, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        with_yarn(attention_factor=1.25, beta_fast=16, beta_slow=2.5, truncate=False),
        {**QWEN2, "sliding_window": 16, "use_sliding_window": True},
    ],
)
def test_fields_equal_those_of_transformers(raw: RawConfig) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    # Through JSON, as from a file: transformers changes the dictionaries it is given.
    theirs = transformers.AutoConfig.for_model(**json.loads(json.dumps(raw)))
    theirs.standardize_rope_params()  # as building the model does: the outer original length counts from here
    ours = parse_config(raw)
    assert {key: getattr(ours, key) for key in SHARED_FIELDS} == {
        key: getattr(theirs, key) for key in SHARED_FIELDS
    }
    quotient = theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == getattr(theirs, "head_dim", quotient)
    assert set(theirs.layer_types) == {"full_attention"}
    assert theirs.hidden_act == "silu"
    assert ours.o_bias == getattr(theirs, "attention_bias", False)
    rope, scaling = theirs.rope_parameters, ours.rope_scaling
    assert ours.rope_theta == rope["rope_theta"]
    assert (scaling.rope_type if scaling else "default") == rope["rope_type"]
    if scaling:
        assert scaling.factor == rope["factor"]
    if scaling and scaling.rope_type == "yarn":
        assert scaling.original_max_position_embeddings == rope["original_max_position_embeddings"]


@pytest.mark.transformers
@pytest.mark.parametrize("raw", [QWEN2_5_0_5B, QWEN3_0_6B, *CONFIGS.values()])
def test_reads_what_transformers_writes(raw: RawConfig) -> None:
    """transformers 5 spells dtype, rope_parameters and layer_types its own way when it saves."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    saved = json.loads(transformers.AutoConfig.for_model(**json.loads(json.dumps(raw))).to_json_string())
    assert parse_config({**saved, "architectures": raw["architectures"]}) == parse_config(raw)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 1e300},
        {"rope_type": "linear", "factor": 1.7e308},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1e300},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 1e308, "mscale_all_dim": 1e-308},
    ],
    ids=str,
)
def test_rope_numbers_beyond_reason_are_one_line(rope: dict[str, Any]) -> None:
    """Each would be a division by zero, a shape of 300 digits, or logits that are never finite."""
    with pytest.raises(UserError, match=r"config\.json: "):
        parse_config({**QWEN2, "rope_scaling": rope})


@pytest.mark.parametrize(
    "fields", [{"architectures": "Foo"}, {"dual_chunk_attention_config": {"chunk_size": 8}}]
)
def test_what_was_passed_over_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"config\.json: "):
        parse_config({**QWEN2, **fields})
