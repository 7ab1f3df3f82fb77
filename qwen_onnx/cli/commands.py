"""The commands: each reads what was given, calls one function and prints what comes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qwen_onnx.checkpoints import DEFAULT_MODEL
from qwen_onnx.cli.cache import cache_app
from qwen_onnx.cli.flags import flags
from qwen_onnx.cli.run_options import RunOptions
from qwen_onnx.cli.terminal.json_line import as_json_line
from qwen_onnx.cli.terminal.output import answer, show, tell
from qwen_onnx.cli.web.options import WebOptions
from qwen_onnx.exports.cached.options import ModelOptions
from qwen_onnx.exports.options import ExportOptions
from qwen_onnx.options import Given, made
from qwen_onnx.runners.runtime.options import SessionOptions
from qwen_onnx.runners.sampling.request import Request

Model = Annotated[
    str,
    typer.Argument(help="Folder, name of an export, Hub id, or `tiny`.", show_default=False),
]
Export = Annotated[Path, typer.Argument(help="Export folder.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]

app = typer.Typer(
    name="qwen-onnx",
    help="Turn Qwen checkpoints into ONNX graphs, and run them on ONNX Runtime.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(cache_app, name="cache")


def _version(wanted: bool) -> None:
    if wanted:
        from qwen_onnx import __version__

        show(f"qwen-onnx {__version__}")
        raise typer.Exit


@app.callback()
def _all(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
@flags("of_model", ModelOptions, only=("yes",))
@flags("options", ExportOptions)
def export(
    options: Given,
    of_model: Given,
    model: Annotated[
        str,
        typer.Argument(
            help=f"Checkpoint folder, Hub id, `tiny`; default {DEFAULT_MODEL}", show_default=False
        ),
    ] = "",
    out: Annotated[
        Path | None,
        typer.Argument(help="Folder; default ./NAME-DTYPE, with -portable, -panels or -LAYOUT after it."),
    ] = None,
) -> None:
    """Export a checkpoint to a folder of ONNX graphs and one weights file."""
    asked = made(ExportOptions, options)
    from qwen_onnx.cli.open_model import checkpoint_of

    source = checkpoint_of(model, asked, out, yes=made(ModelOptions, of_model).yes)
    from qwen_onnx.cli.progress import export_with_progress, summary_table  # which import what makes graphs

    show(*summary_table(export_with_progress(source, out, asked)))


@app.command()
@flags("session", SessionOptions)
@flags("asked", Request)
@flags("of_model", ModelOptions)
@flags("run_options", RunOptions)
def run(
    run_options: Given,
    of_model: Given,
    asked: Given,
    session: Given,
    model: Annotated[
        str, typer.Argument(help=f"Folder, name, Hub id; default {DEFAULT_MODEL}", show_default=False)
    ] = "",
) -> None:
    """Chat with a model; or answer a prompt (-p, or piped in), or a file of them."""
    from qwen_onnx.cli.run import run_model

    if code := run_model(model, run=run_options, of_model=of_model, asked=asked, session=session):
        raise typer.Exit(code)


@app.command()
@flags("of_model", ModelOptions)
@flags("options", WebOptions)
def web(options: Given, of_model: Given, model: Model) -> None:
    """Serve a chat page on this machine, in which the browser runs the model; print its address."""
    asked = made(WebOptions, options)
    from qwen_onnx.cli.web.serve import serve

    serve(model, asked, made(ModelOptions, of_model))


@app.command()
@flags("of_model", ModelOptions)
def info(
    of_model: Given,
    model: Model,
    graphs: Annotated[
        bool, typer.Option("--graphs", help="Show files, and inputs, outputs and operators of each graph.")
    ] = False,
) -> None:
    """Show an export: model, sizes, graphs, and what runs them."""
    from qwen_onnx.cli.open_model import export_folder

    folder = export_folder(model, made(ModelOptions, of_model))
    from qwen_onnx.checks.info import describe

    show(*describe(folder, graphs=graphs).split("\n"))


@app.command()
@flags("session", SessionOptions, only=("provider", "tf32"))
@flags("of_model", ModelOptions)
def check(
    of_model: Given,
    session: Given,
    model: Model,
    against: Annotated[
        str | None, typer.Option(help="Checkpoint to compare weights and logits with.")
    ] = None,
    runtime: Annotated[
        str | None,
        typer.Option(help="Compare greedy ids in onnxruntime, onnxruntime-genai, openvino or tract."),
    ] = None,
) -> None:
    """Check hashes, graphs and greedy ids of an export; with --against, its weights and logits too."""
    options = made(SessionOptions, session)
    from qwen_onnx.checks.known_runtimes import verify_runtime
    from qwen_onnx.cli.open_model import export_to_open, verify_checkpoint
    from qwen_onnx.contract.manifest import read_manifest

    asked = made(ModelOptions, of_model)
    folder = export_to_open(model, asked, options)
    if runtime is not None:
        verify_runtime(runtime, read_manifest(folder))
    if against is not None:
        verify_checkpoint(against, yes=asked.yes)
    from qwen_onnx.checks.check import check_export  # which imports what makes graphs

    failed = []
    for finding in check_export(folder, options, against=against, runtime=runtime):
        tell(f"{'ok' if finding.ok else 'FAILED':<7} {finding.text}")
        if not finding.ok:
            failed.append(finding.text)
    show(f"MISMATCH: {failed[0]}" if failed else "OK: the export is what it should be")
    if failed:
        raise typer.Exit(1)


@app.command()
def build(
    export: Export,
    max_context: Annotated[int | None, typer.Option(help="Tokens of the cache; give `run` the same.")] = None,
) -> None:
    """Build the TensorRT engine of an export ahead, and check its greedy ids."""
    from qwen_onnx.checks.engines import build_engine

    show(build_engine(export, max_context=max_context, report=tell))


@app.command()
@flags("session", SessionOptions, only=("provider", "threads", "prepack"))
@flags("of_model", ModelOptions)
def bench(
    of_model: Given,
    session: Given,
    model: Model,
    prompt_tokens: Annotated[int, typer.Option(help="Length of each prompt, of random ids.")] = 128,
    new_tokens: Annotated[int, typer.Option(help="Length of each answer.")] = 64,
    repeats: Annotated[int, typer.Option(help="Answers measured, after one to warm up.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Measure an export here: TTFT, tokens/s, memory, and the share of the memory's bandwidth that it reaches."""
    options = made(SessionOptions, session)
    from qwen_onnx.cli.open_model import export_to_open
    from qwen_onnx.runners.runtime.providers import verify_provider

    verify_provider(options.provider)
    folder = export_to_open(model, made(ModelOptions, of_model), options)
    from qwen_onnx.checks.benchmark import run_benchmark  # which imports what makes graphs
    from qwen_onnx.cli import bench as shown

    found = run_benchmark(
        folder, options, prompt_tokens=prompt_tokens, new_tokens=new_tokens, repeats=repeats
    )
    answer(as_json_line(shown.as_json(found))) if as_json else show(*shown.as_lines(found))


@app.command()
@flags("session", SessionOptions, only=("provider", "threads", "max_context"))
@flags("of_model", ModelOptions)
def score(
    of_model: Given,
    session: Given,
    model: Model,
    file: Annotated[
        str, typer.Argument(help="UTF-8 text without its last line break; - is stdin.", show_default=False)
    ],
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show each token with its log-probability.")
    ] = False,
    against: Annotated[
        str,
        typer.Option(
            metavar="OTHER", help="Compare with another model: perplexity, KL, top-1.", show_default=False
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show the log-probability and perplexity of a text; or how far two models' predictions are apart."""
    options, write = made(SessionOptions, session), answer if as_json else show
    from qwen_onnx.cli.score import score_file

    asked = made(ModelOptions, of_model)
    write(*score_file(model, asked, file, options, tokens=tokens, against=against, as_json=as_json))


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Show versions, NVIDIA libraries and GPUs found here, and the providers that really start."""
    from qwen_onnx.doctor.examine import examine, to_json
    from qwen_onnx.doctor.text import describe

    report = examine()
    answer(to_json(report)) if as_json else show(*describe(report).split("\n"))
    if not report.ready:
        raise typer.Exit(1)
