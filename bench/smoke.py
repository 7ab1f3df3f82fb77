"""The real Qwen2.5-0.5B-Instruct from the Hub in three dtypes, against what is known of it. Needs Hub access."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from qwen_onnx import export, load
from qwen_onnx.checkpoints.hub import DEFAULT_MODEL
from qwen_onnx.checks.check import check_export
from qwen_onnx.exports.exporter import ExportSummary
from qwen_onnx.runners.sampling.params import GREEDY

EXPECTED = {
    "architecture": "Qwen2ForCausalLM",
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 151_936,
    "context_length": 32_768,
    "eos_token_ids": (151_643, 151_645),
}
PARAMETERS = 494_032_768  # the tied embedding once
TABLES = 2 * 32_768 * 32 * 4  # bytes of the rotary tables
PROMPT = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
ANSWER = "Paris"


def verify(summary: ExportSummary, bytes_each: int) -> list[str]:
    """What differs from the expected properties, a line each."""
    manifest = summary.manifest
    faults = [
        f"{name} is {getattr(manifest, name)}, expected {wanted}"
        for name, wanted in EXPECTED.items()
        if getattr(manifest, name) != wanted
    ]
    size, wanted_size = manifest.files["weights.safetensors"].size, PARAMETERS * bytes_each + TABLES
    if not wanted_size < size < wanted_size + 2**20:
        faults.append(f"weights.safetensors has {size:,} bytes, expected {wanted_size:,} and a header")
    chat = load(summary.folder, provider="cpu")
    tokens = chat.generate(PROMPT, max_new_tokens=32, **GREEDY)
    text = "".join(token.text for token in tokens)
    if ANSWER not in text:
        faults.append(f"asked for the capital of France, it said {text!r}")
    faults += [found.text for found in check_export(summary.folder, against=DEFAULT_MODEL) if not found.ok]
    return faults


def main() -> int:
    faults = []
    with tempfile.TemporaryDirectory() as folder:
        for dtype, bytes_each in (("f32", 4), ("f16", 2), ("bf16", 2)):
            summary = export(DEFAULT_MODEL, Path(folder) / dtype, dtype=dtype)
            found = verify(summary, bytes_each)
            print(f"{dtype}: {'; '.join(found) or 'as expected'} ({summary.seconds:.1f} s to export)")
            faults += found
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
