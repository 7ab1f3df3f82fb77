"""Options of a session that change nothing where it runs: each is named, once."""

from __future__ import annotations

from qwen_onnx.contract import LOWERINGS
from qwen_onnx.contract.manifest import Manifest
from qwen_onnx.errors import option
from qwen_onnx.options import default_of
from qwen_onnx.runners.runtime.options import SessionOptions

_PROVIDERS = {
    "cuda_graph": ("cuda",),
    "tf32": ("cuda", "tensorrt"),
    "gpu_mem_limit": ("cuda",),
    "prepack": ("cpu",),
}
"""What has a use for an option; what is in no list, every provider has."""


def may_be_idle(options: SessionOptions) -> bool:
    """Whether anything was asked for that not every provider has a use for."""
    return options.greedy_on_device or any(_is_asked(options, name) for name in _PROVIDERS)


def idle_notes(options: SessionOptions, manifest: Manifest, provider: str) -> list[str]:
    """What of these options changes nothing for this export on this provider, and why."""
    idle = [name for name, of in _PROVIDERS.items() if provider not in of and _is_asked(options, name)]
    notes = []
    if idle:
        names = ", ".join(_called(options, name) for name in idle)
        notes.append(f"note: {names}: {'changes' if len(idle) == 1 else 'change'} nothing on {provider}")
    if provider == "cpu" and options.greedy_on_device:
        notes.append(f"note: {option('greedy_on_device')} is for a GPU: on cpu there is no copy to save")
    if provider == "cpu" and options.prepack and (what := _packed_anyway(manifest)):
        notes.append(f"note: {option('prepack')} changes nothing: {what} are always repacked")
    return notes


def _packed_anyway(manifest: Manifest) -> str | None:
    if manifest.quantized:
        return f"{manifest.dtype} weights"
    is_grown = LOWERINGS[manifest.graph("prefill", "cpu").lowering].cache == "grown"
    return f"weights of {option('target', 'portable')}" if is_grown else None


def _is_asked(options: SessionOptions, name: str) -> bool:
    return bool(getattr(options, name) != default_of(SessionOptions, name))


def _called(options: SessionOptions, name: str) -> str:
    value = getattr(options, name)
    return option(name, value) if isinstance(value, bool) else option(name)
