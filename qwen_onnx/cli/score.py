"""`qwen-onnx score`: how likely a model finds a text."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from qwen_onnx.checks.comparison import compare_models, verify_same_tokens
from qwen_onnx.cli.completion import token_text
from qwen_onnx.cli.open_model import open_chat, processor_of
from qwen_onnx.cli.terminal.json_line import as_json_line
from qwen_onnx.cli.terminal.output import tell
from qwen_onnx.errors import UserError, counted
from qwen_onnx.exports.cached.options import ModelOptions
from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.runtime.options import SessionOptions
from qwen_onnx.runners.runtime.providers import verify_provider
from qwen_onnx.runners.score import Score, verify_scored
from qwen_onnx.runners.text.tokenizer import TOKENIZER_FILE


def score_file(
    model: str,
    asked: ModelOptions,
    file: str,
    options: SessionOptions,
    *,
    tokens: bool,
    against: str,
    as_json: bool,
) -> list[str]:
    """What `score` prints of a UTF-8 text; where it is longer than the context, a note on stderr.

    Args:
        file: a path, or `-` for stdin. A line break at its end is none of the text.
        tokens: a line for each token too.
        against: another model to compare with; none if empty.

    Raises:
        UserError: anything wrong with the file, the export or the options.
    """
    if against and tokens:
        raise UserError("--tokens is of one model: leave it out, or --against")
    verify_provider(options.provider)
    text = _read(file)
    processor = processor_of(model, asked, options)
    if processor.tokenizer is None:
        raise UserError(
            f"{processor.folder}: has no {TOKENIZER_FILE}: no text; Chat.score, in Python, takes ids"
        )
    ids = processor.prompts.encode(text)
    verify_scored(ids, processor.vocabulary)
    other = processor_of(against, asked, options) if against else None
    if other is not None:
        verify_same_tokens(processor, other)
    chat = open_chat(processor, options, for_scores=True)
    if other is not None:
        return _compared(chat, open_chat(other, options, for_scores=True), against, ids, as_json=as_json)
    score = chat.score(ids)
    if score.windows > 1:
        context = chat.runner.context_length
        before = counted(max(1, context // 2), "token")
        tell(
            f"note: longer than the context of {counted(context, 'token')}: scored in {score.windows:,} windows; "
            f"after the first each token is given {before} or more of those before it, not all"
        )
    if as_json:
        return [as_json_line(_as_json(chat, score))]
    table = [_line(chat, *token) for token in zip(score.token_ids, score.logprobs, strict=True)]
    return [*(table if tokens else []), *_summary(score)]


def _compared(chat: Chat, other: Chat, name: str, ids: Sequence[int], *, as_json: bool) -> list[str]:
    found = compare_models(chat, other, ids)
    if as_json:
        return [as_json_line({**dataclasses.asdict(found), "positions": found.positions})]
    lines = [
        f"perplexity     {found.perplexity:.4f}; of {name} {found.other_perplexity:.4f}",
        f"KL divergence  {found.kl:.3g} nats a token, mean of {found.positions:,} positions",
        f"top-1          the same at {100 * found.top1:.1f} % of them",
        "worst          KL, the text before, and what comes next by either:",
    ]
    for each in found.worst:
        before = "".join(
            token_text(chat, one) for one in found.token_ids[max(0, each.index - 12) : each.index]
        )
        mine, theirs = (token_text(chat, one) for one in (each.best, each.other_best))
        lines.append(f"{each.kl:14.2f} {before!r}: {mine!r}, {name} {theirs!r}")
    return lines


def _read(file: str) -> str:
    name = "stdin" if file == "-" else file
    try:
        if file != "-":
            content = Path(file).read_bytes()
        elif sys.stdin is None:  # closed, as `<&-` does
            raise UserError("stdin is closed: give the text in a file")
        else:
            content = sys.stdin.buffer.read()
        text = content.decode("utf-8-sig")  # files saved by Windows editors open with a byte order mark
    except FileNotFoundError:
        raise UserError(f"{name}: no such file; wanted one of UTF-8 text, or - for stdin") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 (byte {error.start})") from None
    except (OSError, ValueError) as error:  # a null byte in the name
        raise UserError(f"{name}: {getattr(error, 'strerror', None) or error}") from None
    return text.removesuffix("\n").removesuffix("\r")


def _summary(score: Score) -> list[str]:
    return [
        f"log-probability  {score.logprob:.4f}",
        f"perplexity       {score.perplexity:.4f}",
        f"tokens           {len(score.token_ids)}, all but the first scored",
    ]


def _line(chat: Chat, token_id: int, logprob: float | None) -> str:
    return f"{token_id:>7} {'-' if logprob is None else f'{logprob:.4f}':>10} {token_text(chat, token_id)!r}"


def _as_json(chat: Chat, score: Score) -> dict[str, object]:
    return {
        "logprob": score.logprob,
        "perplexity": score.perplexity,
        "tokens": len(score.token_ids),
        "windows": score.windows,
        "token_ids": score.token_ids,
        "texts": [token_text(chat, token_id) for token_id in score.token_ids],
        "logprobs": score.logprobs,
        "provider": chat.runner.provider,
        "dtype": chat.runner.manifest.dtype,
    }
