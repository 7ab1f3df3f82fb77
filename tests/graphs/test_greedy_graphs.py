"""The `greedy` graphs on the CPU provider, run without a runner: their outputs are the inputs of the next step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import safetensors.numpy

from qwen_onnx import contract, export
from support.checkpoints import CONFIGS, random_tensors, write_checkpoint
from support.exports import (
    IDS,
    ContribCache,
    DirectCache,
    Exported,
    LeftPadded,
    past_names,
    present_names,
)
from support.tolerances import F16_ORDER, F32_ORDER, assert_close

Export = Callable[..., Exported]

KINDS = [
    ("qwen2", "f32", "static-capture"),
    ("qwen3", "f32", "static-capture"),
    ("qwen2", "bf16", "static-capture"),  # for the CPU: computes in f32
    ("qwen2_14_2", "f16", "static-capture"),  # in f16, for heads that GroupQueryAttention does not take
    ("qwen2", "f16", "contrib"),
    ("qwen3", "f16", "contrib"),
]
every_kind = pytest.mark.parametrize(("name", "dtype", "lowering"), KINDS)
CAPACITY = 128
PROMPTS = [IDS[row, :length] for row, length in enumerate((9, 12, 5))]


def over(array: np.ndarray) -> Any:
    """An OrtValue over the array's own memory."""
    assert array.flags.c_contiguous
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


class Greedy:
    """A batch whose small inputs the graph itself writes.

    In `contrib` rows lie from slot 0 on; else they end together, with padding on the left.
    """

    def __init__(self, model: Exported, lowering: str, batch_size: int) -> None:
        self.contrib, self.session = lowering == "contrib", model.session("greedy", lowering)
        layers, spec = model.manifest.num_hidden_layers, model.cache_spec("greedy", lowering)
        self.past, self.present = past_names(layers), present_names(layers)
        shape = (batch_size, int(spec.shape[1]), CAPACITY, int(spec.shape[3]))
        self.cache = [np.zeros(shape, spec.dtype) for _ in self.past]
        self.bias = np.zeros(model.config.vocab_size, np.float32)
        self.logits = np.zeros((batch_size, 1, model.config.vocab_size), np.float32)
        self.mask = np.ones((batch_size, CAPACITY), np.int64)
        self.state: dict[str, np.ndarray] = {contract.INPUT_IDS: np.zeros((batch_size, 1), np.int64)}
        if self.contrib:
            self.state[contract.SEQLENS_K] = np.zeros(batch_size, np.int32)
        else:
            self.state[contract.POSITION_IDS] = np.zeros((batch_size, 1), np.int64)
            self.state[contract.WRITE_INDICES] = np.zeros(batch_size, np.int64)
        self.values = {name: over(array) for name, array in self.state.items()}
        """Inputs and outputs of `step`: the very same."""

    @property
    def ids(self) -> list[int]:
        """What the last step chose."""
        return [int(token_id) for token_id in self.state[contract.INPUT_IDS][:, 0]]

    def prefill(self, prompts: Sequence[np.ndarray]) -> None:
        """In two chunks."""
        if self.contrib:
            for row, prompt in enumerate(prompts):
                for chunk in halves(len(prompt)):
                    inputs = {
                        contract.INPUT_IDS: prompt[None, chunk],
                        contract.SEQLENS_K: np.array([chunk.stop - 1], np.int32),
                        contract.TOTAL_SEQUENCE_LENGTH: np.array(chunk.stop, np.int32),
                    }
                    self._run({name: over(array) for name, array in inputs.items()}, row)
            return
        longest = max(map(len, prompts))
        pads = np.array([[longest - len(prompt)] for prompt in prompts])
        ids = np.stack([np.pad(prompt, (longest - len(prompt), 0), constant_values=7) for prompt in prompts])
        self.mask[:, :longest] = np.arange(longest) >= pads
        for chunk in halves(longest):
            slots = np.arange(chunk.start, chunk.stop)
            inputs = {
                contract.INPUT_IDS: np.ascontiguousarray(ids[:, chunk]),
                contract.POSITION_IDS: np.maximum(slots - pads, 0),
                contract.WRITE_INDICES: np.full(len(prompts), chunk.start),
                contract.ATTENTION_MASK: self.mask,
            }
            self._run({name: over(array) for name, array in inputs.items()}, None)

    def step(self) -> None:
        """One token of each row, of the graph's own choice."""
        if self.contrib:
            fixed = {contract.TOTAL_SEQUENCE_LENGTH: over(np.array(CAPACITY, np.int32))}
        else:
            fixed = {contract.ATTENTION_MASK: over(self.mask)}
        self._run(self.values | fixed, None)

    def _run(self, inputs: dict[str, Any], row: int | None) -> None:
        rows = slice(None) if row is None else slice(row, row + 1)
        outputs = self.values if row is None else {n: over(a[rows]) for n, a in self.state.items()}
        binding = self.session.io_binding()
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in outputs.items():
            binding.bind_ortvalue_output(contract.NEXT + name, value)
        binding.bind_ortvalue_input(contract.LOGIT_BIAS, over(self.bias))
        binding.bind_ortvalue_output(contract.LOGITS, over(self.logits[rows]))
        for past, present, buffer in zip(self.past, self.present, self.cache, strict=True):
            shared = over(buffer[rows])
            binding.bind_ortvalue_input(past, shared)
            binding.bind_ortvalue_output(present, shared)
        self.session.run_with_iobinding(binding)


def halves(length: int) -> list[slice]:
    return [slice(0, length // 2), slice(length // 2, length)]


class Host:
    """The prefill and decode graphs, the ids chosen on the host."""

    def __init__(self, model: Exported, lowering: str, prompts: Sequence[np.ndarray]) -> None:
        self.lengths = np.array([len(prompt) for prompt in prompts])
        self.given, self.cache = np.zeros((len(prompts), 160), np.int64), None
        for row, prompt in zip(self.given, prompts, strict=True):
            row[: len(prompt)] = prompt
        if lowering == "contrib":
            self.cache = ContribCache(model, len(prompts), capacity=CAPACITY)
            self.logits = np.stack([self.cache.prefill(row, prompt) for row, prompt in enumerate(prompts)])
            return
        # An export whose graphs for the CPU are twins has no prefill and decode of static-capture.
        has = any(spec.entry == "decode" and spec.lowering == lowering for spec in model.manifest.graphs)
        cache = DirectCache(model, len(prompts), lowering=lowering if has else "static", capacity=CAPACITY)
        self.batch = LeftPadded(cache, self.lengths.max() - self.lengths, self.given)
        self.logits = self.batch.step(int(self.lengths.max()))

    def choose(self, bias: np.ndarray) -> list[int]:
        """The ids, which become the next tokens."""
        best = (self.logits + bias).argmax(axis=-1)
        self.given[np.arange(len(best)), self.lengths] = best
        self.lengths += 1
        return [int(token_id) for token_id in best]

    def step(self) -> None:
        ids = self.given[np.arange(len(self.lengths)), self.lengths - 1]
        self.logits = self.cache.decode(ids) if self.cache else self.batch.step(1)


@every_kind
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("exclude", [False, True], ids=["", "excluded"])
def test_64_ids_of_a_graph_that_feeds_itself(
    name: str, dtype: str, lowering: str, batch_size: int, exclude: bool, exported: Export
) -> None:
    """They are those that the host chooses: inputs are overwritten after they were read, and excluded ids never come.

    -inf is the bias of every third id: many of them would be chosen.
    """
    model, prompts = exported(name, dtype), PROMPTS[:batch_size]
    greedy, host, chosen = Greedy(model, lowering, batch_size), Host(model, lowering, prompts), []
    if exclude:
        greedy.bias[::3] = -np.inf
    greedy.prefill(prompts)
    for _ in range(63):
        chosen += host.choose(greedy.bias)
        assert greedy.ids == chosen[-batch_size:]
        greedy.step()
        host.step()
    assert greedy.ids == host.choose(greedy.bias)
    assert any(token_id % 3 == 0 for token_id in chosen) is not exclude
    narrow = greedy.cache[0].dtype == np.float16
    assert_close(greedy.logits[:, 0], host.logits, F16_ORDER if narrow else F32_ORDER)


@every_kind
def test_what_a_step_leaves_for_the_next(name: str, dtype: str, lowering: str, exported: Export) -> None:
    """Each row has its own place, which moves on by the tokens of the step; padding does not count."""
    greedy = Greedy(exported(name, dtype), lowering, 3)
    greedy.prefill(PROMPTS)
    for made in range(4):
        lengths = np.array([9, 12, 5]) + made  # the next token's place in its row
        if lowering == "contrib":
            assert greedy.state[contract.SEQLENS_K].tolist() == lengths.tolist()
        else:
            assert greedy.state[contract.POSITION_IDS][:, 0].tolist() == lengths.tolist()
            assert greedy.state[contract.WRITE_INDICES].tolist() == [12 + made] * 3
        greedy.step()


@every_kind
def test_a_tie_takes_the_lowest_id(name: str, dtype: str, lowering: str, exported: Export) -> None:
    """As the host does."""
    greedy = Greedy(exported(name, dtype), lowering, 3)
    greedy.bias[[200, 31, 77]] = 1e9  # beside it every logit vanishes in f32
    greedy.prefill(PROMPTS)
    assert greedy.ids == [31, 31, 31]
    greedy.step()
    assert greedy.ids == [31, 31, 31]
    assert np.abs(greedy.logits).max() < 32  # half of the last bit of 1e9


STRANGER = 300
"""The token whose embedding is changed to what is no number."""


def spoilt(folder: Path, dtype: str, value: float) -> Exported:
    """NaN makes all logits NaN. Infinity, in the head, makes one of two logits of every row infinite."""
    write_checkpoint(folder / "checkpoint", CONFIGS["qwen2_untied"])
    tensors = random_tensors(CONFIGS["qwen2_untied"])
    if np.isnan(value):
        tensors["model.embed_tokens.weight"][STRANGER] = value
    else:
        tensors["lm_head.weight"][[50, 51], 3] = value, -value
    safetensors.numpy.save_file(tensors, folder / "checkpoint" / "model.safetensors", {"format": "pt"})
    export(folder / "checkpoint", folder / "export", dtype=dtype, check=False)
    return Exported(folder / "checkpoint", folder / "export", dtype)


@pytest.mark.parametrize(("dtype", "lowering"), [("f32", "static-capture"), ("f16", "contrib")])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_numbers_choose_minus_one(
    dtype: str, lowering: str, value: float, tmp_path: Path
) -> None:
    """The row stands still then, and the rows beside it go on."""
    model = spoilt(tmp_path, dtype, value)
    prompts = [np.array([5, STRANGER, 9, 11]), np.array([5, 6, 9, 11])]
    greedy, fine = Greedy(model, lowering, 2), 1 if np.isnan(value) else 0
    greedy.prefill(prompts)
    host = Host(model, lowering, prompts[1:])
    for made in range(1, 4):
        wanted = host.choose(greedy.bias) if fine else [-1]
        assert greedy.ids == [-1, *wanted]
        moved = [0, made * fine]
        if lowering == "contrib":
            assert greedy.state[contract.SEQLENS_K].tolist() == [3 + steps for steps in moved]
        else:
            assert greedy.state[contract.POSITION_IDS][:, 0].tolist() == [3 + steps for steps in moved]
            assert greedy.state[contract.WRITE_INDICES].tolist() == [3 + steps for steps in moved]
        greedy.step()
        host.step()
