"""FIELD.md, chapter A, first half: checkpoints and configs, and the export that they become."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from chats import write_chat_checkpoint
from checkpoints import QWEN2, QWEN2_14_2, QWEN3, QWEN3_BIAS, random_tensors, write_checkpoint
from command import child, command
from damage import forge, perturbed, poke
from exports import IDS, ON_CPU, Exported
from field_runs import exported_as, follow, graphs
from tolerances import F32, assert_close

from qwen_onnx.contract import read_manifest
from qwen_onnx.graphs.build import verify
from qwen_onnx.reference import reference_logits
from qwen_onnx.runners.runner import Runner
from qwen_onnx.safetensors_file import read_header

Export = Callable[..., Exported]


@pytest.mark.parametrize(
    ("name", "overrides", "size"),
    [
        ("qwen3", {}, 32),  # 4 heads x 32 are twice hidden_size 64
        ("qwen3_bias", {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}, 4),  # and half
        (
            "qwen3",
            {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16},
            16,
        ),  # no divisor of 64
        ("qwen3", {"head_dim": None}, 16),
        ("qwen2", {"head_dim": None}, 16),
    ],
)
def test_a1_head_dim_wins_over_hidden_over_heads(
    name: str, overrides: dict[str, Any], size: int, exported: Export
) -> None:
    """An export that refuses its own cache (64 for 128), or projections taken for hidden x hidden."""
    model = exported(name, **overrides)
    heads = model.config.num_attention_heads
    layer = read_header(model.folder / "weights.safetensors")
    assert layer["model.layers.0.self_attn.q_proj.weight"].shape == (heads * size, 64)
    assert layer["model.layers.0.self_attn.o_proj.weight"].shape == (64, heads * size)
    runner = follow(model, [5], 3)
    assert runner.new_cache().buffers[0].shape()[3] == runner.manifest.head_dim == size


@pytest.mark.parametrize("dtype", ["f32", "f16", "int8"])
def test_a2_cache_has_key_value_heads(dtype: str, tmp_path: Path) -> None:
    """Caches of 28 query heads for 4 key/value heads; here 14 and 2, in every graph, and read from the graph."""
    write_checkpoint(tmp_path / "m", QWEN2_14_2)
    folder = exported_as(tmp_path / "m", tmp_path / "out", dtype=dtype)
    seen = 0
    for spec, model in graphs(folder):
        for value in (*model.graph.input, *model.graph.output):
            if value.name.startswith(("past_key_values.", "present.")):
                batch, *dims = value.type.tensor_type.shape.dim
                assert batch.dim_param == "batch_size"
                assert (dims[0].dim_value, dims[2].dim_value) == (2, 8), (spec.file, value.name)
                assert dims[1].dim_param
                seen += 1
    assert seen >= 8 * 3  # keys and values of two layers, in and out
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 14}))
    forge(folder)
    assert Runner(folder, ON_CPU).new_cache(batch_size=3).buffers[0].shape() == [3, 2, 128, 8]


def test_a3_reshape_shapes_are_vectors(tmp_path: Path) -> None:
    """A model that builds and dies in k_norm's Reshape: "A shape tensor must be a vector tensor"."""
    write_checkpoint(tmp_path / "m", {**QWEN3, "num_hidden_layers": 2})
    for options in ({"dtype": "f16"}, {"dtype": "int4"}, {"target": "portable"}):
        folder = exported_as(tmp_path / "m", tmp_path / "out", force=True, **options)
        for spec, model in graphs(folder):
            verify(model)  # the checker, and strict inference
            ranks = {tensor.name: len(tensor.dims) for tensor in model.graph.initializer}
            reshapes = [node.input[1] for node in model.graph.node if node.op_type == "Reshape"]
            assert {ranks.get(name, 1) for name in reshapes} <= {1}, spec.file
        runner = Runner(folder, ON_CPU)
        assert np.isfinite(runner.prefill(runner.new_cache(), IDS[:1, :24])).all()


def test_a4_golden_ids_tell_of_a_runtime_that_computes_otherwise(tmp_path: Path) -> None:
    """f16 Qwen3 that turns to "1+1+1+" after an upgrade: here one norm's weights are others, and hashes agree."""
    write_chat_checkpoint(tmp_path / "m", **QWEN3 | {"vocab_size": 400})
    folder = exported_as(tmp_path / "m", tmp_path / "out", dtype="f16")
    assert command("check", folder, "--provider", "cpu").code == 0
    golden = read_manifest(folder).golden
    assert golden is not None
    assert len(golden.token_ids) >= 16
    poke(folder, "model.layers.1.self_attn.k_norm.weight", lambda norm: norm * np.linspace(0.2, 2, norm.size))
    forge(folder)
    ran = command("check", folder, "--provider", "cpu")
    assert (ran.code, ran.out.split(":")[:2]) == (1, ["MISMATCH", " golden ids"])


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
    """A page on how to write a config class of one's own; or minutes of weights before any word."""
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


def test_a6_export_without_torch_and_transformers_is_the_same(tmp_path: Path) -> None:
    """Exporters that trace, and break or change with each release of those two."""
    write_checkpoint(tmp_path / "m", QWEN3_BIAS, dtype="BF16")
    here = exported_as(tmp_path / "m", tmp_path / "here", dtype="bf16")
    program = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None"
    with child("export", tmp_path / "m", tmp_path / "there", "--dtype", "bf16", program=program) as process:
        _, err = process.communicate()
    assert process.returncode == 0, err
    files = read_manifest(here).files
    assert len(files) > 12
    assert files == read_manifest(tmp_path / "there").files  # sizes and sha256


YARN = {"factor": 4.0, "original_max_position_embeddings": 32_768}


def rows(folder: Path, positions: list[int]) -> tuple[np.ndarray, np.ndarray]:
    tables = read_header(folder / "weights.safetensors")
    return tuple(
        np.asarray(tables[name].numpy()[positions], np.float64) for name in ("rotary.cos", "rotary.sin")
    )  # type: ignore[return-value]


def test_a10_yarn_is_computed_in_every_spelling(tmp_path: Path) -> None:
    """rope_scaling dropped without a word: long prompts degrade, short ones do not tell."""
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
    """The other types: implemented or refused, and null is none at all."""
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
    """A declared window that is ignored, or max_window_layers read the wrong way round."""
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
    """Fluent garbage from the wrong matrix, where the flag and the shards disagree."""
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
    """Partial or mixed weights, which nobody notices until the text is bad."""
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


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_a23_one_verdict_that_one_layer_flips(dtype: str, tmp_path: Path) -> None:
    """Pages of differences that nobody can judge: one line, good for a good export and bad for a perturbed one."""
    raw = {**QWEN3, "vocab_size": 400, "tie_word_embeddings": False}
    write_chat_checkpoint(tmp_path / "m", **raw)
    folder = exported_as(tmp_path / "m", tmp_path / "out", dtype=dtype)
    good = command("check", folder, "--against", tmp_path / "m", "--provider", "cpu")
    assert (good.code, good.out) == (0, "OK: the export is what it should be\n")
    assert "top-1 agrees on 100%" in good.err
    assert "KL" in good.err
    poke(folder, "model.layers.0.self_attn.o_proj.weight", perturbed)  # each number by a hundredth
    forge(folder)
    bad = command("check", folder, "--provider", "cpu")
    assert bad.code == 1
    assert bad.out.startswith("MISMATCH: golden ids")
    assert len(bad.out.splitlines()) == 1
