"""nxrt, on its CPU provider."""

from importlib.metadata import version
from pathlib import Path

import nxrt
from loop import Step, run_steps


def load(path: Path) -> Step:
    session = nxrt.InferenceSession(str(path))
    return lambda inputs: session.run(None, inputs)


if __name__ == "__main__":
    run_steps("nxrt", version("nxrt"), load)
