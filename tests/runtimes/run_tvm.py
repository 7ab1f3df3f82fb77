"""Apache TVM: Relax, compiled for the CPU with dimensions as symbols."""

from pathlib import Path

import numpy as np
import onnx
import tvm
from loop import Step, Tensors, run_steps
from tvm import relax
from tvm.relax.frontend.onnx import from_onnx


def load(path: Path) -> Step:
    module = relax.get_pipeline("zero")(from_onnx(onnx.load(path)))
    device = tvm.cpu()
    machine = relax.VirtualMachine(tvm.compile(module, target="llvm"), device)

    def step(inputs: Tensors) -> list[np.ndarray]:
        found = machine["main"](*(tvm.runtime.tensor(value, device) for value in inputs.values()))
        return [value.numpy() for value in found]

    return step


if __name__ == "__main__":
    run_steps("tvm", tvm.__version__, load)
