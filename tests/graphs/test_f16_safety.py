"""f16 and bf16 graphs node by node, each value in its declared type, as a GPU computes and a CPU does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import safetensors.numpy
from onnx import TensorProto
from onnx.reference.op_run import OpRun

from qwen_onnx import contract
from support.checkpoints import QWEN2, write_checkpoint
from support.exports import Exported, export_checkpoint
from support.f16 import HEAD_DIMS, Run, attend_in_f16, norm_in_f16, outlier_config, outlier_weights
from support.strict import (
    OPERATORS,
    GroupQueryAttention,
    SkipSimplifiedLayerNormalization,
    not_finite,
)
from support.tolerances import F16, OF_TYPE, assert_close

F16_MAX = float(np.finfo(np.float16).max)

Kind = tuple[str, str]
"""An export's dtype and a lowering that it has."""
NARROW: list[Kind] = [
    (dtype, lowering) for dtype in ("f16", "bf16") for lowering in ("contrib", "static-capture")
]
EVERY_KIND: list[Kind] = [
    ("f32", "static"),
    ("f32", "static-capture"),
    ("f16", "static"),  # for the CPU: f16 weights, and f32 from there on
    ("bf16", "static"),
    *NARROW,
]


@pytest.fixture(scope="module")
def outliers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kind], Exported]:
    made: dict[tuple[str, int], Exported] = {}

    def make(kind: Kind) -> Exported:
        dtype, lowering = kind
        key = dtype, HEAD_DIMS[lowering]
        if key not in made:
            folder, raw = tmp_path_factory.mktemp("outliers") / "checkpoint", outlier_config(key[1])
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
            safetensors.numpy.save_file(outlier_weights(raw), folder / "model.safetensors", {"format": "pt"})
            made[key] = export_checkpoint(folder, folder.parent / "export", dtype)
        return made[key]

    return make


def check(run: Run) -> None:
    """Against the reference, as near as the type that the graph computes in allows."""
    for ran in run.ran:
        assert_close(ran.found, ran.wanted, OF_TYPE[next(iter(run.cache.values())).dtype.name])


@pytest.mark.parametrize(
    ("name", "dtype", "lowering"),
    [
        *((name, dtype, lowering) for name in ("qwen2", "qwen3") for dtype, lowering in EVERY_KIND[:4]),
        *((name, dtype, "static-capture") for name in ("qwen2_14_2",) for dtype in ("f16", "bf16")),
        *(
            (name, dtype, "contrib")
            for name in ("qwen2", "qwen2_untied", "qwen2_yarn", "qwen3", "qwen3_bias", "qwen3_head_dim_48")
            for dtype in ("f16", "bf16")
        ),
    ],
)
def test_node_by_node_as_the_reference(
    name: str, dtype: str, lowering: str, exported: Callable[..., Exported]
) -> None:
    """The bf16 graphs too, which no CPU runs, and the evaluator itself, in f32."""
    check(Run(exported(name, dtype), lowering))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_linked_weights_node_by_node(dtype: str, tmp_path: Path) -> None:
    """Queries, keys and values are then of a matrix each."""
    write_checkpoint(tmp_path / "checkpoint", QWEN2, dtype="F16" if dtype == "f16" else "BF16")
    model = export_checkpoint(tmp_path / "checkpoint", tmp_path / "export", dtype, link=True)
    (tmp_path / "checkpoint" / "model.safetensors").unlink()  # onnx reads no file that has two names
    check(Run(model, "contrib"))


@pytest.mark.parametrize("kind", EVERY_KIND, ids="-".join)
def test_outliers_stay_finite_and_right(kind: Kind, outliers: Callable[[Kind], Exported]) -> None:
    """Scores beyond 65,504 and squares of such states do not overflow."""
    lowering = kind[1]
    run = Run(outliers(kind), lowering)
    for ran in run.ran:
        assert not_finite(ran.values) == []
    check(run)
    # The input is what it is said to be: f16 could hold neither these scores nor these squares, and what comes
    # of them is more than the tolerance.
    first = run.ran[0].values
    attention = "GroupQueryAttention" if lowering == "contrib" else "Attention"
    total = "SkipSimplifiedLayerNormalization.1" if lowering == "contrib" else "Add"
    assert np.abs(first[contract.LOGITS]).max() > 5
    assert np.abs(first[f"model.layers.0.self_attn/{attention}.scores"]).max() > F16_MAX
    for norm in ("layers.0.post_attention_layernorm", "layers.1.input_layernorm", "norm"):
        assert float(np.abs(first[f"model.{norm}/{total}"]).max()) ** 2 > F16_MAX


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("index", [0, -1], ids=["prefill", "decode"])
def test_what_may_overflow_is_f32_in_the_graph(
    index: int, dtype: str, outliers: Callable[[Kind], Exported]
) -> None:
    """No flag of a runtime is needed for it: the precision is in the types of the values."""
    run = Run(outliers((dtype, "static-capture")), "static-capture")
    values, graph = run.ran[index].values, run.graphs["prefill" if index == 0 else "decode"].graph
    stored = {tensor.name: tensor.data_type for tensor in graph.initializer}
    protected = [node for node in graph.node if node.op_type in ("Attention", "RotaryEmbedding")]
    assert [node.op_type for node in protected] == ["RotaryEmbedding", "RotaryEmbedding", "Attention"] * 2
    for node in protected:
        for name in [*node.input, *node.output]:
            if name == contract.POSITION_IDS:
                continue
            is_f32 = values[name].dtype == np.float32 if name in values else stored[name] == TensorProto.FLOAT
            assert is_f32, (node.name, name)
    for node in graph.node:
        if node.op_type == "Gemm":  # and nothing else is: weights and states are in the export's type
            assert values[node.output[0]].dtype == next(iter(run.cache.values())).dtype != np.float32, (
                node.name
            )
    assert values[contract.LOGITS].dtype == np.float32


@pytest.mark.parametrize("kind", NARROW, ids="-".join)
def test_norms_take_their_statistics_in_f32(kind: Kind, outliers: Callable[[Kind], Exported]) -> None:
    for entry in ("prefill", "decode", "greedy"):
        graph = onnx.load(outliers(kind).path(entry, kind[1]), load_external_data=False).graph
        norms = [node for node in graph.node if "Normalization" in node.op_type]
        assert len(norms) == 5
        for node in norms:
            stash = [a.i for a in node.attribute if a.name == "stash_type"]
            # The operator of com.microsoft has no such attribute: its kernel does so by itself.
            assert stash == ([TensorProto.FLOAT] if node.op_type == "RMSNormalization" else []), node.name


def in_f16(*operators: type[OpRun]) -> list[type[OpRun]]:
    """OPERATORS, these of them with their inner values in f16, as a kernel might be written."""
    half = {operator: type(operator.__name__, (operator,), {"inner": np.float16}) for operator in operators}
    return [half.get(operator, operator) for operator in OPERATORS]


def changed(model: Exported, lowering: str, part: str) -> Run:
    """A run whose attention, or whose norms, compute in f16."""
    if lowering == "contrib":
        fused = GroupQueryAttention if part == "attention" else SkipSimplifiedLayerNormalization
        return Run(model, lowering, lambda _: None, in_f16(fused))
    return Run(model, lowering, attend_in_f16 if part == "attention" else norm_in_f16)


@pytest.mark.parametrize("lowering", ["contrib", "static-capture"])
def test_attention_in_f16_is_caught(lowering: str, outliers: Callable[[Kind], Exported]) -> None:
    """The test above sees scores overflow."""
    run = changed(outliers(("f16", lowering)), lowering, "attention")
    found = not_finite(run.ran[0].values)
    attention = "GroupQueryAttention" if lowering == "contrib" else "Attention"
    assert found[0].startswith(f"model.layers.0.self_attn/{attention}")
    assert f"model.layers.0.self_attn/{attention}.scores" in found
    assert contract.LOGITS in found


@pytest.mark.parametrize("lowering", ["contrib", "static-capture"])
def test_norm_statistics_in_f16_are_caught(lowering: str, outliers: Callable[[Kind], Exported]) -> None:
    """A mean square of infinity makes zeros, not NaN: the logits are far off."""
    assert changed(outliers(("f16", lowering)), lowering, "norms").distance > 10 * F16.bound


@pytest.mark.parametrize("part", ["attention", "norms"])
@pytest.mark.parametrize(("name", "lowering"), [("qwen3", "contrib"), ("qwen2_14_2", "static-capture")])
def test_the_changes_do_no_harm_to_usual_weights(
    name: str, lowering: str, part: str, exported: Callable[..., Exported]
) -> None:
    """So that what the two tests above catch is overflow alone."""
    assert changed(exported(name, "f16"), lowering, part).distance < F16.bound
