"""ONNX Runtime, on its CPU provider."""

from pathlib import Path

import onnxruntime
from loop import Step, run_steps


def load(path: Path) -> Step:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, inputs)


if __name__ == "__main__":
    run_steps("onnxruntime", onnxruntime.__version__, load)
