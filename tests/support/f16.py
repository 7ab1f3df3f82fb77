"""f16 graphs run node by node, each value in its declared type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper
from onnx.reference.op_run import OpRun

from qwen_onnx import contract
from support.checkpoints import QWEN2, RawConfig, random_tensors
from support.exports import IDS, Exported, past_names, present_names
from support.strict import (
    OPERATORS,
    evaluate,
)
from support.tolerances import difference

HEAD_DIMS = {"contrib": 128, "static-capture": 120, "static": 128}
"""By the lowering that is looked at: with 120, f16 and bf16 exports have no `contrib` graphs."""
CHANNEL = 5
NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
PROMPT, CAPACITY, PADS = 9, 16, np.array([0, 4])


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
        self.names = list(zip(past_names(layers), present_names(layers), strict=True))
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

    def _run(self, entry: str, inputs: Values, rows: slice, ends: Sequence[int] | np.ndarray) -> None:
        cache = {name: buffer[rows] for name, buffer in self.cache.items()}
        values = evaluate(self.graphs[entry], inputs | cache, self.operators)
        for past, present in self.names:
            self.cache[past][rows] = values[present]
        own = zip(range(2)[rows], ends, strict=True)
        wanted = [self.model.wanted(IDS[row, : PROMPT + 1])[end - 1] for row, end in own]
        self.ran.append(Ran(values, np.stack(wanted)))

    def _static(self, lowering: str) -> None:
        for entry, start, stop in (("prefill", 0, PROMPT), ("decode", PROMPT, PROMPT + 1)):
            slots = np.arange(stop if lowering == "static" else CAPACITY)
            inputs = {
                contract.INPUT_IDS: np.stack(
                    [np.roll(IDS[row], pad)[start:stop] for row, pad in enumerate(PADS)]
                ),
                contract.ATTENTION_MASK: (slots >= PADS[:, None]).astype(np.int64),
                contract.POSITION_IDS: np.maximum(np.arange(start, stop) - PADS[:, None], 0),
                contract.WRITE_INDICES: np.full(2, start),
            }
            self._run(entry, inputs, slice(0, 2), stop - PADS)

    def _contrib(self, _: str) -> None:
        """Row by row, the first in two chunks; then together."""
        for row, start, stop in ((0, 0, 6), (0, 6, PROMPT), (1, 0, PROMPT - PADS[1])):
            inputs: Values = {
                contract.INPUT_IDS: IDS[row : row + 1, start:stop],
                contract.SEQLENS_K: np.array([stop - 1], np.int32),
                contract.TOTAL_SEQUENCE_LENGTH: np.array(stop, np.int32),
            }
            self._run("prefill", inputs, slice(row, row + 1), [stop])
        lengths = PROMPT - PADS
        inputs = {
            contract.INPUT_IDS: np.stack([IDS[row, [length]] for row, length in enumerate(lengths)]),
            contract.SEQLENS_K: lengths.astype(np.int32),
            contract.TOTAL_SEQUENCE_LENGTH: np.array(CAPACITY, np.int32),
        }
        self._run("decode", inputs, slice(0, 2), lengths + 1)


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
