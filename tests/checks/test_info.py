"""`qwen-onnx info`: what an export is, on one screen, without loading it."""

from __future__ import annotations

import collections
import re
from pathlib import Path

import onnx
import pytest

from qwen_onnx.checks.info import describe
from qwen_onnx.contract.manifest import read_manifest
from support.chats import copy_export, endless, endless_checkpoint
from support.command import command
from support.damage import WEIGHTS
from support.refusals import refused


def info(folder: Path, *arguments: str) -> list[str]:
    ran = command("info", folder, *arguments)
    assert (ran.code, ran.err) == (0, "")
    return ran.out.splitlines()


def test_one_screen_describes_the_manifest() -> None:
    lines = info(endless())
    manifest = read_manifest(endless())
    assert len(lines) < 24
    assert max(map(len, lines)) < 300
    assert "`--graphs` shows" in lines[-1]
    told = {line[:10].strip(): line[11:] for line in lines[:-1]}
    assert told["model"] == "endless"
    assert told["kind"] == "Qwen2ForCausalLM, 3 layers, 2 key/value heads of 16, vocabulary 400"
    assert told["dtype"] == "f32"
    assert told["context"] == "4,096 tokens"
    assert told["end tokens"] == ", ".join(map(str, manifest.eos_token_ids))
    assert told["target"] == "onnxruntime"
    assert told["cache"] == f"{3 * 2 * 2 * 16 * 4:,} bytes a token in float32, on cpu and cuda"
    sizes = [spec.size for spec in manifest.files.values()]
    weights = manifest.files[WEIGHTS].size
    assert told["size"] == f"{sum(sizes):,} bytes in {len(sizes)} files, weights {weights:,}"
    assert told["graphs"] == "cpu: prefill, decode, greedy, grow, score"
    assert f"{'':<10} cuda: prefill, decode, greedy, grow" in lines
    assert told["needs"] == f"ONNX Runtime {manifest.min_onnxruntime} or newer"
    for package, version in manifest.packages.items():
        assert f"{package} {version}" in told["made with"]
    assert "none yet" in told["golden ids"]


def test_the_longer_text_begins_with_the_shorter() -> None:
    shorter, longer = info(endless()), info(endless(), "--graphs")
    assert longer[: len(shorter) - 1] == shorter[:-1]
    assert longer[len(shorter) - 1] == ""


def test_files_and_their_sizes() -> None:
    lines = info(endless(), "--graphs")
    for file in endless().iterdir():
        if file.name != "export.json":
            assert any(line.split() == [f"{file.stat().st_size:,}", file.name] for line in lines)


@pytest.mark.parametrize(
    ("dtype", "float_type"), [("f32", "float32"), ("f16", "float16"), ("bf16", "bfloat16")]
)
def test_inputs_and_outputs_with_the_layers_folded(dtype: str, float_type: str) -> None:
    """The cache of all layers is one line for keys and one for values."""
    text = "\n".join(info(endless(dtype), "--graphs"))
    cache = f"{float_type} [batch_size, 2, cache_capacity, 16]"
    for line in (
        "  in   input_ids: int64 [batch_size, sequence_length]",
        "  in   attention_mask: int64 [batch_size, total_sequence_length]",
        "  in   position_ids: int64 [batch_size, sequence_length]",
        "  in   write_indices: int64 [batch_size]",
        f"  in   past_key_values.N.key: {cache}",
        f"  in   past_key_values.N.value: {cache}",
        "  out  logits: float32 [batch_size, 1, 400]",
        f"  out  present.N.key: {cache}",
        f"  out  present.N.value: {cache}",
    ):
        assert line in text
    assert ".0." not in text


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_operators_are_counted_by_domain(dtype: str) -> None:
    """So that operators which only one runtime has are seen, and none guards against NaN."""
    lines = info(endless(dtype), "--graphs")
    for graph in read_manifest(endless(dtype)).graphs:
        nodes = onnx.load(endless(dtype) / graph.file, load_external_data=False).graph.node
        start = next(i for i, line in enumerate(lines) if line.startswith(f"{graph.file}: {graph.entry}, "))
        section = lines[start : lines.index("", start) if "" in lines[start:] else None]
        counted = [line for line in section if re.match(r"  \d+ nodes? of ", line)]
        assert len(counted) == len({node.domain for node in nodes})
        [line] = [line for line in counted if " of ai.onnx: " in line]
        head, listed = line.strip().split(": ")
        own = [node.op_type for node in nodes if node.domain == ""]
        assert head == f"{len(own)} node{'s' if len(own) > 1 else ''} of ai.onnx"
        pairs = (item.rsplit(" ", 1) for item in listed.split(", "))
        assert {name: int(count) for name, count in pairs} == collections.Counter(own)
        assert "IsNaN" not in listed


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_graphs_are_small_and_of_standard_operators_but_for_contrib(dtype: str) -> None:
    """Graphs that need no fused attention are of ai.onnx alone; a layer has few nodes in all of them."""
    for graph in read_manifest(endless(dtype)).graphs:
        nodes = onnx.load(endless(dtype) / graph.file, load_external_data=False).graph.node
        fused = graph.lowering in ("contrib", "static-grouped") and graph.entry != "grow"
        contrib = {"com.microsoft"} if fused else set()
        assert {node.domain for node in nodes} == {"", *contrib}
        # Primitives only: the norms and the rotation spelled out.
        assert len(nodes) < (100 if graph.lowering == "portable" else 60) * 3


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_inputs_of_contrib_graphs(dtype: str) -> None:
    """Among them a scalar, and integers of 32 bits."""
    text = "\n".join(info(endless(dtype), "--graphs"))
    head = "decode.onnx: decode, contrib, ai.onnx 24, com.microsoft 1, for cuda\n"
    section = text[text.index(head) :].split("\n\n")[0]
    for line in ("seqlens_k: int32 [batch_size]", "total_sequence_length: int32 []"):
        assert f"  in   {line}\n" in section
    assert "GroupQueryAttention 3" in section


def test_weights_are_not_needed(tmp_path: Path) -> None:
    folder = copy_export(endless(), tmp_path / "copy")
    (folder / WEIGHTS).unlink()
    for arguments in ((), ("--graphs",)):
        assert info(folder, *arguments) == info(endless(), *arguments)


def test_recorded_golden_ids_are_counted(tmp_path: Path) -> None:
    folder = copy_export(endless(), tmp_path / "copy")
    assert command("check", folder, "--provider", "cpu").code == 0
    assert "golden ids 32" in info(folder)


def test_a_damaged_graph_is_one_line(tmp_path: Path) -> None:
    folder = copy_export(endless(), tmp_path / "copy")
    (folder / "decode.onnx").write_bytes(b"\xff" * 1000)
    assert "decode.onnx: not an ONNX file" in command("info", folder, "--graphs").error
    (folder / "decode.onnx").unlink()
    assert "decode.onnx: missing" in command("info", folder, "--graphs").error


def test_a_checkpoint_is_no_export() -> None:
    refused(describe, endless_checkpoint(), mentions=("make one with `qwen-onnx export`",))
