"""What may be chosen of how an export runs."""

from __future__ import annotations

import dataclasses

from qwen_onnx.errors import UserError, option
from qwen_onnx.option_kinds import Count, Switch, Text, Texts
from qwen_onnx.options import Options, declare

PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
"""ONNX Runtime's providers, by our name."""
OPTIMIZATION_LEVELS = {
    "disabled": "ORT_DISABLE_ALL", "basic": "ORT_ENABLE_BASIC", "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}  # fmt: skip
"""How far ONNX Runtime may rewrite a graph, by our name; in rising order."""
_MOST_THREADS = 1024  # far above any machine's cores; making more of them takes minutes
_PERFORMANCE, _CUDA = "Performance", "CUDA"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionOptions(Options):
    """Where and how an export runs.

    Raises:
        UserError: values that are wrong, or do not go together.
    """

    provider: str = declare("auto", Text(("auto", *PROVIDERS)), "auto, cpu, cuda or tensorrt.", _PERFORMANCE)
    threads: int | None = declare(
        None, Count(1, _MOST_THREADS), "CPU threads; default one a core.", _PERFORMANCE,
        about="Cores to compute on; default all physical ones that may be used, on a GPU 1.",
    )  # fmt: skip
    max_context: int | None = declare(None, Count(1), "Context length; default all.", _PERFORMANCE)
    prepack: bool | None = declare(
        None, Switch(), "CPU: repack weights first.", _PERFORMANCE,
        about="On a CPU, repack the weights: prompts faster, the start slower; default for int8 and int4.",
    )  # fmt: skip
    """Prompts in f32 are 10 to 17 % faster, and the start takes seconds."""
    speculate: bool = declare(
        False, Switch(), "CPU: guess tokens ahead.", _PERFORMANCE, flag="--speculate",
        about="On a CPU, guess greedy tokens from the context and verify several a step.",
    )  # fmt: skip
    optimization_level: str = declare(
        "all", Text((*OPTIMIZATION_LEVELS,)), "disabled, basic, extended or all.", _PERFORMANCE, hidden=True,
        about="How far ONNX Runtime rewrites graphs: disabled, basic, extended or all.",
    )  # fmt: skip
    """To find out which rewriting did harm."""
    disabled_optimizers: tuple[str, ...] = declare(
        (), Texts(), "Leave it out; may be repeated.", _PERFORMANCE, flag="--disable-optimizer", metavar="NAME",
        hidden=True, about="ONNX Runtime's rewritings to leave out, as SkipLayerNormFusion.",
    )  # fmt: skip
    cuda_graph: bool = declare(True, Switch(), "CUDA graph decode; default on.", _CUDA)
    greedy_on_device: bool = declare(
        False, Switch(), "Argmax on the GPU.", _CUDA, flag="--greedy-on-device",
        about="Choose greedy tokens in the graph: each is the input of the next step, with no copy to the host.",
    )  # fmt: skip
    tf32: bool = declare(
        False, Switch(), "f32 products in TF32.", _CUDA,
        about="Let f32 products round their factors to 10 bits (TensorFloat-32).",
    )  # fmt: skip
    gpu_mem_limit: int | None = declare(
        None, Count(1, 2**63 - 1), "GPU memory; cache not counted.", _CUDA,
        metavar="MIB", read=lambda mib: mib << 20, flag_kind=Count(1, (2**63 - 1) >> 20),
        about="Most bytes of weights and activations on the GPU; the cache is not counted.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "disabled_optimizers", tuple(self.disabled_optimizers))
        if self.speculate and self.greedy_on_device:
            device, ahead = option("greedy_on_device"), option("speculate")
            raise UserError(f"{device} takes one token a step, {ahead} several: choose one of them")
