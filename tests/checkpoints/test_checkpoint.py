"""open_checkpoint: stale, incomplete and hostile folders, and whether the head is the embedding or its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from qwen_onnx.checkpoints.checkpoint import INDEX_FILE, Checkpoint, open_checkpoint
from support.checkpoints import QWEN2, QWEN2_UNTIED, write_checkpoint
from support.refusals import refused

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two shards and their index."""
    write_checkpoint(tmp_path / "model", QWEN2_UNTIED, shards=2)
    return tmp_path / "model"


def edit_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    change(index)
    (folder / INDEX_FILE).write_text(json.dumps(index))


def assert_holds(checkpoint: Checkpoint, tensors: dict[str, np.ndarray]) -> None:
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert checkpoint.read(name).dtype == tensor.dtype
        np.testing.assert_array_equal(checkpoint.read(name), tensor)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_reads_what_was_stored(tmp_path: Path, dtype: Any, shards: int) -> None:
    """Of one file and of several."""
    tensors = write_checkpoint(tmp_path, QWEN2_UNTIED, dtype=dtype, shards=shards)
    checkpoint = open_checkpoint(tmp_path)
    assert_holds(checkpoint, tensors)
    assert checkpoint.notes == ()


def test_missing_shard_is_named(sharded: Path) -> None:
    """As after a download that stopped half-way (A21 in docs/faults.md)."""
    (sharded / SECOND).unlink()
    refused(open_checkpoint, sharded, mentions=(SECOND, "incomplete download"))


def test_truncated_shard_is_named(sharded: Path) -> None:
    """It is found as it is opened, before any of it is read (A21)."""
    with (sharded / SECOND).open("r+b") as file:
        file.truncate((sharded / SECOND).stat().st_size - 1)
    refused(open_checkpoint, sharded, mentions=(SECOND, "incomplete download"))


def test_other_model_beside_the_shards_is_ignored_with_a_note(sharded: Path, tmp_path: Path) -> None:
    """The shards that the index names are read, not a model.safetensors left beside them (A21)."""
    wanted = {name: tensor.numpy().copy() for name, tensor in open_checkpoint(sharded).tensors.items()}
    write_checkpoint(tmp_path / "other", QWEN2_UNTIED, seed=1)
    shutil.copy(tmp_path / "other" / "model.safetensors", sharded)
    shutil.copy(sharded / SECOND, sharded / "model-00009-of-00009.safetensors")
    checkpoint = open_checkpoint(sharded)
    assert_holds(checkpoint, wanted)
    (note,) = checkpoint.notes
    assert "model.safetensors" in note
    assert "model-00009-of-00009.safetensors" in note


def test_tensor_that_is_not_in_its_shard_is_named(sharded: Path) -> None:
    """It is not looked for in other shards (A21)."""
    edit_index(sharded, lambda index: index["weight_map"].update({EMBEDDING: SECOND}))
    refused(open_checkpoint, sharded, mentions=(SECOND, EMBEDDING))


def test_of_two_tensors_of_one_name_the_index_says_which(sharded: Path) -> None:
    """The other one may be of an earlier version of its shard, whichever comes first."""
    name = "model.norm.weight"  # the last that the index names, so that both headers are read by then
    right = open_checkpoint(sharded).read(name).copy()
    for file in (FIRST, SECOND):
        tensors = safetensors.numpy.load_file(sharded / file)
        tensors[name] = right if file == SECOND else right + 1
        safetensors.numpy.save_file(tensors, sharded / file)
    for file, wanted in ((SECOND, right), (FIRST, right + 1)):
        edit_index(sharded, lambda index, file=file: index["weight_map"].update({name: file}))
        np.testing.assert_array_equal(open_checkpoint(sharded).read(name), wanted)


def test_tensor_that_the_index_does_not_name_is_ignored_with_a_note(sharded: Path) -> None:
    """It may be of an earlier version of the shard."""
    edit_index(sharded, lambda index: index["weight_map"].pop("model.norm.weight"))
    checkpoint = open_checkpoint(sharded)
    assert "model.norm.weight" not in checkpoint.tensors
    assert any(SECOND in note and "model.norm.weight" in note for note in checkpoint.notes)


def test_shards_without_an_index(sharded: Path) -> None:
    """Read where all of them are there, by the numbers in their names (A21)."""
    wanted = {name: tensor.numpy().copy() for name, tensor in open_checkpoint(sharded).tensors.items()}
    (sharded / INDEX_FILE).unlink()
    shutil.copy(sharded / FIRST, sharded / "model-00003-of-00002.safetensors")  # its name says: no part of it
    checkpoint = open_checkpoint(sharded)
    assert_holds(checkpoint, wanted)
    assert "model-00003-of-00002.safetensors" in checkpoint.notes[0]
    (sharded / FIRST).unlink()
    refused(open_checkpoint, sharded, mentions=(sharded, FIRST, "incomplete download"))


def test_two_sets_of_shards_without_an_index(sharded: Path) -> None:
    """Which of them is meant is not guessed."""
    (sharded / INDEX_FILE).unlink()
    shutil.copy(sharded / FIRST, sharded / "model-00001-of-00001.safetensors")
    refused(open_checkpoint, sharded, mentions=(sharded, "[1, 2]"))


def test_same_tensor_in_two_shards_without_an_index(tmp_path: Path) -> None:
    """Which of them is meant is not guessed."""
    tensors = write_checkpoint(tmp_path, QWEN2)
    (tmp_path / "model.safetensors").unlink()
    for file in (FIRST, SECOND):
        safetensors.numpy.save_file({EMBEDDING: tensors[EMBEDDING]}, tmp_path / file)
    refused(open_checkpoint, tmp_path, mentions=(SECOND, EMBEDDING, FIRST))


@pytest.mark.parametrize(
    "file",
    [
        "../model.safetensors", "/model.safetensors", "sub/model.safetensors", "sub\\model.safetensors",
        "..\\model.safetensors", "..", ".", "", "a\0.safetensors", "a\n.safetensors", "config.json",
        "prefill.onnx", None, 1, True, ["model.safetensors"], {},
    ],
)  # fmt: skip
def test_index_naming_no_safetensors_file_of_the_folder(sharded: Path, file: Any) -> None:
    """Neither a path that leads out of it nor a name that an export gives to something else."""
    shutil.copy(sharded / FIRST, sharded.parent / "model.safetensors")
    edit_index(sharded, lambda index: index["weight_map"].update({EMBEDDING: file}))
    refused(open_checkpoint, sharded, mentions=(INDEX_FILE, EMBEDDING))


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "null", "1", "{}", '{"weight_map": null}', '{"weight_map": []}', '{"weight_map": {}}',
        '{"weight_map": "model.safetensors"}', "[" * 100_000, '{"weight_map": {"a\\nb": "model.safetensors"}}',
    ],
)  # fmt: skip
def test_malformed_index_is_named(sharded: Path, content: str) -> None:
    """No shard is read without it then."""
    (sharded / INDEX_FILE).write_text(content)
    refused(open_checkpoint, sharded, mentions=(INDEX_FILE,))


@pytest.mark.parametrize("file", ["pytorch_model.bin", "qwen-q4.gguf"])
def test_other_formats_are_named(tmp_path: Path, file: str) -> None:
    """A folder has weights, in a format that is not read."""
    write_checkpoint(tmp_path, QWEN2)
    (tmp_path / "model.safetensors").rename(tmp_path / file)
    refused(open_checkpoint, tmp_path, mentions=(tmp_path, "model.safetensors", file))


def test_no_folder_no_config_no_weights(tmp_path: Path) -> None:
    refused(open_checkpoint, tmp_path / "none", mentions=(tmp_path / "none",))
    refused(open_checkpoint, tmp_path, mentions=("config.json", "no such file"))
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    refused(open_checkpoint, tmp_path, mentions=(tmp_path, "model.safetensors"))
    (tmp_path / "model.safetensors").symlink_to("gone")  # a cache whose blob was deleted
    refused(open_checkpoint, tmp_path, mentions=("model.safetensors", "no such file"))


def test_architecture_is_refused_before_weights_are_touched(sharded: Path) -> None:
    """The error names it, and not some tensor (A5 in docs/faults.md)."""
    (sharded / "config.json").write_text(json.dumps({**QWEN2, "model_type": "llama", "architectures": None}))
    (sharded / FIRST).write_bytes(b"")
    refused(open_checkpoint, sharded, mentions=("llama", "Qwen2ForCausalLM", "Qwen3ForCausalLM"))


def test_stored_rotary_frequencies_are_passed_over(tmp_path: Path) -> None:
    """Old transformers versions saved them; they are computed anyway."""
    tensors = write_checkpoint(tmp_path, QWEN2)
    stored = {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    safetensors.numpy.save_file(stored, tmp_path / "model.safetensors")
    assert_holds(open_checkpoint(tmp_path), tensors)


def test_symlinked_files_as_in_the_hub_cache(sharded: Path, tmp_path: Path) -> None:
    """Its files are links into another folder (C5 in docs/faults.md)."""
    wanted = {name: tensor.numpy().copy() for name, tensor in open_checkpoint(sharded).tensors.items()}
    snapshot = tmp_path / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(sharded.iterdir())):
        (snapshot / file.name).symlink_to(Path("../..", "model", file.rename(sharded / f"blob{number}").name))
    assert_holds(open_checkpoint(snapshot), wanted)


@pytest.mark.parametrize(
    ("lm_head", "says_tied", "is_tied", "noted"),
    [
        ("own", True, False, True),
        ("own", False, False, False),
        ("copy", True, True, False),
        ("copy", False, True, False),
        ("absent", True, True, False),
    ],
)
def test_tensors_decide_whether_the_head_is_tied(
    tmp_path: Path, lm_head: Any, says_tied: bool, is_tied: bool, noted: bool
) -> None:
    """Where the flag of config.json disagrees, a note says so (A15 in docs/faults.md)."""
    tensors = write_checkpoint(tmp_path, {**QWEN2, "tie_word_embeddings": says_tied}, lm_head=lm_head)
    if is_tied:
        tensors.pop(HEAD, None)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.tie_word_embeddings == is_tied
    assert_holds(checkpoint, tensors)
    assert [HEAD in note for note in checkpoint.notes] == [True] * noted


def test_absent_head_that_is_not_tied_is_an_error(tmp_path: Path) -> None:
    """The embedding is not taken for it (A15)."""
    write_checkpoint(tmp_path, QWEN2_UNTIED, lm_head="absent")
    refused(open_checkpoint, tmp_path, mentions=(HEAD, "tie_word_embeddings"))


@pytest.mark.parametrize("place", [0, -1])
def test_heads_that_differ_in_one_number_are_two(tmp_path: Path, place: int) -> None:
    """All numbers are compared."""
    tensors = write_checkpoint(tmp_path, QWEN2, lm_head="copy", dtype="BF16")
    tensors[HEAD].flat[place] += ml_dtypes.bfloat16(1)
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    assert not open_checkpoint(tmp_path).config.tie_word_embeddings
