"""tinygrad, which compiles kernels for each new length."""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from loop import Step, Tensors, run_steps
from tinygrad import Tensor
from tinygrad.nn.onnx import OnnxRunner, OpSetId


class Eager(OnnxRunner):
    """Computes every node at once: 0.14 fuses a ReduceMean of f32 into kernels that it then cannot compile."""

    def _select_op(self, op: str, required_opset: OpSetId) -> Callable[..., Any]:
        evaluate = super()._select_op(op, required_opset)

        def computed(*inputs: Any, **attributes: Any) -> Any:
            found = evaluate(*inputs, **attributes)
            tensors = found if isinstance(found, tuple) else (found,)
            Tensor.realize(*(value for value in tensors if isinstance(value, Tensor)))
            return found

        return computed


def load(path: Path) -> Step:
    runner = Eager(path)

    def step(inputs: Tensors) -> list[np.ndarray]:
        runner.variable_dims.clear()  # else dimensions must stay those of the first call
        return [value.numpy() for value in runner({name: Tensor(v) for name, v in inputs.items()}).values()]

    return step


if __name__ == "__main__":
    run_steps("tinygrad", version("tinygrad"), load)
