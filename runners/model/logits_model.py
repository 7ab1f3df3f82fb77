"""Logits of tokens over a cache: prompts in chunks, single tokens, several verified at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.errors import EqualLogitsError, NonFiniteLogitsError, UserError
from qwen_onnx.runners.model.executors.executor import Executor
from qwen_onnx.runners.model.kv_cache import KVCache

T = TypeVar("T")

PREFILL_CHUNK = 512
"""Most tokens of a prompt computed at a time."""
SCORED_PAIRS = PREFILL_CHUNK * 4096
"""Most pairs of new and cached tokens scored at a time, times the heads 4 bytes each: beyond 4,096 tokens in the
cache the chunks shrink, so that memory stays bounded whatever the prompt's length."""
_NOT_FINITE = (
    "the logits are not finite: the numbers overflowed on the way; try another dtype, or `qwen-onnx check`"
)
_ALL_EQUAL = (
    "all logits are equal, so that no token is likelier than another: weights are missing or zeroed; "
    "`qwen-onnx check` names them"
)


class LogitsModel:
    """An executor with what a model asks around it: ids that exist, a context that ends, numbers that are finite."""

    def __init__(
        self, executor: Executor, *, vocab_size: int, context_length: int, prefill_chunk: int = PREFILL_CHUNK
    ) -> None:
        """`prefill_chunk`: most tokens of a prompt computed at a time."""
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk {prefill_chunk}: 1 or more wanted")
        self.executor, self.context_length = executor, context_length
        self.vocab_size, self._prefill_chunk = vocab_size, min(prefill_chunk, context_length)
        self._lowest_id = 0

    @property
    def chooses(self) -> bool:
        """The graph chooses the token: `prefill_greedy` and `decode_greedy` work."""
        return self.executor.chooses

    @property
    def scores(self) -> bool:
        """The graph puts out logits after several tokens: `score` works."""
        return self.executor.scores

    def new_cache(self, *, batch_size: int = 1) -> KVCache:
        """An empty cache for `batch_size` sequences; it grows up to the context length.

        Raises:
            UserError: it does not fit on the device, or so many rows cannot go together.
        """
        self.verify_batch_size(batch_size)
        return self.executor.new_cache(batch_size=batch_size, limit=self.context_length)

    def exclude(self, token_ids: NDArray[np.bool_]) -> None:
        """Ids, True here [vocab], that `prefill_greedy` and `decode_greedy` never choose."""
        self.executor.exclude(token_ids)
        self._lowest_id = int(np.argmin(token_ids))

    def prefill(
        self,
        cache: KVCache,
        input_ids: NDArray[np.int64],
        attention_mask: NDArray[np.int64] | None = None,
    ) -> NDArray[np.float32]:
        """Append tokens to the cache, a chunk at a time; the f32 logits [batch, vocab] after the last one.

        Args:
            input_ids: int64 [batch, S].
            attention_mask: int64 [batch, S], 0 for padding on the left; None when nothing is padding.

        Raises:
            UserError: an id outside the embedding, or more tokens than the context holds; before any compute.
            NonFiniteLogitsError: the model computed NaN or infinity.
            EqualLogitsError: it computed one number for all tokens.
        """
        return self._append(cache, input_ids, attention_mask, self._usable_logits)

    def decode(self, cache: KVCache, input_ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Append one token a row, int64 [batch, 1]; the logits after it. Raises as `prefill` does."""
        return self._append(cache, input_ids, None, self._usable_logits)

    def prefill_greedy(
        self,
        cache: KVCache,
        input_ids: NDArray[np.int64],
        attention_mask: NDArray[np.int64] | None = None,
    ) -> NDArray[np.int64]:
        """As `prefill`, but the device chooses: the best ids, int64 [batch]. For `greedy_on_device` only."""
        return self._append(cache, input_ids, attention_mask, self._first_chosen)

    def decode_greedy(self, cache: KVCache, input_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """As `decode`, but the device chooses. Where the ids are those it chose last, nothing is copied to it."""
        return self._append(cache, input_ids, None, self._chosen)

    def score(self, cache: KVCache, input_ids: NDArray[np.int64], count: int) -> NDArray[np.float32]:
        """Append tokens, at most a chunk, in one step; f32 logits after the last `count`, [batch, count, vocab].

        Raises:
            ValueError: `scores` is False.
            UserError, NonFiniteLogitsError: as `prefill`.
        """
        if not 0 < count <= input_ids.shape[1] <= self.chunk(cache):
            raise ValueError(
                f"{input_ids.shape[1]} tokens, {count} logits: at most a chunk of tokens is possible"
            )
        found: list[NDArray[np.float32]] = []

        def advance(held: KVCache, new_ids: NDArray[np.int64], start: int) -> None:
            found.append(self.executor.score(held, new_ids, start, count))

        return self._append(cache, input_ids, None, lambda held: self._usable(held, found[0]), advance)

    def logits(self, cache: KVCache) -> NDArray[np.float32]:
        """What the last ids were chosen from on the device, f32 [batch, vocab]."""
        return self.executor.logits(cache)

    def verify_batch_size(self, batch_size: int) -> None:
        """Raises UserError where so many rows cannot go together."""

    def chunk(self, cache: KVCache, *, ahead: int = 0) -> int:
        """Most tokens that one step appends to this cache, once so many more are in it."""
        live = cache.batch_size * (cache.length + ahead + self._prefill_chunk)
        return max(1, min(self._prefill_chunk, SCORED_PAIRS // live))

    def _usable_logits(self, cache: KVCache) -> NDArray[np.float32]:
        return self._usable(cache, self.executor.logits(cache))

    def _usable(self, cache: KVCache, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits [..., vocab] that are finite and tell tokens apart."""
        # The product is finite if all are, unless the logits are absurd, and takes a third of the time.
        if not np.isfinite(np.vdot(logits, logits)) and not np.isfinite(logits).all():
            cache.renew()
            raise NonFiniteLogitsError(_NOT_FINITE)
        if _some_row_is_equal(logits.reshape(-1, self.vocab_size)):
            cache.renew()
            raise EqualLogitsError(_ALL_EQUAL)
        return logits

    def _chosen(self, cache: KVCache) -> NDArray[np.int64]:
        token_ids = self.executor.chosen(cache)
        if (token_ids < 0).any():
            cache.renew()
            raise NonFiniteLogitsError(_NOT_FINITE)
        return token_ids

    def _first_chosen(self, cache: KVCache) -> NDArray[np.int64]:
        token_ids = self._chosen(cache)
        # Of equal logits the lowest id is chosen: only then are they worth a copy to the host.
        if (token_ids == self._lowest_id).any():
            logits = self.executor.logits(cache)
            if _some_row_is_equal(logits.reshape(-1, self.vocab_size)[:, self._lowest_id :]):
                cache.renew()
                raise EqualLogitsError(_ALL_EQUAL)
        return token_ids

    def _append(
        self,
        cache: KVCache,
        input_ids: NDArray[np.int64],
        attention_mask: NDArray[np.int64] | None,
        read: Callable[[KVCache], T],
        advance: Callable[[KVCache, NDArray[np.int64], int], None] | None = None,
    ) -> T:
        """Tokens into the cache, a chunk at a time; what is to be read after the last one."""
        advance = advance or self.executor.advance
        input_ids = np.ascontiguousarray(input_ids, np.int64)
        if input_ids.ndim != 2 or input_ids.shape[0] != cache.batch_size or not input_ids.shape[1]:
            raise ValueError(f"input_ids [{cache.batch_size}, S > 0] wanted, found {list(input_ids.shape)}")
        mask = None if attention_mask is None else np.asarray(attention_mask, np.int64)
        self._verify(cache, input_ids)
        done = 0
        while True:
            chunk = slice(done, done + self.chunk(cache))
            start = cache.length
            try:
                cache.append(input_ids[:, chunk], None if mask is None else mask[:, chunk])
                advance(cache, input_ids[:, chunk], start)
                done = chunk.stop
                if done >= input_ids.shape[1]:
                    return read(cache)
            except BaseException:  # a Ctrl-C too, wherever it strikes: no slot is held that was not computed
                cache.truncate(start)
                raise

    def _verify(self, cache: KVCache, input_ids: NDArray[np.int64]) -> None:
        low, high, vocab = int(input_ids.min()), int(input_ids.max()), self.vocab_size
        if low < 0 or high >= vocab:
            raise UserError(f"token id {low if low < 0 else high} is outside the embedding's {vocab} rows")
        if cache.length + input_ids.shape[1] > self.context_length:
            raise UserError(
                f"{cache.length + input_ids.shape[1]} tokens found, the context holds {self.context_length}"
            )


def _some_row_is_equal(logits: NDArray[np.float32]) -> bool:
    """Some row of [rows, vocab] is one number; -inf, which stands for ids never to be chosen, does not count."""
    if logits.shape[1] < 2:
        return False
    for row in logits[(logits[:, 0] == logits[:, 1]) | np.isinf(logits[:, 1])]:
        numbers = row[np.isfinite(row)]
        if numbers.size > 1 and (numbers == numbers[0]).all():
            return True
    return False
