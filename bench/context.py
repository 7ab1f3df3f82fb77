"""How long a decode step takes as the context grows, against what reading the cache has to take.

python bench/context.py EXPORT [EXPORT ...] --png bench/context.png

The cache is filled without computing: a step takes as long whatever the keys and values are. Needs the bench extra.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import matplotlib as mpl
import numpy as np

from qwen_onnx.checks.benchmark import step_bytes
from qwen_onnx.checks.machine import describe_machine, read_bandwidth
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.machine import physical_cores
from qwen_onnx.runners.runtime.options import SessionOptions

CONTEXTS = (16, 256, 1024, 2048, 4096, 8192, 12_288, 16_384)
ROUNDS, STEPS = 5, 6


def steps_ms(runner: Runner, contexts: tuple[int, ...]) -> dict[int, list[float]]:
    """Of each context, the steps of all rounds, which go through the contexts in turn."""
    caches = {}
    for context in contexts:
        cache = caches[context] = runner.new_cache()
        ids = np.ones((1, context), np.int64)
        cache.append(ids, None)
    found: dict[int, list[float]] = {context: [] for context in contexts}
    for _ in range(ROUNDS):
        for context, cache in caches.items():
            cache.truncate(context)
            runner.decode(cache, np.ones((1, 1), np.int64))  # warm up
            for _ in range(STEPS):
                cache.truncate(context)
                begun = time.perf_counter()
                runner.decode(cache, np.ones((1, 1), np.int64))
                found[context].append(1e3 * (time.perf_counter() - begun))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("exports", type=Path, nargs="+")
    parser.add_argument("--png", type=Path, default=Path("context.png"))
    options = parser.parse_args()
    mpl.use("Agg")
    from matplotlib import pyplot

    threads = physical_cores()
    print(f"{describe_machine()}, {threads} threads; medians of {ROUNDS * STEPS} steps\n")
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    print("| export | context | ms a token | more than at 16, ms | reading the cache takes, ms | ratio |")
    print("|---|---|---|---|---|---|")
    for export in options.exports:
        runner = Runner(export, SessionOptions(provider="cpu", threads=threads))
        before = read_bandwidth(threads)
        medians = {context: statistics.median(times) for context, times in steps_ms(runner, CONTEXTS).items()}
        bandwidth = max(before, read_bandwidth(threads))
        first = CONTEXTS[0]
        base, limits = medians[first], {}
        for context, median in medians.items():
            more = step_bytes(runner, context) - step_bytes(runner, first)
            limits[context] = 1e3 * more / (bandwidth * 1e9)
            cells = f"{median:.1f} | {median - base:.1f} | {limits[context]:.1f} at {bandwidth:.1f} GB/s"
            ratio = "-" if context == first else f"{(median - base) / limits[context]:.2f}"
            print(f"| {export.name} | {context:,} | {cells} | {ratio} |", flush=True)
        (line,) = axes.plot(medians.keys(), medians.values(), marker="o", label=f"{export.name}, measured")
        bound = [base + 1.5 * limit for limit in limits.values()]
        axes.plot(
            limits.keys(),
            bound,
            "--",
            color=line.get_color(),
            label=f"{export.name}, 1.5 x reading the cache",
        )
    axes.set_xlabel("tokens in the cache")
    axes.set_ylabel("ms a decode step, median")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(options.png, dpi=110)


if __name__ == "__main__":
    main()
