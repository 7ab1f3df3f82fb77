"""IREE: compiled for the CPU."""

import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
from iree import compiler, runtime
from loop import Step, Tensors, run_steps


def load(path: Path) -> Step:
    with tempfile.TemporaryDirectory() as folder:
        imported = f"{folder}/model.mlir"
        convert = [sys.executable, "-m", "iree.compiler.tools.import_onnx", str(path), "-o", imported]
        subprocess.run(convert, check=True)
        compiled = compiler.compile_file(
            imported,
            input_type="onnx",
            target_backends=["llvm-cpu"],
            extra_args=["--iree-llvmcpu-target-cpu=host"],
        )
    module = runtime.load_vm_flatbuffer(compiled, driver="local-task")
    main = module[next(name for name in module.vm_module.function_names if "$" not in name)]

    def step(inputs: Tensors) -> list[np.ndarray]:
        return [value.to_host() for value in main(*inputs.values())]

    return step


if __name__ == "__main__":
    run_steps("iree", version("iree-base-compiler"), load)
