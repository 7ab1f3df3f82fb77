"""From logits to token ids: greedy decoding of one sequence, a step at a time."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.errors import UserError
from qwen_onnx.runners.kv_cache import KVCache
from qwen_onnx.runners.sampling import greedy, top, without_nameless


class FinishReason(enum.StrEnum):
    """Why an answer ended."""

    EOS = "eos"
    """The model ended it."""
    STOP = "stop"
    """A stop string came up."""
    LENGTH = "length"
    """`max_new_tokens` were made."""
    CONTEXT = "context"
    """The context is full."""
    INTERRUPTED = "interrupted"
    """The user ended it."""


class LogitsModel(Protocol):
    """What generation needs of a runner."""

    context_length: int

    @property
    def chooses(self) -> bool:
        """The device chooses the ids; the `greedy` methods do it."""

    def prefill(self, cache: KVCache, input_ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """[1, S] ids to [1, vocab] logits."""

    def decode(self, cache: KVCache, input_ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """[1, 1] ids to [1, vocab] logits."""

    def prefill_greedy(self, cache: KVCache, input_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """[1, S] ids to the best id [1]."""

    def decode_greedy(self, cache: KVCache, input_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """[1, 1] ids to the best id [1]."""

    def logits(self, cache: KVCache) -> NDArray[np.float32]:
        """[1, vocab], from which the device chose."""


@dataclasses.dataclass(frozen=True)
class GeneratedId:
    """One step of decoding."""

    token_id: int
    finish_reason: FinishReason | None
    """None while the answer goes on."""
    top_logits: tuple[tuple[int, float], ...] = ()
    """The best ids and their logits at this step, when asked for."""


@dataclasses.dataclass(frozen=True)
class GenerationOptions:
    """What a caller may choose of a generation."""

    max_new_tokens: int | None = None
    """None: until the model ends or the context is full."""
    ignore_eos: bool = False
    top_logits: int = 0


def generate_ids(
    model: LogitsModel,
    cache: KVCache,
    prompt_ids: Sequence[int],
    options: GenerationOptions,
    *,
    eos_token_ids: Collection[int] = (),
    size: int,
    holes: NDArray[np.int64],
) -> Iterator[GeneratedId]:
    """Greedy ids after a prompt, of which only what the cache does not hold is computed.

    The id that ends the answer is yielded too; its finish_reason says so.

    Args:
        size, holes: ids at or beyond `size`, or in `holes`, name no token and are never chosen; where the device
            chooses, its runner was told to `exclude` them.

    Raises:
        UserError: an empty prompt, or one that leaves no room in the context; before any compute.
        NonFiniteLogitsError: the model computed NaN or infinity.
    """
    if not prompt_ids:
        raise UserError("the prompt is empty: no token to start from")
    if len(prompt_ids) >= model.context_length:
        raise UserError(
            f"the prompt has {len(prompt_ids)} tokens, the context holds {model.context_length} with the answer"
        )
    if options.max_new_tokens is not None and options.max_new_tokens <= 0:
        return
    # The last id is computed even where the cache holds it: its logits are what is needed.
    cached = cache.shared_prefix(prompt_ids[:-1])
    cache.truncate(cached)
    new_ids, made = np.array([prompt_ids[cached:]], np.int64), 0
    while True:
        logits = None
        if model.chooses:
            choose = model.decode_greedy if made else model.prefill_greedy
            token_id = int(choose(cache, new_ids)[0])
        else:
            logits = (model.decode if made else model.prefill)(cache, new_ids)
            token_id = greedy(without_nameless(logits[0], size, holes))
        made += 1
        reason = None
        if token_id in eos_token_ids and not options.ignore_eos:
            reason = FinishReason.EOS
        elif made == options.max_new_tokens:
            reason = FinishReason.LENGTH
        elif cache.length >= model.context_length:
            reason = FinishReason.CONTEXT
        best: tuple[tuple[int, float], ...] = ()
        if options.top_logits:
            logits = model.logits(cache) if logits is None else logits
            best = tuple(top(without_nameless(logits[0], size, holes), options.top_logits))
        yield GeneratedId(token_id, reason, best)
        if reason is not None:
            return
        new_ids = np.array([[token_id]], np.int64)
