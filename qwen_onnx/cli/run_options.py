"""The options of `qwen-onnx run` that are neither the request's nor the session's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from qwen_onnx.errors import UserError
from qwen_onnx.option_kinds import Count, FilePath, Switch, Text
from qwen_onnx.options import Options, declare

_RUN, _CHAT, _OUTPUT = "Options", "Chat", "Output"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """What is run, and what is shown of it.

    Raises:
        UserError: values that are wrong, or do not go together.
    """

    prompt: str | None = declare(None, Text(), "Answer this prompt and leave.", _RUN, flag="--prompt -p")
    prompt_ids: str | None = declare(None, Text(), "Token ids for a prompt: 1,2,3.", _RUN, metavar="IDS")
    batch: str | None = declare(
        None, Text(), "Answer each line of a JSONL file; - is stdin.", _RUN, metavar="FILE"
    )
    batch_size: int | None = declare(None, Count(1, 4096), "Prompts of --batch at a time; default 8.", _RUN)
    out: Path | None = declare(
        None, FilePath(), "Results of --batch; run again to go on.", _RUN, metavar="FILE"
    )

    system: str | None = declare(None, Text(), "System message.", _CHAT)
    raw: bool = declare(False, Switch(), "Continue the text as it is.", _CHAT, flag="--raw")
    context_full: str = declare("shift", Text(("shift", "stop")), "shift (default), or stop.", _CHAT)
    greedy: bool = declare(
        False, Switch(), "Best token; penalties only as given.", "Sampling", flag="--greedy"
    )
    show_thinking: bool = declare(
        True, Switch(), "Reasoning on stderr; default on.", _OUTPUT, flag="--show-thinking/--hide-thinking"
    )
    stats: bool = declare(False, Switch(), "TTFT, tokens/s and memory.", _OUTPUT, flag="--stats")
    verbose: bool = declare(False, Switch(), "Provider, cache and sampling.", _OUTPUT, flag="--verbose -v")
    json: bool = declare(False, Switch(), "Answer as one JSON object.", _OUTPUT, flag="--json")
    show_prompt_ids: bool = declare(
        False, Switch(), "The prompt's ids in --json.", _OUTPUT, flag="--show-prompt-ids", hidden=True
    )
    color: bool = declare(
        True, Switch(), "Colors on a terminal; default on.", _OUTPUT, flag="--color/--no-color"
    )
    markdown: bool = declare(
        True, Switch(), "Emphasis in answers on a terminal.", _OUTPUT,
        flag="--markdown/--no-markdown", hidden=True,
    )  # fmt: skip
    wrap: bool = declare(
        True, Switch(), "Words that a terminal does not cut.", _OUTPUT, flag="--wrap/--no-wrap", hidden=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt is not None and self.prompt_ids is not None:
            raise UserError("-p and --prompt-ids are two prompts: give one")
        if self.batch is not None and (self.prompt is not None or self.prompt_ids is not None):
            raise UserError("--batch brings the prompts: leave out -p and --prompt-ids")
        for name, value in (("--batch-size", self.batch_size), ("--out", self.out)):
            if value is not None and self.batch is None:
                raise UserError(f"{name} is for --batch FILE.jsonl, which is not given")
        if self.show_prompt_ids and not self.json:
            raise UserError("--show-prompt-ids is for --json, which is not given")
        if self.system is not None and not self.uses_template:
            raise UserError("--system belongs to the chat template; --raw and --prompt-ids use none")

    @property
    def uses_template(self) -> bool:
        """Prompts go through the chat template."""
        return not self.raw and self.prompt_ids is None
