"""`qwen-onnx run --batch`: a file of prompts in, a file of answers out, in order; it goes on where it was cut off."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Self

from rich.progress import TimeElapsedColumn

from qwen_onnx.cli.batch.input import (
    OPTIONS,
    Line,
    open_input,
    parse_line,
    parse_object,
    read_lines,
    verify_input,
)
from qwen_onnx.cli.batch.output import Results
from qwen_onnx.cli.completion import Completion, verify_for_template
from qwen_onnx.cli.terminal.bar import progress_bar
from qwen_onnx.cli.terminal.output import tell
from qwen_onnx.errors import OutOfMemoryError, UserError, counted, naming
from qwen_onnx.options import Given
from qwen_onnx.runners.chat import Chat, Token
from qwen_onnx.runners.generate import verify_batch
from qwen_onnx.runners.output import FinishReason
from qwen_onnx.runners.runtime.session import onnxruntime_version
from qwen_onnx.runners.text.prompts import PromptIds

BATCH_SIZE = 8
WINDOW = 4
"""Batches whose lines are read ahead, so that prompts of like length go together."""

Result = dict[str, object]


@dataclasses.dataclass(frozen=True)
class BatchOptions:
    """What `run` is told of a batch."""

    file: str
    """`-` is stdin."""
    size: int
    """Most prompts at a time."""
    out: Path | None
    """None: stdout."""

    @classmethod
    def of(cls, file: str, size: int | None, out: Path | None) -> Self:
        """As they were given."""
        return cls(file, BATCH_SIZE if size is None else size, out)


def verify_batch_files(options: BatchOptions) -> None:
    """Raises UserError where the files cannot be opened: before a model is."""
    verify_input(options.file)
    out = options.out
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise UserError(f"--out {out}: {'a folder' if out.is_dir() else 'lies in no folder that exists'}")


@dataclasses.dataclass
class _Item:
    """A line that is read, and what became of it so far."""

    line: Line
    key: str
    asked: Given
    prompt_ids: PromptIds = dataclasses.field(default_factory=PromptIds)
    echoed: Result = dataclasses.field(default_factory=dict)
    """Its id, where it has one."""
    result: Result | None = None
    new_tokens: int = 0

    def fail(self, error: UserError) -> None:
        self.result = {**self.echoed, "error": str(error)}

    def answer(self, chat: Chat, tokens: Sequence[Token], reason: FinishReason) -> None:
        """What `run --json` prints, but for the prompt's ids, and for times: the same again gives the same line."""
        request = chat.request(self.asked)
        found = Completion.of(self.prompt_ids, tokens, request, reason, begun=self.prompt_ids.begun)
        self.result = {**self.echoed, **found.reported(chat)}
        if (cut := found.cut(chat, request)) is not None:
            self.result["error"] = cut
        self.new_tokens = len(tokens)


def complete_file(
    chat: Chat,
    options: BatchOptions,
    asked: Given,
    *,
    raw: bool,
    system: str | None,
    stats: bool,
) -> int:
    """Answer every line of a file; the exit code: 0, or 130 after Ctrl-C.

    Args:
        asked: what holds where a line says nothing.
        raw, system: see `parse_line`.

    Raises:
        UserError: nothing of it can be done; or, once all is done, some lines could not be answered.
    """
    verify_batch(chat.runner, options.size)
    started, new_tokens, answered = time.perf_counter(), 0, 0
    runner = chat.runner
    held = [
        *(runner.manifest.files, runner.context_length, chat.request(asked), raw, system, runner.describe()),
        *(runner.options.optimization_level, runner.options.disabled_optimizers, onnxruntime_version()),
    ]
    settings = hashlib.sha256(repr(held).encode())

    def keyed(line: Line) -> tuple[Line, str]:
        digest = settings.copy()
        digest.update(line.content)
        return line, digest.hexdigest()[:16]

    with (
        open_input(options.file) as stream,
        Results(options.out) as results,
        _bar(stream, options) as show,
        naming(dict.fromkeys(OPTIONS)),
    ):
        try:
            lines = results.remaining(map(keyed, read_lines(stream, options.file)))
            # One at a time, each is answered as it comes.
            window = options.size * WINDOW if options.size > 1 else 1
            while taken := list(itertools.islice(lines, window)):
                items = [_item(chat, line, key, asked, raw=raw, system=system) for line, key in taken]
                for item, result in _in_order(items, _completed(chat, items, options.size)):
                    if "error" in result:
                        tell(f"line {item.line.number}: {result['error']}")
                    results.write(item.line, item.key, result)
                    new_tokens, answered = new_tokens + item.new_tokens, answered + 1
                    show(results, item.line.end)
        except KeyboardInterrupt:
            failed = f", {results.failed} of them failed" if results.failed else ""
            then = "" if options.out is None else f", in {options.out}; the same command goes on from there"
            tell(f"interrupted: {results.done} done{failed}{then}")
            return 130
    if stats:
        words = (
            f"{counted(results.done, 'line')}, {results.failed} failed, {counted(new_tokens, 'new token')}"
        )
        speed = new_tokens / (time.perf_counter() - started)
        tell(f"{words}, {speed:.1f} tokens/s, {chat.runner.describe()}")
    if options.out is not None:
        tell(*results.summary(answered))
    if results.failed:
        raise UserError(
            f"{results.failed} of {counted(results.done, 'line')} could not be answered; the others are done"
        )
    return 0


def _item(chat: Chat, line: Line, key: str, asked: Given, *, raw: bool, system: str | None) -> _Item:
    """A line that is ready to be answered, or whose result is why it cannot be."""
    item = _Item(line, key, asked)
    try:
        value = parse_object(line.content)
        item.echoed = {"id": value["id"]} if "id" in value else {}
        prompt, item.asked = parse_line(value, asked, raw=raw, system=system)
        verify_for_template(chat.processor, item.asked)
        item.prompt_ids = chat.verified_ids(prompt, item.asked)
    except UserError as error:
        item.fail(error)
    return item


def _in_order(items: Iterable[_Item], answered: Iterable[_Item]) -> Iterator[tuple[_Item, Result]]:
    """The items and their results, each as soon as it and all before it are among those answered."""
    waiting = collections.deque(items)
    for _ in answered:
        while waiting and (result := waiting[0].result) is not None:
            yield waiting.popleft(), result


def _completed(chat: Chat, items: Sequence[_Item], size: int) -> Iterator[_Item]:
    """The items, each when it has its result: prompts of like length together, the batch of the first line first."""
    left = []
    for item in items:
        if item.result is None:
            left.append(item)
        else:
            yield item
    left.sort(key=lambda item: len(item.prompt_ids))
    batches = [left[start : start + size] for start in range(0, len(left), size)]
    for batch in sorted(batches, key=lambda batch: min(item.line.number for item in batch)):
        yield from _together(chat, batch)


def _together(chat: Chat, batch: Sequence[_Item]) -> Iterator[_Item]:
    tokens: list[list[Token]] = [[] for _ in batch]
    try:
        stream = chat.generate_each([item.prompt_ids for item in batch], [item.asked for item in batch])
        for index, token in stream:
            tokens[index].append(token)
            if token.finish_reason is not None:
                batch[index].answer(chat, tokens[index], token.finish_reason)
                yield batch[index]
    except UserError as error:
        left = [item for item in batch if item.result is None]
        if len(batch) == 1 and isinstance(error, OutOfMemoryError):
            raise  # it is none of the line's: to go on with, once there is memory
        if len(batch) == 1:  # the line is named, not its place among prompts
            batch[0].fail(UserError(str(error).removeprefix("prompts[0]: ")))
            yield from left
        else:  # one of them, or all are too many: each by itself
            for item in left:
                yield from _together(chat, [item])
        return
    for item in batch:  # no token of it was wanted
        if item.result is None:
            item.answer(chat, [], FinishReason.LENGTH)
            yield item


@contextlib.contextmanager
def _bar(stream: BinaryIO, options: BatchOptions) -> Iterator[Callable[[Results, int], None]]:
    """Shows how many lines are done and how much of the file they are: on a terminal that gets no results."""
    size = None
    if options.file != "-" and stat.S_ISREG((found := os.fstat(stream.fileno())).st_mode):
        size = found.st_size
    hidden = options.out is None and sys.stdout.isatty()
    with progress_bar("answering", TimeElapsedColumn(), hidden=hidden) as show:
        show(0, size, "0 lines")

        def show_results(results: Results, end: int) -> None:
            failed = f", {results.failed} failed" if results.failed else ""
            show(end, size, f"{counted(results.done, 'line')}{failed}")

        yield show_results
