"""Graphs that read the whole cache: a step of one token a row has one shape, and on CUDA is captured and replayed.

The session's graph takes any number of tokens, so prompts run on it too, eagerly.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen_onnx import contract
from qwen_onnx.runners.model.binding import EAGER, bind_cache, bind_cache_row, from_numpy, row_of, run_bound
from qwen_onnx.runners.model.buffers import CacheMemory
from qwen_onnx.runners.model.executors.executor import Executor
from qwen_onnx.runners.model.executors.inputs import Inputs, StepInputs
from qwen_onnx.runners.model.kv_cache import KVCache

_ON_HOST = (contract.TOTAL_SEQUENCE_LENGTH,)
"""Inputs that operators read in host memory, whatever the device."""

_WARM_UPS = 2
"""Runs of a step by ONNX Runtime before the one that it captures and launches, all within one call."""


class FixedShape(Executor):
    """Prefill and decode of the `static-capture`, `static-grouped` and `contrib` graphs, on one session."""

    def __init__(
        self,
        session: Any,
        memory: CacheMemory,
        inputs: StepInputs,
        *,
        vocab_size: int,
        capture: bool,
        chooses: bool,
    ) -> None:
        """`capture`: the session captures CUDA graphs. `chooses`: its graph ends in the choice of the token."""
        super().__init__(memory)
        self.session, self.inputs, self.device = session, inputs, memory.device
        self.vocab_size, self.capture, self.chooses = vocab_size, capture, chooses
        self.scores = any(value.name == contract.NUM_LOGITS_TO_KEEP for value in session.get_inputs())
        self.logit_bias = from_numpy(np.zeros(vocab_size, np.float32), self.device) if chooses else None
        self._graph_ids = 0
        self._of_thread = threading.local()

    @property
    def captured(self) -> set[int]:
        """Graph ids captured by this thread: ONNX Runtime keeps captured graphs by thread."""
        if not hasattr(self._of_thread, "captured"):
            self._of_thread.captured = set()
        captured: set[int] = self._of_thread.captured
        return captured

    def new_graph_id(self) -> int:
        """Of a CUDA graph not captured yet."""
        self._graph_ids += 1
        return self._graph_ids

    def exclude(self, token_ids: NDArray[np.bool_]) -> None:
        """See Executor.exclude."""
        if self.logit_bias is not None:
            self.logit_bias.update_inplace(np.where(token_ids, -np.inf, 0).astype(np.float32))

    def advance(self, cache: KVCache, input_ids: NDArray[np.int64], start: int) -> None:
        """See Executor.advance."""
        step = self._bound(cache)
        if input_ids.shape[1] == 1 and not (
            self.inputs.by_row and cache.padded and not cache.mask[:, start:].all()
        ):
            step.run(cache, self.inputs.prepare_inputs(cache, input_ids, start))
            return
        step.forget()
        if self.inputs.by_row:
            for row in range(cache.batch_size):
                arrays = self.inputs.prepare_row(cache, row, input_ids, start)
                if arrays[contract.INPUT_IDS].size:  # else this much of the row is padding
                    self._run_tokens(step, cache, arrays, row)
        else:
            self._run_tokens(step, cache, self.inputs.prepare_inputs(cache, input_ids, start), None)

    def score(
        self, cache: KVCache, input_ids: NDArray[np.int64], start: int, count: int
    ) -> NDArray[np.float32]:
        """See Executor.score; eagerly, whatever the number of tokens."""
        if not self.scores:
            return super().score(cache, input_ids, start, count)
        step = self._bound(cache)
        step.forget()
        on_host = np.zeros((cache.batch_size, count, self.vocab_size), np.float32)
        logits = from_numpy(on_host, self.device)
        if self.inputs.by_row:
            for row in range(cache.batch_size):
                self._run_tokens(
                    step, cache, self.inputs.prepare_row(cache, row, input_ids, start), row, logits
                )
        else:
            self._run_tokens(step, cache, self.inputs.prepare_inputs(cache, input_ids, start), None, logits)
        return on_host if self.device == "cpu" else np.asarray(logits.numpy())

    def _bound(self, cache: KVCache) -> BoundStep:
        step: BoundStep | None = cache.binding
        if step is None or step.executor is not self:  # bound to another graph, or not at all
            step = cache.binding = BoundStep(self, cache)
        return step

    def logits(self, cache: KVCache) -> NDArray[np.float32]:
        """See Executor.logits."""
        step: BoundStep = cache.binding
        return step.read_logits()

    def chosen(self, cache: KVCache) -> NDArray[np.int64]:
        """See Executor.chosen."""
        if not self.chooses:
            return super().chosen(cache)
        step: BoundStep = cache.binding
        return step.read_chosen()

    def _run_tokens(
        self, step: BoundStep, cache: KVCache, arrays: Inputs, row: int | None, logits: Any = None
    ) -> None:
        """Several tokens of all rows, or of one. What comes out lies where the next step finds it, or in `logits`."""
        binding = self.session.io_binding()
        if row is None:
            bind_cache(binding, cache)
        else:
            bind_cache_row(binding, cache, row)
        outputs = {contract.LOGITS: step.logits if logits is None else logits}
        if self.scores:
            count = outputs[contract.LOGITS].shape()[1]
            arrays = arrays | {contract.NUM_LOGITS_TO_KEEP: np.array(count, np.int64)}
        for name, array in arrays.items():
            device = "cpu" if name in _ON_HOST else self.device
            binding.bind_ortvalue_input(name, from_numpy(np.asarray(array, order="C"), device))
        if self.chooses:
            binding.bind_ortvalue_input(contract.LOGIT_BIAS, self.logit_bias)
            outputs |= {contract.NEXT + name: step.inputs[name] for name in step.advanced}
        for name, value in outputs.items():
            if row is None:
                binding.bind_ortvalue_output(name, value)
            else:
                binding.bind_output(name, *row_of(value, row))
        run_bound(self.session, binding, EAGER if self.capture else None)


class BoundStep:
    """One token a row, everything bound once: inputs are updated in place, and addresses stay."""

    def __init__(self, executor: FixedShape, cache: KVCache) -> None:
        blank = np.zeros((cache.batch_size, 1), np.int64)
        arrays = executor.inputs.prepare_inputs(cache, blank, cache.length - 1)
        self.executor = executor
        self.inputs = {
            name: from_numpy(array.copy(), "cpu" if name in _ON_HOST else executor.device)
            for name, array in arrays.items()
        }
        if executor.scores:
            self.inputs[contract.NUM_LOGITS_TO_KEEP] = from_numpy(np.array(1, np.int64), executor.device)
        self.held: Inputs = {}
        """What the device is known to hold of the inputs; nothing is copied that is there already."""
        self._host_logits = np.zeros((cache.batch_size, 1, executor.vocab_size), np.float32)
        self.logits = from_numpy(self._host_logits, executor.device)
        """On the CPU over the array's own memory."""
        self.advanced = [contract.INPUT_IDS, *executor.inputs.advanced(arrays)] if executor.chooses else []
        """Inputs that the graph writes for its next step."""
        self._binding = executor.session.io_binding()
        bind_cache(self._binding, cache)
        for name, value in self.inputs.items():
            self._binding.bind_ortvalue_input(name, value)
        self._binding.bind_ortvalue_output(contract.LOGITS, self.logits)
        if executor.chooses:
            self._binding.bind_ortvalue_input(contract.LOGIT_BIAS, executor.logit_bias)
            for name in self.advanced:
                self._binding.bind_ortvalue_output(contract.NEXT + name, self.inputs[name])
        self._graph_id = executor.new_graph_id() if executor.capture else None

    def run(self, cache: KVCache, arrays: Inputs) -> None:
        """One step; the token lies in the cache's last slot."""
        self._upload(arrays)
        graph_id = self._graph_id
        if graph_id is not None and graph_id not in self.executor.captured:
            if self.advanced and cache.length + _WARM_UPS > cache.capacity:
                graph_id = EAGER  # see below: there are no slots to spare
            else:
                # Runs to warm up, and then as the captured graph. A graph that feeds itself is then some steps
                # ahead: it is set back, and overwrites the slots that it wrote too early.
                self._run(graph_id)
                self.executor.captured.add(graph_id)
                if not self.advanced:
                    return
                self._upload(arrays)
        self._run(graph_id)
        if self.advanced:
            self.held |= self.executor.inputs.advanced(arrays)

    def _run(self, graph_id: int | None) -> None:
        self.forget()  # before it, since a Ctrl-C may strike after
        run_bound(self.executor.session, self._binding, graph_id)

    def forget(self) -> None:
        """What a graph that feeds itself writes is no longer what was copied there."""
        for name in self.advanced:
            self.held.pop(name, None)

    def read_logits(self) -> NDArray[np.float32]:
        """A copy on the host, [batch, vocab]."""
        if self.executor.device == "cpu":
            return self._host_logits[:, 0].copy()
        logits: NDArray[np.float32] = self.logits.numpy()
        return logits[:, 0]

    def read_chosen(self) -> NDArray[np.int64]:
        """The chosen ids, [batch]; the device goes on from them by itself."""
        chosen: NDArray[np.int64] = np.array(self.inputs[contract.INPUT_IDS].numpy())
        self.held[contract.INPUT_IDS] = chosen
        return chosen[:, 0]

    def _upload(self, arrays: Inputs) -> None:
        for name, array in arrays.items():
            held = self.held.get(name)
            if held is not array and (held is None or not np.array_equal(held, array)):
                self.held.pop(name, None)  # before it, as above
                self.inputs[name].update_inplace(np.asarray(array, order="C"))
                self.held[name] = array
