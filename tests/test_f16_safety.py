"""f16 and bf16 graphs node by node, each value in its declared type: what a GPU does and a CPU hides."""

from __future__ import annotations

import json
from collections.abc import Callable

import ml_dtypes
import numpy as np
import onnx
import pytest
import safetensors.numpy
from checkpoints import QWEN2, random_tensors
from exports import IDS, Exported, export_checkpoint
from onnx import TensorProto, helper
from strict import evaluate, not_finite
from tolerances import BF16, F16, F32, Tolerance, assert_close, difference

from qwen_onnx import contract

OUTLIERS = {
    **QWEN2,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
CHANNEL = 5
NUMPY = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
STRICT: dict[str, Tolerance] = {"f32": F32, "f16": F16, "bf16": BF16}
PROMPT, CAPACITY, PADS = 9, 16, np.array([0, 4])
F16_MAX = float(np.finfo(np.float16).max)


def outlier_weights() -> dict[str, np.ndarray]:
    """Qwen2's ways, in the small: q and k biases of 200 (in layer 0), and a channel of 3,000 in every state.

    The norms' gains keep that channel small and lift the others, so that all of them count in the logits.
    """
    tensors = random_tensors(OUTLIERS, seed=3)
    signs = np.random.default_rng(4).choice([-200, 200], OUTLIERS["head_dim"])
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.tile(signs, 2).astype(np.float32)
    tensors["model.layers.0.self_attn.k_proj.bias"] = signs.astype(np.float32)
    tensors["model.embed_tokens.weight"][:, CHANNEL] = 3000
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensor *= 600 if name == "model.norm.weight" else 150  # logits of order 10
            tensor[CHANNEL] = 0.1
    return tensors


@pytest.fixture(scope="module")
def outliers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    folder = tmp_path_factory.mktemp("outliers")
    (folder / "config.json").write_text(json.dumps(OUTLIERS), encoding="utf-8")
    safetensors.numpy.save_file(outlier_weights(), folder / "model.safetensors", {"format": "pt"})
    made = tmp_path_factory.mktemp("exports")
    return {dtype: export_checkpoint(folder, made / dtype, dtype) for dtype in NUMPY}


Values = dict[str, np.ndarray]
Change = Callable[[onnx.ModelProto], None]


def run(model: Exported, change: Change = lambda _: None) -> tuple[Values, Values]:
    """Every value of a prefill of two left-padded rows, and of a decode after it; `change` edits the graphs."""
    layers = model.manifest.num_hidden_layers
    spec = model.manifest.graph("prefill", "cuda").inputs[-1]
    shape = (2, int(spec.shape[1]), CAPACITY, int(spec.shape[3]))
    cache = {name: np.zeros(shape, NUMPY[model.dtype]) for name in contract.past_names(layers)}
    runs = []
    for entry, start, stop in (("prefill", 0, PROMPT), ("decode", PROMPT, PROMPT + 1)):
        graph = onnx.load(model.folder / f"{entry}.onnx")
        change(graph)
        slots = np.arange(stop)
        mask = (slots >= PADS[:, None]).astype(np.int64)
        feeds = {
            contract.INPUT_IDS: np.stack(
                [np.roll(IDS[row], pad)[start:stop] for row, pad in enumerate(PADS)]
            ),
            contract.ATTENTION_MASK: mask,
            contract.POSITION_IDS: np.maximum(slots - PADS[:, None], 0)[:, start:],
            contract.WRITE_INDICES: np.full(2, start),
        }
        values = evaluate(graph, feeds | cache)
        present = zip(contract.past_names(layers), contract.present_names(layers), strict=True)
        cache = {past: values[name] for past, name in present}
        runs.append(values)
    return runs[0], runs[1]


def distance(model: Exported, runs: tuple[Values, Values]) -> float:
    return max(difference(*pair) for pair in logits(model, runs))


def logits(model: Exported, runs: tuple[Values, Values]) -> list[tuple[np.ndarray, np.ndarray]]:
    """What was found and what is wanted, [B, V], after the prefill and after the decode."""
    pairs = []
    for values, end in zip(runs, (PROMPT, PROMPT + 1), strict=True):
        wanted = [model.wanted(IDS[row, : PROMPT + 1])[end - pad - 1] for row, pad in enumerate(PADS)]
        pairs.append((values[contract.LOGITS][:, 0], np.stack(wanted)))
    return pairs


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_node_by_node_as_the_reference(name: str, dtype: str, exported: Callable[..., Exported]) -> None:
    """The bf16 graphs, which no CPU runs; and this evaluator itself, in f32."""
    model = exported(name, dtype)
    runs = run(model)
    for found, wanted in logits(model, runs):
        assert_close(found, wanted, STRICT[dtype])


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_outliers_stay_finite_and_right(dtype: str, outliers: dict[str, Exported]) -> None:
    """ "!!!!!!": scores beyond 65,504 or squares of a state overflow, and NaN logits choose token 0."""
    model = outliers[dtype]
    runs = run(model)
    for values in runs:
        assert not_finite(values) == []
    for found, wanted in logits(model, runs):
        assert_close(found, wanted, STRICT[dtype])
    # The input is what it is said to be: f16 could hold neither these scores nor these squares, and what comes
    # of them is more than the tolerance.
    first = runs[0]
    assert np.abs(first[contract.LOGITS]).max() > 5
    assert np.abs(first["model.layers.0.self_attn/Attention.scores"]).max() > F16_MAX
    assert float(np.abs(first["model.layers.1/Add"]).max()) ** 2 > F16_MAX


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("entry", ["prefill", "decode"])
def test_what_may_overflow_is_f32_in_the_graph(entry: str, dtype: str, outliers: dict[str, Exported]) -> None:
    """Precision left to flags of a runtime (TensorRT dropped them): it lives in the types of the values."""
    runs = dict(zip(("prefill", "decode"), run(outliers[dtype]), strict=True))
    values, graph = runs[entry], onnx.load(outliers[dtype].folder / f"{entry}.onnx").graph
    protected = [node for node in graph.node if node.op_type in ("Attention", "RotaryEmbedding")]
    assert [node.op_type for node in protected] == ["RotaryEmbedding", "RotaryEmbedding", "Attention"] * 2
    for node in protected:
        stored = {tensor.name: tensor.data_type for tensor in graph.initializer}
        for name in [*node.input, *node.output]:
            if name == contract.POSITION_IDS:
                continue
            is_f32 = values[name].dtype == np.float32 if name in values else stored[name] == TensorProto.FLOAT
            assert is_f32, (node.name, name)
    norms = [node for node in graph.node if node.op_type == "RMSNormalization"]
    assert len(norms) == 5
    for node in norms:
        stash = [a.i for a in node.attribute if a.name == "stash_type"]
        assert stash == [TensorProto.FLOAT], node.name
    for node in graph.node:
        if node.op_type == "Gemm":  # and nothing else is: weights and states are in the export's type
            assert values[node.output[0]].dtype == NUMPY[dtype], node.name
    assert values[contract.LOGITS].dtype == np.float32


def attend_in_f16(model: onnx.ModelProto) -> None:
    """The natural export: attention in the type of the states, under a mask that f16 can hold."""
    nodes = []
    for node in model.graph.node:
        if node.op_type != "Attention":
            nodes.append(node)
            continue
        floor = f"{node.name}.mask"
        nodes.append(helper.make_node("Max", [node.input[3], "lowest"], [floor]))
        node.input[3] = floor
        for index, name in enumerate(node.input):
            nodes.append(helper.make_node("Cast", [name], [f"{node.name}.{index}"], to=TensorProto.FLOAT16))
            node.input[index] = f"{node.name}.{index}"
        output, node.output[0] = node.output[0], f"{node.name}.half"
        nodes += [node, helper.make_node("Cast", [node.output[0]], [output], to=TensorProto.FLOAT)]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.append(helper.make_tensor("lowest", TensorProto.FLOAT, [], [-6e4]))


def norm_in_f16(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "stash_type":
                attribute.i = TensorProto.FLOAT16


def test_attention_in_f16_is_caught(outliers: dict[str, Exported]) -> None:
    """The check itself: it must see the scores overflow, and be content with the same change on usual weights."""
    values, _ = run(outliers["f16"], attend_in_f16)
    found = not_finite(values)
    assert found[0] == "model.layers.0.self_attn/Attention.half"
    assert "model.layers.0.self_attn/Attention.scores" in found
    assert contract.LOGITS in found


def test_norm_statistics_in_f16_are_caught(outliers: dict[str, Exported]) -> None:
    """A mean square of infinity makes zeros, not NaN: only the logits tell."""
    model = outliers["f16"]
    runs = run(model, norm_in_f16)
    assert distance(model, runs) > 10 * F16.bound


def test_the_changes_do_no_harm_to_usual_weights(exported: Callable[..., Exported]) -> None:
    """So what the two tests above catch is overflow, and not a graph that the change broke."""
    model = exported("qwen3", "f16")
    for change in (attend_in_f16, norm_in_f16):
        assert distance(model, run(model, change)) < F16.bound
