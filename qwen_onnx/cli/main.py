"""The command line: parse, call one function, print. stdout is the answer, stderr is everything else."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from qwen_onnx.cli import chat_flags
from qwen_onnx.cli import options as flags
from qwen_onnx.errors import UserError
from qwen_onnx.runners.sampling.params import SamplingOptions

app = typer.Typer(
    name="qwen-onnx",
    help="Turn Qwen checkpoints into ONNX graphs, and run them on ONNX Runtime.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
cache_app = typer.Typer(help="Exports that `run` made of models.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")

CacheDir = Annotated[Path | None, typer.Option(help="Folder for exports made on the way.")]
Provider = Annotated[str, typer.Option(help="auto, cpu, cuda or tensorrt.")]
Tf32 = Annotated[
    bool, typer.Option("--tf32/--no-tf32", help="On CUDA, let f32 products round their factors to 10 bits.")
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")]


def main() -> None:
    """The `qwen-onnx` command: a UserError is one line on stderr and exit code 1."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # a terminal that cannot show a character shows `?`
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # here, where what it says is caught
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "start new thread" not in str(error):
            raise
        print(
            "error: out of memory; free some, or take a smaller model, dtype or --max-context",
            file=sys.stderr,
        )
        sys.exit(1)
    except OSError as error:
        # Of stdout: all else becomes a UserError. A reader that left, as `| head` does, needs no word.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"error: stdout: {error.strerror or error}", file=sys.stderr)
        sys.exit(1)


def _open_closed_streams() -> None:
    """stdout or stderr that is closed, as `>&-` does, is as good as /dev/null; and no file gets its number."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 - for good


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="Hub id, checkpoint folder, or `tiny`.")] = "",
    out: Annotated[
        Path | None, typer.Argument(help="Default ./NAME-DTYPE, then -portable or -LAYOUT.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="f32, f16, bf16, int8 or int4.")] = "f32",
    block_size: Annotated[
        int | None, typer.Option(help="Weights that share a scale; default 128 in int8, 64 in int4.")
    ] = None,
    head_bits: Annotated[
        int | None,
        typer.Option(help="Of embedding and head in int8 and int4, 4 or 8; default as the layers."),
    ] = None,
    head_block_size: Annotated[
        int | None, typer.Option(help="As --block-size, of embedding and head; default as the layers.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="onnxruntime, or portable: one graph for any runtime, f32 or f16.")
    ] = None,
    layout: Annotated[
        str, typer.Option(help="plain, cpu, onnxruntime-genai, transformers.js, optimum or triton.")
    ] = "plain",
    split: Annotated[
        bool, typer.Option("--split", help="Portable: model.onnx as prefill.onnx too, and decode.onnx.")
    ] = False,
    revision: Revision = None,
    max_context: Annotated[int | None, typer.Option(help="Positions; default the model's own.")] = None,
    link: Annotated[
        bool, typer.Option("--link", help="Hard-link the weights; only where no byte changes.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export at OUT.")] = False,
) -> None:
    """Export a checkpoint to a folder of ONNX graphs and one weights file."""
    from qwen_onnx.checkpoints.hub import DEFAULT_MODEL
    from qwen_onnx.cli.progress import make_export, summary_table

    summary = make_export(
        model or DEFAULT_MODEL, out, dtype=dtype, revision=revision, max_context=max_context,
        block_size=block_size, head_bits=head_bits, head_block_size=head_block_size, target=target,
        layout=layout, split=split, link=link, force=force,
    )  # fmt: skip
    print(summary_table(summary))


@app.command()
def run(
    model: Annotated[str, typer.Argument(help="Export folder, Hub id, checkpoint folder, or `tiny`.")] = "",
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Answer this and leave.")] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="Token ids instead of text, as 1,2,3.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Complete the text; no chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=0, help="Most tokens of an answer; default generation_config.json's, or 1024."),
    ] = None,
    min_new_tokens: flags.MinNewTokens = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end token.")] = False,
    stop: flags.Stop = None,
    greedy: flags.Greedy = False,
    temperature: flags.Temperature = None,
    top_k: flags.TopK = None,
    top_p: flags.TopP = None,
    min_p: flags.MinP = None,
    repetition_penalty: flags.RepetitionPenalty = None,
    presence_penalty: flags.PresencePenalty = None,
    frequency_penalty: flags.FrequencyPenalty = None,
    logit_bias: flags.LogitBias = None,
    seed: flags.Seed = None,
    provider: Provider = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Of an export made on the way; default f32 on a CPU, the checkpoint's own on CUDA."
        ),
    ] = None,
    revision: Revision = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Cores to compute on; default all physical ones.")
    ] = None,
    prepack: Annotated[
        bool | None,
        typer.Option(
            "--prepack/--no-prepack",
            help="On a CPU, repack the weights: prompts a little faster, the start slow; default in int8, int4.",
        ),
    ] = None,
    cuda_graph: Annotated[
        bool, typer.Option("--cuda-graph/--no-cuda-graph", help="On CUDA, capture decode and replay it.")
    ] = True,
    greedy_on_device: Annotated[
        bool, typer.Option("--greedy-on-device", help="Choose the token in the graph, which feeds itself.")
    ] = False,
    speculate: Annotated[
        bool,
        typer.Option("--speculate", help="Guess tokens from the context, verify several a step; on a CPU."),
    ] = False,
    tf32: Tf32 = False,
    optimization_level: Annotated[
        str, typer.Option(help="Of ONNX Runtime's rewriting of graphs: disabled, basic, extended or all.")
    ] = "all",
    disable_optimizer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="One of its rewritings to leave out; may be repeated."),
    ] = None,
    gpu_mem_limit: Annotated[
        int | None, typer.Option(min=1, max=1 << 40, help="On CUDA, most MiB of weights and activations.")
    ] = None,
    max_context: Annotated[
        int | None, typer.Option(help="Positions to use; default all of the export's.")
    ] = None,
    top_logits: Annotated[int, typer.Option(min=0, help="Show the K best tokens of each step.")] = 0,
    logprobs: flags.Logprobs = None,
    json_schema: flags.JsonSchema = None,
    regex: flags.Regex = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="TTFT, tokens/s and memory after each answer.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Say first what is computed with, and how tokens are chosen."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
    think: chat_flags.Think = None,
    show_thinking: chat_flags.ShowThinking = True,
    tools: chat_flags.Tools = None,
    context_full: chat_flags.ContextFull = "shift",
    cache_reuse: chat_flags.CacheReuse = True,
    color: chat_flags.Color = True,
    cache_dir: CacheDir = None,
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Answer a file of JSON lines with `prompt` or `messages`; - is stdin."
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Prompts of --batch at a time; default 8.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="File for the results of --batch, a JSON line each; continued where it ends."),
    ] = None,
) -> None:
    """Chat with a model, or answer one prompt (-p, or text piped in) or a file of them (--batch)."""
    from qwen_onnx.cli.batch.run import batch_options
    from qwen_onnx.cli.run import RunOptions, run_model
    from qwen_onnx.runners.runtime.session import SessionOptions
    from qwen_onnx.runners.sampling.request import GenerationRequest

    sampling = SamplingOptions(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty, logit_bias=flags.parse_logit_bias(logit_bias),
    )  # fmt: skip
    request = GenerationRequest(
        max_new_tokens=max_new_tokens, ignore_eos=ignore_eos, min_new_tokens=min_new_tokens, stop=stop or None,
        sampling=flags.without_drawing(sampling) if greedy else sampling, top_logits=top_logits,
        logprobs=logprobs, tools=chat_flags.read_tools(tools), enable_thinking=think, reuse_cache=cache_reuse,
        constraint=flags.parse_constraint(json_schema, regex),
    )  # fmt: skip
    session = SessionOptions(
        provider, threads=threads, prepack=prepack, cuda_graph=cuda_graph, tf32=tf32,
        greedy_on_device=greedy_on_device, speculate=speculate,
        gpu_mem_limit=None if gpu_mem_limit is None else gpu_mem_limit << 20,
        optimization_level=optimization_level, disabled_optimizers=tuple(disable_optimizer or ()),
    )  # fmt: skip
    options = RunOptions(
        model=model, prompt=prompt, prompt_ids=prompt_ids, raw=raw, system=system, request=request,
        session=session, dtype=dtype, revision=revision, max_context=max_context, stats=stats, verbose=verbose,
        as_json=as_json, show_thinking=show_thinking, color=color, context_full=context_full,
        cache_dir=cache_dir, batch=batch_options(batch, batch_size, out),
    )  # fmt: skip
    if code := run_model(options):
        raise typer.Exit(code)


@app.command()
def info(export: Annotated[Path, typer.Argument(help="Export folder.")]) -> None:
    """Show an export's manifest, inputs and outputs, operators and sizes."""
    from qwen_onnx.checks.info import describe

    print(describe(export))


@app.command()
def check(
    export: Annotated[Path, typer.Argument(help="Export folder.")],
    against: Annotated[
        str | None, typer.Option(help="Checkpoint to compare weights and logits with.")
    ] = None,
    provider: Provider = "auto",
    tf32: Tf32 = False,
    runtime: Annotated[
        str | None,
        typer.Option(help="Compare greedy ids in onnxruntime, onnxruntime-genai, openvino or tract too."),
    ] = None,
) -> None:
    """Check hashes, graphs and greedy ids of an export; with --against, its weights and logits too."""
    from qwen_onnx.checks.check import check_export

    failed = []
    for finding in check_export(export, against=against, provider=provider, tf32=tf32, runtime=runtime):
        print(f"{'ok' if finding.ok else 'FAILED':<7} {finding.text}", file=sys.stderr)
        if not finding.ok:
            failed.append(finding.text)
    print(f"MISMATCH: {failed[0]}" if failed else "OK: the export is what it should be")
    if failed:
        raise typer.Exit(1)


@app.command()
def build(
    export: Annotated[Path, typer.Argument(help="Export folder.")],
    max_context: Annotated[
        int | None, typer.Option(help="Tokens of the engine's cache; `run` wants the same.")
    ] = None,
) -> None:
    """Build the TensorRT engine of an export ahead, and check its greedy ids."""
    from qwen_onnx.checks.engines import build_engine

    print(build_engine(export, max_context=max_context, report=lambda line: print(line, file=sys.stderr)))


@app.command()
def bench(
    export: Annotated[Path, typer.Argument(help="Export folder.")],
    prompt_tokens: Annotated[int, typer.Option(help="Of each prompt, random ids.")] = 128,
    new_tokens: Annotated[int, typer.Option(help="Of each answer.")] = 64,
    repeats: Annotated[int, typer.Option(help="After one to warm up.")] = 5,
    provider: Provider = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Default all physical cores.")] = None,
    prepack: Annotated[
        bool | None, typer.Option("--prepack/--no-prepack", help="On a CPU, as for `run`.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Measure an export here: TTFT, tokens/s, memory, and the share of the memory's bandwidth that it reaches."""
    from qwen_onnx.checks.benchmark import as_json as to_json
    from qwen_onnx.checks.benchmark import as_text, run_benchmark
    from qwen_onnx.runners.runtime.providers import verify_provider
    from qwen_onnx.runners.runtime.session import SessionOptions

    verify_provider(provider)
    options = SessionOptions(provider, threads=threads, prepack=prepack)
    found = run_benchmark(
        export, options, prompt_tokens=prompt_tokens, new_tokens=new_tokens, repeats=repeats
    )
    print(json.dumps(to_json(found)) if as_json else as_text(found))


@app.command()
def score(
    export: Annotated[Path, typer.Argument(help="Export folder.")],
    file: Annotated[str, typer.Argument(help="UTF-8 text, or - for stdin.")],
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Each token with its log-probability too.")
    ] = False,
    provider: Provider = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Default all physical cores.")] = None,
    max_context: Annotated[
        int | None, typer.Option(help="Most tokens that one is given; default all of the export's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Show the log-probability and perplexity of a text."""
    from qwen_onnx.cli.score import score_file
    from qwen_onnx.runners.runtime.session import SessionOptions

    options = SessionOptions(provider, threads=threads)
    print(score_file(export, file, options, max_context=max_context, tokens=tokens, as_json=as_json))


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
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
