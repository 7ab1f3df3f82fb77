"""One prompt, one answer: consumes a generation and keeps what is worth reporting of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Self

from qwen_onnx.runners.chat import Chat, Prompt, Token
from qwen_onnx.runners.generate import FinishReason
from qwen_onnx.runners.generation_options import GenerationRequest


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """How likely one token of an answer was to the model."""

    token_id: int
    logprob: float
    top_logprobs: list[tuple[int, float]]
    """The same of as many best ids as were asked for, best first."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """A finished generation."""

    prompt_ids: list[int]
    token_ids: list[int]
    """With the id that ended it."""
    text: str
    """Without the end token or the stop string."""
    finish_reason: FinishReason
    ttft_ms: float | None
    tokens_per_s: float | None
    top_logits: list[list[tuple[int, float]]] | None = None
    """Per token, when asked for."""
    logprobs: list[TokenLogprob] | None = None
    """Per token, when asked for."""

    @classmethod
    def of(
        cls, prompt_ids: list[int], tokens: Sequence[Token], request: GenerationRequest, reason: FinishReason
    ) -> Self:
        """Of the tokens that were made; what was asked for beside them is kept."""
        last = tokens[-1] if tokens else None
        return cls(
            prompt_ids=prompt_ids,
            token_ids=[token.token_id for token in tokens],
            text="".join(token.text for token in tokens),
            finish_reason=reason,
            ttft_ms=last.ttft_ms if last else None,
            tokens_per_s=last.tokens_per_s if last else None,
            top_logits=[list(token.top_logits) for token in tokens] if request.top_logits else None,
            logprobs=None if request.logprobs is None else [_logprob(token) for token in tokens],
        )

    def as_json(self, chat: Chat) -> dict[str, object]:
        """What `run --json` prints."""
        fields = dataclasses.asdict(self) | {
            "provider": chat.runner.provider,
            "dtype": chat.runner.manifest.dtype,
        }
        for name in ("top_logits", "logprobs"):
            if fields[name] is None:
                del fields[name]
        return fields


def answer(
    chat: Chat,
    prompt: Prompt,
    request: GenerationRequest,
    *,
    on_token: Callable[[Token], None] = lambda token: None,
) -> Answer:
    """Generate to the end, or to Ctrl-C: then what there is so far is the answer, `interrupted`.

    Raises:
        UserError: as `Chat.generate`.
    """
    prompt_ids = chat.prompt_ids(prompt, tools=request.tools, enable_thinking=request.enable_thinking)
    tokens: list[Token] = []
    # Nothing asked for is nothing missing: max_new_tokens 0 ends by length.
    reason = FinishReason.LENGTH
    try:
        for token in chat.stream(prompt_ids, request):
            tokens.append(token)
            on_token(token)
            reason = token.finish_reason or FinishReason.INTERRUPTED
    except KeyboardInterrupt:
        reason = FinishReason.INTERRUPTED
    return Answer.of(prompt_ids, tokens, request, reason)


def _logprob(token: Token) -> TokenLogprob:
    if token.logprob is None:
        raise TypeError("a token without the logprob that was asked for")
    return TokenLogprob(token.token_id, token.logprob, list(token.top_logprobs))
