"""What comes out of generation, token by token."""

from __future__ import annotations

import dataclasses
import enum


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
    """The best ids and their logits at this step, when asked for."""
    logprob: float | None = None
    """ln of its probability, in float64, when asked for: the softmax of the model's own logits of all ids that name a
    token, before bias, penalties and temperature, as in OpenAI's API."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """(id, the same) of the best ids, best first, when asked for."""
