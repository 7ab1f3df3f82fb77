"""How the code is laid out: who imports whom, how large files and folders are, what is in memory when."""

from __future__ import annotations

import ast
import json
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import qwen_onnx
from qwen_onnx.exports.exporter import export_model
from support.checkpoints import QWEN2, write_checkpoint

CONTRACT = {"contract", "manifest", "json_file", "errors", "memory"}
"""Modules that everything may import; of one another they import what stands before them in ORDER."""
LAYERS = {
    "checkpoints": set(),
    "reference": {"checkpoints"},
    "graphs": {"checkpoints"},
    "runners": {"checkpoints"},
    "doctor": {"runners"},
    "exports": {"graphs", "runners", "checkpoints"},
    "checks": {"exports", "graphs", "runners", "checkpoints", "reference"},
    "cli": {"checks", "exports", "runners", "checkpoints", "doctor"},
}
"""What each part may import beside itself and CONTRACT."""
RUNS_ELSEWHERE = "qwen_onnx.exports.layouts.triton_model"
"""Copied into a Triton repository, and run there: it uses the package as any user does."""


def modules() -> dict[str, Path]:
    """Every module of the package and its file."""
    found = {"qwen_onnx": Path(qwen_onnx.__file__)}
    for module in pkgutil.walk_packages(qwen_onnx.__path__, "qwen_onnx."):
        spec = module.module_finder.find_spec(module.name)  # type: ignore[call-arg]
        assert spec is not None
        assert spec.origin is not None
        found[module.name] = Path(spec.origin)
    return found


def part_of(module: str) -> str:
    """`runners` of qwen_onnx.runners.model.runner."""
    return module.split(".")[1] if "." in module else "the package itself"


def imports(path: Path) -> Iterator[str]:
    """Every module imported anywhere in the file, within functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import hides what is imported"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def loaded_after(code: str, *arguments: object) -> set[str]:
    """Names of the modules that a fresh process has in memory after running `code`."""
    report = "\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    command = [sys.executable, "-c", code + report, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names: list[str] = json.loads(done.stdout.splitlines()[-1])
    return set(names)


def test_nothing_imports_torch_or_transformers() -> None:
    """Fault A6, H3: gigabytes to install, and exports that break with each of their releases."""
    for name, path in modules().items():
        roots = {module.partition(".")[0] for module in imports(path)}
        assert not roots & {"torch", "transformers"}, name


@pytest.mark.parametrize("part", LAYERS)
def test_imports_go_one_way(part: str) -> None:
    """cli -> checks -> exports -> graphs | runners -> checkpoints -> contract; graphs and runners never meet."""
    known = {module.rpartition(".")[2] for module in modules()} | LAYERS.keys()
    assert {part, *CONTRACT} <= known
    for name, path in modules().items():
        if part_of(name) != part or name == RUNS_ELSEWHERE:
            continue
        ours = {module for module in imports(path) if module.startswith("qwen_onnx.")}
        parts = {part_of(module) for module in ours}
        assert parts <= LAYERS[part] | CONTRACT | {part}, f"{name} imports {parts - LAYERS[part] - CONTRACT}"


def test_runners_build_no_graph() -> None:
    """Fault: running an export needs the libraries that made it."""
    for name, path in modules().items():
        if name.startswith("qwen_onnx.runners."):
            roots = {module.partition(".")[0] for module in imports(path)}
            assert not roots & {"onnx", "onnx_ir", "onnxscript"}, name


def test_importing_the_package_loads_nothing_heavy() -> None:
    """Fault: seconds before `--help`."""
    loaded = loaded_after("import qwen_onnx")
    assert {name for name in loaded if name.startswith("qwen_onnx")} == {"qwen_onnx", "qwen_onnx.errors"}
    assert not loaded & {
        "huggingface_hub", "jinja2", "ml_dtypes", "numpy", "onnx", "onnx_ir", "onnxruntime", "onnxscript",
        "rich", "safetensors", "tokenizers", "torch", "transformers", "typer",
    }  # fmt: skip


def test_running_an_export_loads_nothing_that_makes_one(tmp_path: Path) -> None:
    """Fault: a second of imports before the first token, and hundreds of megabytes for nothing."""
    write_checkpoint(tmp_path / "model", QWEN2)
    export_model(str(tmp_path / "model"), tmp_path / "out")
    code = """
import sys
import qwen_onnx
chat = qwen_onnx.load(sys.argv[1], provider="cpu", threads=1)
tokens = list(chat.generate([1, 2, 3], max_new_tokens=2))
assert len(tokens) == 2
"""
    loaded = loaded_after(code, tmp_path / "out")
    assert "onnxruntime" in loaded
    unused = {"onnx", "onnx_ir", "onnxscript", "torch", "transformers", "huggingface_hub", "llguidance"}
    assert not loaded & unused
    assert not {name for name in loaded if name.startswith(("qwen_onnx.graphs", "qwen_onnx.export"))}


def test_the_oracle_shares_nothing_with_the_graphs() -> None:
    """Fault: one wrong formula on both sides of a comparison."""
    path = modules()["qwen_onnx.reference"]
    ours = {module for module in imports(path) if module.startswith("qwen_onnx")}
    assert ours
    assert all(module.startswith("qwen_onnx.checkpoints.config") for module in ours)
