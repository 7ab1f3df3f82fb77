"""OpenVINO, on its CPU plugin."""

from pathlib import Path

import openvino
from loop import Step, run_steps


def load(path: Path) -> Step:
    # It would compute f32 models in bf16 on processors that have it.
    model = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda inputs: [value.copy() for value in model(inputs).values()]


if __name__ == "__main__":
    run_steps("openvino", openvino.__version__.split("-")[0], load)
