"""`qwen-onnx run`: finds or makes the export, then answers once or chats."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from qwen_onnx.cli.batch.run import BatchOptions, answer_file, verify_batch
from qwen_onnx.cli.chat.line_reader import LineReader, as_typed, can_edit, read_plain
from qwen_onnx.cli.chat.repl import COMMANDS, Repl
from qwen_onnx.cli.completion import answer, bounded, verify_for_template
from qwen_onnx.cli.printer import Screen, has_colors, introduce, report
from qwen_onnx.contract import DTYPES, EXPORT_DTYPES
from qwen_onnx.errors import ExportRunningError, UserError
from qwen_onnx.manifest import MANIFEST_FILE, read_manifest
from qwen_onnx.runners.chat import Chat, Message
from qwen_onnx.runners.generate import verify_options
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.panels import suits_processor
from qwen_onnx.runners.runtime.providers import missing_library, verify_provider
from qwen_onnx.runners.runtime.session import ONE_DISTRIBUTION, SessionOptions, installed_distributions
from qwen_onnx.runners.sampling.request import GenerationRequest

if TYPE_CHECKING:
    from qwen_onnx.checkpoints.hub import ModelSource

_MEASURED_PANELS = 16  # rows; --layout cpu is the faster one there (bench/README.md), of 8 rows nobody knows
_LOOK_AGAIN = 0.2  # seconds
CONTEXT_FULL = ("shift", "stop")
"""What happens in a chat when the context is full: the oldest turns go, or the turn is refused."""

_NO_TEMPLATE = "no chat template; use --raw to complete text"


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """The options of `run`, as the command line names them."""

    model: str
    prompt: str | None
    prompt_ids: str | None
    raw: bool
    system: str | None
    request: GenerationRequest
    session: SessionOptions
    dtype: str | None
    revision: str | None
    max_context: int | None
    stats: bool
    verbose: bool
    as_json: bool
    show_thinking: bool
    color: bool
    context_full: str
    cache_dir: Path | None
    batch: BatchOptions | None = None


def run_model(options: RunOptions) -> int:
    """Answer one prompt (from -p, --prompt-ids or a pipe), or chat when stdin is a terminal; the exit code.

    Raises:
        UserError: anything wrong with the options, the model or the prompt.
    """
    if options.prompt is not None and options.prompt_ids is not None:
        raise UserError("-p and --prompt-ids are two prompts: give one")
    if options.batch is not None:
        if options.prompt is not None or options.prompt_ids is not None:
            raise UserError("--batch brings the prompts: leave out -p and --prompt-ids")
        verify_batch(options.batch)
    verify_provider(options.session.provider)
    alone = options.batch is None
    chatting = alone and options.prompt is None and options.prompt_ids is None and _stdin().isatty()
    if chatting and options.as_json:
        raise UserError("--json answers one prompt: give it with -p, --prompt-ids or a pipe")
    if options.system is not None and (options.raw or options.prompt_ids is not None):
        raise UserError("--system belongs to the chat template; --raw and --prompt-ids use none")
    of_template = {"--think, --no-think": options.request.enable_thinking, "--tools": options.request.tools}
    for name, given in of_template.items():
        if given is not None and (options.raw or options.prompt_ids is not None):
            raise UserError(f"{name} belongs to the chat template; --raw and --prompt-ids use none")
    if options.context_full not in CONTEXT_FULL:
        raise UserError(f"--context-full {options.context_full!r}: {' or '.join(CONTEXT_FULL)} wanted")
    if options.dtype not in (None, *EXPORT_DTYPES):
        raise UserError(f"dtype {options.dtype!r} is not known; choose one of {', '.join(EXPORT_DTYPES)}")
    prompt = _prompt(options) if alone and not chatting else None
    chat = _open(options)
    if chat.template is None and not options.raw and options.prompt_ids is None:
        missing = "no tokenizer; give ids with --prompt-ids" if chat.tokenizer is None else _NO_TEMPLATE
        raise UserError(f"{chat.runner.folder}: has {missing}")
    verify_for_template(chat, options.request)
    if options.verbose:
        introduce(chat, bounded(chat, options.request))
    if options.batch is not None:
        request = bounded(chat, options.request)
        return answer_file(
            chat, options.batch, request, raw=options.raw, system=options.system, stats=options.stats
        )
    if chatting:
        return _chat(chat, options)
    screen = Screen(chat, show_thinking=options.show_thinking, color=options.color)
    result = answer(
        chat,
        prompt or [],
        bounded(chat, options.request),
        on_token=lambda token, said: None if options.as_json else screen.show(token, said),
    )
    if options.as_json:
        print(json.dumps(result.as_json(chat)), flush=True)
    else:
        screen.end()
        known = options.request.max_new_tokens is not None and options.request.constraint is None
        if result.finish_reason == "context" or (result.finish_reason == "length" and not known):
            print(f"({result.finish_reason})", file=sys.stderr)
    if options.stats:
        report(chat, result)
    return 130 if result.finish_reason == "interrupted" else 0


def _chat(chat: Chat, options: RunOptions) -> int:
    verify_options(chat.runner, chat.options(options.request))  # now, and not as the end of every answer
    screen = Screen(chat, show_thinking=options.show_thinking, color=options.color)
    repl = Repl(
        chat,
        options.request,
        system=as_typed(options.system) if options.system else None,
        raw=options.raw,
        shift=options.context_full == "shift",
        show=screen.show,
        end=screen.end,
        report=lambda result: report(chat, result) if options.stats else None,
    )
    if not can_edit():
        return repl.run(read_plain)
    reader = LineReader(commands=COMMANDS, status=repl.status, color=options.color and has_colors())
    for name in ("SIGTERM", "SIGHUP"):  # so that the terminal is left as it was
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda number, _: reader.leave(128 + number))
    return repl.run(reader)


def _stdin() -> TextIO:
    if sys.stdin is None:  # closed, as `<&-` does
        raise UserError("stdin is closed: give the prompt with -p or --prompt-ids")
    return sys.stdin


def _prompt(options: RunOptions) -> str | list[int] | list[Message]:
    if options.prompt_ids is not None:
        try:
            return [int(part) for part in options.prompt_ids.split(",")]
        except ValueError:
            raise UserError(f"--prompt-ids {options.prompt_ids!r}: whole numbers wanted, as 1,2,3") from None
    text = None if options.prompt is None else as_typed(options.prompt)
    if text is None:
        try:
            text = as_typed(_stdin().read().removesuffix("\n"))
        except UnicodeDecodeError as error:
            raise UserError(f"stdin is not {error.encoding} text ({error.reason})") from None
    if options.raw:
        return text
    system: list[Message] = (
        [{"role": "system", "content": as_typed(options.system)}] if options.system else []
    )
    return [*system, {"role": "user", "content": text}]


def _open(options: RunOptions) -> Chat:
    folder = _export_folder(options)
    held = read_manifest(folder).dtype
    if options.dtype not in (None, held):
        raise UserError(f"{folder}: holds {held}, --dtype {options.dtype} asked for")
    chat = Chat(Runner(folder, options.session, max_context=options.max_context))
    if options.session.provider == "auto":
        print(f"provider: {chat.runner.provider}", file=sys.stderr)
    if ignored := chat.defaults.ignored:
        print(f"note: not supported, of generation_config.json: {', '.join(ignored)}", file=sys.stderr)
    if chat.runner.engine is not None:
        print(chat.runner.engine.describe(), file=sys.stderr)
    if chat.runner.engine is not None and not chat.runner.engine.checked:
        from qwen_onnx.checks.engines import verify_engine  # here, because it imports what makes exports

        print(verify_engine(chat), file=sys.stderr)
    if len(both := installed_distributions()) > 1:
        print(
            f"warning: {' and '.join(both)} overwrite each other; {ONE_DISTRIBUTION}",
            file=sys.stderr,
        )
    return chat


def _export_folder(options: RunOptions) -> Path:
    """The export itself, or the one made of a model, once, in the user's cache."""
    from qwen_onnx.checkpoints.hub import as_path
    from qwen_onnx.exports.publish.staging import recover

    given = as_path(options.model)
    if options.model and not (given / MANIFEST_FILE).exists():
        for note in recover(given):  # a killed `export --force` may have left it displaced
            print(f"note: {note}", file=sys.stderr)
    if options.model and (given / MANIFEST_FILE).exists():
        if options.revision is not None:
            raise UserError(f"{given}: an export; --revision {options.revision} is for models on the Hub")
        return given

    from qwen_onnx.checkpoints.hub import DEFAULT_MODEL, resolve_model
    from qwen_onnx.cli.export_cache import cache_folder, cached_export_path

    source = resolve_model(options.model or DEFAULT_MODEL, revision=options.revision)
    provider, cache = _expected_provider(options.session.provider), cache_folder(options.cache_dir)
    dtype = options.dtype or _default_dtype(source, provider)
    in_panels = f"f32-cpu{_MEASURED_PANELS}"
    kinds = (in_panels, dtype) if (dtype, provider) == ("f32", "cpu") else (dtype,)
    for kind in kinds:
        path = cached_export_path(cache, source, kind)
        if (path / MANIFEST_FILE).exists() and suits_processor(path, read_manifest(path)):
            return path

    from qwen_onnx.checkpoints.checkpoint import open_checkpoint
    from qwen_onnx.exports.panels import possible_panels

    path, layout = cached_export_path(cache, source, dtype), "plain"
    if in_panels in kinds and possible_panels(open_checkpoint(source.folder).config) == _MEASURED_PANELS:
        found = cached_export_path(cache, source, in_panels)
        if not (found / MANIFEST_FILE).exists():  # or it is damaged: a plain one does as well
            path, layout = found, "cpu"
    print(f"exporting {source.model_id} as {dtype}, once, to {path}", file=sys.stderr)
    _make_once(source, path, dtype, layout)
    return path


def _make_once(source: ModelSource, path: Path, dtype: str, layout: str) -> None:
    """Make the export, or wait for the process that is making it."""
    from qwen_onnx.cli.progress import make_export

    waiting = False
    while True:
        try:
            # For its whole context: --max-context is the runner's here.
            make_export(source, path, dtype=dtype, layout=layout)
            return
        except UserError as error:
            if (path / MANIFEST_FILE).exists():  # published meanwhile
                return
            if not isinstance(error, ExportRunningError):
                raise
        if not waiting:
            print("another process is exporting it: waiting", file=sys.stderr)
        waiting = True
        time.sleep(_LOOK_AGAIN)


def _expected_provider(asked: str) -> str:
    """What `auto` will come to."""
    if asked != "auto":
        return asked
    return "cpu" if missing_library("cuda") else "cuda"


def _default_dtype(source: ModelSource, provider: str) -> str:
    if provider != "cuda":
        return "f32"
    from qwen_onnx.checkpoints.checkpoint import open_checkpoint

    embedding = open_checkpoint(source.folder).tensors.get("model.embed_tokens.weight")
    return next((dtype for dtype, held in DTYPES.items() if embedding and embedding.dtype == held), "f32")
