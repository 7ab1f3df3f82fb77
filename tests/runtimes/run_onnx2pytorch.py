"""onnx2pytorch: the graph as a torch module."""

from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx
import torch
import without_torchvision  # noqa: F401
from loop import Step, Tensors, run_steps
from onnx2pytorch import ConvertModel


def load(path: Path) -> Step:
    module = ConvertModel(onnx.load(path)).eval()

    def step(inputs: Tensors) -> list[np.ndarray]:
        with torch.inference_mode():
            return [value.numpy() for value in module(*map(torch.from_numpy, inputs.values()))]

    return step


if __name__ == "__main__":
    run_steps("onnx2pytorch", f"{version('onnx2pytorch')} on torch {torch.__version__}", load)
