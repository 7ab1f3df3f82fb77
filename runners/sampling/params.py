"""How tokens are chosen: what a caller may ask for, and what is in force with the export's own settings under it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Self

from qwen_onnx.errors import UserError

_NUMBERS: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: value >= 0, "a number of 0 or more"),
    "top_p": (lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "min_p": (lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "repetition_penalty": (lambda value: value > 0, "a number above 0"),
    "presence_penalty": (lambda value: -2 <= value <= 2, "a number from -2 to 2"),
    "frequency_penalty": (lambda value: -2 <= value <= 2, "a number from -2 to 2"),
}
_OF_DRAWING = ("temperature", "top_k", "top_p", "min_p")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """What is asked of the choice of tokens; None leaves a value to the export's generation_config.json.

    Where temperature (above 0), top_k, top_p or min_p is given, tokens are drawn, whatever that file says. Applied
    in the order: logit_bias, repetition, presence and frequency penalty, end tokens held off by min_new_tokens,
    temperature, top_k, top_p, min_p.

    Raises:
        UserError: a value of the wrong kind or out of range.
    """

    do_sample: bool | None = None
    """False is greedy: the best token after bias and penalties, nothing drawn."""
    temperature: float | None = None
    """Logits are divided by it; 0 is greedy."""
    top_k: int | None = None
    """Only so many of the best tokens, and equals of the last; 0 for all."""
    top_p: float | None = None
    """Only the best tokens that together have this probability, at least one."""
    min_p: float | None = None
    """Only tokens of at least this share of the best one's probability."""
    repetition_penalty: float | None = None
    """Positive logits of ids in prompt and answer are divided by it, negative ones multiplied."""
    presence_penalty: float | None = None
    """Taken off the logits of ids in the answer, -2 to 2."""
    frequency_penalty: float | None = None
    """The same, times how often the id is there."""
    logit_bias: Mapping[int, float] | None = dataclasses.field(default=None, hash=False)
    """Ids and what is added to their logits, -100 to 100."""
    seed: int | None = None
    """The same gives the same text, on one provider, dtype and version; None draws another each time."""

    def __post_init__(self) -> None:
        if self.do_sample is not None and type(self.do_sample) is not bool:
            raise UserError(f"do_sample {self.do_sample!r}: True or False wanted")
        for name, (fits, wanted) in _NUMBERS.items():
            value = getattr(self, name)
            if value is not None and not (is_number(value) and fits(value)):
                raise UserError(f"{name} {value!r}: {wanted} wanted")
        verify_count("top_k", self.top_k)
        verify_count("seed", self.seed, most=2**64 - 1)
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _verified_bias(self.logit_bias))

    @classmethod
    def greedy(cls) -> Self:
        """The best token as the model computes it, whatever generation_config.json says: no penalty, no bias."""
        return cls(
            do_sample=False,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            logit_bias={},
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """The values in force; what nobody set changes nothing. (transformers sets an unset top_k to 50.)"""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    seed: int | None = None

    @property
    def plain(self) -> bool:
        """The best logit as the model computed it: nothing is drawn, penalised or biased."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return not self.do_sample and penalties == (1, 0, 0) and not self.logit_bias

    def describe(self) -> str:
        """All values, in one line; those of drawing only where it draws."""
        left_out = {"do_sample"} if self.do_sample else {"do_sample", "seed", *_OF_DRAWING}
        fields = [field.name for field in dataclasses.fields(self) if field.name not in left_out]
        words = [f"{name} {_text(getattr(self, name))}" for name in fields]
        return ", ".join(["sampling" if self.do_sample else "greedy", *words])


def in_force(asked: SamplingOptions, default: SamplingOptions) -> Sampling:
    """What was asked for, what the default says of the rest, and neutral values for what neither says."""
    values: dict[str, Any] = {}
    for options in (default, asked):
        held = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
        values |= {name: value for name, value in held.items() if value is not None}
    if asked.do_sample is None and any(getattr(asked, name) is not None for name in _OF_DRAWING):
        values["do_sample"] = True
    if values.get("temperature") == 0:
        values |= {"do_sample": False, "temperature": Sampling.temperature}
    return Sampling(**values)


def is_number(value: object) -> bool:
    """A finite int or float, and not a bool, which is an int to Python."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond all floats
        return False


def verify_count(name: str, value: object, *, most: int | None = None) -> None:
    """Raises UserError for what is neither a whole number of 0 or more nor None."""
    if value is None:
        return
    if type(value) is not int or value < 0 or (most is not None and value > most):
        upper = "of 0 or more" if most is None else f"from 0 to {most}"
        raise UserError(f"{name} {value!r}: a whole number {upper} wanted")


def _verified_bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise UserError(f"logit_bias {bias!r}: token ids and numbers wanted, as {{5: -1.0}}")
    for token_id, value in bias.items():
        if type(token_id) is not int or token_id < 0:
            raise UserError(f"logit_bias of {token_id!r}: a token id wanted")
        if not is_number(value) or not -100 <= value <= 100:
            raise UserError(f"logit_bias {value!r} of {token_id}: a number from -100 to 100 wanted")
    return dict(bias)


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{token_id}={bias:g}" for token_id, bias in value.items()) or "none"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
