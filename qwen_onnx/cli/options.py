"""The options of `run` that say how tokens are chosen, and what they come to."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from qwen_onnx.errors import UserError
from qwen_onnx.runners.sampling.constraint import Constraint, as_constraint
from qwen_onnx.runners.sampling.params import SamplingOptions

Greedy = Annotated[
    bool, typer.Option("--greedy", help="The best token each time, whatever generation_config.json says.")
]
Temperature = Annotated[float | None, typer.Option(help="Logits are divided by it; 0 is greedy.")]
TopK = Annotated[int | None, typer.Option(help="Choose among the K best tokens; 0 for all.")]
TopP = Annotated[float | None, typer.Option(help="Among the best that have this probability together.")]
MinP = Annotated[float | None, typer.Option(help="Among those of this share of the best one's probability.")]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Logits of tokens in prompt and answer are divided by it.")
]
PresencePenalty = Annotated[
    float | None, typer.Option(help="Taken off the logits of tokens in the answer, -2 to 2.")
]
FrequencyPenalty = Annotated[float | None, typer.Option(help="The same, times how often they are there.")]
LogitBias = Annotated[
    str | None, typer.Option(metavar="ID=VALUE,...", help="Added to the logits of these ids, -100 to 100.")
]
Seed = Annotated[int | None, typer.Option(help="The same gives the same text; default another each time.")]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="End the answer before this text; may be given several times."),
]
MinNewTokens = Annotated[int | None, typer.Option(min=0, help="So many tokens before the answer can end.")]
Logprobs = Annotated[
    int | None, typer.Option(min=0, help="Show each token's log probability, and those of the K best.")
]

JsonSchema = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The answer is JSON of the schema in this file.")
]
Regex = Annotated[str | None, typer.Option(metavar="TEXT", help="The answer is a match of this expression.")]


def without_drawing(asked: SamplingOptions) -> SamplingOptions:
    """What `--greedy` makes of the other options: penalties and bias stay only where they are asked for.

    Raises:
        UserError: an option that only drawing has a use for.
    """
    for name in ("temperature", "top_k", "top_p", "min_p"):
        if getattr(asked, name):
            raise UserError(f"--greedy draws nothing: leave out --{name.replace('_', '-')}, or --greedy")
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed")
    given = {name: getattr(asked, name) for name in names}
    kept = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(SamplingOptions.greedy(), **kept)


def parse_logit_bias(text: str | None) -> dict[int, float] | None:
    """`5=-1,7=2.5` as a dict; None stays None.

    Raises:
        UserError: anything else.
    """
    if text is None:
        return None
    bias: dict[int, float] = {}
    for part in text.split(","):
        token_id, equals, value = part.partition("=")
        try:
            if not equals:
                raise ValueError
            bias[int(token_id)] = float(value)
        except ValueError:
            raise UserError(f"logit_bias {text!r}: ids and numbers wanted, as 5=-1,7=2.5") from None
    return bias


def parse_constraint(json_schema: Path | None, regex: str | None) -> Constraint | None:
    """What `--json-schema` and `--regex` ask for; None without them.

    Raises:
        UserError: both, a file that cannot be read, or what is in it is no schema.
    """
    if json_schema is not None and regex is not None:
        raise UserError("--json-schema and --regex are two constraints: give one")
    if json_schema is None:
        return as_constraint(regex=regex)
    try:
        text = json_schema.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"--json-schema {json_schema}: no such file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--json-schema {json_schema}: not UTF-8 (byte {error.start})") from None
    except (OSError, ValueError) as error:  # a null byte in the name
        said = getattr(error, "strerror", None) or error
        raise UserError(f"--json-schema {json_schema}: cannot be read ({said})") from None
    try:
        return as_constraint(json_schema=text)
    except UserError as error:
        raise UserError(f"--json-schema {json_schema}: {error}") from None
