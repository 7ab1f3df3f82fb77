"""L5, L7, L8 and M8: what a checkpoint's folder says and transformers does not mind; and what is no checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_onnx.checkpoints.config import parse_config
from qwen_onnx.checkpoints.tensor_names import quantization_note
from qwen_onnx.contract.manifest import read_manifest
from qwen_onnx.errors import UserError
from qwen_onnx.reference import rotate
from support.checkpoints import QWEN2, QWEN3, RawConfig, random_tensors
from support.command import command
from support.odd_checkpoints import check_reference, export, theirs, write
from support.tolerances import TRANSFORMERS_F32, assert_close

pytestmark = pytest.mark.thorough

# L5: dual chunk attention.


def dual(chunk: int, local: int, original: int | None = None) -> RawConfig:
    found = {"chunk_size": chunk, "local_size": local, "original_max_position_embeddings": original}
    return {**QWEN2, "dual_chunk_attention_config": found}


def dual_chunk_distances(positions: int, chunk: int, local: int) -> np.ndarray:
    """At what distance each query (row) sees each key: [positions, positions], keys ahead left out (0).

    The paper's three cases (arXiv:2402.17463, section 3): the same chunk, the one before, and all earlier ones.
    """
    stride = chunk - local
    seen = np.zeros((positions, positions), int)
    for query in range(positions):
        for key in range(query + 1):
            chunks = query // stride - key // stride
            place = query % stride
            turned = [place, min(place + stride, chunk), min(2 * stride - 1, chunk)][min(chunks, 2)]
            seen[query, key] = turned - key % stride
    return seen


@pytest.mark.parametrize(
    ("chunk", "local"), [(64, 16), (64, 32), (64, 31), (64, 48), (64, 1), (8, 7), (2, 1), (3, 2), (100, 60)]
)
def test_l5_dual_chunk_attention_is_plain_up_to_the_context(chunk: int, local: int) -> None:
    """By the formula: every distance is the true one there, and not far beyond."""
    context = parse_config(dual(chunk, local)).context_length
    true = np.tril(np.subtract.outer(np.arange(2 * chunk), np.arange(2 * chunk)))
    found = dual_chunk_distances(2 * chunk, chunk, local)
    np.testing.assert_array_equal(found[:context, :context], true[:context, :context])
    if local < chunk - 1 and context + 2 <= 2 * chunk:
        assert (found[: context + 2, : context + 2] != true[: context + 2, : context + 2]).any()
    # A rotation by the distance is what two rotations leave of a product: the reference's own.
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, 1, 16))
    frequencies = 10_000.0 ** (-np.arange(8) / 8)
    at = [(np.cos(n * frequencies)[None], np.sin(n * frequencies)[None]) for n in (40, 9, 31, 0)]
    scores = [(rotate(q, *at[i]) * rotate(k, *at[i + 1])).sum() for i in (0, 2)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-12)


@pytest.mark.parametrize(
    ("raw", "context"),
    [
        (dual(64, 16, 64), 64),
        (dual(64, 16), 64),
        (dual(64, 16, 48), 48),  # scores are scaled beyond
        (dual(64, 48), 32),  # a third chunk begins
        (dual(1_000, 8), 128),
        ({**QWEN2, "max_position_embeddings": 16_384, "dual_chunk_attention_config": {"a": 1}}, 8192),
    ],
)
def test_l5_the_context_is_where_it_is_plain(raw: RawConfig, context: int) -> None:
    assert parse_config(raw).context_length == context


def test_l5_dual_chunk_attention_is_exported_with_a_note(tmp_path: Path) -> None:
    """Plain attention's logits, a context to match, and no more on request."""
    tensors = random_tensors(QWEN2)
    folder = write(tmp_path / "m", dual(64, 16, 64), tensors)
    notes = check_reference(folder, QWEN2, tensors)
    assert [note for note in notes if "config.json" in note] == [
        "note: config.json: dual_chunk_attention_config is plain attention up to 64 positions: the export has no more"
    ]
    assert read_manifest(tmp_path / "out").context_length == 64
    assert "1 to 64 wanted" in command("export", folder, tmp_path / "o2", "--max-context", 65).error


@pytest.mark.parametrize(
    "raw",
    [
        {**QWEN2, "dual_chunk_attention_config": "yes"},
        dual(0, 1),
        dual(8, 8),
        {**dual(64, 16), "rope_scaling": {"type": "yarn", "factor": 4.0}},
    ],
)
def test_l5_other_dual_chunk_configs_are_one_line(raw: RawConfig) -> None:
    with pytest.raises(UserError, match=r"config\.json: dual_chunk_attention_config"):
        parse_config(raw)


# L7: the architecture's name.


@pytest.mark.parametrize(("raw", "prefix"), [(QWEN2, "FSDP"), (QWEN3, "DDP"), (QWEN3, "Unsloth")])
def test_l7_wrappers_of_an_architecture_are_read_with_a_note(
    raw: RawConfig, prefix: str, tmp_path: Path
) -> None:
    tensors, plain = random_tensors(raw), raw["architectures"][0]
    folder = write(tmp_path / "m", {**raw, "architectures": [prefix + plain]}, tensors)
    notes = check_reference(folder, raw, tensors)
    assert f"note: config.json: architecture {prefix}{plain} is read as {plain}, by its model_type" in notes


@pytest.mark.parametrize(
    "architecture", ["Qwen3ForCausalLM", "FSDPQwen3ForCausalLM", "Qwen2ForSequenceClassification", "Qwen2", 7]
)
def test_l7_another_architecture_is_still_another(architecture: Any) -> None:
    with pytest.raises(UserError, match="supported are"):
        parse_config({**QWEN2, "architectures": [architecture]})


# L8: files left behind.


def test_l8_an_adapter_config_beside_a_whole_model(tmp_path: Path) -> None:
    tensors = random_tensors(QWEN2)
    folder = write(tmp_path / "m", QWEN2, tensors, adapter_config={"peft_type": "LORA"})
    notes = check_reference(folder, QWEN2, tensors)
    assert "note: adapter_config.json is passed over: the model beside it is whole" in notes


@pytest.mark.parametrize("weights", ["adapter_model.safetensors", "adapter_model.bin"])
@pytest.mark.parametrize("whole", [True, False])
def test_l8_an_adapter_is_refused(weights: str, whole: bool, tmp_path: Path) -> None:
    """Also beside a model, of which nobody knows whether it was merged."""
    folder = write(tmp_path / "m", QWEN2, random_tensors(QWEN2), adapter_config={})
    (folder / weights).write_bytes((folder / "model.safetensors").read_bytes())
    if not whole:
        (folder / "model.safetensors").unlink()
    error = command("export", folder, tmp_path / "out").error
    assert weights in error
    assert "merge it into its base model first" in error


LEFT_OVER: list[RawConfig] = [
    {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    {"compression_config": {"quant_method": "compressed-tensors"}},
    {"quantization_config": "awq"},
]


@pytest.mark.parametrize("left", LEFT_OVER, ids=str)
def test_l8_a_quantization_config_over_floats_is_passed_over(left: RawConfig, tmp_path: Path) -> None:
    tensors, (key,) = random_tensors(QWEN2), left
    notes = check_reference(write(tmp_path / "m", {**QWEN2, **left}, tensors), QWEN2, tensors)
    assert [key in note for note in notes if "floats" in note] == [True]


@pytest.mark.parametrize("left", LEFT_OVER, ids=str)
@pytest.mark.parametrize("stored", ["int8", "named"])
def test_l8_quantized_weights_are_refused(left: RawConfig, stored: str, tmp_path: Path) -> None:
    tensors = random_tensors(QWEN2)
    name = "model.layers.0.mlp.up_proj.weight"
    if stored == "int8":
        tensors[name] = tensors[name].astype(np.int8)
    else:
        tensors[name.replace("weight", "weight_scale")] = np.ones(4, np.float32)
    error = command("export", write(tmp_path / "m", {**QWEN2, **left}, tensors), tmp_path / "out").error
    (key,) = left
    assert f"config.json: {key} (" in error
    assert "quantized weights are not supported" in error


def test_l8_an_index_of_quantized_names_is_refused_before_a_download(tmp_path: Path) -> None:
    """The names alone decide, where nobody knows the dtypes yet."""
    raw = {**QWEN2, **LEFT_OVER[0]}
    for name in ("a.qweight", "a.weight.absmax", "a.SCB", "a.weight_scale_inv", "a.weight_packed"):
        with pytest.raises(UserError, match="quantized weights"):
            quantization_note(raw, [name], ())
    assert quantization_note(raw, ["a.weight"], ()) is not None


# M8: what is no checkpoint.


def test_m8_gguf_is_named_whether_in_a_folder_or_alone(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "qwen-q4.gguf").write_bytes(b"GGUF")
    for verb in ("export", "run"):
        for given in (folder, folder / "qwen-q4.gguf"):
            error = command(verb, given).error
            assert "qwen-q4.gguf: GGUF is not read" in error
    (folder / "config.json").write_text(json.dumps(QWEN2))
    assert "GGUF is not read" in command("export", folder, tmp_path / "out").error


@pytest.mark.parametrize("content", ["", "{", '{"format_version": 3, "graphs": [', "[]", "null", "\x00"])
def test_m8_a_truncated_manifest_says_to_export_again(content: str, tmp_path: Path) -> None:
    (tmp_path / "export.json").write_text(content)
    for name in ("run", "info", "check"):
        error = command(name, tmp_path).error
        assert str(tmp_path / "export.json") in error
        assert "export the model again" in error


# With transformers, which reads the same folders.


@pytest.mark.transformers
def test_l5_l7_l8_transformers_computes_the_same(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    tensors = random_tensors(QWEN2)
    cases: dict[str, tuple[RawConfig, dict[str, np.ndarray]]] = {
        "wrapped": ({**QWEN2, "architectures": ["FSDPQwen2ForCausalLM"]}, tensors),
        "adapter": (QWEN2, tensors),
        "dual": (dual(64, 16, 64), tensors),
    }
    for name, (raw, stored) in cases.items():
        folder = write(tmp_path / name / "m", raw, stored)
        assert_close(export(folder)[0], theirs(folder), TRANSFORMERS_F32)
