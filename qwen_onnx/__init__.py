"""Qwen checkpoints to ONNX graphs, and a runner for them on ONNX Runtime.

from qwen_onnx import export, load

export("Qwen/Qwen2.5-0.5B-Instruct", "qwen-f32")
chat = load("qwen-f32")
for token in chat.generate([{"role": "user", "content": "Hello!"}], max_new_tokens=100):
    print(token.text, end="", flush=True)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qwen_onnx.errors import NonFiniteLogitsError, UserError

if TYPE_CHECKING:
    from qwen_onnx.exports.exporter import ExportSummary
    from qwen_onnx.runners.chat import Chat
    from qwen_onnx.runners.sampling.params import SamplingOptions
    from qwen_onnx.runners.sampling.request import GenerationRequest

__all__ = ["GenerationRequest", "NonFiniteLogitsError", "SamplingOptions", "UserError", "export", "load"]


def __getattr__(name: str) -> object:
    if name == "SamplingOptions":  # here, so that importing the package loads no runner
        from qwen_onnx.runners.sampling.params import SamplingOptions

        return SamplingOptions
    if name == "GenerationRequest":
        from qwen_onnx.runners.sampling.request import GenerationRequest

        return GenerationRequest
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def export(
    model: str | Path,
    out: str | Path | None = None,
    *,
    dtype: str = "f32",
    revision: str | None = None,
    max_context: int | None = None,
    block_size: int | None = None,
    head_bits: int | None = None,
    head_block_size: int | None = None,
    target: str | None = None,
    layout: str = "plain",
    split: bool = False,
    link: bool = False,
    force: bool = False,
) -> ExportSummary:
    """Export a checkpoint to an ONNX folder; the options are those of `qwen-onnx export`.

    Args:
        model: a Hub id, a checkpoint folder, or `tiny`.
        out: the folder to make; default `./NAME-DTYPE`.
        dtype: `f32`, `f16`, `bf16`, `int8` or `int4`.
        revision: branch, tag or commit of a Hub id.
        max_context: positions the export is made for; default the model's own context length.
        block_size: weights that share a scale in int8 and int4: 16, 32, 64 or 128; default 128 and 64.
        head_bits: of embedding and head in int8 and int4, 4 or 8; default as the layers.
        head_block_size: as block_size, of embedding and head; default as the layers.
        target: `onnxruntime`, or `portable`: one graph of old operators for any runtime, in f32 or f16; default the
            layout's.
        layout: who finds the files where they are: `plain`, `onnxruntime-genai`, `transformers.js`, `optimum` or
            `triton`; or `cpu`, for processors like this one.
        split: of a portable export, `prefill.onnx` and `decode.onnx` too.
        link: hard-link the weights instead of copying them; only where no byte changes.
        force: replace an earlier export at `out`.

    Raises:
        UserError: anything wrong with the model or the output, in one line; `out` is then as it was.
    """
    from qwen_onnx.exports.exporter import export_model  # here, because it imports onnxscript

    return export_model(
        str(model),
        None if out is None else Path(out),
        dtype=dtype,
        revision=revision,
        max_context=max_context,
        block_size=block_size,
        head_bits=head_bits,
        head_block_size=head_block_size,
        target=target,
        layout=layout,
        split=split,
        link=link,
        force=force,
    )


def load(
    path: str | Path,
    *,
    provider: str = "auto",
    threads: int | None = None,
    prepack: bool | None = None,
    cuda_graph: bool = True,
    tf32: bool = False,
    greedy_on_device: bool = False,
    speculate: bool = False,
    gpu_mem_limit: int | None = None,
    max_context: int | None = None,
) -> Chat:
    """Open an exported folder.

    Args:
        path: a folder made by `export`.
        provider: `auto`, `cpu`, `cuda` or `tensorrt`.
        threads: cores to compute on; default all physical ones that this process may use.
        prepack: on the CPU, copy weights to the order that products read; default in int8 and int4 only.
        cuda_graph: on CUDA, capture decode steps and replay them.
        tf32: on CUDA, let f32 products round their factors to 10 bits.
        greedy_on_device: choose the token in the graph, which feeds its own next step.
        speculate: on the CPU, guess several tokens from the context and verify them in one step.
        gpu_mem_limit: most bytes of weights and activations on the GPU; the cache is not counted.
        max_context: use fewer positions than the export holds.

    Raises:
        UserError: not an export, damaged, or the provider does not start; in one line.
    """
    from qwen_onnx.runners.chat import Chat  # here, because it imports onnxruntime
    from qwen_onnx.runners.model.runner import Runner
    from qwen_onnx.runners.runtime.session import SessionOptions

    options = SessionOptions(
        provider,
        threads=threads,
        prepack=prepack,
        cuda_graph=cuda_graph,
        tf32=tf32,
        greedy_on_device=greedy_on_device,
        speculate=speculate,
        gpu_mem_limit=gpu_mem_limit,
    )
    chat = Chat(Runner(Path(path), options, max_context=max_context))
    if chat.runner.engine is not None and not chat.runner.engine.checked:
        from qwen_onnx.checks.engines import verify_engine  # here, because it imports what makes exports

        verify_engine(chat)
    return chat
