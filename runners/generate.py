"""From logits to token ids: decoding of one sequence."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.errors import UserError
from qwen_onnx.runners.model.kv_cache import KVCache
from qwen_onnx.runners.sampling.logits import greedy, log_normaliser, top
from qwen_onnx.runners.sampling.request import GenerationOptions
from qwen_onnx.runners.sampling.sampler import Chooser
from qwen_onnx.runners.speculate import PromptLookup, is_near
from qwen_onnx.runners.text.vocabulary import Vocabulary


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

    @property
    def scores(self) -> bool:
        """`score` works, so that guesses can be verified."""

    def score(self, cache: KVCache, input_ids: NDArray[np.int64], count: int) -> NDArray[np.float32]:
        """[1, S] ids to the logits after the last `count`, [1, count, vocab]."""

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
    logprob: float | None = None
    """ln of its probability, when asked for: of the model's own logits, before penalties and temperature."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """The best ids and the same of them, when asked for."""


Chosen = tuple[int, NDArray[np.float32] | None]
"""An id, and the logits it was chosen from where the host has them."""


def verify_options(model: LogitsModel, options: GenerationOptions) -> None:
    """Raises UserError where the model chooses or guesses ids by itself, and the options are not plain greedy."""
    if (model.chooses or model.scores) and not options.plain:
        name = "greedy_on_device" if model.chooses else "speculate"
        raise UserError(
            f"{name} is greedy: no sampling, penalties, logit_bias, min_new_tokens, json_schema or regex; "
            "--greedy (SamplingOptions.greedy()) leaves out those of generation_config.json"
        )


def verify_prompt(prompt_ids: Sequence[int], context_length: int) -> None:
    """Raises UserError for an empty prompt, and for one that leaves no room in the context."""
    if not prompt_ids:
        raise UserError("the prompt is empty: no token to start from")
    if len(prompt_ids) >= context_length:
        raise UserError(
            f"the prompt has {len(prompt_ids)} tokens, the context holds {context_length} with the answer"
        )


class AnswerIds:
    """The ids of one answer, as they are made: what is chosen from which logits, and what ends it."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        options: GenerationOptions,
        vocabulary: Vocabulary,
        *,
        context_length: int,
    ) -> None:
        """Of `generate_ids`' arguments those that the choice hangs on."""
        self._options, self._vocabulary = options, vocabulary
        self._chooser = Chooser(
            options.sampling,
            prompt_ids,
            size=vocabulary.size,
            eos_token_ids=vocabulary.eos_token_ids,
            min_new_tokens=options.min_new_tokens,
            matcher=None if options.grammar is None else options.grammar.matcher(hold_end=options.ignore_eos),
        )
        # Of a grammar, an end token is chosen where nothing else is left.
        self._goes_on = options.ignore_eos and options.grammar is None
        self._room = context_length - len(prompt_ids)
        self.made = 0
        """Ids so far."""

    def named(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Of f32 [vocab], those of ids that name a token."""
        return self._vocabulary.named(logits)

    def choose(self, logits: NDArray[np.float32]) -> Chosen:
        """The next id by `options`, from f32 [vocab]."""
        logits = self.named(logits)
        return self._chooser.choose(logits), logits

    def take(self, token_id: int, logits: NDArray[np.float32] | None) -> GeneratedId:
        """The next id of the answer, and whether it ends it; `logits`, as `named` left them, are what is reported."""
        self.made += 1
        options, reason = self._options, None
        if token_id in self._vocabulary.eos_token_ids and not self._goes_on:
            reason = FinishReason.EOS
        elif self.made == options.max_new_tokens:
            reason = FinishReason.LENGTH
        elif self.made > self._room:  # this id needs no slot: nothing is computed after it
            reason = FinishReason.CONTEXT
        if logits is None:
            return GeneratedId(token_id, reason)
        best = tuple(top(logits, options.top_logits)) if options.top_logits else ()
        if options.logprobs is None:
            return GeneratedId(token_id, reason, best)
        less = log_normaliser(logits)
        best_logprobs = tuple((best_id, logit - less) for best_id, logit in top(logits, options.logprobs))
        return GeneratedId(token_id, reason, best, float(logits[token_id]) - less, best_logprobs)


def generate_ids(
    model: LogitsModel,
    cache: KVCache,
    prompt_ids: Sequence[int],
    options: GenerationOptions,
    vocabulary: Vocabulary,
) -> Iterator[GeneratedId]:
    """Ids after a prompt, of which only what the cache does not hold is computed.

    The id that ends the answer is yielded too; its finish_reason says so.

    Args:
        vocabulary: ids that name no token are never chosen; where the device chooses, its runner was told to
            `exclude` them.

    Raises:
        UserError: an empty prompt, one that leaves no room in the context, or options that the model does not take;
            before any compute. Or no token is left to choose.
        NonFiniteLogitsError: the model computed NaN or infinity.
    """
    verify_prompt(prompt_ids, model.context_length)
    verify_options(model, options)
    if options.max_new_tokens is not None and options.max_new_tokens <= 0:
        return
    # The last id is computed even where the cache holds it: its logits are what is needed.
    cached = cache.shared_prefix(prompt_ids[:-1])
    cache.truncate(cached)

    answer = AnswerIds(prompt_ids, options, vocabulary, context_length=model.context_length)
    lookup = PromptLookup(prompt_ids) if model.scores else None
    new_ids = np.array([prompt_ids[cached:]], np.int64)
    while True:
        if lookup is None:
            chosen = [_choose(model, cache, new_ids, answer)]
        else:
            room = model.context_length - cache.length - new_ids.shape[1]
            left = room if options.max_new_tokens is None else options.max_new_tokens - answer.made - 1
            drafts = lookup.draft(min(room, left)) if answer.made else []
            chosen = _verified(model, cache, new_ids, drafts, answer)
            lookup.extend([token_id for token_id, _ in chosen])
            if drafts:
                lookup.learn(len(chosen) - 1)
        for later, (token_id, logits) in zip(reversed(range(len(chosen))), chosen, strict=True):
            if logits is None and (options.top_logits or options.logprobs is not None):
                logits = answer.named(model.logits(cache)[0])
            step = answer.take(token_id, logits)
            if step.finish_reason is not None:
                cache.truncate(cache.length - later)  # guesses that were right, and are not wanted
            yield step
            if step.finish_reason is not None:
                return
        new_ids = np.array([[token_id]], np.int64)


def _choose(model: LogitsModel, cache: KVCache, new_ids: NDArray[np.int64], answer: AnswerIds) -> Chosen:
    """The next id after these."""
    if model.chooses:
        choose = model.decode_greedy if answer.made else model.prefill_greedy
        return int(choose(cache, new_ids)[0]), None
    return answer.choose((model.decode if answer.made else model.prefill)(cache, new_ids)[0])


def _verified(
    model: LogitsModel, cache: KVCache, new_ids: NDArray[np.int64], drafts: Sequence[int], answer: AnswerIds
) -> list[Chosen]:
    """The next ids after these, one more than the drafts that are right; what the cache holds is right."""
    if not drafts:
        return [_choose(model, cache, new_ids, answer)]
    start = cache.length
    chosen: list[Chosen] = []
    given = np.concatenate([new_ids, np.array([drafts], np.int64)], axis=1)
    for index, row in enumerate(model.score(cache, given, given.shape[1])[0]):
        logits = answer.named(row)
        if is_near(logits):
            cache.truncate(start + index)
            return [*chosen, _choose(model, cache, given[:, index : index + 1], answer)]
        chosen.append((greedy(logits), logits))
        if index == len(drafts) or chosen[-1][0] != drafts[index]:
            break
    cache.truncate(start + len(chosen))
    return chosen
