"""L2 to L4: checkpoints that transformers loads, whose tensors have other names, or are more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qwen_onnx.checkpoints.checkpoint import open_checkpoint
from qwen_onnx.contract.manifest import read_manifest
from qwen_onnx.errors import UserError
from support.checkpoints import QWEN2, QWEN2_UNTIED, QWEN3, QWEN3_BIAS, RawConfig, random_tensors
from support.command import command
from support.odd_checkpoints import Arrays, check_reference, export, theirs, wanted, write
from support.tolerances import F32, TRANSFORMERS_F32, assert_close

pytestmark = pytest.mark.thorough

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def bare(tensors: Arrays) -> Arrays:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


# L2: a decoder without a head.


@pytest.mark.parametrize("raw", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
@pytest.mark.parametrize("as_bare", [True, False])
def test_l2_names_without_model_are_read(raw: RawConfig, as_bare: bool, tmp_path: Path) -> None:
    """As published for embeddings, under the architecture of either class."""
    tensors = random_tensors(raw)
    architecture = raw["architectures"][0].replace("ForCausalLM", "Model" if as_bare else "ForCausalLM")
    folder = write(tmp_path / "m", {**raw, "architectures": [architecture]}, bare(tensors))
    (note,) = check_reference(folder, raw, tensors)
    assert "no tokenizer.json" in note


def test_l2_names_without_model_beside_an_own_head_and_linked(tmp_path: Path) -> None:
    """The head has its own name in both spellings; `--link` leaves the file as it is."""
    tensors = random_tensors(QWEN2_UNTIED)
    folder = write(tmp_path / "m", QWEN2_UNTIED, bare(tensors))
    assert_close(export(folder, "--link")[0], wanted(QWEN2_UNTIED, tensors), F32)


@pytest.mark.parametrize("architecture", ["Qwen2Model", "Qwen2ForCausalLM"])
def test_l2_no_head_is_said(architecture: str, tmp_path: Path) -> None:
    raw = {**QWEN2_UNTIED, "architectures": [architecture]}
    tensors = {name: tensor for name, tensor in random_tensors(raw).items() if name != HEAD}
    error = command("export", write(tmp_path / "m", raw, bare(tensors)), tmp_path / "out").error
    assert "lm_head.weight is missing" in error
    assert ("without a head" in error) is (architecture == "Qwen2Model")


def test_l2_both_spellings_of_a_tensor_are_refused(tmp_path: Path) -> None:
    tensors = bare(random_tensors(QWEN2))
    tensors["model.norm.weight"] = tensors["norm.weight"] + 1
    with pytest.raises(UserError, match=r"has both norm\.weight and model\.norm\.weight"):
        open_checkpoint(write(tmp_path / "m", QWEN2, tensors))


# L3: a tied head.


@pytest.mark.parametrize("named", ["head only", "both", "both, bare"])
def test_l3_a_tied_matrix_under_either_name(named: str, tmp_path: Path) -> None:
    tensors = random_tensors(QWEN2)
    stored = {**tensors, HEAD: tensors[EMBEDDING]}
    if named == "head only":
        del stored[EMBEDDING]
    folder = write(tmp_path / "m", QWEN2, bare(stored) if named == "both, bare" else stored)
    check_reference(folder, QWEN2, tensors)
    assert_close(export(folder, "--link")[0], wanted(QWEN2, tensors), F32)
    stored = read_manifest(tmp_path / "out").files["model.safetensors"].size
    assert stored < 2 * sum(tensor.nbytes for tensor in tensors.values())


def test_l3_a_head_alone_is_no_embedding_where_the_two_are_not_tied(tmp_path: Path) -> None:
    tensors = {name: array for name, array in random_tensors(QWEN2_UNTIED).items() if name != EMBEDDING}
    error = command("export", write(tmp_path / "m", QWEN2_UNTIED, tensors), tmp_path / "out").error
    assert "model.embed_tokens.weight" in error


# L4: more tensors than the model has.

EXTRA = [
    "v_head.summary.weight", "score.weight", "mtp.0.weight", "model.mtp.norm.weight",
    "model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq", "rotary_emb.inv_freq",
    "model.layers.1.self_attn.bias", "model.layers.1.self_attn.masked_bias", "model.layers.0.attn.masked_bias",
    "model.layers.0.self_attn.k_proj.k_scale", "model.layers.2.mlp.up_proj.weight",
    "model.layers.61.eh_proj.weight", "model.visual.patch.weight",
]  # fmt: skip


@pytest.mark.parametrize("extra", EXTRA)
def test_l4_what_no_logit_depends_on_is_named_and_left(extra: str, tmp_path: Path) -> None:
    """Whatever its type and shape; the logits are those of the model."""
    tensors = random_tensors(QWEN2_UNTIED)
    folder = write(tmp_path / "m", QWEN2_UNTIED, {**tensors, extra: np.ones((1, 64), np.int8)})
    notes = check_reference(folder, QWEN2_UNTIED, tensors)
    assert f"note: tensors that the model does not use: {extra}" in notes


def test_l4_many_are_named_in_one_short_line(tmp_path: Path) -> None:
    tensors = random_tensors(QWEN2_UNTIED)
    more = {f"mtp.{number}.{'x' * 90}": np.ones(1, np.float32) for number in range(30)}
    (note,) = open_checkpoint(write(tmp_path / "m", QWEN2_UNTIED, {**tensors, **more})).notes
    assert "(30 in all)" in note
    assert len(note) < 500


@pytest.mark.parametrize(
    ("raw", "extra", "says"),
    [
        (QWEN3, "model.layers.0.self_attn.q_proj.bias", "attention_bias"),
        (QWEN2, "model.layers.0.self_attn.o_proj.bias", "attention_bias"),
        (QWEN2, "model.layers.0.mlp.up_proj.bias", "left over"),
        (QWEN2, "model.layers.0.self_attn.q_norm.weight", "left over"),
        (QWEN2, "model.layers.0.self_attn.sinks", "left over"),
        (QWEN2, "model.norm.bias", "left over"),
        (QWEN2_UNTIED, "lm_head.bias", "left over"),
        (QWEN2, "model.layers.0.self_attn.q_proj.lora_A.weight", "adapter"),
        (QWEN2, "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight", "adapter"),
        (QWEN2, "model.layers.0.self_attn.q_proj.weight_scale_inv", "left over"),
    ],
)
def test_l4_what_may_be_meant_is_refused(raw: RawConfig, extra: str, says: str, tmp_path: Path) -> None:
    """transformers passes over a bias that its config does not speak of; whoever trained it would be surprised."""
    stored = {**random_tensors(raw), extra: np.ones(4, np.float32)}
    error = command("export", write(tmp_path / "m", raw, stored), tmp_path / "out").error
    assert extra in error
    assert says in error


def test_l4_biases_that_the_config_speaks_of_are_computed(tmp_path: Path) -> None:
    """As the refusal advises."""
    tensors = random_tensors(QWEN3_BIAS)
    check_reference(write(tmp_path / "m", QWEN3_BIAS, tensors), QWEN3_BIAS, tensors)


# With transformers, which reads the same folders.


@pytest.mark.transformers
def test_l2_l3_l4_transformers_computes_the_same(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    tensors = random_tensors(QWEN2)
    cases: dict[str, tuple[RawConfig, Arrays]] = {
        "bare": ({**QWEN2, "architectures": ["Qwen2Model"]}, bare(tensors)),
        "extra": (QWEN2, {**tensors, **{name: np.ones((1, 64), np.float32) for name in EXTRA[:4]}}),
        "head": (QWEN2, {HEAD: tensors[EMBEDDING], **{k: v for k, v in tensors.items() if k != EMBEDDING}}),
    }
    for name, (raw, stored) in cases.items():
        folder = write(tmp_path / name / "m", raw, stored)
        assert_close(export(folder)[0], theirs(folder), TRANSFORMERS_F32)
