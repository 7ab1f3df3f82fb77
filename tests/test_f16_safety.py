"""f16 and bf16 graphs node by node, each value in its declared type: what a GPU does and a CPU hides."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import onnx
import pytest
import safetensors.numpy
from checkpoints import QWEN2, RawConfig, random_tensors, write_checkpoint
from exports import IDS, Exported, export_checkpoint
from onnx import TensorProto, helper
from onnx.reference.op_run import OpRun
from strict import (
    OPERATORS,
    GroupQueryAttention,
    SkipSimplifiedLayerNormalization,
    evaluate,
    not_finite,
)
from tolerances import F16, OF_TYPE, assert_close, difference

from qwen_onnx import contract

HEAD_DIMS = {"contrib": 128, "static-capture": 120, "static": 128}
"""By the lowering that is looked at: with 120, f16 and bf16 exports have no `contrib` graphs."""
CHANNEL = 5
NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
PROMPT, CAPACITY, PADS = 9, 16, np.array([0, 4])
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


def outlier_config(head_dim: int) -> RawConfig:
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": head_dim}
    return {**QWEN2, **shape, "tie_word_embeddings": False}


def outlier_weights(raw: RawConfig) -> dict[str, np.ndarray]:
    """Qwen2's ways, in the small: q and k biases of 200 (in layer 0), and a channel of 3,000 in every state.

    The norms' gains keep that channel small and lift the others, so that all of them count in the logits.
    """
    tensors = random_tensors(raw, seed=3)
    signs = np.random.default_rng(4).choice([-200, 200], raw["head_dim"])
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.tile(signs, 2).astype(np.float32)
    tensors["model.layers.0.self_attn.k_proj.bias"] = signs.astype(np.float32)
    tensors["model.embed_tokens.weight"][:, CHANNEL] = 3000
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensor *= 600 if name == "model.norm.weight" else 150  # logits of order 10
            tensor[CHANNEL] = 0.1
    return tensors


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


Values = dict[str, np.ndarray]
Change = Callable[[onnx.ModelProto], None]


class Ran(NamedTuple):
    """A run of a graph."""

    values: Values
    wanted: np.ndarray
    """The reference's logits, [B, V]."""

    @property
    def found(self) -> np.ndarray:
        return self.values[contract.LOGITS][:, 0]


class Run:
    """Two rows of PROMPT tokens but for PADS, and then one token each; what every node made."""

    def __init__(
        self,
        model: Exported,
        lowering: str,
        change: Change = lambda _: None,
        operators: Sequence[type[OpRun]] = OPERATORS,
    ) -> None:
        """`change` edits the graphs before they are run."""
        self.model, self.operators = model, operators
        layers, spec = model.manifest.num_hidden_layers, model.cache_spec("prefill", lowering)
        self.names = list(zip(contract.past_names(layers), contract.present_names(layers), strict=True))
        shape = (2, int(spec.shape[1]), CAPACITY, int(spec.shape[3]))
        self.cache = {past: np.zeros(shape, NUMPY[spec.dtype]) for past, _ in self.names}
        self.graphs = {entry: onnx.load(model.path(entry, lowering)) for entry in ("prefill", "decode")}
        for graph in self.graphs.values():
            change(graph)
        self.ran: list[Ran] = []
        (self._contrib if lowering == "contrib" else self._static)(lowering)

    @property
    def distance(self) -> float:
        return max(difference(ran.found, ran.wanted) for ran in self.ran)

    def _run(self, entry: str, feeds: Values, rows: slice, ends: Sequence[int] | np.ndarray) -> None:
        cache = {name: buffer[rows] for name, buffer in self.cache.items()}
        values = evaluate(self.graphs[entry], feeds | cache, self.operators)
        for past, present in self.names:
            self.cache[past][rows] = values[present]
        own = zip(range(2)[rows], ends, strict=True)
        wanted = [self.model.wanted(IDS[row, : PROMPT + 1])[end - 1] for row, end in own]
        self.ran.append(Ran(values, np.stack(wanted)))

    def _static(self, lowering: str) -> None:
        for entry, start, stop in (("prefill", 0, PROMPT), ("decode", PROMPT, PROMPT + 1)):
            slots = np.arange(stop if lowering == "static" else CAPACITY)
            feeds = {
                contract.INPUT_IDS: np.stack(
                    [np.roll(IDS[row], pad)[start:stop] for row, pad in enumerate(PADS)]
                ),
                contract.ATTENTION_MASK: (slots >= PADS[:, None]).astype(np.int64),
                contract.POSITION_IDS: np.maximum(np.arange(start, stop) - PADS[:, None], 0),
                contract.WRITE_INDICES: np.full(2, start),
            }
            self._run(entry, feeds, slice(0, 2), stop - PADS)

    def _contrib(self, _: str) -> None:
        """Row by row, the first in two chunks; then together."""
        for row, start, stop in ((0, 0, 6), (0, 6, PROMPT), (1, 0, PROMPT - PADS[1])):
            feeds: Values = {
                contract.INPUT_IDS: IDS[row : row + 1, start:stop],
                contract.SEQLENS_K: np.array([stop - 1], np.int32),
                contract.TOTAL_SEQUENCE_LENGTH: np.array(stop, np.int32),
            }
            self._run("prefill", feeds, slice(row, row + 1), [stop])
        lengths = PROMPT - PADS
        feeds = {
            contract.INPUT_IDS: np.stack([IDS[row, [length]] for row, length in enumerate(lengths)]),
            contract.SEQLENS_K: lengths.astype(np.int32),
            contract.TOTAL_SEQUENCE_LENGTH: np.array(CAPACITY, np.int32),
        }
        self._run("decode", feeds, slice(0, 2), lengths + 1)


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
    """The bf16 graphs, which no CPU runs; and this evaluator itself, in f32."""
    check(Run(exported(name, dtype), lowering))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_linked_weights_node_by_node(dtype: str, tmp_path: Path) -> None:
    """The same graphs, with queries, keys and values from matrices of their own."""
    write_checkpoint(tmp_path / "checkpoint", QWEN2, dtype="F16" if dtype == "f16" else "BF16")
    model = export_checkpoint(tmp_path / "checkpoint", tmp_path / "export", dtype, link=True)
    (tmp_path / "checkpoint" / "model.safetensors").unlink()  # onnx reads no file that has two names
    check(Run(model, "contrib"))


@pytest.mark.parametrize("kind", EVERY_KIND, ids="-".join)
def test_outliers_stay_finite_and_right(kind: Kind, outliers: Callable[[Kind], Exported]) -> None:
    """ "!!!!!!": scores beyond 65,504 or squares of a state overflow, and NaN logits choose token 0."""
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
    """Precision left to flags of a runtime (TensorRT dropped them): it lives in the types of the values."""
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
    """The check itself: it must see the scores overflow, and be content with the same change on usual weights."""
    run = changed(outliers(("f16", lowering)), lowering, "attention")
    found = not_finite(run.ran[0].values)
    attention = "GroupQueryAttention" if lowering == "contrib" else "Attention"
    assert found[0].startswith(f"model.layers.0.self_attn/{attention}")
    assert f"model.layers.0.self_attn/{attention}.scores" in found
    assert contract.LOGITS in found


@pytest.mark.parametrize("lowering", ["contrib", "static-capture"])
def test_norm_statistics_in_f16_are_caught(lowering: str, outliers: Callable[[Kind], Exported]) -> None:
    """A mean square of infinity makes zeros, not NaN: only the logits tell."""
    assert changed(outliers(("f16", lowering)), lowering, "norms").distance > 10 * F16.bound


@pytest.mark.parametrize("part", ["attention", "norms"])
@pytest.mark.parametrize(("name", "lowering"), [("qwen3", "contrib"), ("qwen2_14_2", "static-capture")])
def test_the_changes_do_no_harm_to_usual_weights(
    name: str, lowering: str, part: str, exported: Callable[..., Exported]
) -> None:
    """So what the two tests above catch is overflow, and not a graph that the change broke."""
    assert changed(exported(name, "f16"), lowering, part).distance < F16.bound
