"""A random checkpoint of the 0.5B shape on a CPU: export, load, TTFT and decode, f32 weights mapped and repacked.

The settings take turns in processes of their own, and the table holds every run. Needs the bench extra.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import psutil
import safetensors.numpy

from qwen_onnx import export
from qwen_onnx.runners.session import installed_distributions

SHAPE = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 896,
    "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
    "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip

CHILD = """
import re, statistics, sys, time
from pathlib import Path
import numpy as np
from qwen_onnx.runners import runner, session

setting, folder = sys.argv[1:]
if setting == "repacked":
    opened = session.open_session
    runner.open_session = lambda *args, map_weights=False: opened(*args)
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


def write_checkpoint(folder: Path) -> None:
    """Random bf16 weights, scaled so that activations stay of order 1."""
    rng, hidden, wide = np.random.default_rng(0), SHAPE["hidden_size"], SHAPE["intermediate_size"]
    shapes = {"model.embed_tokens.weight": (SHAPE["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for layer in range(SHAPE["num_hidden_layers"]):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{norm}.weight"] = (hidden,)
        for name, rows in (("q_proj", 896), ("k_proj", 128), ("v_proj", 128)):
            shapes |= {f"{attention}.{name}.weight": (rows, hidden), f"{attention}.{name}.bias": (rows,)}
        shapes |= {f"{attention}.o_proj.weight": (hidden, 896), f"{mlp}.down_proj.weight": (hidden, wide)}
        shapes |= {f"{mlp}.{name}.weight": (wide, hidden) for name in ("gate_proj", "up_proj")}
    tensors = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape, np.float32) * (shape[-1] ** -0.5 if len(shape) == 2 else 0.2)
        tensors[name] = (values + name.endswith("norm.weight")).astype(ml_dtypes.bfloat16)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


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
        write_checkpoint(model)
        print("| export | seconds |\n|---|---|")
        for dtype in ("f32", "f16", "bf16"):
            summary = export(model, Path(scratch) / dtype, dtype=dtype)
            print(f"| {dtype} | {summary.seconds:.1f} |", flush=True)
        print("\n| f32 weights | load, s | TTFT of 128, ms | decode, tokens/s | anonymous, MB |")
        print("|---|---|---|---|---|", flush=True)
        for _ in range(rounds):
            for setting in ("repacked", "mapped"):
                folder = Path(scratch) / "f32"
                subprocess.run([sys.executable, "-c", CHILD, setting, str(folder)], check=True)


if __name__ == "__main__":
    main()
