"""Logits of a peer over windows of ids, in a process and an environment of its own; bench/front.py starts it.

python bench/front_child.py quantize PLAIN.gguf OUT.gguf KIND
python bench/front_child.py llama_cpp|genai MODEL IDS.npy OUT.f32
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np


def quantize(plain: str, out: str, kind: str) -> None:
    """By llama.cpp's own quantizer, as its users do."""
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
    if llama_cpp.llama_model_quantize(plain.encode(), out.encode(), ctypes.byref(options)):
        raise SystemExit(f"{kind}: llama.cpp does not quantize")


def llama_cpp(model: str, windows: np.ndarray) -> Iterator[np.ndarray]:
    """f32 [tokens, vocab_size] of each window."""
    import llama_cpp

    size = windows.shape[1]
    llama = llama_cpp.Llama(model, n_ctx=size, n_batch=size, n_ubatch=size, logits_all=True, verbose=False)
    for ids in windows:
        llama.reset()
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llama.ctx), True)
        llama.eval(ids.tolist())
        yield np.asarray(llama.scores[:size], np.float32)


def genai(model: str, windows: np.ndarray) -> Iterator[np.ndarray]:
    """As llama_cpp; its graph is run as it lies, since its generator gives the last token's logits only."""
    import onnxruntime

    session = onnxruntime.InferenceSession(
        str(Path(model) / "model.onnx"), providers=["CPUExecutionProvider"]
    )
    decoder = json.loads((Path(model) / "genai_config.json").read_text())["model"]["decoder"]
    kinds = {"tensor(int64)": np.int64, "tensor(float)": np.float32, "tensor(int32)": np.int32}
    for ids in windows:
        inputs = {}
        for spec in session.get_inputs():
            if spec.name == "input_ids":
                inputs[spec.name] = ids[np.newaxis].astype(kinds[spec.type])
            elif spec.name == "attention_mask":
                inputs[spec.name] = np.ones((1, len(ids)), kinds[spec.type])
            elif spec.name == "position_ids":
                inputs[spec.name] = np.arange(len(ids), dtype=kinds[spec.type])[np.newaxis]
            else:
                shape = (1, decoder["num_key_value_heads"], 0, decoder["head_size"])
                inputs[spec.name] = np.zeros(shape, kinds[spec.type])
        yield session.run(["logits"], inputs)[0][0]


if __name__ == "__main__":
    if sys.argv[1] == "quantize":
        quantize(*sys.argv[2:])
    else:
        engine = {"llama_cpp": llama_cpp, "genai": genai}[sys.argv[1]]
        with open(sys.argv[4], "wb") as file:  # noqa: PTH123
            for logits in engine(sys.argv[2], np.load(sys.argv[3])):
                file.write(logits.astype(np.float32).tobytes())
