"""What a step takes in beside the cache: the host's account of the cache, as the inputs of each lowering."""

from __future__ import annotations

import abc

import numpy as np
from numpy.typing import NDArray

from qwen_onnx import contract
from qwen_onnx.runners.model.kv_cache import KVCache

Inputs = dict[str, NDArray[np.int64] | NDArray[np.int32]]


class StepInputs(abc.ABC):
    """The small inputs of a lowering's graphs, by name."""

    by_row = False
    """Several tokens go one row at a time, each row without its padding."""

    @abc.abstractmethod
    def prepare_inputs(self, cache: KVCache, input_ids: NDArray[np.int64], start: int) -> Inputs:
        """For tokens [batch, S] that the cache counts from slot `start` on."""

    def prepare_row(self, cache: KVCache, row: int, input_ids: NDArray[np.int64], start: int) -> Inputs:
        """For one row's tokens [batch, S]; its padding is left out."""
        raise NotImplementedError("rows go together")

    @abc.abstractmethod
    def advanced(self, inputs: Inputs) -> Inputs:
        """What a graph that feeds itself leaves for the next step, beside the token."""


class StaticInputs(StepInputs):
    """Of `static` graphs that read all slots: the mask has a column for every slot, whatever is in it."""

    def prepare_inputs(self, cache: KVCache, input_ids: NDArray[np.int64], start: int) -> Inputs:
        """See StepInputs."""
        return {
            contract.INPUT_IDS: input_ids.copy(),  # kept to know what the device holds; the caller's may change
            contract.ATTENTION_MASK: cache.full_mask,
            contract.POSITION_IDS: positions(cache, start),
            contract.WRITE_INDICES: np.full(cache.batch_size, start, np.int64),
        }

    def advanced(self, inputs: Inputs) -> Inputs:
        """See StepInputs."""
        position_ids = inputs[contract.POSITION_IDS]
        return {
            contract.POSITION_IDS: position_ids.max(axis=1, keepdims=True) + 1,
            contract.WRITE_INDICES: inputs[contract.WRITE_INDICES] + position_ids.shape[1],
        }


class ContribInputs(StepInputs):
    """Of the `contrib` graphs: a row's tokens lie from slot 0 on, padding takes no slot."""

    by_row = True

    def __init__(self, *, fixed: bool) -> None:
        """`fixed`: what is read in host memory never changes, since a captured graph could not follow."""
        self._fixed = fixed

    def prepare_inputs(self, cache: KVCache, input_ids: NDArray[np.int64], start: int) -> Inputs:
        """See StepInputs; for one token a row."""
        live = cache.counts(cache.length)
        return {
            contract.INPUT_IDS: input_ids.copy(),  # as above
            contract.SEQLENS_K: (live - 1).astype(np.int32),
            # Anything from the live length on will do; the CPU provider is fastest with just that.
            contract.TOTAL_SEQUENCE_LENGTH: np.array(cache.capacity if self._fixed else live.max(), np.int32),
        }

    def prepare_row(self, cache: KVCache, row: int, input_ids: NDArray[np.int64], start: int) -> Inputs:
        """See StepInputs."""
        real = cache.mask[row, start:] == 1
        live = int(cache.counts(cache.length)[row])
        return {
            contract.INPUT_IDS: np.ascontiguousarray(input_ids[row : row + 1, real]),
            contract.SEQLENS_K: np.array([live - 1], np.int32),
            contract.TOTAL_SEQUENCE_LENGTH: np.array(live, np.int32),
        }

    def advanced(self, inputs: Inputs) -> Inputs:
        """See StepInputs."""
        return {contract.SEQLENS_K: inputs[contract.SEQLENS_K] + np.int32(1)}


def step_inputs(lowering: str, *, on_cpu: bool) -> StepInputs:
    """Those of a lowering that is given the whole cache."""
    names = contract.LOWERINGS[lowering].inputs
    return ContribInputs(fixed=not on_cpu) if contract.SEQLENS_K in names else StaticInputs()


def positions(cache: KVCache, start: int) -> NDArray[np.int64]:
    """Of the slots from `start` on, [batch, S]: a row counts its own tokens; padding gets some valid position."""
    seen = cache.counts(start)[:, None]
    return np.maximum(seen + np.cumsum(cache.mask[:, start:], axis=1) - 1, 0)
