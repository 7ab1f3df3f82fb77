"""Command lines that people mistype and programs put together wrongly."""

from __future__ import annotations

import contextlib
import random
import shutil
from pathlib import Path

from qwen_onnx.errors import UserError
from support.chats import copy_export
from support.command import command

STRANGE = (
    "", " ", "0", "-1", "1", "1e3", "٣", "9" * 30, "nan", "x", "é", "\ud800", "../x", "a\0b", "a\nb", "--", "cpu",
)  # fmt: skip
VERBS = ("export", "info", "check", "build", "cache", "bench", "", "exprot", "--version", "-h")
IDS = (
    "1,2,3",
    "1",
    "",
    ",",
    "1,,2",
    "-1",
    "400",
    "9" * 30,
    " 1 , 2",
    "1.0",
    "٣",
    "1;2",
    "x",
    ",".join("1" * 99),
)
SWITCHES = (
    "--stats", "--json", "--raw", "--speculate", "--ignore-eos", "--no-prepack", "--greedy-on-device", "--tf32",
    "--prepack", "--no-such", "--greedy", "--think", "--no-think", "--hide-thinking", "--no-cache-reuse",
    "--no-color",
)  # fmt: skip
VALUES = (
    "-p", "--max-new-tokens", "--max-context", "--dtype", "--provider", "--top-logits", "--system", "--threads",
    "--revision", "--gpu-mem-limit", "--temperature", "--top-k", "--top-p", "--min-p", "--seed", "--stop",
    "--logit-bias", "--logprobs", "--min-new-tokens", "--repetition-penalty", "--context-full", "--tools",
    "--batch", "--batch-size", "--out",
)  # fmt: skip


def damaged_command(rng: random.Random, export: Path, checkpoint: Path, scratch: Path) -> None:
    """Run one in a folder of its own.

    Raises:
        UserError: it was refused, as every command must.
    """
    home = scratch / "command"
    shutil.rmtree(home, ignore_errors=True)
    copy_export(export, home / "export")  # `check` writes to it
    (home / "here").mkdir()
    arguments = _arguments(rng, str(home / "export"), str(checkpoint))
    stdin = rng.randbytes(rng.randrange(9)) if rng.random() < 0.5 else b"Hi"
    with contextlib.chdir(home / "here"):
        ran = command(*arguments, stdin=stdin)
    assert "Traceback" not in ran.err
    if ran.code == 2:
        assert ran.err.rstrip().endswith("--help")
        assert not ran.out
        raise UserError("usage")
    if ran.code == 1 and not ran.out.startswith("MISMATCH: "):
        raise UserError(ran.error)
    assert ran.code == 0 or ran.out.startswith("MISMATCH: "), ran


def _arguments(rng: random.Random, export: str, checkpoint: str) -> list[str]:
    places = (checkpoint, ".", "none", "./none", "../none", "", "a\0b", "a\nb", "~", "~x", "x" * 300)
    verb = rng.choice(("run",) * 10 + VERBS)
    arguments = [verb]
    if rng.random() < 0.9:
        arguments.append(rng.choice((export,) * 8 + places))
    match verb:
        case "run":
            for _ in range(rng.randrange(3)):
                arguments += rng.choice(((rng.choice(SWITCHES),), (rng.choice(VALUES), rng.choice(STRANGE))))
            if rng.random() < 0.7:
                arguments += ["--prompt-ids", rng.choice(IDS)]
        case "export":
            arguments += [rng.choice(STRANGE)] if rng.random() < 0.7 else []
            arguments += ["--dtype", rng.choice(("f32", "int4", "x", ""))] if rng.random() < 0.5 else []
            arguments += ["--max-context", rng.choice(STRANGE)] if rng.random() < 0.5 else []
        case "bench":  # what it accepts it measures, which takes its time
            arguments += [
                "--repeats",
                rng.choice(("0", "-1", "x", "")),
                "--new-tokens",
                rng.choice(("0", "-1")),
            ]
        case "cache":
            arguments[1:] = [
                rng.choice(("ls", "rm", "", "x")),
                *rng.choices((*STRANGE, "--all", "--json"), k=2),
            ]
    return arguments
