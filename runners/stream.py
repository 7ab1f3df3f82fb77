"""The ids of one answer as tokens: with their text, up to a stop string, and timings."""

from __future__ import annotations

import dataclasses
import time

from qwen_onnx.runners.generate import FinishReason, GeneratedId
from qwen_onnx.runners.sampling.request import GenerationOptions
from qwen_onnx.runners.text.detokenizer import StreamDetokenizer
from qwen_onnx.runners.text.stop_strings import StopStrings
from qwen_onnx.runners.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Token:
    """One generated token."""

    token_id: int
    text: str
    """What became certain with it; may be empty, and holds more than one token's bytes after a held-back one."""
    finish_reason: FinishReason | None
    """None while the answer goes on."""
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt's tokens, those an earlier turn had left in the cache."""
    ttft_ms: float
    """Time to first token: from the call to the first token, in milliseconds."""
    tokens_per_s: float | None
    """Decoding speed so far, the first token (which is prefill) not counted; None at the first."""
    top_logits: tuple[tuple[int, float], ...] = ()
    logprob: float | None = None
    """ln of its probability, in float64, when asked for: the softmax of the model's own logits of all ids that name a
    token, before bias, penalties and temperature, as in OpenAI's API."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """(id, the same) of the best ids, best first, when asked for."""


class AnswerTokens:
    """Takes the ids of one answer, one after the other."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        options: GenerationOptions,
        *,
        prompt_tokens: int,
        cached_tokens: int = 0,
        started: float,
    ) -> None:
        """Without a tokenizer texts are empty; `started` is of time.perf_counter."""
        self._detokenizer = None if tokenizer is None else StreamDetokenizer(tokenizer)
        self._stops, self._least = StopStrings(options.stop), options.min_new_tokens
        self._prompt_tokens, self._cached_tokens = prompt_tokens, cached_tokens
        self._started, self._first, self._made = started, 0.0, 0

    def push(self, step: GeneratedId) -> Token:
        """The next id as a token; a stop string in its text makes it the last."""
        now = time.perf_counter()
        self._first = self._first or now
        self._made += 1
        detokenizer, reason = self._detokenizer, step.finish_reason
        # By its reason, not by being special: some tokenizers do not flag their end token.
        ended = reason is FinishReason.EOS
        text = "" if ended or detokenizer is None else detokenizer.push(step.token_id)
        if reason is not None and detokenizer:
            text += detokenizer.flush()
        text = self._stops.push(text, may_end=self._made > self._least)
        if self._stops.found:
            reason = FinishReason.STOP
        elif reason is not None:
            text += self._stops.flush()
        return Token(
            token_id=step.token_id,
            text=text,
            finish_reason=reason,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            ttft_ms=1e3 * (self._first - self._started),
            tokens_per_s=(self._made - 1) / (now - self._first) if self._made > 1 else None,
            top_logits=step.top_logits,
            logprob=step.logprob,
            top_logprobs=step.top_logprobs,
        )
