"""`qwen-onnx run`: one prompt, a file of them, or a chat."""

from __future__ import annotations

import signal
import sys
from typing import TextIO

from qwen_onnx.cli.batch.run import BatchOptions, complete_file, verify_batch_files
from qwen_onnx.cli.chat.commands import COMMANDS
from qwen_onnx.cli.chat.line_reader import LineReader, as_typed, can_edit, read_plain
from qwen_onnx.cli.chat.repl import Repl
from qwen_onnx.cli.chat.settings import settings
from qwen_onnx.cli.completion import bounded, complete, verify_for_template
from qwen_onnx.cli.open_model import open_chat, processor_of
from qwen_onnx.cli.printer import Printer, print_stats, print_verbose
from qwen_onnx.cli.run_options import RunOptions
from qwen_onnx.cli.terminal.json_line import as_json_line
from qwen_onnx.cli.terminal.output import answer, has_colors, tell
from qwen_onnx.cli.terminal.piped import is_piped, is_waiting
from qwen_onnx.errors import UserError, naming
from qwen_onnx.exports.cached.options import ModelOptions
from qwen_onnx.options import Given, made
from qwen_onnx.runners.chat import Chat, Message, Prompt
from qwen_onnx.runners.generate import verify_not_alone, verify_plain
from qwen_onnx.runners.model.runner import context_of
from qwen_onnx.runners.processor import Processor
from qwen_onnx.runners.runtime.optimizers import verify_optimizers
from qwen_onnx.runners.runtime.options import SessionOptions
from qwen_onnx.runners.runtime.providers import verify_provider
from qwen_onnx.runners.sampling.grammar import verify_regex
from qwen_onnx.runners.sampling.params import DRAWING, GREEDY, idle_note
from qwen_onnx.runners.sampling.request import Request
from qwen_onnx.runners.text.prompts import PromptIds

_NO_TEMPLATE = "no chat template; use --raw to complete text"


def run_model(model: str, *, run: Given, of_model: Given, asked: Given, session: Given) -> int:
    """Answer one prompt (from -p, --prompt-ids or a pipe), or a file of them, or chat; the exit code.

    Args:
        run, of_model, asked, session: what was given of RunOptions, ModelOptions, Request and SessionOptions.

    Raises:
        UserError: anything wrong with the options, the model or the prompt.
    """
    options, of_session = made(RunOptions, run), made(SessionOptions, session)
    model_options = made(ModelOptions, of_model)
    asked = _greedy(asked) if options.greedy else dict(asked)
    verify_regex(made(Request, asked).constraint)
    batch = None if options.batch is None else BatchOptions.of(options.batch, options.batch_size, options.out)
    if batch is not None:
        verify_batch_files(batch)
    verify_provider(of_session.provider)
    verify_optimizers(of_session.disabled_optimizers)
    given_prompt = options.prompt is not None or options.prompt_ids is not None
    chatting = batch is None and not given_prompt and _stdin().isatty()
    if chatting and options.json:
        raise UserError("--json answers one prompt: give it with -p, --prompt-ids or a pipe")
    for name, flag in (
        ("enable_thinking", "--think, --no-think"), ("tools", "--tools"), ("chat_template", "--chat-template")
    ):  # fmt: skip
        if name in asked and not options.uses_template:
            raise UserError(f"{flag} belongs to the chat template; --raw and --prompt-ids use none")
    prompt = None if batch is not None or chatting else _prompt(options)
    processor = processor_of(model, model_options, of_session)
    prompt = _verified(processor, options, asked, of_session, prompt)
    chat = open_chat(processor, of_session)
    if options.verbose:
        print_verbose(chat, bounded(chat, asked))
    if batch is not None:
        return complete_file(
            chat, batch, bounded(chat, asked), raw=options.raw, system=options.system, stats=options.stats
        )
    printer = Printer(
        chat,
        show_thinking=options.show_thinking,
        color=options.color,
        markdown=options.markdown,
        wrap=options.wrap,
    )
    return (
        _chat(chat, options, asked, printer) if chatting else _complete(chat, options, asked, printer, prompt)
    )


def _verified(
    processor: Processor, options: RunOptions, asked: Given, session: SessionOptions, prompt: Prompt | None
) -> PromptIds | None:
    """The prompt's ids, where there is one prompt.

    Raises:
        UserError: whatever can be refused before the weights are opened.
    """
    by_ids = options.prompt_ids is not None
    if not by_ids and (processor.tokenizer is None or (
        options.uses_template and processor.prompts.template_of(asked) is None
    )):  # fmt: skip
        missing = "no tokenizer; give ids with --prompt-ids" if processor.tokenizer is None else _NO_TEMPLATE
        raise UserError(f"{processor.folder}: has {missing}")
    verify_for_template(processor, asked)
    request = processor.request(bounded(processor, asked))
    special = {"on_device": session.greedy_on_device, "speculate": session.speculate}
    verify_plain(request, **special)
    if options.batch is None and (note := idle_note(processor.generation_config.given, asked)):
        tell(note)  # lines may ask for something else
    if options.batch is not None:
        verify_not_alone(**special)
    context = context_of(processor.manifest, session.max_context, session.provider)
    found = None if prompt is None else processor.verified_ids(prompt, request, context_length=context)
    processor.grammar(request)
    return found


def _complete(
    chat: Chat, options: RunOptions, asked: Given, printer: Printer, prompt: PromptIds | None
) -> int:
    try:
        result = complete(
            chat,
            prompt or [],
            bounded(chat, asked),
            on_token=lambda token, said: None if options.json else printer.print_token(token, said),
        )
    except UserError:
        printer.break_off()
        raise
    if options.json:
        answer(as_json_line(result.as_json(chat, prompt_ids=options.show_prompt_ids)))
    else:
        printer.end()
        known = "max_new_tokens" in asked and chat.request(asked).constraint is None
        if result.finish_reason == "context" or (result.finish_reason == "length" and not known):
            tell(f"({result.finish_reason})")
    if options.stats:
        print_stats(chat, result)
    request = chat.request(asked)
    if (note := result.early_end(request)) is not None:
        tell(note)
    if (cut := result.cut(chat, request)) is not None:
        raise UserError(cut)
    return 130 if result.finish_reason == "interrupted" else 0


def _chat(chat: Chat, options: RunOptions, asked: Given, printer: Printer) -> int:
    called = {name: setting for setting, name in settings().items()}
    repl = Repl(
        chat,
        asked,
        system=_text(options.system, "--system") or None,
        raw=options.raw,
        shift=options.context_full == "shift",
        print_token=printer.print_token,
        end=printer.end,
        break_off=printer.break_off,
        report=lambda result: print_stats(chat, result) if options.stats else None,
    )
    if not can_edit():
        with naming(called):
            return repl.run(read_plain)
    reader = LineReader(
        commands=COMMANDS, settings=[*settings()], status=repl.status, color=options.color and has_colors()
    )
    for name in ("SIGTERM", "SIGHUP"):  # so that the terminal is left as it was
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda number, _: reader.leave(128 + number))
    with naming(called):
        return repl.run(reader)


def _greedy(asked: Given) -> Given:
    """What `--greedy` makes of what was asked: penalties and bias stay only where they are asked for.

    Raises:
        UserError: an option that only drawing has a use for.
    """
    for name in DRAWING:
        if asked.get(name):
            raise UserError(f"--greedy draws nothing: leave out --{name.replace('_', '-')}, or --greedy")
    return {**GREEDY, **{name: value for name, value in asked.items() if name not in DRAWING}}


def _text(given: str | None, origin: str) -> str:
    """What was given, or nothing.

    Raises:
        UserError: its bytes are no text.
    """
    try:
        return as_typed(given or "")
    except UnicodeError as error:
        at = f" (byte {error.start})" if isinstance(error, UnicodeDecodeError) else ""
        raise UserError(f"{origin}: not UTF-8{at}") from None


def _stdin() -> TextIO:
    if sys.stdin is None:  # closed, as `<&-` does
        raise UserError("stdin is closed: give the prompt with -p or --prompt-ids")
    return sys.stdin


def _prompt(options: RunOptions) -> str | list[int] | list[Message]:
    if options.prompt_ids is not None:
        if is_waiting():
            tell("note: what is on stdin is not read: --prompt-ids are the whole prompt")
        try:
            return [int(part) for part in options.prompt_ids.split(",")]
        except ValueError:
            raise UserError(f"--prompt-ids {options.prompt_ids!r}: whole numbers wanted, as 1,2,3") from None
    text = _text(options.prompt, "-p")
    if options.prompt is None or is_piped():
        try:
            piped = _text(_stdin().read(), "stdin")
        except UnicodeDecodeError as error:
            raise UserError(f"stdin: not {error.encoding} (byte {error.start})") from None
        piped = piped.removeprefix("\ufeff").removesuffix("\n").removesuffix("\r")
        # As elsewhere: the question, then what it is about.
        text = piped if options.prompt is None else f"{text}\n\n{piped}" if piped.strip() else text
    if options.raw:
        return text
    said = _text(options.system, "--system")
    system: list[Message] = [{"role": "system", "content": said}] if said else []
    return [*system, {"role": "user", "content": text}]
