"""export_model on random checkpoints: what lies in OUT, and that it is what the manifest says."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import safetensors
import safetensors.numpy

from qwen_onnx import contract
from qwen_onnx.checkpoints.checkpoint import SIDE_FILES
from qwen_onnx.checkpoints.safetensors_file import FLOAT_DTYPES, read_header
from qwen_onnx.contract.manifest import MANIFEST_FILE, read_manifest
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.options import SessionOptions
from support.checkpoints import QWEN2, QWEN2_UNTIED, QWEN3_BIAS, write_checkpoint
from support.exporting import export_model
from support.marks import but_first
from support.text_fixtures import byte_level_tokenizer, tokenizer_json

STORED = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
BOTH = {f"{entry}.onnx" for entry in ("prefill", "decode", "greedy", "grow")}
GRAPHS = {
    "f32": BOTH | {"prefill.cuda.onnx", "decode.cuda.onnx"},
    "f16": BOTH | {name.replace(".onnx", ".cpu.onnx") for name in BOTH},
    "bf16": BOTH | {name.replace(".onnx", ".cpu.onnx") for name in BOTH},
}
"""What an export has at least, for the CPU and CUDA."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "Model-1", QWEN2, shards=2)
    return tmp_path / "Model-1"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def graph_files(folder: Path, dtype: str) -> set[str]:
    """Those of the manifest."""
    found = {graph.file for graph in read_manifest(folder).graphs}
    assert GRAPHS[dtype] <= found
    return found


def logits(folder: Path) -> np.ndarray:
    runner = Runner(folder, SessionOptions(provider="cpu", threads=1))
    return runner.prefill(runner.new_cache(), np.array([[1, 2, 300]]))


def as_in_the_hub_cache(folder: Path) -> Path:
    """Every file a link to a blob of another name elsewhere."""
    snapshot = folder.parent / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        (snapshot / file.name).symlink_to(Path("../..", folder.name, file.rename(folder / f"b{number}").name))
    return snapshot


@pytest.mark.parametrize("raw", [QWEN2, QWEN2_UNTIED, QWEN3_BIAS], ids=["tied", "untied", "qwen3"])
@pytest.mark.parametrize(
    ("source", "dtype"), but_first([("F32", "f32"), ("BF16", "f16"), ("F32", "bf16"), ("BF16", "bf16")], 2)
)
def test_out_holds_the_weights_once_and_nothing_unasked(
    tmp_path: Path, raw: dict[str, Any], source: Any, dtype: str
) -> None:
    """One weights file with each tensor once, also where head and embedding are tied (C2, C4 in docs/faults.md)."""
    tensors = write_checkpoint(tmp_path / "model", raw, dtype=source, shards=2)
    (tmp_path / "model" / "README.md").write_text("not copied")
    summary = export_model(str(tmp_path / "model"), tmp_path / "out", dtype=dtype)
    found = contents(tmp_path / "out")
    named = graph_files(tmp_path / "out", dtype)
    assert found.keys() == {MANIFEST_FILE, "weights.safetensors", "config.json"} | named
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out"}
    with safetensors.safe_open(tmp_path / "out" / "weights.safetensors", "np") as weights:
        assert set(weights.keys()) == tensors.keys() | {"rotary.cos", "rotary.sin"}
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(
                weights.get_tensor(name), tensor.astype(FLOAT_DTYPES[STORED[dtype]])
            )
        assert weights.get_tensor("rotary.cos").shape[0] == summary.manifest.context_length == 128


def test_the_manifest_describes_the_files(model: Path, tmp_path: Path) -> None:
    """Sizes and hashes of all files, names and operator sets of all graphs; and it is read back as it was written."""
    summary = export_model(str(model), tmp_path / "out", dtype="bf16")
    manifest = read_manifest(tmp_path / "out")
    assert manifest == summary.manifest
    found = contents(tmp_path / "out")
    assert manifest.files.keys() == found.keys() - {MANIFEST_FILE}
    for name, spec in manifest.files.items():
        assert (spec.size, spec.sha256) == (len(found[name]), hashlib.sha256(found[name]).hexdigest())
    assert len({graph.file for graph in manifest.graphs}) == len(manifest.graphs)
    assert GRAPHS["bf16"] <= {graph.file for graph in manifest.graphs}
    assert (manifest.model_id, manifest.revision, manifest.dtype) == ("Model-1", None, "bf16")
    assert (manifest.vocab_size, manifest.num_hidden_layers) == (320, 3)
    assert (manifest.num_key_value_heads, manifest.head_dim) == (2, 16)
    for graph in manifest.graphs:
        proto = onnx.load(tmp_path / "out" / graph.file, load_external_data=False)
        assert [spec.name for spec in graph.inputs] == [value.name for value in proto.graph.input]
        assert [spec.name for spec in graph.outputs] == [value.name for value in proto.graph.output]
        assert graph.opsets == {opset.domain: opset.version for opset in proto.opset_import}


def test_graphs_point_at_the_tensors_of_the_weights_file(model: Path, tmp_path: Path) -> None:
    """By the file's bare name, and on whole pages where the tensor is whole pages (C5, C12 in docs/faults.md)."""
    export_model(str(model), tmp_path / "out")
    places = read_header(tmp_path / "out" / "weights.safetensors")
    proto = onnx.load(tmp_path / "out" / "prefill.onnx", load_external_data=False)
    outside = [tensor for tensor in proto.graph.initializer if tensor.external_data]
    assert {tensor.name for tensor in outside} == places.keys()
    for tensor in outside:
        said = {item.key: item.value for item in tensor.external_data}
        place = places[tensor.name]
        assert said["location"] == "weights.safetensors"
        assert (int(said["offset"]), int(said["length"])) == (place.offset, place.nbytes)
        assert list(tensor.dims) == list(place.shape)
        if place.nbytes % 4096 == 0:
            assert place.offset % 4096 == 0


def test_same_model_makes_the_same_bytes(model: Path, tmp_path: Path) -> None:
    """No name is from a counter or the clock, and keys that nobody reads change no graph (A6 in docs/faults.md)."""
    export_model(str(model), tmp_path / "first")
    export_model(str(model), tmp_path / "second")
    first = contents(tmp_path / "first")
    assert first == contents(tmp_path / "second")
    (model / "config.json").write_text(
        json.dumps({**QWEN2, "transformers_version": "9.0", "torch_dtype": "x"})
    )
    export_model(str(model), tmp_path / "third")
    third = contents(tmp_path / "third")
    assert {name for name in first if first[name] != third[name]} == {"config.json", MANIFEST_FILE}


def test_relative_out_from_another_folder(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files go there and none into the current folder, which stays the same (C4 in docs/faults.md)."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    assert export_model("../Model-1").folder == Path("Model-1-f32")
    export_model(str(model), Path("../deep/er/out"), dtype="f16")
    assert Path.cwd() == tmp_path / "cwd"
    assert [path.name for path in Path().iterdir()] == ["Model-1-f32"]
    assert logits(Path("Model-1-f32")).shape == logits(tmp_path / "deep" / "er" / "out").shape == (1, 320)


def test_max_context_is_the_rows_of_the_tables(model: Path, tmp_path: Path) -> None:
    """And it is the manifest's context_length."""
    for rows in (2, 7, 128):
        out = tmp_path / str(rows)
        assert export_model(str(model), out, max_context=rows).manifest.context_length == rows
        tables = read_header(out / "weights.safetensors")
        assert tables["rotary.cos"].shape == tables["rotary.sin"].shape == (rows, 8)
    np.testing.assert_array_equal(logits(tmp_path / "7"), logits(tmp_path / "128"))


def test_side_files_are_copied_untouched(model: Path, tmp_path: Path) -> None:
    """Chat template and all; end tokens are noted in the manifest (D1, I3 in docs/faults.md)."""
    just_enough = byte_level_tokenizer().get_vocab_size()
    write_checkpoint(model, {**QWEN2, "vocab_size": just_enough}, shards=2)
    for name in SIDE_FILES:
        if name != "config.json":
            (model / name).write_bytes(b"{}\r\n")
    (model / "tokenizer.json").write_text(tokenizer_json())
    (model / "chat_template.jinja").write_bytes(b"{% for m in messages %}{{ m.content }}{% endfor %}\r\n")
    (model / "generation_config.json").write_text('{"eos_token_id": [5, 3]}')
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates/tool_use.jinja").write_bytes(b"tools\r\n")
    summary = export_model(str(model), tmp_path / "out")
    assert summary.manifest.eos_token_ids == (3, 5)
    assert summary.notes == ()
    for name in (*SIDE_FILES, "additional_chat_templates/tool_use.jinja"):
        assert name in summary.manifest.files
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()


def test_model_without_a_tokenizer_is_exported_with_a_note(model: Path, tmp_path: Path) -> None:
    """It runs on token ids."""
    (note,) = export_model(str(model), tmp_path / "out").notes
    assert "tokenizer.json" in note
    assert logits(tmp_path / "out").shape == (1, 320)


def test_head_of_a_tied_checkpoint_is_used_with_a_note(tmp_path: Path) -> None:
    """The summary has the checkpoint's notes (A15 in docs/faults.md)."""
    write_checkpoint(tmp_path / "model", QWEN2, lm_head="own")
    assert any(
        "lm_head.weight" in note for note in export_model(str(tmp_path / "model"), tmp_path / "out").notes
    )


def test_progress_counts_up_to_its_total(model: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    export_model(str(model), tmp_path / "out", progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert {total for _, total in seen} == {seen[-1][0]}


@pytest.mark.parametrize("cached", [False, True], ids=["plain", "hub cache"])
def test_link_shares_the_files_and_runs(tmp_path: Path, cached: bool) -> None:
    """Hard links, which ONNX Runtime opens; the logits are those of a copy."""
    model = tmp_path / "model"
    write_checkpoint(model, QWEN2, shards=2)
    export_model(str(model), tmp_path / "copied")
    if cached:
        model = as_in_the_hub_cache(model)
    before = contents(model)
    summary = export_model(str(model), tmp_path / "linked", link=True)
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    linked = contents(tmp_path / "linked")
    named = graph_files(tmp_path / "linked", "f32")
    assert linked.keys() == {MANIFEST_FILE, contract.EXTRA_FILE, "config.json", *shards} | named
    assert summary.manifest.files.keys() == linked.keys() - {MANIFEST_FILE}
    for name in shards:
        assert (tmp_path / "linked" / name).samefile(model / name)
        assert not (tmp_path / "linked" / name).is_symlink()
        assert summary.manifest.files[name].sha256 == hashlib.sha256(before[name]).hexdigest()
    assert read_header(tmp_path / "linked" / contract.EXTRA_FILE).keys() == {"rotary.cos", "rotary.sin"}
    np.testing.assert_array_equal(logits(tmp_path / "linked"), logits(tmp_path / "copied"))
    assert contents(model) == before


def test_hub_cache_layout_is_exported_and_runs(model: Path, tmp_path: Path) -> None:
    """Files there are links; an export has files (C5 in docs/faults.md)."""
    export_model(str(model), tmp_path / "plain")
    export_model(str(as_in_the_hub_cache(model)), tmp_path / "cached")
    assert not any(path.is_symlink() for path in (tmp_path / "cached").iterdir())
    np.testing.assert_array_equal(logits(tmp_path / "cached"), logits(tmp_path / "plain"))


def test_force_replaces_an_earlier_export(model: Path, tmp_path: Path) -> None:
    """No file of the earlier one stays."""
    export_model(str(model), tmp_path / "out", dtype="bf16")
    export_model(str(model), tmp_path / "out", dtype="f32", force=True)
    assert (tmp_path / "out" / "weights.safetensors").stat().st_size > 0
    left = {path.name for path in (tmp_path / "out").glob("*.onnx")}
    assert left == graph_files(tmp_path / "out", "f32")
    assert "prefill.cpu.onnx" not in left


def test_end_tokens_are_noted_without_a_tokenizer(tmp_path: Path) -> None:
    """generation_config.json says where answers to `--prompt-ids` end."""
    write_checkpoint(tmp_path / "model", QWEN2)
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    made = export_model(str(tmp_path / "model"), tmp_path / "out")
    assert made.manifest.eos_token_ids == (2, 7)
