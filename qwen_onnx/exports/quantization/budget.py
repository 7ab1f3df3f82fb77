"""Bits where they count: which parts of a model get smaller blocks or 8 bits, so that a mean is kept."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from qwen_onnx.checkpoints.checkpoint import Checkpoint
from qwen_onnx.contract.quant import HEAD, QuantConfig, QuantPlan, part_of
from qwen_onnx.errors import UserError, option
from qwen_onnx.exports.quantization.blocks import dequantize, quantize
from qwen_onnx.exports.quantization.forward import Decoder, Floats
from qwen_onnx.exports.quantization.gptq import Hessian
from qwen_onnx.exports.quantization.text import CalibrationText
from qwen_onnx.exports.weights import rows_of

_STEPS = (
    QuantConfig(4, 32, zero_points=True, scales="F16"),
    QuantConfig(8, 64, scales="F16"),
    QuantConfig(8, 32, scales="F16"),
)
"""What a part may have instead of the plan's own, each more exact than those before it."""
_TOKENS = 256  # of the text, whose logits are computed
_LEADS_TO = {"qkv": "o", "gate_up": "down"}
"""The part whose product carries another's error into the stream."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """A way to quantize a part."""

    quant: QuantConfig
    bits: float
    """Of all its matrices."""
    loss: float
    """KL divergence that its error makes, in nats, as far as errors are small."""


def plan_of(bits: float, base: QuantPlan, choices: Mapping[str, list[Choice]], weights: int) -> QuantPlan:
    """Spend the bits that are left where each takes away the most loss.

    Args:
        bits: mean of all matrices, scales and zero points included.
        choices: of each part, the base plan's first.
        weights: numbers of all matrices.

    Raises:
        UserError: the base plan has more bits already.
    """
    left = bits * weights - sum(own[0].bits for own in choices.values())
    if left < 0:
        least = sum(own[0].bits for own in choices.values()) / weights
        raise UserError(f"{option('bits', bits)}: {least:.2f} is the least with these blocks")
    chosen = {part: own[0] for part, own in choices.items()}
    steps: list[tuple[float, str, Choice]] = []

    def offer(part: str) -> None:
        now = chosen[part]
        for better in choices[part]:
            if better.bits > now.bits and better.loss < now.loss:
                heapq.heappush(steps, ((better.loss - now.loss) / (better.bits - now.bits), part, better))

    for part in chosen:
        offer(part)
    while steps:
        _, part, better = heapq.heappop(steps)
        now = chosen[part]
        if better.bits <= now.bits or better.bits - now.bits > left:
            continue
        left -= better.bits - now.bits
        chosen[part] = better
        offer(part)
    head = chosen.pop("head").quant
    parts = tuple((part, own.quant) for part, own in chosen.items() if own.quant != choices[part][0].quant)
    return QuantPlan(base.layers, head, parts)


def matrix_weights(checkpoint: Checkpoint) -> int:
    """Numbers of all matrices that are quantized."""
    matrices = (tensor for name, tensor in checkpoint.tensors.items() if part_of(name))
    return sum(math.prod(tensor.shape) for tensor in matrices)


def measured_choices(
    checkpoint: Checkpoint, base: QuantPlan, text: CalibrationText, progress: Callable[[float], None]
) -> dict[str, list[Choice]]:
    """What each way to quantize each part would cost, over the text; every part by itself in the unrounded model."""
    matrices: dict[str, list[str]] = {}
    for name, tensor in checkpoint.tensors.items():
        if len(tensor.shape) == 2 and (part := part_of(name)):
            matrices.setdefault(part, []).append(name)
    decoder = Decoder(
        checkpoint.config, lambda name: rows_of(checkpoint.tensors[name]), text.windows.shape[1]
    )
    table = checkpoint.tensors["model.embed_tokens.weight"].numpy()
    x_SD = np.concatenate([table[ids].astype(np.float32) for ids in text.windows])
    found: dict[str, list[Choice]] = {}
    layers = checkpoint.config.num_hidden_layers
    for index in range(layers):
        progress(index / (layers + 1))
        seen: dict[str, Hessian] = {}

        def add(part: str, x_SI: Floats, seen: dict[str, Hessian] = seen) -> None:
            seen.setdefault(part, Hessian(x_SI.shape[1])).add(x_SI)

        x_SD = decoder.layer(index, x_SD, add)
        energies = {part: _energy(checkpoint, matrices[f"{index}.{part}"], own) for part, own in seen.items()}
        for part, own in seen.items():
            # In units of the stream: of what the part itself makes, and what comes of that.
            unit = energies[_LEADS_TO[part]] / energies[part] if part in _LEADS_TO else 1.0
            names = matrices[f"{index}.{part}"]
            found[f"{index}.{part}"] = [*_choices(checkpoint, names, f"{index}.{part}", base, own, unit)]
    progress(layers / (layers + 1))
    tokens = decoder.normed(x_SD)[:: max(1, len(x_SD) // _TOKENS)]
    head = _Head(lambda: rows_of(checkpoint.tensors[head_name(checkpoint)]), tokens)
    # Each token counts twice in the sums over a layer's inputs, and once for each number of the stream.
    of_stream = head.kl_of_stream() / (2 * x_SD.size)
    found = {
        part: [dataclasses.replace(each, loss=each.loss * of_stream) for each in own]
        for part, own in found.items()
    }
    found["head"] = [*_head_choices(checkpoint, matrices["head"], base, head)]
    return found


def head_name(checkpoint: Checkpoint) -> str:
    """Of the matrix that makes logits."""
    return HEAD[0] if checkpoint.config.tie_word_embeddings else HEAD[1]


class _Head:
    """Of small errors before and in the head, the KL divergence that they make: half the variance of the logits.

    KL(p || q) of logits z and z + d is Var_p(d) / 2 and terms of the third order.
    """

    def __init__(self, rows: Callable[[], Iterator[Floats]], x_SD: Floats) -> None:
        self._rows, self._x_SD = rows, x_SD
        self._highest_S1 = np.max([(x_SD @ piece.T).max(-1) for piece in rows()], axis=0)[:, np.newaxis]
        self._sum_S1 = sum(self._weights(piece).sum(-1, keepdims=True) for piece in rows())

    def _weights(self, piece: Floats) -> Floats:
        """Probabilities of the piece's tokens, but for the sum over all."""
        return np.asarray(np.exp(self._x_SD @ piece.T - self._highest_S1), np.float32)

    def kl_of_stream(self) -> float:
        """Of an error in any direction that is as large as the stream itself."""
        squares, means = 0.0, np.zeros_like(self._x_SD)
        for piece in self._rows():
            p = self._weights(piece) / self._sum_S1
            squares = squares + p @ np.square(piece).sum(-1)
            means += p @ piece
        variance = squares - np.square(means).sum(-1)
        return float(np.mean(np.square(self._x_SD).mean(-1) * variance)) / 2

    def kl_of(self, quant: QuantConfig) -> float:
        """Of the head's own rounding."""
        mean = np.zeros((len(self._x_SD), 1), np.float32)
        square = np.zeros_like(mean)
        for piece in self._rows():
            p = self._weights(piece) / self._sum_S1
            error = self._x_SD @ (piece - dequantize(quantize(piece, quant), piece.shape[1], quant)).T
            mean += (p * error).sum(-1, keepdims=True)
            square += (p * error * error).sum(-1, keepdims=True)
        return float(np.mean(square - mean * mean)) / 2


def _head_choices(checkpoint: Checkpoint, names: list[str], base: QuantPlan, head: _Head) -> Iterator[Choice]:
    """An embedding of its own is quantized as the head is."""
    weights = sum(math.prod(checkpoint.tensors[name].shape) for name in names)
    columns = checkpoint.tensors[names[0]].shape[1]
    for quant in _steps(base.of("head", columns), columns):
        yield Choice(quant, quant.bits_a_weight(columns) * weights, head.kl_of(quant))


def _choices(
    checkpoint: Checkpoint, names: list[str], part: str, base: QuantPlan, seen: Hessian, unit: float
) -> Iterator[Choice]:
    columns = checkpoint.tensors[names[0]].shape[1]
    weights = sum(checkpoint.tensors[name].shape[0] for name in names) * columns
    for quant in _steps(base.of(part, columns), columns):
        loss = unit * _energy(checkpoint, names, seen, quant)
        yield Choice(quant, quant.bits_a_weight(columns) * weights, loss)


def _steps(own: QuantConfig, columns: int) -> list[QuantConfig]:
    """The plan's own, and what has more bits."""
    steps = (step.fitting(columns) for step in _STEPS)
    more = (step for step in steps if step.bits_a_weight(columns) > own.bits_a_weight(columns))
    return [own, *dict.fromkeys(more)]


def _energy(
    checkpoint: Checkpoint, names: list[str], seen: Hessian, quant: QuantConfig | None = None
) -> float:
    """||W X||^2, or with `quant` ||(W - Q) X||^2 of W rounded."""
    total = 0.0
    for name in names:
        for rows in rows_of(checkpoint.tensors[name]):
            lost = rows if quant is None else rows - dequantize(quantize(rows, quant), rows.shape[1], quant)
            for part, sums in zip(seen.slices, seen.sums, strict=True):
                total += float(np.einsum("oi,oi->", lost[:, part] @ sums, lost[:, part]))
    return total
