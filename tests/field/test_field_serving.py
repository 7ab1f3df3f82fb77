"""docs/faults.md, chapter I: other runtimes, serving, and several conversations at once."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qwen_onnx.contract.manifest import read_manifest
from qwen_onnx.exports.layouts import triton
from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.options import SessionOptions
from support.chats import endless, write_chat_checkpoint
from support.checkpoints import QWEN3, QWEN3_HEAD_DIM_48, write_checkpoint
from support.command import command
from support.exports import ON_CPU, past_names, present_names
from support.field_runs import exported_as, graphs
from support.triton import Server, assert_solo, said
from support.triton import _stub as _stub  # for every test here: Triton's module is the stand-in

ON_DEVICE = SessionOptions(provider="cpu", threads=1, greedy_on_device=True)


def test_i1_a_triton_repository_streams_from_the_runner(tmp_path: Path) -> None:
    """The layout is a model repository that answers as it is, a response for each token."""
    write_chat_checkpoint(tmp_path / "m", **QWEN3 | {"vocab_size": 400})
    out = exported_as(tmp_path / "m", tmp_path / "repository", layout="triton")
    model = tmp_path / "repository" / "m"
    assert out == model / "1" / "export"
    assert (model / triton.CONFIG_FILE).exists()
    server = Server(model)
    try:
        prompts = ["Hello!", "The quick brown fox"]
        asked = server.ask(*({"prompt": prompt, "max_new_tokens": 12} for prompt in prompts))
        for one, prompt in zip(asked, prompts, strict=True):
            assert_solo(one.wait(), out, said(prompt), 12)
            assert len(one.sender.responses) == len(one.ids) > 1  # streamed, a response for each token
    finally:
        server.finalize()


def conversation(chat: Chat, turns: list[str], count: int) -> Iterator[int]:
    """The ids of answers to these, one after the other, the whole talk kept."""
    talk: list[dict[str, str]] = []
    for turn in turns:
        talk.append({"role": "user", "content": turn})
        text = ""
        for token in chat.generate(talk, max_new_tokens=count, ignore_eos=True):
            text += token.text
            yield token.token_id
        talk.append({"role": "assistant", "content": text})


@pytest.mark.parametrize(
    ("dtype", "options"),
    [("f32", ON_CPU), ("f16", ON_CPU), ("int8", ON_CPU), ("f32", ON_DEVICE)],
)
def test_i2_two_talks_in_turn_are_each_alone(dtype: str, options: SessionOptions) -> None:
    """Two caches on one model, token by token: each conversation has the ids it has by itself."""
    runner = Runner(endless(dtype), options)
    turns = [["Hello, dog!", "And then?"], ["你好 🔥", "1, 2, 3", "What?"]]
    alone = [list(conversation(Chat(Runner(endless(dtype), options)), own, 9)) for own in turns]
    together = itertools.zip_longest(*(conversation(Chat(runner), own, 9) for own in turns))
    found = [[token_id for token_id in ids if token_id is not None] for ids in zip(*together, strict=True)]
    assert found == alone


def test_i3_the_manifest_says_what_a_loop_needs(tmp_path: Path) -> None:
    """It is one JSON file, for a loop in any language."""
    raw = {**QWEN3_HEAD_DIM_48, "vocab_size": 400}
    write_chat_checkpoint(tmp_path / "m", **raw)
    folder = exported_as(tmp_path / "m", tmp_path / "out", dtype="f16")
    told = json.loads((folder / "export.json").read_text())
    known = {
        "num_hidden_layers": 2, "num_key_value_heads": 3, "head_dim": 48, "vocab_size": 400, "context_length": 128,
        "dtype": "f16", "eos_token_ids": [362], "architecture": "Qwen3ForCausalLM",
    }  # fmt: skip
    assert {name: told[name] for name in known} == known
    for graph in told["graphs"]:
        if graph["entry"] in ("prefill", "decode"):
            names = [value["name"] for value in (*graph["inputs"], *graph["outputs"])]
            assert {"input_ids", "logits", *past_names(2), *present_names(2)} <= set(names)
    contract = (Path(__file__).parents[2] / "docs" / "graphs.md").read_text(encoding="utf-8")
    assert "embedding/static_loop.py" in contract  # the loop itself is run under A8


@pytest.mark.parametrize(("dtype", "split"), [("f32", False), ("f16", True)])
def test_i4_a_portable_export_is_of_standard_operators_and_info_says_so(
    dtype: str, split: bool, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "m", QWEN3)
    folder = exported_as(tmp_path / "m", tmp_path / "out", dtype=dtype, target="portable", split=split)
    for spec, model in graphs(folder):
        assert {opset.domain for opset in model.opset_import} == {""}, spec.file
        assert {node.domain for node in model.graph.node} == {""}, spec.file
        assert not model.functions
    listed = command("info", folder, "--graphs").out
    assert "com.microsoft" not in listed
    assert "ai.onnx 17" in listed
    assert "com.microsoft" in command("info", endless("int8"), "--graphs").out


@pytest.mark.parametrize("raw", [QWEN3, QWEN3_HEAD_DIM_48], ids=["qwen3", "heads of 48"])
def test_i5_a_folder_for_genai_names_what_is_in_the_graph(raw: dict[str, Any], tmp_path: Path) -> None:
    """genai_config.json names the graph's inputs and outputs, all of them, and its sizes."""
    write_chat_checkpoint(tmp_path / "m", **raw | {"vocab_size": 400})
    folder = exported_as(tmp_path / "m", tmp_path / "out", layout="onnxruntime-genai")
    model = json.loads((folder / "genai_config.json").read_text())["model"]
    decoder, manifest = model["decoder"], read_manifest(folder)
    (graph,) = (g for g in manifest.graphs if g.file == decoder["filename"])
    values = {value.name for value in (*graph.inputs, *graph.outputs)}
    used = {
        re.sub("%d", str(layer), name)
        for name in (*decoder["inputs"].values(), *decoder["outputs"].values())
        for layer in range(raw["num_hidden_layers"])
    }
    assert used == values
    found = (
        decoder["head_size"],
        decoder["num_key_value_heads"],
        model["context_length"],
        model["vocab_size"],
    )
    assert found == (raw["head_dim"], raw["num_key_value_heads"], 128, 400)
    assert model["eos_token_id"] in (362, [362])
