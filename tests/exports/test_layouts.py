"""Exports for others: one graph that any runtime takes, and its files where each consumer looks for them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from qwen_onnx import export
from qwen_onnx.checks import runtimes
from qwen_onnx.checks.check import check_export
from qwen_onnx.contract import LAYOUTS
from qwen_onnx.contract.manifest import GraphSpec, is_weights, read_manifest
from qwen_onnx.exports.layouts import known
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.options import SessionOptions
from support.checkpoints import QWEN2, QWEN3, write_checkpoint
from support.command import command
from support.exports import IDS, ON_CPU
from support.refusals import refused

EXAMPLES = ["f32", "f16"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "Model"
    write_checkpoint(folder, QWEN2, shards=2)
    return folder


def nodes(path: Path) -> list[bytes]:
    return [node.SerializeToString() for node in onnx.load(path, load_external_data=False).graph.node]


def logits(folder: Path) -> np.ndarray:
    runner = Runner(folder, ON_CPU)
    cache = runner.new_cache(batch_size=3)
    first = runner.prefill(cache, IDS[:, :9])
    return np.stack([first, runner.decode(cache, IDS[:, 9:10])])


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def good(folder: Path, against: Path) -> bool:
    findings = list(check_export(folder, SessionOptions(provider="cpu"), against=str(against)))
    return all(finding.ok for finding in findings)


@pytest.mark.parametrize("dtype", EXAMPLES)
def test_portable_export_is_the_graph_that_all_tests_of_portable_graphs_hold_for(
    model: Path, tmp_path: Path, dtype: str
) -> None:
    """The graph that others embed is the one that is tested operator by operator."""
    whole = export(model, tmp_path / "whole", dtype=dtype)
    summary = export(model, tmp_path / "out", dtype=dtype, target="portable", split=True)
    names = [graph.file for graph in summary.manifest.graphs]
    assert names == ["model.onnx", "prefill.onnx", "decode.onnx", "shrink.onnx"]
    assert {graph.lowering for graph in summary.manifest.graphs} == {"portable"}
    assert nodes(summary.folder / "model.onnx") == nodes(whole.folder / "prefill.tensorrt.onnx")
    assert nodes(summary.folder / "prefill.onnx") == nodes(summary.folder / "model.onnx")
    decode = next(graph for graph in summary.manifest.graphs if graph.entry == "decode")
    assert decode.inputs[0].shape == ("batch_size", 1)
    np.testing.assert_array_equal(logits(summary.folder), logits_of_portable(whole.folder, tmp_path))
    assert good(summary.folder, model)


def logits_of_portable(folder: Path, tmp_path: Path) -> np.ndarray:
    """Of a whole export's portable graph, which the runner takes where it is the only one."""
    manifest = read(folder / "export.json")
    for graph in manifest["graphs"]:
        graph["providers"] = ["cpu"] if graph["lowering"] == "portable" else ["cuda"]
    manifest["graphs"].sort(key=lambda graph: graph["lowering"] != "portable")
    (folder / "export.json").write_text(json.dumps(manifest), encoding="utf-8")
    return logits(folder)


@pytest.mark.parametrize("dtype", EXAMPLES)
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_each_layout_is_an_export_with_its_weights_once(
    model: Path, tmp_path: Path, layout: str, dtype: str
) -> None:
    """Its weights lie there once, the manifest lists every file, and `check` finds it good."""
    target = "portable" if layout == "plain" else None
    summary = export(model, tmp_path / "out", dtype=dtype, layout=layout, target=target)
    assert (summary.manifest.layout, summary.manifest.dtype) == (layout, dtype)
    assert summary.manifest.target == ("onnxruntime" if layout == "triton" else "portable")
    assert read_manifest(summary.folder) == summary.manifest
    sizes = {
        path.relative_to(summary.folder).as_posix(): path.stat().st_size for path in files_in(summary.folder)
    }
    weights = [name for name in summary.manifest.files if is_weights(name)]
    half = sum(sizes[name] for name in weights) // 2
    assert [name for name, size in sizes.items() if size > half] == weights
    assert sizes.keys() == {"export.json", *summary.manifest.files}
    assert good(summary.folder, model)


def test_files_that_a_browser_reads_stay_below_its_limit(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are cut into files below it, and config.json has their number."""
    whole = export(model, tmp_path / "whole", layout="transformers.js")
    limit = 300_000 + (1 << 20)
    monkeypatch.setattr(known, "BROWSER_LIMIT", limit)
    summary = export(model, tmp_path / "out", layout="transformers.js")
    parts = sorted(name for name in summary.manifest.files if is_weights(name))
    assert parts == [
        "onnx/model.onnx_data",
        *(f"onnx/model.onnx_data_{index}" for index in range(1, len(parts))),
    ]
    assert len(parts) > 1
    assert all((summary.folder / name).stat().st_size <= limit for name in parts)
    told = read(summary.folder / "config.json")["transformers.js_config"]
    assert told["use_external_data_format"]["model.onnx"] == len(parts)
    np.testing.assert_array_equal(logits(summary.folder), logits(whole.folder))
    assert good(summary.folder, model)


def test_one_tensor_above_the_limit_is_told(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be cut: a note says that no browser loads it."""
    monkeypatch.setattr("qwen_onnx.exports.layouts.transformers_js.BROWSER_LIMIT", 100_000)
    summary = export(model, tmp_path / "out", layout="transformers.js")
    assert any("onnx/model.onnx_data: " in note and "2 GB" in note for note in summary.notes)


def test_transformers_js_finds_names_and_the_cache_type(model: Path, tmp_path: Path) -> None:
    """File names are those that `dtype: "fp16"` looks for, and config.json has the type of the cache."""
    summary = export(model, tmp_path / "out", dtype="f16", layout="transformers.js")
    assert {graph.file for graph in summary.manifest.graphs} == {
        "onnx/model_fp16.onnx",
        "onnx/shrink_fp16.onnx",
    }
    told = read(summary.folder / "config.json")["transformers.js_config"]
    files = {"model.onnx": 1, "model_fp16.onnx": 1}
    assert told == {"use_external_data_format": files, "kv_cache_dtype": {"fp16": "float16"}}
    other = export(model, tmp_path / "other", layout="transformers.js")
    assert read(other.folder / "config.json") == read(summary.folder / "config.json"), (
        "so one can be put in the other"
    )


@pytest.mark.parametrize("layout", ["plain", "transformers.js"])
def test_weights_can_be_links_under_the_name_that_a_consumer_wants(
    model: Path, tmp_path: Path, layout: str
) -> None:
    """`--link` makes links whatever the name is."""
    summary = export(model, tmp_path / "out", layout=layout, target="portable", link=True)
    inodes = {path.stat().st_ino for path in model.glob("*.safetensors")}
    linked = [name for name in summary.manifest.files if (summary.folder / name).stat().st_ino in inodes]
    assert len(linked) == 2
    if layout == "transformers.js":
        assert linked == ["onnx/model.onnx_data", "onnx/model.onnx_data_1"]
        assert "onnx/model.onnx_data_2" in summary.manifest.files  # the tables
    assert good(summary.folder, model)


GENERATION = {
    "do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05,
    "eos_token_id": [7, 5], "pad_token_id": 3, "bos_token_id": 2, "transformers_version": "5.0", "min_p": 0.05,
    "length_penalty": None,
}  # fmt: skip


def test_genai_config_has_all_that_generation_config_has(tmp_path: Path) -> None:
    """Both end tokens, the context, and the penalties (I5 in docs/faults.md)."""
    write_checkpoint(tmp_path / "Model", QWEN3)
    (tmp_path / "Model" / "generation_config.json").write_text(json.dumps(GENERATION), encoding="utf-8")
    summary = export(tmp_path / "Model", tmp_path / "out", layout="onnxruntime-genai", max_context=50)
    found = read(summary.folder / "genai_config.json")
    model, search = found["model"], found["search"]
    assert (model["type"], model["context_length"], model["vocab_size"]) == ("qwen3", 50, QWEN3["vocab_size"])
    assert (sorted(model["eos_token_id"]), model["pad_token_id"], model["bos_token_id"]) == ([5, 7], 3, 2)
    decoder = model["decoder"]
    assert (decoder["num_hidden_layers"], decoder["num_attention_heads"], decoder["num_key_value_heads"]) == (
        QWEN3["num_hidden_layers"], QWEN3["num_attention_heads"], QWEN3["num_key_value_heads"],
    )  # fmt: skip
    assert (decoder["hidden_size"], decoder["head_size"]) == (QWEN3["hidden_size"], QWEN3["head_dim"])
    graph = summary.manifest.graphs[0]
    inputs = {spec.name for spec in graph.inputs}
    assert decoder["filename"] == graph.file
    for name in decoder["inputs"].values():
        assert name.replace("%d", "0") in inputs
    for name in decoder["outputs"].values():
        assert name.replace("%d", "0") in {spec.name for spec in graph.outputs}
    said = ("do_sample", "temperature", "top_p", "top_k", "repetition_penalty")
    assert {name: search[name] for name in said} == {name: GENERATION[name] for name in said}
    assert (search["length_penalty"], search["max_length"]) == (1.0, 50)
    assert search["past_present_share_buffer"] is False, "the cache grows"
    assert [note for note in summary.notes if "min_p" in note], "what it cannot say is told"


def test_batches_of_optimum_are_padded_on_the_left(tmp_path: Path) -> None:
    """After padding on the right there would be nothing to go on from."""
    summary = export("tiny", tmp_path / "out", layout="optimum")
    assert read(summary.folder / "tokenizer_config.json")["padding_side"] == "left"


def test_triton_repository_holds_several_models(model: Path, tmp_path: Path) -> None:
    """`--force` replaces the model of this name and leaves the others of the repository."""
    out = tmp_path / "repository"
    (out / "other").mkdir(parents=True)
    (out / "other" / "config.pbtxt").write_text('name: "other"\n', encoding="utf-8")
    summary = export(model, out, layout="triton")
    assert summary.folder == out / "Model" / "1" / "export"
    assert {path.name for path in (out / "Model").rglob("*") if path.suffix in (".pbtxt", ".py")} == {
        "config.pbtxt", "model.py",
    }  # fmt: skip
    refused(export, model, out, layout="triton", mentions=("force=True",))
    assert export(model, out, layout="triton", dtype="int8", force=True).manifest.dtype == "int8"
    assert (out / "other" / "config.pbtxt").exists()
    refused(read_manifest, out, mentions=(str(summary.folder),))
    odd = shutil.copytree(model, tmp_path / "a model")
    refused(export, odd, tmp_path / "new", layout="triton", mentions=("a model", "rename"))
    assert not (tmp_path / "new").exists()


def test_what_genai_does_not_take_is_left_out_and_told(tmp_path: Path) -> None:
    """Values that onnxruntime-genai would refuse are replaced by its defaults, each with a note."""
    write_checkpoint(tmp_path / "Model", QWEN2)
    odd = {
        "early_stopping": "never", "temperature": "hot", "top_p": 2, "min_length": 3000, "do_sample": 1,
        "bos_token_id": [1, 2], "eos_token_id": [5, 999_999], "top_k": 7,
    }  # fmt: skip
    (tmp_path / "Model" / "generation_config.json").write_text(json.dumps(odd), encoding="utf-8")
    # `run` would refuse such a file.
    summary = export(tmp_path / "Model", tmp_path / "out", layout="onnxruntime-genai", check=False)
    found = read(summary.folder / "genai_config.json")
    wanted = {
        "early_stopping": True,
        "temperature": 1.0,
        "top_p": 1.0,
        "min_length": 0,
        "do_sample": False,
        "top_k": 7,
    }
    assert {name: found["search"][name] for name in wanted} == wanted
    assert found["model"]["eos_token_id"] == [5]
    text = " ".join(summary.notes)
    for name in (
        "early_stopping",
        "temperature",
        "top_p",
        "min_length",
        "do_sample",
        "bos_token_id",
        "999999",
    ):
        assert name in text, f"{name} is not told"
    assert "top_k" not in text


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"target": "portable", "dtype": "bf16"}, "bf16"),
        ({"target": "portable", "dtype": "int4"}, "int4"),
        ({"layout": "optimum", "target": "onnxruntime"}, "portable"),
        ({"layout": "docker"}, "transformers.js"),
        ({"target": "browser"}, "portable"),
        ({"split": True}, "target='portable'"),
        ({"layout": "triton", "split": True}, "target='portable'"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_written(
    model: Path, tmp_path: Path, options: dict[str, Any], word: str
) -> None:
    """Each of them would be an export that no runtime of its layout loads."""
    refused(export, model, tmp_path / "out", mentions=(word,), **options)
    assert not (tmp_path / "out").exists()


def test_info_names_the_runtimes_that_take_a_graph(model: Path, tmp_path: Path) -> None:
    """And those that do not."""
    whole, portable = tmp_path / "whole", tmp_path / "portable"
    export(model, whole)
    export(model, portable, layout="onnxruntime-genai")
    text = command("info", portable, "--graphs").out
    assert "target     portable, laid out for onnxruntime-genai" in text
    model_part = text[text.index("model.onnx: ") : text.index("shrink.onnx: ")]
    assert "OpenVINO" in model_part
    assert "  not in " not in model_part
    text = command("info", whole, "--graphs").out
    assert "  not in onnxruntime-genai, optimum, transformers.js, OpenVINO, tract" in text


def test_check_runs_the_golden_ids_in_another_runtime(model: Path, tmp_path: Path) -> None:
    """A default export, which other runtimes cannot run, is refused there."""
    export("tiny", tmp_path / "out", target="portable")
    done = command("check", str(tmp_path / "out"), "--runtime", "onnxruntime", "--provider", "cpu")
    assert done.code == 0
    assert "32 of 32 equal on onnxruntime" in done.err
    export("tiny", tmp_path / "whole")
    done = command("check", str(tmp_path / "whole"), "--runtime", "onnxruntime", "--provider", "cpu")
    assert "--target portable" in done.error
    assert "choose one of onnxruntime" in command("check", str(tmp_path / "out"), "--runtime", "x").err


def test_a_runtime_that_chooses_otherwise_is_a_mismatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here each logit has the other sign."""
    export("tiny", tmp_path / "out", target="portable")
    real = runtimes._onnxruntime

    def wrong(path: Path, graph: GraphSpec) -> runtimes.Step:
        step = real(path, graph)
        return lambda inputs: {name: -value for name, value in step(inputs).items()}

    monkeypatch.setattr(runtimes, "_onnxruntime", wrong)
    options = SessionOptions(provider="cpu")
    findings = list(check_export(tmp_path / "out", options, runtime="onnxruntime"))
    assert [finding.ok for finding in findings[-2:]] == [True, False]
