"""How tokens are chosen: the options of sampling, each with its bounds, flag and key in generation_config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from qwen_onnx.errors import UserError, option
from qwen_onnx.option_kinds import Count, Number, Switch, is_number
from qwen_onnx.options import SAME, Given, Kind, Options, declare, declared, default_of

PANEL = "Sampling"
"""Of the help."""
SWITCH = "do_sample"


@dataclasses.dataclass(frozen=True)
class Biases:
    """Token ids, and what is added to their logits."""

    wanted: str = "numbers by token id, as {5: -1.0},"
    typed: Any = str

    def accepts(self, value: Any) -> bool:
        """See Kind.accepts; what is in it, SamplingParams looks at, and names the pair that is wrong."""
        return isinstance(value, Mapping)

    def parse(self, text: str) -> object:
        """`5=-1,7=2.5`.

        Raises:
            UserError: anything else.
        """
        pairs = [part.partition("=") for part in text.split(",")]
        try:
            if not all(equals for _, equals, _ in pairs):
                raise ValueError
            return {int(token_id): float(value) for token_id, _, value in pairs}
        except ValueError:
            raise UserError(
                f"{option('logit_bias')} {text!r}: ids and numbers wanted, as 5=-1,7=2.5"
            ) from None


def _everywhere(
    default: Any,
    kind: Kind,
    help: str,
    about: str = "",
    *,
    only_with: str | None = None,
    hidden: bool = False,
) -> Any:
    """An option that has one name everywhere."""
    return declare(
        default, kind, help, PANEL,
        config_key=SAME, setting=SAME, of_lines=True, only_with=only_with, hidden=hidden, about=about,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams(Options):
    """How each token is chosen; as it is made, nothing is drawn, penalized or biased.

    Applied in this order: logit_bias, repetition, presence and frequency penalty, end tokens held off by
    min_new_tokens, temperature, top_k, top_p, min_p. Names and formulas are transformers' (which takes a top_k of 50
    where none is set); presence, frequency and bias are OpenAI's.

    Raises:
        UserError: a value of the wrong kind or out of range.
    """

    do_sample: bool = declare(
        False, Switch(), "Draw tokens; else the best each time.", config_key=SAME, setting=SAME
    )
    temperature: float = _everywhere(1.0, Number(0), "Logits are divided by it; 0: greedy.", only_with=SWITCH)
    top_k: int = _everywhere(
        0,
        Count(),
        "Draw from the K best; 0: from all.",
        "Draw from the K best, and equals of the last; 0: from all.",
        only_with=SWITCH,
    )
    top_p: float = _everywhere(
        1.0, Number(0, 1), "Draw from the best that sum up to X.",
        "Draw from the best that have this probability together, at least one.", only_with=SWITCH,
    )  # fmt: skip
    min_p: float = _everywhere(
        0.0, Number(0, 1), "Drop what is below X times the best.",
        "Draw only from tokens that have this share of the best one's probability.", only_with=SWITCH,
    )  # fmt: skip
    repetition_penalty: float = _everywhere(
        1.0, Number(0, above=True), "Divides logits of ids said before.",
        "Positive logits of ids in prompt and answer are divided by it, others multiplied.",
    )  # fmt: skip
    presence_penalty: float = _everywhere(0.0, Number(-2, 2), "Taken off logits of ids in the answer.")
    frequency_penalty: float = _everywhere(
        0.0, Number(-2, 2), "The same, for each time it is there.",
        "Taken off logits of ids in the answer, for each time they are there.",
    )  # fmt: skip
    logit_bias: Mapping[int, float] = declare(
        dict, Biases(), "Added to logits; -100 to 100.", PANEL, metavar="ID=X,..", read=Biases().parse,
        setting=SAME, of_lines=True, hash=False,
        about="Numbers from -100 to 100 by token id, added to the logits; ids may be strings, as in JSON.",
    )  # fmt: skip
    seed: int | None = declare(
        None, Count(0, 2**64 - 1), "The same seed draws the same text.", PANEL, setting=SAME, of_lines=True,
        about="The same seed draws the same text, on one provider, dtype and version.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        # Anew, for the caller's may change.
        biases = {_as_id(token_id): bias for token_id, bias in self.logit_bias.items()}
        object.__setattr__(self, "logit_bias", biases)
        name = option("logit_bias")
        for token_id, bias in self.logit_bias.items():
            if type(token_id) is not int or token_id < 0:
                raise UserError(f"{name} of {token_id!r}: a token id wanted")
            if not is_number(bias) or not -100 <= bias <= 100:
                raise UserError(f"{name} {bias!r} of {token_id}: a number from -100 to 100 wanted")

    @property
    def plain(self) -> bool:
        """The best logit as the model computed it: nothing is drawn, penalized or biased."""
        return all(getattr(self, name) == value for name, value in GREEDY.items())

    def describe(self) -> str:
        """How tokens are chosen, in one line; values of drawing only where it draws."""
        left_out = {"do_sample"} if self.do_sample else {"do_sample", "seed", *DRAWING}
        names = [field.name for field in dataclasses.fields(SamplingParams) if field.name not in left_out]
        words = [f"{name} {_in_words(getattr(self, name))}" for name in names]
        return ", ".join(["sampling" if self.do_sample else "greedy", *words])


DRAWING = tuple(name for name, option in declared(SamplingParams).items() if option.only_with == SWITCH)
"""Options that only drawing has a use for."""
GREEDY: Mapping[str, Any] = MappingProxyType({
    name: default_of(SamplingParams, name) for name in declared(SamplingParams) if name not in (*DRAWING, "seed")
})  # fmt: skip
"""The best token as the model computes it, whatever generation_config.json says: no penalty, no bias."""


def merged(defaults: Given, asked: Given) -> dict[str, object]:
    """What was asked for, and what the defaults say of the rest.

    Whoever asks for something that only drawing has a use for wants to draw; a temperature of 0 is greedy.
    """
    values = {**defaults, **asked}
    if "do_sample" not in asked and any(name in asked for name in DRAWING):
        values["do_sample"] = True
    if values.get("temperature") == 0:
        values = {**values, "do_sample": False, "temperature": SamplingParams.temperature}
    return values


def idle_note(defaults: Given, asked: Given) -> str:
    """What was asked for and changes nothing, because no token is drawn; empty where there is no such thing."""
    values = merged(defaults, asked)
    idle = [name for name in (SWITCH, *DRAWING) if name != "temperature" and asked.get(name)]
    if values.get(SWITCH) or not idle:
        return ""
    why = "temperature is 0" if {**defaults, **asked}.get("temperature") == 0 else f"{SWITCH} is off"
    return f"note: {why}: the best token is taken, whatever {', '.join(map(option, idle))} says"


def _as_id(token_id: object) -> Any:
    """Of a JSON object's key, the number that it is."""
    if not isinstance(token_id, str) or len(token_id) > len(str(2**63)) or not token_id.isdecimal():
        return token_id
    return int(token_id) if str(int(token_id)) == token_id else token_id


def _in_words(value: object) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{token_id}={bias:g}" for token_id, bias in value.items()) or "none"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
