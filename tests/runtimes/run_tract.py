"""tract: dimensions stay symbols, the plan is made once."""

from pathlib import Path

import tract
from loop import Step, run_steps


def load(path: Path) -> Step:
    runnable = tract.onnx().load(path).into_model().into_runnable()
    return lambda inputs: [value.to_numpy() for value in runnable.run(list(inputs.values()))]


if __name__ == "__main__":
    run_steps("tract", tract.version(), load)
