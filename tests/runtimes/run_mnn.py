"""MNN: the graph converted to its own format first."""

import tempfile
from pathlib import Path

import _tools  # MNN's converter, whose own Python module installs a package to report its use
import MNN
import numpy as np
import onnx
from loop import Step, Tensors, past_names, read_cases, run_steps
from MNN import expr, nn


def load(path: Path) -> Step:
    past = past_names(read_cases())
    names = ["input_ids", "attention_mask", "position_ids", *past]
    outputs = ["logits", *(name.replace("past_key_values", "present") for name in past)]
    with tempfile.TemporaryDirectory() as folder:
        inside, converted = f"{folder}/model.onnx", f"{folder}/model.mnn"
        onnx.save(onnx.load(path), inside)  # of weights in a file of their own it reads f32 only
        _tools.mnnconvert(["mnnconvert", "-f", "ONNX", "--modelFile", inside, "--MNNModel", converted])
        module = nn.load_module_from_file(converted, names, outputs, precision_mode=expr.PrecisionMode.High)

    def variable(array: np.ndarray) -> expr.Var:
        # Of integers it knows 32 bits, and inputs of f16 became f32.
        dtype, kind = (np.int32, expr.int) if array.dtype.kind == "i" else (np.float32, expr.float)
        return expr.const(np.ascontiguousarray(array, dtype), list(array.shape), expr.NCHW, kind)

    def step(inputs: Tensors) -> list[np.ndarray]:
        return [value.read().copy() for value in module.forward(list(map(variable, inputs.values())))]

    return step


if __name__ == "__main__":
    run_steps("MNN", MNN.version(), load)
