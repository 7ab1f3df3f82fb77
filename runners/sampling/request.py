"""The values that one generation goes by."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from qwen_onnx.errors import UserError
from qwen_onnx.runners.sampling.constraint import Constraint
from qwen_onnx.runners.sampling.grammar import Grammar
from qwen_onnx.runners.sampling.params import Sampling, SamplingOptions, verify_count
from qwen_onnx.runners.text.stop_strings import verified_stop


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """What is asked of one answer; None leaves a value to the export's generation_config.json or its template.

    Raises:
        UserError: a value of the wrong kind or out of range.
    """

    max_new_tokens: int | None = None
    """Where that file says nothing either: until the model ends or the context is full."""
    ignore_eos: bool = False
    """Go on after an end token."""
    top_logits: int = 0
    """How many of the best ids and logits each token carries."""
    sampling: SamplingOptions = dataclasses.field(default_factory=SamplingOptions)
    """How tokens are chosen; each value overrides the file's."""
    stop: str | Sequence[str] | None = None
    """Strings that end the answer, beside the end tokens, and are not part of its text; they may span tokens. Special
    tokens have no text: they do not count."""
    min_new_tokens: int | None = None
    """So many tokens come before an end token, or the one that completes a stop string."""
    logprobs: int | None = None
    """Each token carries the log probability of its id, and of so many best ids."""
    constraint: Constraint | None = None
    """What the answer's text must be, all of it: no reasoning comes before it. It ends with an end token (`eos`)
    where that text is complete: never before, and there whatever `min_new_tokens` and `ignore_eos` say if nothing
    else can come. What else ends it (`length`, `context`, `stop`) leaves the beginning of such a text."""
    tools: Sequence[Mapping[str, object]] | None = None
    """JSON schemas of functions, for a chat template that shows them to the model."""
    enable_thinking: bool | None = None
    """The switch of templates for models that may think before they answer."""
    reuse_cache: bool = True
    """Compute only what the cache does not hold of the prompt; else all of it."""

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and (
            type(self.max_new_tokens) is not int or self.max_new_tokens < 0
        ):
            raise UserError(f"max_new_tokens {self.max_new_tokens!r}: a whole number wanted, or None")
        if type(self.top_logits) is not int or self.top_logits < 0:
            raise UserError(f"top_logits {self.top_logits!r}: a whole number of 0 or more wanted")
        for name in ("ignore_eos", "reuse_cache"):
            if type(getattr(self, name)) is not bool:
                raise UserError(f"{name} {getattr(self, name)!r}: True or False wanted")
        if self.enable_thinking is not None and type(self.enable_thinking) is not bool:
            raise UserError(f"enable_thinking {self.enable_thinking!r}: True, False or None wanted")
        if self.stop is not None:
            verified_stop(self.stop)
        if self.tools is not None and (
            isinstance(self.tools, str) or not all(isinstance(tool, Mapping) for tool in _listed(self.tools))
        ):
            raise UserError(f"tools {self.tools!r}: a list of JSON objects wanted, or None")
        verify_count("min_new_tokens", self.min_new_tokens)
        verify_count("logprobs", self.logprobs)
        if not isinstance(self.sampling, SamplingOptions):
            raise UserError(f"sampling {self.sampling!r}: SamplingOptions wanted, or None")
        if not isinstance(self.constraint, Constraint | None):
            raise UserError(f"constraint {self.constraint!r}: a Constraint wanted, or None")


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, Sequence) else [None]


@dataclasses.dataclass(frozen=True)
class GenerationOptions:
    """What a generation goes by, once all is decided."""

    max_new_tokens: int | None = None
    """None: until the model ends or the context is full."""
    ignore_eos: bool = False
    top_logits: int = 0
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    min_new_tokens: int = 0
    """So many tokens come before an end token, or before the one that completes a stop string."""
    logprobs: int | None = None
    """How many of the best ids have theirs beside the chosen one; None for none at all."""
    stop: tuple[str, ...] = ()
    """Looked for in the text, which `generate_ids` does not make."""
    grammar: Grammar | None = None
    """What the ids are held to."""

    @property
    def plain(self) -> bool:
        """Each id is that of the best logit as the model computed it."""
        return self.sampling.plain and not self.min_new_tokens and self.grammar is None

    def describe(self) -> str:
        """The values in force, in two lines, and a third for a constraint."""
        most = "none" if self.max_new_tokens is None else self.max_new_tokens
        stop = " ".join(map(repr, self.stop)) or "none"
        held = "" if self.grammar is None else f"\n{self.grammar.constraint.describe()}"
        on = ", ignore_eos on" if self.ignore_eos else ""
        on += f", top_logits {self.top_logits}" if self.top_logits else ""
        on += "" if self.logprobs is None else f", logprobs {self.logprobs}"
        return (
            f"{self.sampling.describe()}\n"
            f"max_new_tokens {most}, min_new_tokens {self.min_new_tokens}, stop {stop}{on}{held}"
        )
