"""Who may import whom, and what is in memory when a user has imported this much and no more."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import QWEN2, write_checkpoint

from qwen_onnx.exporter import export_model

PACKAGES = ("qwen_onnx", "qwen_onnx.graphs", "qwen_onnx.layouts", "qwen_onnx.runners")
SHARED = {
    "graphs": {"config", "contract", "graphs"},
    "runners": {"config", "contract", "errors", "runners"},
}


def modules() -> dict[str, Path]:
    """Every module of the package and its file; graphs and runners may lie outside its folder."""
    found = {}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        for folder in spec.submodule_search_locations or ():
            found |= {f"{package}.{path.stem}": path for path in Path(folder).glob("*.py")}
    return found


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


@pytest.mark.parametrize("part", SHARED)
def test_graphs_and_runners_share_the_contract_only(part: str) -> None:
    """Fault: a runner that needs what builds graphs, or a graph that depends on who runs it."""
    own = {name: path for name, path in modules().items() if name.startswith(f"qwen_onnx.{part}.")}
    assert len(own) > 5
    for name, path in own.items():
        ours = {module for module in imports(path) if module.partition(".")[0] == "qwen_onnx"}
        parts = {module.split(".")[1] for module in ours - {"qwen_onnx"}}
        assert parts <= SHARED[part], f"{name} imports {parts - SHARED[part]}"


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
    assert all(module.startswith("qwen_onnx.config") for module in ours)
