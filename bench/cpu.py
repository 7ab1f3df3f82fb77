"""A random checkpoint of the 0.5B shape on a CPU: export, load, TTFT and decode, in f32, int8 and int4.

The settings take turns in processes of their own, and the table holds every run. Needs the bench extra.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
from checkpoint import QWEN_05B, parameter_count, write_checkpoint

from qwen_onnx import export
from qwen_onnx.runners.session import installed_distributions

EXPORTS: dict[str, tuple[str, int | None]] = {
    "f32": ("f32", None),
    "f16": ("f16", None),
    "bf16": ("bf16", None),
    "int8": ("int8", None),
    "int4": ("int4", None),
    "int4, blocks of 128": ("int4", 128),
}
"""Each with its dtype and block size."""

CHILD = """
import re, statistics, sys, time
from pathlib import Path
import numpy as np
from qwen_onnx.runners import runner, session, steps

setting, folder = sys.argv[1:]
if setting == "f32, repacked":
    opened = steps.open_session
    steps.open_session = lambda *args, map_weights=False, **named: opened(*args, **named)
begun = time.perf_counter()
model = runner.Runner(Path(folder), session.SessionOptions("cpu"))
loaded = time.perf_counter() - begun
ids, cache = np.random.default_rng(0).integers(0, 151_000, (1, 128)), model.new_cache()
model.prefill(cache, ids)  # warm up
prefills, decodes = [], []
for _ in range(3):
    cache.truncate(0)
    begun = time.perf_counter()
    logits = model.prefill(cache, ids)
    prefills.append(time.perf_counter() - begun)
for _ in range(24):
    begun = time.perf_counter()
    logits = model.decode(cache, logits.argmax(-1)[:, None])
    decodes.append(time.perf_counter() - begun)
anonymous = int(re.search(r"RssAnon:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) / 1e3
ttft, speed = 1e3 * statistics.median(prefills), 1 / statistics.median(decodes)
print(f"| {setting} | {loaded:.2f} | {ttft:.0f} | {speed:.1f} | {anonymous:,.0f} |")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "onnx", "onnxscript")]
    print(
        f"{psutil.cpu_count(logical=False)} cores, {psutil.virtual_memory().total / 1e9:.0f} GB, "
        f"{platform.platform()}, Python {platform.python_version()}, "
        f"{', '.join([*versions, *installed_distributions()])}\n"
    )
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        write_checkpoint(model, QWEN_05B)
        print("| export | seconds | bits a parameter |\n|---|---|---|")
        for name, (dtype, block_size) in EXPORTS.items():
            summary = export(model, Path(scratch) / name, dtype=dtype, block_size=block_size)
            size = summary.manifest.files["weights.safetensors"].size
            bits = 8 * size / parameter_count(QWEN_05B)
            print(f"| {name} | {summary.seconds:.1f} | {bits:.2f} |", flush=True)
        print("\n| weights | load, s | TTFT of 128, ms | decode, tokens/s | anonymous, MB |")
        print("|---|---|---|---|---|", flush=True)
        for _ in range(rounds):
            for setting in ("f32, repacked", "f32, mapped", *(name for name in EXPORTS if "int" in name)):
                folder = Path(scratch) / setting.removesuffix(", repacked").removesuffix(", mapped")
                subprocess.run([sys.executable, "-c", CHILD, setting, str(folder)], check=True)


if __name__ == "__main__":
    main()
