"""MODEL of a command: found or exported, then opened; what is worth saying of it goes to stderr."""

from __future__ import annotations

from pathlib import Path

from qwen_onnx.checkpoints import DEFAULT_MODEL
from qwen_onnx.checkpoints.checkpoint import open_checkpoint
from qwen_onnx.checkpoints.hub import Download, ModelSource, resolve_model
from qwen_onnx.cli.terminal.output import tell
from qwen_onnx.cli.terminal.question import confirmed
from qwen_onnx.contract.manifest import read_manifest
from qwen_onnx.errors import UserError
from qwen_onnx.exports.cached.find import find_export
from qwen_onnx.exports.cached.options import ModelOptions
from qwen_onnx.exports.layouts.known import chosen_layout, output_folder
from qwen_onnx.exports.options import ExportOptions, export_positions
from qwen_onnx.exports.publish.output_folder import refuse_output
from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.model.runner import Runner, context_of
from qwen_onnx.runners.processor import Processor
from qwen_onnx.runners.runtime.idle_options import idle_notes, may_be_idle
from qwen_onnx.runners.runtime.options import SessionOptions
from qwen_onnx.runners.runtime.providers import choose_provider
from qwen_onnx.runners.runtime.session import ONE_DISTRIBUTION, installed_distributions


def export_folder(model: str, asked: ModelOptions, *, provider: str = "auto") -> Path:
    """The folder of the export that MODEL is, or that is made of it.

    Raises:
        UserError: as `find_export`; or the user wants no download.
    """
    if not model:
        tell(f"no model named: {DEFAULT_MODEL}, the default")
    return find_export(
        model,
        asked,
        provider=provider,
        export=export_source,
        tell=tell,
        before_download=DownloadQuestion(
            dtypes=(asked.dtype,) if asked.dtype else ("f32", "int4"), yes=asked.yes
        ),
    )


def export_to_open(model: str, asked: ModelOptions, session: SessionOptions) -> Path:
    """As `export_folder`; what of the session's options changes nothing for it is said.

    Raises:
        UserError: as `export_folder`, and where the provider does not start.
    """
    folder = export_folder(model, asked, provider=session.provider)
    if may_be_idle(session):
        manifest = read_manifest(folder)
        for note in idle_notes(session, manifest, choose_provider(session.provider, manifest)):
            tell(note)
    return folder


def checkpoint_of(model: str, options: ExportOptions, out: Path | None, *, yes: bool) -> ModelSource:
    """The checkpoint to export: what can be refused of it and of OUT is, before anything heavy is imported.

    Raises:
        UserError: as `export_model`; or the user wants no download.
    """
    chosen_layout(options)
    if name := Path(
        model or DEFAULT_MODEL
    ).name:  # before a download; afterwards the folder's own name counts
        refuse_output(output_folder(out, name, options), force=options.force)
    source = _resolved(model, revision=options.revision, dtypes=(options.dtype,), yes=yes)
    export_positions(open_checkpoint(source.folder).config, options.max_context)
    return source


def verify_checkpoint(model: str, *, yes: bool) -> None:
    """Raises UserError where there is no such checkpoint to compare with, or the user wants no download."""
    open_checkpoint(_resolved(model, revision=None, dtypes=(), yes=yes).folder)


def _resolved(model: str, *, revision: str | None, dtypes: tuple[str, ...], yes: bool) -> ModelSource:
    if not model:
        tell(f"no model named: {DEFAULT_MODEL}, the default")
    question = DownloadQuestion(dtypes=dtypes, yes=yes)
    return resolve_model(model or DEFAULT_MODEL, revision=revision, before_download=question, tell=tell)


def processor_of(model: str, asked: ModelOptions, session: SessionOptions) -> Processor:
    """What the model's prompts and options go through; its weights are not opened.

    Raises:
        UserError: as `export_folder`; or a file is damaged, or has not so long a context.
    """
    processor = Processor.of(export_folder(model, asked, provider=session.provider))
    context_of(processor.manifest, session.max_context, session.provider)
    return processor


def open_chat(processor: Processor, session: SessionOptions, *, for_scores: bool = False) -> Chat:
    """The model, ready to answer.

    Raises:
        UserError: anything wrong with the model or the options.
    """
    chat = Chat(Runner(processor.folder, session, for_scores=for_scores), processor)
    for note in idle_notes(session, processor.manifest, chat.runner.provider):
        tell(note)
    if session.provider == "auto":
        tell(f"provider: {chat.runner.provider}")
    if not for_scores and (ignored := chat.generation_config.ignored):
        tell(f"note: not supported, of generation_config.json: {', '.join(ignored)}")
    verify_engine_of(chat)
    if len(both := installed_distributions()) > 1:
        tell(f"warning: {' and '.join(both)} overwrite each other; {ONE_DISTRIBUTION}")
    return chat


def verify_engine_of(chat: Chat) -> None:
    """A TensorRT engine is compared with the CPU before it is used.

    Raises:
        UserError: it gives other tokens.
    """
    if chat.runner.engine is None:
        return
    tell(chat.runner.engine.describe())
    if not chat.runner.engine.checked:
        from qwen_onnx.checks.engines import verify_engine  # here, because it imports what makes exports

        tell(verify_engine(chat))


class DownloadQuestion:
    """Says what a download takes, before it begins, and asks where somebody can answer."""

    def __init__(self, *, dtypes: tuple[str, ...], yes: bool) -> None:
        """`dtypes` are those that an export of it may have, the likely one first; none where none is made."""
        self._dtypes, self._yes = dtypes, yes

    def __call__(self, download: Download) -> None:
        """Raises UserError where the answer is no."""
        from qwen_onnx.exports.cached.size import (  # here: it imports what makes graphs
            CONTEXT,
            export_size,
            gigabytes,
        )

        size = "its weights" if download.nbytes is None else gigabytes(download.nbytes)
        tell(f"{download.model_id}: {size} to download, to {download.folder}")
        for dtype in self._dtypes:
            takes = export_size(download.config, dtype)
            tokens = min(CONTEXT, download.config.context_length)
            tell(
                f"  exported as {dtype:<5} {gigabytes(takes.disk):>7} more on disk; runs in "
                f"{gigabytes(takes.memory)} of memory with {tokens:,} tokens"
            )
        if not self._yes and not confirmed("download it? [Y/n] "):
            raise UserError(f"{download.model_id}: not downloaded, as you said")


def export_source(source: ModelSource, path: Path, options: ExportOptions) -> None:
    """Export with a progress bar. Raises UserError as `export_model`."""
    from qwen_onnx.cli.progress import export_with_progress  # here, because it imports what makes graphs

    export_with_progress(source, path, options)
