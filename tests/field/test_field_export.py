"""docs/faults.md, chapter A: from a checkpoint to an export that holds what it should."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_onnx.checkpoints.safetensors_file import read_header
from qwen_onnx.contract.manifest import read_manifest
from qwen_onnx.exports.graph_file import verify
from qwen_onnx.runners.model.runner import Runner
from support.chats import write_chat_checkpoint
from support.checkpoints import QWEN2_14_2, QWEN3, QWEN3_BIAS, write_checkpoint
from support.command import child, command
from support.damage import forge, perturbed, poke
from support.exports import IDS, ON_CPU, Exported
from support.field_runs import exported_as, follow, graphs

pytestmark = pytest.mark.thorough

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
    """Projections and cache have the head size of the config, whatever hidden_size over heads is."""
    model = exported(name, **overrides)
    heads = model.config.num_attention_heads
    layer = read_header(model.folder / "weights.safetensors")
    assert layer["model.layers.0.self_attn.q_proj.weight"].shape == (heads * size, 64)
    assert layer["model.layers.0.self_attn.o_proj.weight"].shape == (64, heads * size)
    runner = follow(model, [5], 3)
    assert runner.new_cache().buffers[0].shape()[3] == runner.manifest.head_dim == size


@pytest.mark.parametrize("dtype", ["f32", "f16", "int8"])
def test_a2_cache_has_key_value_heads(dtype: str, tmp_path: Path) -> None:
    """2 heads for 14 of queries, in every graph; the runner reads it from the graph, not from config.json."""
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
    """TensorRT refuses any other: "A shape tensor must be a vector tensor"."""
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
    """`check` fails where one norm computes otherwise, though every hash agrees."""
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


def test_a6_export_without_torch_and_transformers_is_the_same(tmp_path: Path) -> None:
    """Every file has the same bytes."""
    write_checkpoint(tmp_path / "m", QWEN3_BIAS, dtype="BF16")
    here = exported_as(tmp_path / "m", tmp_path / "here", dtype="bf16")
    program = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None"
    with child("export", tmp_path / "m", tmp_path / "there", "--dtype", "bf16", program=program) as process:
        _, err = process.communicate()
    assert process.returncode == 0, err
    files = read_manifest(here).files
    assert len(files) > 12
    assert files == read_manifest(tmp_path / "there").files  # sizes and sha256


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_a23_one_verdict_that_one_layer_flips(dtype: str, tmp_path: Path) -> None:
    """The verdict is one line: OK for a good export, MISMATCH for one whose layer is perturbed."""
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
