"""The f16 `contrib` graphs on the CPU provider, run without a runner, and what lies in the files of both types.

The provider has the operators of com.microsoft for f16, not for bf16. NaN in slots that are not live does not reach
its GroupQueryAttention: it multiplies a row's live slots only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from qwen_onnx import contract
from qwen_onnx.checkpoints.safetensors_file import StoredTensor, read_header
from qwen_onnx.exports.graph_file import StoredParameter, save_graph
from qwen_onnx.exports.layouts.known import choose_layout
from qwen_onnx.exports.plan import ExportKind, build_planned, graph_plans
from support.checkpoints import CONFIGS, write_checkpoint
from support.exports import IDS, ContribCache, Exported, export_checkpoint
from support.tolerances import EXACT, F16, F16_ORDER, assert_close

Export = Callable[..., Exported]

NAMES = ["qwen2", "qwen2_untied", "qwen2_yarn", "qwen3", "qwen3_bias", "qwen3_head_dim_48"]
ENTRIES = ["prefill", "decode", "greedy"]
LENGTHS = [3, 17, 40]
"""Of three prompts in one batch."""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", [1, 2, 17, 97])
def test_prefill_of_any_length(name: str, tokens: int, exported: Export) -> None:
    """The logits are of the last token, and the next one goes on from there."""
    model = exported(name, "f16")
    cache, wanted = ContribCache(model, 1), model.wanted(IDS[0, :98])
    assert_close(cache.prefill(0, IDS[0, :tokens]), wanted[tokens - 1], F16)
    assert_close(cache.decode(IDS[:1, tokens])[0], wanted[tokens], F16)


@pytest.mark.parametrize("name", NAMES)
def test_chunks_and_then_64_tokens(name: str, exported: Export) -> None:
    """Each chunk sees what was before it, and the last token is as near to the reference as the first."""
    model = exported(name, "f16")
    cache, wanted, end = ContribCache(model, 1), model.wanted(IDS[0, :96]), 0
    for tokens in (5, 17, 1, 2, 7):
        end += tokens
        assert_close(cache.prefill(0, IDS[0, end - tokens : end]), wanted[end - 1], F16)
    for slot in range(end, end + 64):
        assert_close(cache.decode(IDS[:1, slot])[0], wanted[slot], F16)


def ragged(
    model: Exported, *, bound: bool = True, unread: float = np.nan, live_total: bool = False
) -> np.ndarray:
    """LENGTHS tokens of three rows, in two chunks each, and 20 of all: logits [step, row, V] of the latter."""
    cache = ContribCache(model, 3, bound=bound, unread=unread)
    for row, length in enumerate(LENGTHS):
        cache.prefill(row, IDS[row, :2])
        cache.prefill(row, IDS[row, 2:length])
    logits = []
    for step in range(20):
        ids = IDS[np.arange(3), np.array(LENGTHS) + step]
        logits.append(cache.decode(ids, total=max(LENGTHS) + step + 1 if live_total else None))
    return np.stack(logits)


@pytest.mark.parametrize("name", NAMES)
def test_rows_filled_one_at_a_time_and_decoded_together(name: str, exported: Export) -> None:
    """Each row has its own length, and its own slots are written."""
    model = exported(name, "f16")
    found = ragged(model)
    for row, length in enumerate(LENGTHS):
        assert_close(found[:, row], model.wanted(IDS[row, : length + 20])[length:], F16)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "options",
    [{"unread": 6e4}, {"unread": 0.0}, {"live_total": True}, {"bound": False}],
    ids=["large", "zeros", "total", "plain"],
)
def test_the_bits_do_not_depend_on_how_a_step_is_given(
    name: str, options: dict[str, Any], exported: Export
) -> None:
    """Not on unread slots, capacity or live length as total_sequence_length of a decode, or shared buffers."""
    model = exported(name, "f16")
    assert_close(ragged(model, **options), ragged(model), EXACT)


# What lies in the files.


def proto(model: Exported, entry: str) -> onnx.ModelProto:
    return onnx.load(model.path(entry, "contrib"), load_external_data=False)


def without_types(model: onnx.ModelProto, own: int) -> bytes:
    """The graph with its own type replaced by another, and without the offsets of its weights."""
    graph = model.graph
    for tensor in graph.initializer:
        if tensor.external_data:
            del tensor.external_data[:]
            assert tensor.data_type == (TensorProto.FLOAT if tensor.name.startswith("rotary.") else own)
            tensor.data_type = TensorProto.UNDEFINED
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == own:
            value.type.tensor_type.elem_type = TensorProto.UNDEFINED
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.i == own:
                attribute.i = TensorProto.UNDEFINED
    return model.SerializeToString(deterministic=True)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", NAMES)
def test_f16_and_bf16_graphs_differ_in_types_only(name: str, entry: str, exported: Export) -> None:
    """So that f16, which runs here, stands for bf16, which no CPU runs."""
    halves = [
        without_types(proto(exported(name, dtype), entry), own)
        for dtype, own in (("f16", TensorProto.FLOAT16), ("bf16", TensorProto.BFLOAT16))
    ]
    assert halves[0] == halves[1]


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_packed_matrices_are_views_of_the_checkpoints_own(name: str, dtype: str, exported: Export) -> None:
    """There is no second copy: each spans whole tensors that lie side by side."""
    model = exported(name, dtype)
    places = read_header(model.folder / contract.WEIGHTS_FILE)
    assert not [weight for weight in places if "qkv" in weight or "gate_up" in weight]
    assert places.keys() == read_header(exported(name).folder / contract.WEIGHTS_FILE).keys()
    for entry in ENTRIES:
        read: list[str] = []
        for tensor in proto(model, entry).graph.initializer:
            if not tensor.external_data:
                continue
            own = packed_places(tensor.name, places)
            said = {item.key: item.value for item in tensor.external_data}
            assert said["location"] == contract.WEIGHTS_FILE
            assert int(said["offset"]) == own[0].offset
            assert int(said["length"]) == sum(place.nbytes for place in own)
            assert list(tensor.dims) == [sum(place.shape[0] for place in own), *own[0].shape[1:]]
            read += [place.name for place in own]
        assert sorted(read) == sorted(places)


def packed_places(name: str, places: dict[str, StoredTensor]) -> list[StoredTensor]:
    """The tensors that an initializer spans, in order."""
    for packed, parts in (("qkv_proj", ("q", "k", "v")), ("gate_up_proj", ("gate", "up"))):
        if packed in name:
            return [places[name.replace(packed, f"{part}_proj")] for part in parts]
    return [places[name]]


@pytest.mark.parametrize("part", ["self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj"])
def test_weights_that_lie_apart_are_not_read_as_one(part: str, exported: Export, tmp_path: Path) -> None:
    """Where another order of the file leaves a hole, or another tensor between them."""
    model = exported("qwen2", "f16")
    places = {
        name: StoredParameter(contract.WEIGHTS_FILE, place.offset, place.nbytes)
        for name, place in read_header(model.folder / contract.WEIGHTS_FILE).items()
    }
    layout, _ = choose_layout("plain", None, "f16")
    plans = graph_plans(model.config, ExportKind("f16", layout))
    plan = next(plan for plan in plans if plan.lowering.name == "contrib")

    def save(stored: dict[str, StoredParameter]) -> None:
        save_graph(build_planned(plan, model.config, 128), tmp_path / "graph.onnx", stored)

    save(places)
    moved = f"model.layers.1.{part}.weight"
    for place in (
        places[moved]._replace(offset=places[moved].offset + 4096),
        places[moved]._replace(file="another.safetensors"),
    ):
        with pytest.raises(ValueError, match="side by side"):
            save(places | {moved: place})


@pytest.mark.parametrize("name", ["qwen2", "qwen3_bias"])
def test_linked_weights_are_read_one_by_one_to_the_same_logits(name: str, tmp_path: Path) -> None:
    """A checkpoint's own file may have q, k and v in any order and place."""
    write_checkpoint(tmp_path / "checkpoint", CONFIGS[name], dtype="F16", shards=2)
    packed = export_checkpoint(tmp_path / "checkpoint", tmp_path / "packed", "f16")
    linked = export_checkpoint(tmp_path / "checkpoint", tmp_path / "linked", "f16", link=True)
    for entry in ENTRIES:
        names = [tensor.name for tensor in proto(linked, entry).graph.initializer]
        assert not [weight for weight in names if "qkv" in weight or "gate_up" in weight]
        assert "model.layers.1.self_attn.k_proj.weight" in names
    found = ragged(linked)
    assert_close(found, ragged(packed), F16_ORDER)
    for row, length in enumerate(LENGTHS):
        assert_close(found[:, row], linked.wanted(IDS[row, : length + 20])[length:], F16)
