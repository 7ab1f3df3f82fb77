"""onnx2torch: the graph as a torch module."""

from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import without_torchvision  # noqa: F401
from loop import Step, Tensors, run_steps
from onnx2torch import convert


def load(path: Path) -> Step:
    module = convert(path)

    def step(inputs: Tensors) -> list[np.ndarray]:
        with torch.inference_mode():
            return [value.numpy() for value in module(*map(torch.from_numpy, inputs.values()))]

    return step


if __name__ == "__main__":
    run_steps("onnx2torch", f"{version('onnx2torch')} on torch {torch.__version__}", load)
