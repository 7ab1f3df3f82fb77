"""What is asked of one answer: how its tokens are chosen, what ends it, what its text must be, what it reports."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from qwen_onnx.contract.json_file import read_json_value, read_text
from qwen_onnx.errors import UserError, option
from qwen_onnx.option_kinds import Count, Switch, Text, Texts, as_json
from qwen_onnx.options import SAME, declare
from qwen_onnx.runners.sampling.constraint import Constraint, as_constraint
from qwen_onnx.runners.sampling.params import GREEDY, PANEL, SamplingParams

PLAIN: Mapping[str, Any] = MappingProxyType({**GREEDY, "stop": (), "min_new_tokens": 0, "ignore_eos": True})
"""Greedy ids as the model computes them, past every end, whatever generation_config.json says."""
_OUTPUT, _CHAT = "Output", "Chat"
_OF_PROMPT = ("tools", "enable_thinking", "chat_template", "escape_special")


@dataclasses.dataclass(frozen=True)
class Schema:
    """A JSON Schema, as Python values or as JSON."""

    wanted: str = "an object, or true,"
    typed: Any = Path

    def accepts(self, value: Any) -> bool:
        """See Kind.accepts; what is in it, `as_constraint` looks at."""
        return isinstance(value, Mapping | bool | str)

    def parse(self, text: str) -> object:
        """See Kind.parse."""
        return text


@dataclasses.dataclass(frozen=True)
class Tools:
    """Functions that the model may call, as OpenAI's API describes them."""

    wanted: str = "a list of JSON objects"
    typed: Any = Path

    def accepts(self, value: Any) -> bool:
        """See Kind.accepts."""
        return isinstance(value, list | tuple) and all(isinstance(tool, Mapping) for tool in value)

    def parse(self, text: str) -> object:
        """See Kind.parse."""
        return as_json(text)


def read_schema(path: Path) -> str:
    """A schema's file.

    Raises:
        UserError: it cannot be read, or holds no schema.
    """
    text = read_text(path, name=f"--json-schema {path}")
    try:
        as_constraint(json_schema=text)
    except UserError as error:
        name = option("json_schema")  # with which the error begins
        raise UserError(f"{name} {path}{str(error).removeprefix(name)}") from None
    return text


def read_tools(path: Path) -> list[dict[str, Any]]:
    """The functions in a JSON file: a list of objects that have names.

    Raises:
        UserError: anything else.
    """
    found = read_json_value(path)
    if not isinstance(found, list) or not found:
        raise UserError(f"{path}: a JSON list of functions wanted")
    for tool in found:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UserError(f"{path}: each function is an object with a name, found {str(tool)[:200]}")
    return found


def read_template(given: str) -> str:
    """A template's name, or the text of its file: what has a dot or a slash is a file.

    Raises:
        UserError: the file cannot be read, or holds no template.
    """
    if not set("./\\") & set(given):
        return given
    if "{" not in (text := read_text(Path(given), name=f"--chat-template {given}")):
        raise UserError(f"--chat-template {given}: not a Jinja template")
    return text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(SamplingParams):
    """What is asked of one answer, complete: `Chat.request` makes one of what was given and of the export's defaults.

    Raises:
        UserError: a value of the wrong kind or out of range.
    """

    max_new_tokens: int | None = declare(
        None, Count(), "Most tokens of an answer.", PANEL, config_key=SAME, setting=SAME, of_lines=True,
        about="Most tokens of an answer; default until the model ends it or the context is full.",
    )  # fmt: skip
    min_new_tokens: int = declare(
        0, Count(), "Least tokens before the answer may end.", PANEL, config_key=SAME, setting=SAME, of_lines=True,
        about="So many tokens come before an end token, or the one that completes a stop string.",
    )  # fmt: skip
    stop: str | Sequence[str] = declare(
        (), Texts(), "End before this text; may be repeated.", PANEL, metavar="TEXT", config_key="stop_strings",
        setting=SAME, of_lines=True, about="End the answer before this text, or the first of several.",
    )  # fmt: skip
    """They may span tokens, and are not part of the text. Special tokens have no text: they do not count. Nor does
    the reasoning before an answer."""
    ignore_eos: bool = declare(
        False, Switch(), "Go on after an end token.", PANEL, flag="--ignore-eos", setting=SAME
    )
    json_schema: Mapping[str, object] | bool | str | None = declare(
        None, Schema(), "The answer is JSON of this schema.", PANEL, metavar="FILE", read=read_schema, hash=False,
        of_lines=True,
        about="The answer is JSON of this schema: Python values, or JSON text.",
    )  # fmt: skip
    """The whole answer is, with no reasoning before it. It ends with an end token (`eos`) where its text is complete:
    never before, and there whatever `min_new_tokens` and `ignore_eos` say if nothing else can come. What else ends it
    (`length`, `context`, `stop`) leaves the beginning of such a text."""
    additional_properties: bool = declare(
        False, Switch(), "Objects of --json-schema may have more keys.", PANEL, flag="--additional-properties",
        hidden=True, of_lines=True,
        about="Objects of json_schema may have keys that it does not name; else they do only where it says so.",
    )  # fmt: skip
    regex: str | None = declare(None, Text(), "The answer matches this expression.", PANEL, of_lines=True)
    """The whole answer does, as with `json_schema`; in the syntax of Rust's `regex`."""
    logprobs: int | None = declare(
        None, Count(), "Of each token and the K best.", _OUTPUT, metavar="K", setting=SAME,
        about="Report each token's log probability, and those of the K best.",
    )  # fmt: skip
    top_logits: int = declare(
        0, Count(), "The K best tokens of each step.", _OUTPUT, metavar="K", setting=SAME,
        about="Report the K best tokens of each step.",
    )  # fmt: skip
    enable_thinking: bool | None = declare(
        None, Switch(), "Reason first, or not.", _CHAT, flag="--think/--no-think", setting="think", of_lines=True,
        about="Have the model reason first, or not; default as the chat template says.",
    )  # fmt: skip
    tools: Sequence[Mapping[str, object]] | None = declare(
        None, Tools(), "Functions, as a JSON list.", _CHAT, metavar="FILE", read=read_tools, hash=False,
        of_lines=True,
        about="Functions that the model may call, as OpenAI's API describes them.",
    )  # fmt: skip
    chat_template: str | None = declare(
        None, Text(), "Template: name, or ./FILE.", _CHAT, metavar="NAME", read=read_template,
        about="One of the model's chat templates by name, or a Jinja text; default as transformers chooses.",
    )  # fmt: skip
    escape_special: bool = declare(
        False, Switch(), "<|im_end|> in text is text.", _CHAT, flag="--escape-special", setting=SAME,
        about="What messages, tools and their results spell as control tokens, as <|im_end|>, stays text.",
    )  # fmt: skip
    reuse_cache: bool = declare(
        True, Switch(), "Compute new tokens only.", _CHAT, flag="--cache-reuse/--no-cache-reuse",
        about="Compute only what of the prompt is not in the cache yet.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        _ = self.constraint  # which says what is wrong with it

    @functools.cached_property
    def constraint(self) -> Constraint | None:
        """What the answer's text must be."""
        return as_constraint(
            json_schema=self.json_schema, regex=self.regex, additional_properties=self.additional_properties
        )

    @property
    def of_prompt(self) -> dict[str, Any]:
        """What `Chat.prompt_ids` takes of it."""
        asked = {name: getattr(self, name) for name in _OF_PROMPT}
        # The whole answer is held to a constraint: no reasoning comes before it.
        return asked | {"close_reasoning": self.constraint is not None}

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return tuple(self.stop)

    @property
    def plain(self) -> bool:
        """Each id is that of the best logit as the model computed it."""
        return super().plain and not self.min_new_tokens and self.constraint is None

    def describe(self) -> str:
        """The values, in two lines, and a third for a constraint."""
        most = "none" if self.max_new_tokens is None else self.max_new_tokens
        stop = " ".join(map(repr, self.stops)) or "none"
        held = "" if self.constraint is None else f"\n{self.constraint.describe()}"
        on = ", ignore_eos on" if self.ignore_eos else ""
        on += f", top_logits {self.top_logits}" if self.top_logits else ""
        on += "" if self.logprobs is None else f", logprobs {self.logprobs}"
        return (
            f"{super().describe()}\n"
            f"max_new_tokens {most}, min_new_tokens {self.min_new_tokens}, stop {stop}{on}{held}"
        )
