"""Writes kernels.json beside it: which kernels ONNX Runtime's CUDA provider has, and for which types.

Run it with the version that the table is to be of: PYTHONPATH=tests python -m support.cuda.kernel_table
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from support.cuda import stand_ins as cuda_stand_ins

TABLE = Path(__file__).parent / "kernels.json"
OLDEST = 21
"""Opset of ai.onnx: kernels that serve none so new are left out."""

UNTIL_NOW = 2**31 - 1
"""What ONNX Runtime says of a kernel that no newer one has replaced."""

PROGRAM = """
import json
import onnxruntime
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_opkernel_def
kernels = [
    [kernel.domain or "ai.onnx", kernel.op_name, *kernel.version_range, kernel.type_constraints]
    for kernel in get_all_opkernel_def() if kernel.provider == "CUDAExecutionProvider"
]
print(json.dumps([onnxruntime.__version__, kernels]))
"""


def compile_tensorrt_into(folder: Path) -> None:
    """Stand-ins for what the TensorRT provider links to: the list of kernels is made by starting every provider."""
    provider = cuda_stand_ins._provider().with_name("libonnxruntime_providers_tensorrt.so")
    lines = cuda_stand_ins._output("nm", "-D", "--undefined-only", provider).splitlines()
    names = [line.split()[-1] for line in lines]
    tensorrt = [
        name
        for name in names
        if re.fullmatch(r"create\w+_INTERNAL|getInferLibVersion|getPluginRegistry", name)
    ]
    cudnn = [name.partition("@")[0] for name in names if name.endswith("@libcudnn.so.9")]
    _compile(
        folder / "libnvinfer.so.10", "".join(f"void *{name}(void) {{ return 0; }}\n" for name in tensorrt)
    )
    (folder / "libnvonnxparser.so.10").symlink_to("libnvinfer.so.10")
    (folder / "libcudnn.so.9").unlink()
    source = "".join(f"int {name}(void **out) {{ static int it; *out = &it; return 0; }}\n" for name in cudnn)
    _compile(folder / "libcudnn.so.9", source, "libcudnn.so.9 { global: *; };\n")


def _compile(library: Path, source: str, versions: str = "") -> None:
    (library.parent / "source.c").write_text(source)
    (library.parent / "source.map").write_text(versions or "{ global: *; };\n")
    command = [
        "gcc",
        "-w",
        "-shared",
        "-fPIC",
        f"-Wl,-soname,{library.name}",
        "-Wl,--version-script=source.map",
    ]
    subprocess.run([*command, "-o", library.name, "source.c"], cwd=library.parent, check=True)


def compact(version: str, kernels: list[Any]) -> dict[str, Any]:
    """`{domain: {op: [[since, until or null, {type parameter: types}], ...]}}`, sorted."""
    table: dict[str, dict[str, list[Any]]] = {"ai.onnx": {}, "com.microsoft": {}}
    for domain, op, since, until, types in kernels:
        if domain not in table or (domain == "ai.onnx" and until < OLDEST):
            continue
        short = {
            name: " ".join(sorted(kind.removeprefix("tensor(").removesuffix(")") for kind in kinds))
            for name, kinds in sorted(types.items())
        }
        table[domain].setdefault(op, []).append([since, None if until == UNTIL_NOW else until, short])
    for ops in table.values():
        for found in ops.values():
            found.sort(key=json.dumps)
    about = "kernels of CUDAExecutionProvider, written by cuda_kernel_table.py"
    return {
        "about": about,
        "onnxruntime": version,
        **{domain: dict(sorted(table[domain].items())) for domain in table},
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        cuda_stand_ins.compile_into(Path(folder))
        compile_tensorrt_into(Path(folder))
        done = cuda_stand_ins.run(Path(folder), PROGRAM)
    if done.returncode:
        raise RuntimeError(f"the kernels cannot be listed ({done.returncode}):\n{done.stderr}")
    table = compact(*json.loads(done.stdout.splitlines()[-1]))
    TABLE.parent.mkdir(exist_ok=True)
    text = json.dumps(table, separators=(",", ":"))
    # A line for each operator, so that a diff shows which ones a version changed.
    TABLE.write_text(re.sub(r'(?<=[]{])(,?)(?="\w+":\[\[)', r"\1\n", text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
