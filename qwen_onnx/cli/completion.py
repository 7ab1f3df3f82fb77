"""One prompt, one completion: consumes a generation and keeps what is worth reporting of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from qwen_onnx.errors import UserError, counted, option
from qwen_onnx.options import Given
from qwen_onnx.runners.chat import Chat, Prompt, Token
from qwen_onnx.runners.output import FinishReason
from qwen_onnx.runners.processor import Processor
from qwen_onnx.runners.sampling.request import Request
from qwen_onnx.runners.text.reasoning import ReasoningSplitter, Said, closed, split
from qwen_onnx.runners.text.tool_calls import ToolCall, parse_tool_calls

MOST_TOKENS = 1024
"""Of an answer, where neither the request nor generation_config.json says how many."""


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """How likely one token of an answer was to the model."""

    token_id: int
    logprob: float
    top_logprobs: list[tuple[int, float]]
    """The same of as many best ids as were asked for, best first."""


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished generation."""

    prompt_ids: list[int]
    token_ids: list[int]
    """With the id that ended it."""
    text: str
    """Without the end token or the stop string, reasoning and tool calls."""
    finish_reason: FinishReason
    ttft_ms: float | None
    tokens_per_s: float | None
    top_logits: list[list[tuple[int, float]]] | None = None
    """Per token, when asked for."""
    logprobs: list[TokenLogprob] | None = None
    """Per token, when asked for."""
    reasoning: str | None = None
    """What the model thought before it answered."""
    tool_calls: list[ToolCall] | None = None
    """When tools were given."""
    content: str = ""
    """All that was said, as the next turns' prompts hold it."""

    @classmethod
    def of(
        cls,
        prompt_ids: list[int],
        tokens: Sequence[Token],
        request: Request,
        reason: FinishReason,
        *,
        begun: bool | None,
    ) -> Self:
        """Of the tokens that were made; what was asked for beside them is kept.

        Args:
            begun: as of PromptIds: None where the prompt is no chat: all that was said is text.
        """
        content = "".join(token.text for token in tokens)
        reasons = begun is not None and request.constraint is None
        said, calls = split(content, begun=bool(begun)) if reasons else Said(answer=content), None
        text = said.answer
        if begun is not None and request.tools:
            text, calls = parse_tool_calls(text)
        last = tokens[-1] if tokens else None
        return cls(
            prompt_ids=prompt_ids,
            token_ids=[token.token_id for token in tokens],
            text=text,
            finish_reason=reason,
            ttft_ms=last.ttft_ms if last else None,
            tokens_per_s=last.tokens_per_s if last else None,
            top_logits=[list(token.top_logits) for token in tokens] if request.top_logits else None,
            logprobs=None if request.logprobs is None else [_logprob(token) for token in tokens],
            reasoning=said.reasoning or None,
            tool_calls=calls,
            content=closed(content, begun=bool(begun)) if reasons else content,
        )

    def cut(self, chat: Chat, request: Request) -> str | None:
        """Why the text is only the beginning of what was asked for, where it is."""
        if self.finish_reason not in ("length", "context", "stop"):
            return None
        grammar = chat.processor.grammar(request)
        if grammar is None or request.constraint is None or grammar.accepts(self.text):
            return None
        names = {"length": "max_new_tokens", "context": "max_context", "stop": "stop"}
        how = {"length": "more", "context": "a larger", "stop": "no"}[self.finish_reason]
        return (
            f"the answer ends after {counted(len(self.token_ids), 'token')} ({self.finish_reason}), and is only the "
            f"beginning of what {option(request.constraint.kind)} asks for; {how} "
            f"{option(names[self.finish_reason])} wanted"
        )

    def early_end(self, request: Request) -> str | None:
        """Why the answer ended before it was to, where a constraint lets nothing more come."""
        if request.constraint is None or self.finish_reason != "eos":
            return None
        early = len(self.token_ids) <= request.min_new_tokens
        passed = [
            name
            for name, is_passed in (("min_new_tokens", early), ("ignore_eos", request.ignore_eos))
            if is_passed
        ]
        if not passed:
            return None
        held = option(request.constraint.kind)
        return f"note: {held} lets nothing more come: the answer ends in spite of {' and '.join(map(option, passed))}"

    def reported(self, chat: Chat) -> dict[str, object]:
        """What `run --json` and results of batches have in common: no times, so that the same again is the same."""
        fields: dict[str, object] = {
            "text": self.text,
            "reasoning": self.reasoning,
            "tool_calls": None if self.tool_calls is None else [*map(dataclasses.asdict, self.tool_calls)],
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "top_logits": self.top_logits and [_named(chat, best, "logit") for best in self.top_logits],
            "logprobs": self.logprobs and [_with_text(chat, one) for one in self.logprobs],
            "prompt_tokens": len(self.prompt_ids),
        }
        return {name: value for name, value in fields.items() if value is not None}

    def as_json(self, chat: Chat, *, prompt_ids: bool = False) -> dict[str, object]:
        """What `run --json` prints; the prompt's ids where they are asked for."""
        fields = {"prompt_ids": [*self.prompt_ids]} if prompt_ids else {}
        return fields | self.reported(chat) | {
            "ttft_ms": self.ttft_ms,
            "tokens_per_s": self.tokens_per_s,
            "provider": chat.runner.provider,
            "dtype": chat.runner.manifest.dtype,
        }  # fmt: skip


def complete(
    chat: Chat,
    prompt: Prompt,
    asked: Mapping[str, Any],
    *,
    on_token: Callable[[Token | None, Said], None] = lambda token, said: None,
) -> Completion:
    """Generate to the end, or to Ctrl-C: then what there is so far is the answer, `interrupted`.

    Args:
        asked: values of Request by field name.
        on_token: gets each token as it comes, and what became certain with it of reasoning and answer (all of it is
            answer where the prompt is no chat); None at the end, with what was held back.

    Raises:
        UserError: as `Chat.generate`.
    """
    request = chat.request(asked)
    prompt_ids = chat.prompt_ids(prompt, **request.of_prompt, most=chat.runner.context_length)
    begun = prompt_ids.begun
    splitter = None if begun is None or request.constraint is not None else ReasoningSplitter(begun=begun)
    tokens: list[Token] = []
    # Nothing asked for is nothing missing: max_new_tokens 0 ends by length.
    reason = FinishReason.LENGTH
    try:
        for token in chat.generate(prompt_ids, **asked):
            tokens.append(token)
            reason = token.finish_reason or FinishReason.INTERRUPTED
            on_token(token, Said(answer=token.text) if splitter is None else splitter.push(token.text))
    except KeyboardInterrupt:
        reason = FinishReason.INTERRUPTED
    if splitter is not None:
        on_token(None, splitter.flush())
    return Completion.of(prompt_ids, tokens, request, reason, begun=begun)


def bounded(chat: Chat | Processor, asked: Given) -> dict[str, Any]:
    """What was asked, with a number of tokens that an answer ends at, whoever says it."""
    own = chat.generation_config.given.get("max_new_tokens", MOST_TOKENS)
    return {"max_new_tokens": own, **asked}


def verify_for_template(processor: Processor, asked: Given) -> None:
    """Raises UserError for what the chat template would pass over without a word."""
    template = processor.prompts.template_of(asked)
    source = template.source if template else ""
    if asked.get("enable_thinking") is not None and "enable_thinking" not in source:
        given = option("enable_thinking", asked["enable_thinking"])
        raise UserError(f"{processor.folder}: its chat template has no switch for thinking ({given})")
    if asked.get("tools") is not None and "tools" not in source:
        raise UserError(
            f"{processor.folder}: its chat template shows no tools to the model ({option('tools')})"
        )


def _logprob(token: Token) -> TokenLogprob:
    if token.logprob is None:
        raise TypeError("a token without the logprob that was asked for")
    return TokenLogprob(token.token_id, token.logprob, list(token.top_logprobs))


def _named(chat: Chat, pairs: Sequence[tuple[int, float]], of: str) -> list[dict[str, object]]:
    return [{"token_id": one, "text": token_text(chat, one), of: value} for one, value in pairs]


def _with_text(chat: Chat, one: TokenLogprob) -> dict[str, object]:
    (fields,) = _named(chat, [(one.token_id, one.logprob)], "logprob")
    return {**fields, "top_logprobs": _named(chat, one.top_logprobs, "logprob")}


def token_text(chat: Chat, token_id: int) -> str:
    """The text of one id by itself; empty without a tokenizer."""
    return chat.tokenizer.decode([token_id], skip_special_tokens=False) if chat.tokenizer else ""
