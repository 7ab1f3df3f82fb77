"""One answer as it is made: ids so far, how the next is chosen, the text that they come to, and what ends it."""

from __future__ import annotations

import collections.abc
import dataclasses
import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.errors import UserError, counted
from qwen_onnx.runners.output import FinishReason, Token
from qwen_onnx.runners.sampling.grammar import Grammar
from qwen_onnx.runners.sampling.logits import greedy, log_normalizer, top
from qwen_onnx.runners.sampling.request import Request
from qwen_onnx.runners.sampling.sampler import Sampler
from qwen_onnx.runners.speculate import PromptLookup, is_near
from qwen_onnx.runners.text.stream import TextStream
from qwen_onnx.runners.text.tokenizer import Tokenizer
from qwen_onnx.runners.text.vocabulary import Vocabulary

Ids = collections.abc.Sequence[int]


class Chosen(NamedTuple):
    """An id, and the logits it was chosen from, f32 [vocab], where the host has them."""

    token_id: int
    logits: NDArray[np.float32] | None


class Sequence:
    """A prompt and its answer; `step` chooses the next token."""

    def __init__(
        self,
        prompt_ids: Ids,
        request: Request,
        vocabulary: Vocabulary,
        *,
        context_length: int,
        tokenizer: Tokenizer | None = None,
        begun: bool | None = None,
        grammar: Grammar | None = None,
        speculate: bool = False,
        started: float | None = None,
    ) -> None:
        """Nothing is chosen yet.

        Args:
            vocabulary: ids that name no token are never chosen.
            begun: of an answer that may reason first: its prompt began the reasoning. None: all of it is answer.
            grammar: of the request's constraint.
            speculate: guess ids from what the sequence says already; for greedy requests.
            started: of time.perf_counter; now where it is None.
        """
        self.token_ids = list(prompt_ids)
        """Prompt and answer so far."""
        self.prompt_tokens, self.cached_tokens = len(prompt_ids), 0
        self.request, self._vocabulary, self._context_length = request, vocabulary, context_length
        self.finish_reason = FinishReason.LENGTH if request.max_new_tokens == 0 else None
        """None while the answer goes on."""
        self._sampler = Sampler(
            request,
            prompt_ids,
            size=vocabulary.size,
            eos_token_ids=vocabulary.eos_token_ids,
            matcher=None if grammar is None else grammar.matcher(hold_end=request.ignore_eos),
        )
        # Of a grammar, an end token is chosen where nothing else is left.
        self._goes_on = request.ignore_eos and grammar is None
        self._stream = TextStream(tokenizer, request.stops, begun=begun)
        self._lookup = PromptLookup(prompt_ids) if speculate else None
        self._alone = False
        self._started, self._first = time.perf_counter() if started is None else started, 0.0

    @property
    def made(self) -> int:
        """Ids of the answer so far."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def reports(self) -> bool:
        """Tokens tell of the logits that they were chosen from."""
        return bool(self.request.top_logits) or self.request.logprobs is not None

    def named(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Of f32 [vocab], those of ids that name a token."""
        return self._vocabulary.named(logits)

    def step(self, logits: NDArray[np.float32]) -> Token:
        """The token after these logits, f32 [vocab].

        Raises:
            UserError: no token is left to choose.
        """
        return self.take(self.choose(logits))

    def choose(self, logits: NDArray[np.float32]) -> Chosen:
        """The next id, from f32 [vocab]."""
        self._alone = False
        named = self.named(logits)
        return Chosen(self._sampler.choose(named), named)

    def drafts(self, most: int) -> list[int]:
        """Guesses of the next ids, at most so many; often none, and none before the first id."""
        if self._lookup is None or self._alone or not self.made or most < 1:
            return []
        if self.request.max_new_tokens is not None:
            most = min(most, self.request.max_new_tokens - self.made - 1)
        return self._lookup.draft(most)

    def verified(self, rows: NDArray[np.float32], drafts: Ids) -> list[Chosen]:
        """The next ids, from the logits before each draft and after the last, [drafts + 1, vocab].

        They end with the first that is no draft. One that is near to another is left to a step of its own: the
        logits of several tokens at once differ a little from those of one.
        """
        found: list[Chosen] = []
        for index, row in enumerate(rows):
            named = self.named(row)
            self._alone = is_near(named)
            if self._alone:
                break
            found.append(Chosen(greedy(named), named))
            if index == len(drafts) or found[-1].token_id != drafts[index]:
                break
        if self._lookup is not None:
            self._lookup.learn(len(found) - (not self._alone))
        return found

    def take(self, chosen: Chosen) -> Token:
        """The next id as a token of the answer, which it may end."""
        token_id, logits = chosen
        now = time.perf_counter()
        self._first = self._first or now
        self.token_ids.append(token_id)
        if self._lookup is not None:
            self._lookup.extend([token_id])
        reason = self._reason(token_id)
        text = self._stream.push(
            None if reason is FinishReason.EOS else token_id,
            may_stop=self.made > self.request.min_new_tokens,
            last=reason is not None,
        )
        self.finish_reason = reason = FinishReason.STOP if self._stream.stopped else reason
        token = Token(
            token_id=token_id,
            text=text,
            finish_reason=reason,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            ttft_ms=1e3 * (self._first - self._started),
            tokens_per_s=(self.made - 1) / (now - self._first) if self.made > 1 else None,
        )
        return token if logits is None or not self.reports else self._reported(token, logits)

    def _reason(self, token_id: int) -> FinishReason | None:
        if token_id in self._vocabulary.eos_token_ids and not self._goes_on:
            return FinishReason.EOS
        if self.made == self.request.max_new_tokens:
            return FinishReason.LENGTH
        # The last id needs no slot: nothing is computed after it.
        return FinishReason.CONTEXT if len(self.token_ids) > self._context_length else None

    def _reported(self, token: Token, logits: NDArray[np.float32]) -> Token:
        best = tuple(top(logits, self.request.top_logits))
        if self.request.logprobs is None:
            return dataclasses.replace(token, top_logits=best)
        less = log_normalizer(logits)
        return dataclasses.replace(
            token,
            top_logits=best,
            logprob=float(logits[token.token_id]) - less,
            top_logprobs=tuple(
                (best_id, logit - less) for best_id, logit in top(logits, self.request.logprobs)
            ),
        )


class GivenSequence(Sequence):
    """A sequence whose next ids are given: each is reported as if it had been chosen."""

    def __init__(
        self, prompt_ids: Ids, given_ids: Ids, vocabulary: Vocabulary, *, context_length: int
    ) -> None:
        """`given_ids`, at least one, come after the prompt."""
        request = Request(logprobs=0, max_new_tokens=len(given_ids))
        super().__init__(prompt_ids, request, vocabulary, context_length=context_length)
        self._given = list(given_ids)

    def choose(self, logits: NDArray[np.float32]) -> Chosen:
        """See Sequence.choose."""
        return Chosen(self._given[self.made], self.named(logits))

    def drafts(self, most: int) -> list[int]:
        """See Sequence.drafts; the last id needs no slot."""
        return self._given[self.made : -1][: max(0, most)]

    def verified(self, rows: NDArray[np.float32], drafts: Ids) -> list[Chosen]:
        """See Sequence.verified; all are right."""
        ids = self._given[self.made : self.made + len(rows)]
        return [Chosen(token_id, self.named(row)) for token_id, row in zip(ids, rows, strict=True)]

    def _reason(self, token_id: int) -> FinishReason | None:
        return FinishReason.LENGTH if self.made == len(self._given) else None


def verify_prompt(prompt_ids: Ids, context_length: int) -> None:
    """Raises UserError for an empty prompt, and for one that leaves no room in the context."""
    if not prompt_ids:
        raise UserError("the prompt is empty: no token to start from")
    if len(prompt_ids) >= context_length:
        raise UserError(
            f"the prompt has {counted(len(prompt_ids), 'token')}, the context holds {context_length} with the answer"
        )
