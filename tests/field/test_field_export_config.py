"""docs/faults.md, chapter A: what config.json and the shards' index say is done, or refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from qwen_onnx.checkpoints.safetensors_file import read_header
from qwen_onnx.contract.manifest import read_manifest
from qwen_onnx.reference import reference_logits
from qwen_onnx.runners.model.runner import Runner
from support.checkpoints import QWEN2, QWEN3, QWEN3_BIAS, random_tensors, write_checkpoint
from support.command import command
from support.exports import IDS, ON_CPU, Exported
from support.field_runs import exported_as
from support.tolerances import F32, assert_close

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize(
    "found",
    [
        {"model_type": "qwen", "architectures": ["QWenLMHeadModel"]},
        {"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"]},
        {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]},
        {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]},
        {"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"]},
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        {"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"]},
        {"model_type": None, "architectures": ["Qwen2ForCausalLM"]},
    ],
)
def test_a5_other_architectures_are_named_in_a_line(found: dict[str, Any], tmp_path: Path) -> None:
    """What was found and what is supported is said before any weights are read."""
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**QWEN2, **found}))
    (folder / "model.safetensors").write_bytes(b"not looked at")
    error = command("export", folder, tmp_path / "out").error
    assert f"{found['model_type']!r}" in error
    assert found["architectures"][0] in error
    assert "Qwen2ForCausalLM" in error.split("supported")[1]
    assert "Qwen3ForCausalLM" in error.split("supported")[1]
    assert not (tmp_path / "out").exists()


YARN = {"factor": 4.0, "original_max_position_embeddings": 32_768}


def rows(folder: Path, positions: list[int]) -> tuple[np.ndarray, np.ndarray]:
    tables = read_header(folder / "weights.safetensors")
    return tuple(
        np.asarray(tables[name].numpy()[positions], np.float64) for name in ("rotary.cos", "rotary.sin")
    )  # type: ignore[return-value]


def test_a10_yarn_is_computed_in_every_spelling(tmp_path: Path) -> None:
    """The tables follow the paper's formula, whichever of three ways the config says YaRN."""
    theta, size, positions = 1e6, 16, [0, 32_767, 40_000]
    old = {**QWEN2, "max_position_embeddings": 32_768, "rope_theta": theta, "num_hidden_layers": 1}
    new = {key: value for key, value in old.items() if key != "rope_theta"}
    spellings = [
        {**old, "rope_scaling": {"type": "yarn", **YARN}},
        {**old, "rope_scaling": {"rope_type": "yarn", **YARN}},
        {**new, "rope_parameters": {"rope_type": "yarn", "rope_theta": theta, **YARN}},
    ]
    # The paper's formula: pairs that turn more than 32 times within the original length keep their frequency, those
    # that turn less than once are stretched, a ramp between.
    pair = [size * math.log(32_768 / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (32, 1)]
    low, high = math.floor(pair[0]), math.ceil(pair[1])
    stretched = np.clip((np.arange(size // 2) - low) / (high - low), 0, 1)
    plain = theta ** (-np.arange(0, size, 2) / size)
    angles = np.outer(positions, plain * (1 - stretched) + plain / 4 * stretched)
    factor = 0.1 * math.log(4) + 1
    assert round(factor, 4) == 1.1386
    for raw in spellings:
        write_checkpoint(tmp_path / "m", raw)
        folder = exported_as(tmp_path / "m", tmp_path / "out", force=True)
        assert read_manifest(folder).context_length == 131_072
        for found, wave in zip(rows(folder, positions), (np.cos, np.sin), strict=True):
            np.testing.assert_allclose(found, factor * wave(angles), rtol=0, atol=2e-7)


def test_a10_linear_is_computed_and_what_is_not_is_named(tmp_path: Path) -> None:
    """Linear stretches positions, null is no scaling, and other types are refused by name."""
    write_checkpoint(tmp_path / "m", {**QWEN2, "rope_scaling": {"type": "linear", "factor": 4.0}})
    linear = exported_as(tmp_path / "m", tmp_path / "linear")
    write_checkpoint(tmp_path / "m", {**QWEN2, "rope_scaling": None})
    none = exported_as(tmp_path / "m", tmp_path / "none")
    for scaled, plain in zip(rows(linear, [4, 100]), rows(none, [1, 25]), strict=True):
        np.testing.assert_array_equal(scaled, plain)
    for kind in ("dynamic", "llama3", "longrope", "mrope"):
        config = {**QWEN2, "rope_scaling": {"rope_type": kind, "factor": 4.0}}
        (tmp_path / "m" / "config.json").write_text(json.dumps(config))
        error = command("export", tmp_path / "m", tmp_path / "out").error
        assert "rope_scaling" in error
        assert repr(kind) in error


def test_a11_sliding_windows_are_off_or_refused_by_name(tmp_path: Path) -> None:
    """A window of some layers is refused with its size and first layer; one of no layer changes nothing."""
    raw = {**QWEN2, "num_hidden_layers": 4}
    write_checkpoint(tmp_path / "m", raw)
    plain = read_manifest(exported_as(tmp_path / "m", tmp_path / "plain")).files
    on = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    for window, says in (
        (on, "window 8 from layer 2 of 4"),
        (on | {"max_window_layers": 0}, "window 8 from layer 0 of 4"),
        ({"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2}, "sliding_attention"),
    ):
        (tmp_path / "m" / "config.json").write_text(json.dumps(raw | window))
        assert says in command("export", tmp_path / "m", tmp_path / "out").error
    for stock in (
        {"sliding_window": 131_072, "use_sliding_window": False, "max_window_layers": 4},
        on | {"max_window_layers": 4, "layer_types": ["full_attention"] * 4},  # of no layer
    ):
        (tmp_path / "m" / "config.json").write_text(json.dumps(raw | stock))
        files = read_manifest(exported_as(tmp_path / "m", tmp_path / "out", force=True)).files
        assert {**files, "config.json": None} == {**plain, "config.json": None}


@pytest.mark.parametrize(
    ("tied", "head", "stored", "says"),
    [
        (True, "own", True, "it is used"),
        (False, "own", True, ""),
        (True, "copy", False, ""),
        (False, "copy", False, ""),
        (True, "absent", False, ""),
    ],
)
def test_a15_the_tensors_decide_which_head_is_used(
    tied: bool, head: Any, stored: bool, says: str, tmp_path: Path
) -> None:
    """Where the flag and the shards disagree, the stored head is used, and a note says so."""
    raw = {**QWEN3, "num_hidden_layers": 2, "tie_word_embeddings": tied}
    tensors = write_checkpoint(tmp_path / "m", raw, lm_head=head, shards=3)
    ran = command("export", tmp_path / "m", tmp_path / "out")
    assert ran.code == 0
    assert ("lm_head.weight differs: it is used" in ran.err) is bool(says)
    model = Exported(tmp_path / "m", tmp_path / "out", "f32")
    assert ("lm_head.weight" in model.tensors) is stored
    matrix = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    untied = {**tensors, "lm_head.weight": matrix}
    runner = Runner(model.folder, ON_CPU)
    found = runner.prefill(runner.new_cache(), IDS[:1, :9])[0]
    config = dataclasses.replace(model.config, tie_word_embeddings=False)
    assert_close(found, reference_logits(config, untied.__getitem__, IDS[0, :9])[-1], F32)


def test_a15_a_head_that_is_nowhere_is_an_error(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", {**QWEN3, "tie_word_embeddings": False}, lm_head="absent")
    assert "lm_head.weight is missing" in command("export", tmp_path / "m", tmp_path / "out").error


@pytest.mark.parametrize("fault", ["deleted", "truncated", "stray", "not in its shard", "no index"])
def test_a21_an_index_is_followed_or_its_fault_named(fault: str, tmp_path: Path) -> None:
    """Missing, short or misplaced tensors are refused by file; strays are ignored with a note."""
    folder, out = tmp_path / "m", tmp_path / "out"
    raw = {**QWEN3_BIAS, "tie_word_embeddings": False}
    tensors = write_checkpoint(folder, raw, dtype="F16", shards=2)
    last, index = folder / "model-00002-of-00002.safetensors", folder / "model.safetensors.index.json"
    says = {"deleted": "incomplete download?", "truncated": "", "not in its shard": "has no tensor"}
    match fault:
        case "deleted":
            last.unlink()
        case "truncated":
            last.write_bytes(last.read_bytes()[:-1000])
        case "stray":
            safetensors.numpy.save_file(random_tensors(raw, seed=9), folder / "model.safetensors")
        case "not in its shard":
            named = json.loads(index.read_text())
            named["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
            index.write_text(json.dumps(named))
        case _:
            index.unlink()
    ran = command("export", folder, out, "--dtype", "f16")
    if fault in says:
        wrong = "model-00001" if fault == "not in its shard" else last.name
        assert wrong in ran.error
        assert says[fault] in ran.error
        assert not out.exists()
        return
    assert ran.code == 0
    assert ("ignored model.safetensors" in ran.err) is (fault == "stray")
    stored = read_header(out / "weights.safetensors")
    for name, tensor in tensors.items():
        assert stored[name].numpy().tobytes() == tensor.tobytes(), name
