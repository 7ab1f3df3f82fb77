"""What a model asks around an executor, over one that computes nothing: what is put in is what comes out."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from qwen_onnx.errors import EqualLogitsError, NonFiniteLogitsError
from qwen_onnx.runners.model.buffers import CacheMemory
from qwen_onnx.runners.model.executors.executor import Executor
from qwen_onnx.runners.model.kv_cache import KVCache
from qwen_onnx.runners.model.logits_model import LogitsModel
from support.caches import attention_spec

VOCAB = 5
USABLE = np.arange(VOCAB, dtype=np.float32)
UNUSABLE = {
    "nan": (np.array([0, 1, np.nan, 3, 4], np.float32), NonFiniteLogitsError),
    "infinity": (np.array([0, 1, np.inf, 3, 4], np.float32), NonFiniteLogitsError),
    "equal": (np.full(VOCAB, -2, np.float32), EqualLogitsError),
}


class Told(Executor):
    """Puts out the logits it is told, the same for each row and token; writes its number into every slot."""

    chooses = scores = True

    def __init__(self) -> None:
        super().__init__(CacheMemory(attention_spec(1), "cpu", {}))
        self.row = USABLE
        self.steps: list[tuple[int, int]] = []

    def advance(self, cache: KVCache, input_ids: NDArray[np.int64], start: int) -> None:
        self.steps.append((start, input_ids.shape[1]))
        for buffer in cache.buffers:
            buffer.update_inplace(np.full(buffer.shape(), self.row[2], np.float32))

    def logits(self, cache: KVCache) -> NDArray[np.float32]:
        return np.tile(self.row, (cache.batch_size, 1))

    def score(
        self, cache: KVCache, input_ids: NDArray[np.int64], start: int, count: int
    ) -> NDArray[np.float32]:
        self.advance(cache, input_ids, start)
        return np.tile(self.row, (cache.batch_size, count, 1))

    def chosen(self, cache: KVCache) -> NDArray[np.int64]:
        best = int(self.row.argmax()) if np.isfinite(self.row).all() else -1
        return np.full(cache.batch_size, best)


def ask(way: str, model: LogitsModel, cache: KVCache, count: int) -> NDArray[np.generic]:
    ids = np.ones((cache.batch_size, count), np.int64)
    return model.score(cache, ids, count) if way == "score" else getattr(model, way)(cache, ids)


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("kind", UNUSABLE)
@pytest.mark.parametrize("way", ["prefill", "decode", "score", "prefill_greedy", "decode_greedy"])
def test_logits_that_tell_nothing_leave_an_empty_cache_of_zeros(way: str, kind: str, batch_size: int) -> None:
    """What was computed with them lies in slots that later steps attend over, masked or not: 0 x NaN is NaN."""
    if (way, kind) == ("decode_greedy", "equal"):
        return  # looked at after a prompt only
    executor = Told()
    model = LogitsModel(executor, vocab_size=VOCAB, context_length=64)
    cache = model.new_cache(batch_size=batch_size)
    ask("prefill", model, cache, 3)
    assert cache.length == 3
    executor.row, error = UNUSABLE[kind]
    with pytest.raises(error):
        ask(way, model, cache, 1)
    assert cache.length == 0
    assert cache.shared_prefix([1, 1, 1]) == 0
    assert all((buffer.numpy() == 0).all() for buffer in cache.buffers)
    executor.row = USABLE
    assert ask("prefill", model, cache, 2)[:, -1].tolist() == [4.0] * batch_size
    assert executor.steps[-1] == (0, 2)


@pytest.mark.parametrize(("chunk", "steps"), [(64, [7]), (3, [3, 3, 1]), (7, [7]), (1, [1] * 7)])
def test_a_prompt_goes_in_by_chunks(chunk: int, steps: list[int]) -> None:
    executor = Told()
    model = LogitsModel(executor, vocab_size=VOCAB, context_length=64, prefill_chunk=chunk)
    cache = model.new_cache()
    ask("prefill", model, cache, 7)
    assert [count for _, count in executor.steps] == steps
    assert [start for start, _ in executor.steps] == np.cumsum([0, *steps[:-1]]).tolist()


def test_a_mask_hides_what_it_says_in_each_chunk() -> None:
    model = LogitsModel(Told(), vocab_size=VOCAB, context_length=64, prefill_chunk=3)
    cache = model.new_cache(batch_size=2)
    mask = [[1] * 7, [0, 0, 0, 0, 1, 1, 1]]
    model.prefill(cache, np.ones((2, 7), np.int64), np.array(mask))
    assert cache.mask.tolist() == mask
    model.decode(cache, np.ones((2, 1), np.int64))
    assert cache.mask.tolist() == [[*row, 1] for row in mask]
    assert cache.counts(8).tolist() == [8, 4]
