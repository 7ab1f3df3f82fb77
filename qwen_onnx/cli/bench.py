"""`qwen-onnx bench`: what was measured, as text or JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from qwen_onnx.checks.benchmark import Benchmark, Spread
from qwen_onnx.errors import counted


def as_json(found: Benchmark) -> dict[str, Any]:
    """What `bench --json` prints."""
    return dataclasses.asdict(found) | {"bandwidth_share": found.bandwidth_share}


def as_lines(found: Benchmark) -> list[str]:
    """What `bench` prints."""
    share = found.outside_ms / found.step_ms.median
    lines = [
        f"{found.export}: {found.model_id}, {found.dtype}, on {found.how}, {counted(found.threads, 'thread')}",
        f"{found.machine}; {found.versions}",
        f"{counted(found.prompt_tokens, 'prompt token')}, {found.new_tokens} new, "
        f"{counted(found.repeats, 'repeat')}: median (lowest to highest)",
        f"load          {found.load_s:.2f} s",
        f"TTFT          {_spread(found.ttft_ms, 1)} ms",
        f"decode        {_spread(found.tokens_per_s, 1)} tokens/s, {_spread(found.step_ms, 2)} ms a token",
        f"outside ORT   {found.outside_ms:.2f} ms a token, {share:.1%}",
    ]
    if found.bandwidth_gb_s is not None and found.bandwidth_share is not None:
        lines.append(
            f"bandwidth     {found.bytes_per_step / 1e6:,.0f} MB a token at {found.bandwidth_gb_s:.1f} GB/s measured "
            f"here: {found.bandwidth_share:.0%} of it"
        )
    memory = [f"weights files {found.weights_bytes / 1e6:,.0f} MB"]
    if found.anonymous_bytes is not None:
        memory.insert(0, f"{found.anonymous_bytes / 1e6:,.0f} MB private")
    if found.peak_bytes is not None:
        memory.insert(1, f"peak {found.peak_bytes / 1e6:,.0f} MB with mapped files")
    return [*lines, f"memory        {', '.join(memory)}"]


def _spread(spread: Spread, digits: int) -> str:
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f} to {spread.high:.{digits}f})"
