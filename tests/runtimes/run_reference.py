"""ONNX's own reference evaluator: every node as the standard says, in NumPy."""

from pathlib import Path

import onnx
from loop import Step, run_steps
from onnx.reference import ReferenceEvaluator


def load(path: Path) -> Step:
    evaluator = ReferenceEvaluator(str(path))
    return lambda inputs: evaluator.run(None, inputs)


if __name__ == "__main__":
    run_steps("onnx.reference", onnx.__version__, load)
