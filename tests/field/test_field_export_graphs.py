"""docs/faults.md, chapter A: what the graphs of an export compute, and of which operators they are."""

from __future__ import annotations

import ast
import collections
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import static_loop
from qwen_onnx.contract.manifest import read_manifest
from qwen_onnx.runners.model import buffers
from qwen_onnx.runners.model.runner import Runner
from support.chats import write_chat_checkpoint
from support.checkpoints import QWEN3, QWEN3_BIAS, QWEN3_HEAD_DIM_48, write_checkpoint
from support.command import command
from support.exports import IDS, ON_CPU, Exported, export_random
from support.field_runs import constants, element_types, exported_as, follow, graphs, greedy, opened
from support.tolerances import F32, assert_close

Export = Callable[..., Exported]
EVERY_DTYPE: list[dict[str, Any]] = [
    {"dtype": "f32"},
    {"dtype": "f16"},
    {"dtype": "int4"},
    {"dtype": "f16", "target": "portable", "split": True},
]


@pytest.fixture(scope="module")
def every_export(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Qwen3 with biases and heads of 32, as each dtype, and portable."""
    folder = tmp_path_factory.mktemp("every")
    write_checkpoint(folder / "m", QWEN3_BIAS)
    return [exported_as(folder / "m", folder / f"{i}", **options) for i, options in enumerate(EVERY_DTYPE)]


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp("portable")
    write_checkpoint(folder / "m", QWEN3_HEAD_DIM_48)
    out = exported_as(folder / "m", folder / "out", target="portable")
    return Exported(folder / "m", out, "f32")


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("past", [0, 1, 9])
@pytest.mark.parametrize("target", ["onnxruntime", "portable"])
def test_a7_any_batch_length_and_past(
    target: str, past: int, batch_size: int, portable: Exported, exported: Export
) -> None:
    model = portable if target == "portable" else exported("qwen3_head_dim_48")
    runner = Runner(model.folder, ON_CPU)
    for length in (1, 2, 17):
        cache = runner.new_cache(batch_size=batch_size)
        if past:
            runner.prefill(cache, IDS[:batch_size, :past])
        found = runner.prefill(cache, IDS[:batch_size, past : past + length])
        wanted = [model.wanted(IDS[row, :26])[past + length - 1] for row in range(batch_size)]
        assert_close(found, np.stack(wanted), F32)


def test_a8_a_loop_of_strangers_runs_the_export(tmp_path: Path) -> None:
    """What export.json says is enough for a loop that uses nothing of this package."""
    raw = QWEN3_HEAD_DIM_48 | {"vocab_size": 400, "head_dim": 40}
    write_chat_checkpoint(tmp_path / "m", **raw)
    folder = exported_as(tmp_path / "m", tmp_path / "out")
    chat = opened(folder)
    for text in ("The quick brown fox", "é🔥好"):
        ours = [token.token_id for token in chat.generate(text, max_new_tokens=24)]
        assert static_loop.generate(folder, text, 24) == ours
    imported = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(ast.parse(Path(static_loop.__file__).read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert imported == {"json", "sys", "pathlib", "numpy", "onnxruntime", "tokenizers"}


def attributes(node: onnx.NodeProto) -> Mapping[str, Any]:
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}


def test_a12_no_graph_leaves_causality_to_the_operator(every_export: list[Path], exported: Export) -> None:
    """is_causal with fewer queries than keys means one thing to a CPU and another to CUDA: a mask says it."""
    seen = 0
    for folder in every_export:
        for spec, model in graphs(folder):
            for node in model.graph.node:
                if node.op_type == "Attention":
                    seen += 1
                    assert not attributes(node).get("is_causal", 0), (spec.file, node.name)
                    assert node.input[3], "a mask says which keys a query may look at"
    assert seen
    for name in ("qwen3_bias", "qwen2_14_2"):  # one query for five keys
        follow(exported(name), [4], 1)


def test_a13_past_and_present_go_together(every_export: list[Path]) -> None:
    """Of Attention and GroupQueryAttention; one without the other would fail at run time only."""
    places = {"Attention": ([4, 5], [1, 2]), "GroupQueryAttention": ([3, 4], [1, 2])}
    seen = collections.Counter[str]()

    def there(names: Any, indices: list[int]) -> list[bool]:
        return [index < len(names) and bool(names[index]) for index in indices]

    for folder in every_export:
        for spec, model in graphs(folder):
            for node in model.graph.node:
                if node.op_type in places:
                    past, present = places[node.op_type]
                    assert there(node.input, past) == there(node.output, present), (spec.file, node.name)
                    seen[node.op_type] += 1
    assert set(seen) == set(places)


PLAIN = {
    "Add", "And", "Cast", "Concat", "Flatten", "Gather", "GatherND", "Less", "LessOrEqual", "Max", "Min",
    "Mul", "Neg", "Range", "ReduceMax", "Reshape", "Shape", "Sigmoid", "Slice", "Split", "Squeeze", "Sub",
    "Transpose", "Unsqueeze", "Where",
}  # fmt: skip
CHOICE = {"ArgMax", "MatMul"}  # of the next token, in `greedy` only
STATIC = PLAIN | {"Gemm", "RMSNormalization", "RotaryEmbedding", "TensorScatter"}
QUANTIZED = {"MatMulNBits", "GatherBlockQuantized"}
ALLOWED = {
    "static": STATIC | {"Attention"},
    "static-capture": STATIC | {"Attention"},
    "static-grouped": STATIC | QUANTIZED | {"MatMul", "Softmax", "SkipSimplifiedLayerNormalization"},
    "contrib": PLAIN
    | QUANTIZED
    | {"FusedMatMul", "GroupQueryAttention", "QuickGelu", "RMSNormalization"}
    | {"SkipSimplifiedLayerNormalization"},
    "portable": PLAIN - {"Flatten", "LessOrEqual", "Neg", "Range", "Shape"}
    | {"CumSum", "Div", "Equal", "MatMul", "ReduceMean", "Softmax", "Sqrt"},
}  # fmt: skip
ANY = frozenset().union(*ALLOWED.values())  # of a lowering that has no list: nothing new


def test_a14_each_target_has_its_operators_and_says_so(every_export: list[Path]) -> None:
    """Each lowering has a list of operators, and the manifest has the opsets of each graph."""
    for folder in every_export:
        manifest = read_manifest(folder)
        for spec, model in graphs(folder):
            where = (manifest.dtype, spec.file)
            operators = {node.op_type for node in model.graph.node}
            allowed = ALLOWED.get(spec.lowering, ANY) | (CHOICE if spec.entry == "greedy" else set())
            assert operators <= allowed, (where, operators - allowed)
            assert {opset.domain: opset.version for opset in model.opset_import} == spec.opsets, where
            assert spec.opsets[""] == (17 if spec.lowering == "portable" else 24), where
            if "tensorrt" in spec.providers:
                assert spec.opsets.keys() == {""}, where
            if "cuda" in spec.providers:  # f32 has no kernel of fused attention there
                assert manifest.dtype != "f32" or "GroupQueryAttention" not in operators, where
            for node in model.graph.node:  # the past as an input is a copy at each step
                assert node.op_type != "Attention" or len([n for n in node.input if n]) == 4, where


@pytest.mark.parametrize("name", ["qwen2_14_2", "qwen3", "qwen2_yarn"])
def test_a17_left_padded_rows_are_each_prompt_alone(name: str, exported: Export) -> None:
    """Positions count from the first token of a row, not from slot 0."""
    runner, lengths, longest = Runner(exported(name).folder, ON_CPU), [3, 5, 17], 17
    prompts = np.zeros((3, longest), np.int64)
    mask = np.zeros((3, longest), np.int64)
    for row, length in enumerate(lengths):
        prompts[row, -length:], mask[row, -length:] = IDS[row, :length], 1
    together = greedy(runner, prompts, mask, 8)
    for row, length in enumerate(lengths):
        alone = greedy(runner, IDS[row : row + 1, :length], None, 8)
        assert together[row].tolist() == alone[0].tolist()


@pytest.mark.parametrize("target", ["onnxruntime", "portable"])
def test_a18_rows_of_padding_only_are_finite(target: str, portable: Exported, exported: Export) -> None:
    """Of chunks of 2, two are padding alone: neither logits nor cache get NaN from a fully masked row."""
    model = portable if target == "portable" else exported("qwen3_head_dim_48")
    runner = Runner(model.folder, ON_CPU, prefill_chunk=2)
    cache, mask = runner.new_cache(batch_size=2), np.ones((2, 8), np.int64)
    mask[1, :5] = 0
    ids = np.stack([IDS[0, :8], np.roll(IDS[1], 5)[:8]])
    steps = [runner.prefill(cache, ids, mask)]
    steps += [runner.decode(cache, IDS[:2, 8:9]) for _ in range(2)]
    assert np.isfinite(np.stack(steps)).all()
    assert all(np.isfinite(buffer.numpy()).all() for buffer in cache.buffers)
    assert_close(steps[0][1], model.wanted(IDS[1, :3])[-1], F32)


def test_a18_fills_survive_adding_a_score(every_export: list[Path]) -> None:
    """Twice the value of a mask is a finite number of its type: -65504 and -40 would be -inf in f16."""
    fills = 0
    for folder in every_export:
        for spec, model in graphs(folder):
            chosen = {name for node in model.graph.node if node.op_type == "Where" for name in node.input[1:]}
            for name, value in constants(model).items():
                if name in chosen and value.dtype.kind == "f" and value.min() < -1e3:
                    fills += 1
                    assert np.isfinite(2 * value).all(), (spec.file, name)
    assert fills > 10


@pytest.mark.parametrize(
    ("name", "overrides"),
    [("qwen2_14_2", {"max_position_embeddings": 64}), ("qwen2_yarn", {}), ("qwen3_head_dim_48", {})],
)
def test_a19_steps_after_prompts_around_each_threshold(
    name: str, overrides: dict[str, Any], exported: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half the context, a chunk, a bucket of the cache and YaRN's length are 32 here; logits are right past each."""
    monkeypatch.setattr(buffers, "SMALLEST_CAPACITY", 32)
    model = exported(name, **overrides)
    for prompt in (31, 32, 33, 60):
        follow(model, [prompt], 4, prefill_chunk=32)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_a22_a_layer_is_a_few_nodes_and_info_counts_them(dtype: str, tmp_path: Path) -> None:
    """No guards and no leftovers of a tracer are among them."""
    few, more = (export_random(tmp_path / f"{n}", QWEN3, dtype, num_hidden_layers=n) for n in (2, 3))
    listed = command("info", more.folder, "--graphs").out
    for (spec, small), (_, large) in zip(graphs(few.folder), graphs(more.folder), strict=True):
        counts = [collections.Counter(node.op_type for node in model.graph.node) for model in (small, large)]
        layer = counts[1] - counts[0]
        assert layer.total() <= {"contrib": 25, "portable": 95}.get(spec.lowering, 45), (spec.file, layer)
        assert not set(layer) & {"IsNaN", "If", "Loop", "Where", "Constant", "Identity", "Shape", "Expand"}
        assert counts[0].total() - 2 * layer.total() < 45, spec.file
        told = listed.partition(f"\n{spec.file}: ")[2].partition("\n\n")[0]
        for operator, count in counts[1].items():
            assert f" {operator} {count}" in told, spec.file


def test_a22_types_are_written_beside_every_value(every_export: list[Path]) -> None:
    """A viewer can show where f32 begins."""
    for folder in every_export:
        for spec, model in graphs(folder):
            types = element_types(model)
            unknown = [
                name for node in model.graph.node for name in node.output if name and not types.get(name)
            ]
            assert not unknown, (spec.file, unknown[:3])
