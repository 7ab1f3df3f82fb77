"""K1: every key of a checkpoint's JSON files is read, refused, or known to change nothing; others are named."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_onnx.checkpoints import known_keys
from qwen_onnx.checkpoints.checkpoint import open_checkpoint
from qwen_onnx.checkpoints.config import CONFIG_KEYS, parse_config
from qwen_onnx.contract.manifest import read_manifest
from qwen_onnx.errors import UserError
from qwen_onnx.options import declared
from qwen_onnx.runners.sampling.request import Request
from support.checkpoints import QWEN2, QWEN3, RawConfig, write_checkpoint
from support.command import command
from support.exports import IDS
from support.field_runs import exported_as

SEES_THE_FUTURE: list[RawConfig] = [
    {"is_causal": False},
    {"is_causal": None},  # transformers asks whether it is true
    {"use_bidirectional_attention": True},
    {"bidirectional": True},
]


@pytest.mark.parametrize("keys", SEES_THE_FUTURE, ids=str)
@pytest.mark.parametrize("raw", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def test_k1_a_model_that_sees_the_future_is_refused(raw: RawConfig, keys: RawConfig, tmp_path: Path) -> None:
    """Also as the original of an earlier export: the reference is not asked for causal logits of it."""
    write_checkpoint(tmp_path / "m", raw)
    exported_as(tmp_path / "m", tmp_path / "before")
    (tmp_path / "m" / "config.json").write_text(json.dumps({**raw, **keys}))
    (name,) = keys
    for words in (
        ("export", tmp_path / "m", tmp_path / "out"),
        ("check", tmp_path / "before", "--against", tmp_path / "m", "--provider", "cpu"),
    ):
        error = command(*words).error
        assert name in error
        assert "not supported" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "keys",
    [
        {"per_layer_config": {"0": {"hidden_size": 8}}},
        {"pruned_heads": {"0": [1]}},
        {"is_encoder_decoder": True},
        {"add_cross_attention": True},
        {"mlp_bias": True},
        {"use_mrope": True},
        {"vision_config": {"depth": 1}},
        {"use_logn_attn": True},
        {"num_experts": 8},
    ],
    ids=str,
)
def test_k1_what_changes_the_logits_is_refused_by_name(keys: RawConfig) -> None:
    (name,) = keys
    with pytest.raises(UserError, match=rf"config\.json: {name} .*not supported|only text"):
        parse_config({**QWEN2, **keys})


def test_k1_keys_that_say_nothing_change_nothing(tmp_path: Path) -> None:
    """Their neutral values, and harmless keys of both spellings: no note, the same files."""
    write_checkpoint(tmp_path / "m", QWEN2)
    plain = read_manifest(exported_as(tmp_path / "m", tmp_path / "plain")).files
    more = {"is_causal": True, "use_bidirectional_attention": False, "num_experts": 0, "pruned_heads": {},
            "torch_dtype": "bfloat16", "dtype": "float16", "attention_dropout": 0.1, "id2label": {"0": "A"},
            "hidden_act": "swish", "layer_types": ["attention"] * 3, "use_cache": False}  # fmt: skip
    (tmp_path / "m" / "config.json").write_text(json.dumps({**QWEN2, **more}))
    ran = command("export", tmp_path / "m", tmp_path / "out")
    assert ran.code == 0
    assert "config.json" not in ran.err
    assert {**read_manifest(tmp_path / "out").files, "config.json": None} == {**plain, "config.json": None}


def test_k1_an_unknown_key_is_named_in_one_note_and_escaped(tmp_path: Path) -> None:
    """One line for each file, whatever stands in it, and not longer than somebody reads."""
    unknown = {"logit_scale": 2.0, "evil\x1b[31m\nkey": 1, **{f"more_{i}": i for i in range(20)}}
    write_checkpoint(tmp_path / "m", {**QWEN2, **unknown, "auto_map": {"AutoModel": "m.M"}})
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps({"frobnicate": True, "eos_token": None}))
    ran = command("export", tmp_path / "m", tmp_path / "out")
    assert ran.code == 0
    (note,) = [line for line in ran.err.split("\n") if "logit_scale" in line]
    assert note.startswith("note: config.json: ")
    assert "evil\\x1b[31m key" in note
    assert "22 in all" in note
    assert len(note) < 300
    assert "\x1b" not in ran.err
    assert [line for line in ran.err.split("\n") if "frobnicate" in line] == [
        "note: tokenizer_config.json: not read, as nobody here knows what it means: frobnicate"
    ]
    assert "auto_map is passed over: the checkpoint's own code is not run" in ran.err


def test_k1_special_tokens_that_are_split_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", QWEN2)
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps({"split_special_tokens": True}))
    assert "split_special_tokens" in command("export", tmp_path / "m", tmp_path / "out").error


def test_k1_generation_keys_that_are_said_to_be_read_are_options() -> None:
    """An option may have a key that no table knows: it is read wherever generation settings stand."""
    read = {name for name, key in known_keys.GENERATION.items() if key.use == "read"}
    options = {option.config_key for option in declared(Request).values() if option.config_key}
    assert read <= options | {"eos_token_id"}
    assert known_keys.GENERATION.keys() & options <= read, "an option, said to be not supported"


def popped(source: str) -> set[str]:
    """Keys that a constructor takes out of its keywords."""
    return set(re.findall(r"kwargs\.(?:pop|get)\(\s*\"(\w+)\"", source))


@pytest.mark.transformers
def test_k1_the_table_knows_every_key_of_transformers() -> None:
    """Signatures, what is taken of other keywords, and what is saved: a new version's key fails here."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config: set[str] = set()
    for kind in (transformers.PretrainedConfig, transformers.Qwen2Config, transformers.Qwen3Config):
        config |= {*inspect.signature(kind.__init__).parameters, *kind().to_dict()} - {"self", "kwargs"}
        config |= popped(inspect.getsource(kind.__post_init__)) | set(kind.attribute_map)
    config |= popped(inspect.getsource(transformers.PretrainedConfig.convert_rope_params_to_dict))
    assert {"is_encoder_decoder", "rope_scaling", "torch_dtype", "layer_types", "per_layer_config"} <= config
    assert config - CONFIG_KEYS.keys() == set()

    generation = set(transformers.GenerationConfig().to_dict())
    generation |= popped(inspect.getsource(transformers.GenerationConfig.__init__))
    assert {"top_k", "stop_strings", "max_length"} <= generation
    assert generation - known_keys.GENERATION.keys() == set()

    tokenizer: set[str] = set()
    for base in transformers.Qwen2Tokenizer.__mro__[:-1]:
        if "__init__" in vars(base):
            tokenizer |= set(inspect.signature(base.__init__).parameters) - {"self", "args", "kwargs"}
            tokenizer |= popped(inspect.getsource(base.__init__).replace("local_kwargs", "kwargs"))
    tokenizer |= set(transformers.PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES)
    assert {"split_special_tokens", "merges", "chat_template", "pad_token"} <= tokenizer
    assert tokenizer - known_keys.TOKENIZER.keys() == set()


@pytest.mark.transformers
def test_k1_transformers_computes_what_is_refused_otherwise(tmp_path: Path) -> None:
    """So that nobody makes `is_causal` harmless: its logits are far from the causal ones."""
    pytest.importorskip("transformers", minversion="5.0")
    causal = theirs(tmp_path / "causal", QWEN2)
    assert np.abs(theirs(tmp_path / "other", {**QWEN2, "is_causal": False}) - causal).max() > 1
    np.testing.assert_array_equal(theirs(tmp_path / "true", {**QWEN2, "is_causal": True}), causal)
    assert open_checkpoint(tmp_path / "true").config == open_checkpoint(tmp_path / "causal").config


def theirs(folder: Path, raw: RawConfig) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    write_checkpoint(folder, raw)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return np.asarray(model.eval()(torch.tensor(IDS[:1, :24])).logits.numpy())
