"""The commands: each reads what was given, calls one function and prints what comes of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from qwen_onnx.cli.flags import flags
from qwen_onnx.cli.run_options import RunOptions
from qwen_onnx.cli.web.options import WebOptions
from qwen_onnx.errors import UserError
from qwen_onnx.exports.options import ExportOptions
from qwen_onnx.options import Given, made
from qwen_onnx.runners.runtime.options import SessionOptions
from qwen_onnx.runners.sampling.request import Request

Export = Annotated[Path, typer.Argument(help="Export folder.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]
CacheDir = Annotated[Path | None, typer.Option(help="Folder for exports made on the way.")]

app = typer.Typer(
    name="qwen-onnx",
    help="Turn Qwen checkpoints into ONNX graphs, and run them on ONNX Runtime.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
cache_app = typer.Typer(help="Exports that `run` made of models.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")


def _version(wanted: bool) -> None:
    if wanted:
        from qwen_onnx import __version__

        print(f"qwen-onnx {__version__}")
        raise typer.Exit


@app.callback()
def _all(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
@flags("options", ExportOptions)
def export(
    options: Given,
    model: Annotated[str, typer.Argument(help="Hub id, checkpoint folder, or `tiny`.")] = "",
    out: Annotated[
        Path | None, typer.Argument(help="Default ./NAME-DTYPE, then -portable, -panels or -LAYOUT.")
    ] = None,
) -> None:
    """Export a checkpoint to a folder of ONNX graphs and one weights file."""
    asked = made(ExportOptions, options)
    from qwen_onnx.checkpoints.hub import DEFAULT_MODEL
    from qwen_onnx.cli.progress import export_with_progress, summary_table

    print(summary_table(export_with_progress(model or DEFAULT_MODEL, out, asked)))


@app.command()
@flags("session", SessionOptions)
@flags("asked", Request)
@flags("run_options", RunOptions)
def run(
    run_options: Given,
    asked: Given,
    session: Given,
    model: Annotated[str, typer.Argument(help="Export folder, Hub id, checkpoint folder, or `tiny`.")] = "",
) -> None:
    """Chat with a model; or answer a prompt (-p, or piped in), or a file of them."""
    from qwen_onnx.cli.run import run_model

    if code := run_model(model, run=run_options, asked=asked, session=session):
        raise typer.Exit(code)


@app.command()
@flags("options", WebOptions)
def web(
    options: Given,
    model: Annotated[
        str,
        typer.Argument(help="Portable export, Hub id, checkpoint folder, or `tiny`.", show_default=False),
    ],
) -> None:
    """Serve a chat page, in which the model runs, to the browser on this machine; print its address."""
    asked = made(WebOptions, options)
    from qwen_onnx.cli.web.serve import serve

    serve(model, asked)


@app.command()
def info(
    export: Export,
    graphs: Annotated[
        bool, typer.Option("--graphs", help="Each graph's inputs, outputs and operators too.")
    ] = False,
) -> None:
    """Show what an export is: model, sizes, and what runs it."""
    from qwen_onnx.checks.info import describe

    print(describe(export, graphs=graphs))


@app.command()
@flags("session", SessionOptions, only=("provider", "tf32"))
def check(
    session: Given,
    export: Export,
    against: Annotated[
        str | None, typer.Option(help="Checkpoint to compare weights and logits with.")
    ] = None,
    runtime: Annotated[
        str | None,
        typer.Option(help="Compare greedy ids in onnxruntime, onnxruntime-genai, openvino or tract too."),
    ] = None,
) -> None:
    """Check hashes, graphs and greedy ids of an export; with --against, its weights and logits too."""
    options = made(SessionOptions, session)
    from qwen_onnx.checks.check import check_export

    failed = []
    for finding in check_export(export, options, against=against, runtime=runtime):
        print(f"{'ok' if finding.ok else 'FAILED':<7} {finding.text}", file=sys.stderr)
        if not finding.ok:
            failed.append(finding.text)
    print(f"MISMATCH: {failed[0]}" if failed else "OK: the export is what it should be")
    if failed:
        raise typer.Exit(1)


@app.command()
def build(
    export: Export,
    max_context: Annotated[
        int | None, typer.Option(help="Tokens of the engine's cache; `run` wants the same.")
    ] = None,
) -> None:
    """Build the TensorRT engine of an export ahead, and check its greedy ids."""
    from qwen_onnx.checks.engines import build_engine

    print(build_engine(export, max_context=max_context, report=lambda line: print(line, file=sys.stderr)))


@app.command()
@flags("session", SessionOptions, only=("provider", "threads", "prepack"))
def bench(
    session: Given,
    export: Export,
    prompt_tokens: Annotated[int, typer.Option(help="Of each prompt, random ids.")] = 128,
    new_tokens: Annotated[int, typer.Option(help="Of each answer.")] = 64,
    repeats: Annotated[int, typer.Option(help="After one to warm up.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Measure an export here: TTFT, tokens/s, memory, and the share of the memory's bandwidth that it reaches."""
    options = made(SessionOptions, session)
    from qwen_onnx.checks.benchmark import run_benchmark
    from qwen_onnx.cli.bench import as_json as to_json
    from qwen_onnx.cli.bench import as_text
    from qwen_onnx.runners.runtime.providers import verify_provider

    verify_provider(options.provider)
    found = run_benchmark(
        export, options, prompt_tokens=prompt_tokens, new_tokens=new_tokens, repeats=repeats
    )
    print(json.dumps(to_json(found)) if as_json else as_text(found))


@app.command()
@flags("session", SessionOptions, only=("provider", "threads", "max_context"))
def score(
    session: Given,
    export: Export,
    file: Annotated[str, typer.Argument(help="UTF-8 text, or - for stdin.", show_default=False)],
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Each token with its log-probability too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the log-probability and perplexity of a text."""
    options = made(SessionOptions, session)
    from qwen_onnx.cli.score import score_file

    print(score_file(export, file, options, tokens=tokens, as_json=as_json))


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Show versions, NVIDIA libraries and GPUs found here, and the providers that really start."""
    from qwen_onnx.doctor.examine import examine, to_json
    from qwen_onnx.doctor.text import describe

    report = examine()
    print(to_json(report) if as_json else describe(report))
    if not report.ready:
        raise typer.Exit(1)


@cache_app.command("ls")
def cache_list(
    cache_dir: CacheDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="As a JSON list.")] = False,
) -> None:
    """List exports made on the way."""
    from qwen_onnx.cli.export_cache import cache_folder, list_exports

    exports = list_exports(cache_folder(cache_dir))
    if as_json:
        listed = [{"name": e.name, "model": e.model_id, "dtype": e.dtype, "bytes": e.size} for e in exports]
        print(json.dumps(listed))
        return
    for export in exports:
        print(f"{export.size:>15,}  {export.name}")


@cache_app.command("rm")
def cache_remove(
    names: Annotated[list[str] | None, typer.Argument(help="Names as `cache ls` shows them.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove them all.")] = False,
    cache_dir: CacheDir = None,
) -> None:
    """Remove exports made on the way."""
    from qwen_onnx.cli.export_cache import cache_folder, remove_exports

    if not names and not everything:
        raise UserError("nothing to remove: give names from `qwen-onnx cache ls`, or --all")
    removed = remove_exports(cache_folder(cache_dir), names or [], everything=everything)
    print(f"removed {len(removed)}, {sum(export.size for export in removed):,} bytes", file=sys.stderr)
