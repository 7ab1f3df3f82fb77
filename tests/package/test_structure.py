"""How the code is laid out: who imports whom, how large files and folders are, what is in memory when."""

from __future__ import annotations

import ast
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import qwen_onnx
from support.checkpoints import QWEN2, write_checkpoint
from support.exporting import export_model

CONTRACT = {"contract", "errors", "memory", "options", "option_kinds"}
"""Parts that everything may import."""
LAYERS = {
    "checkpoints": set(),
    "reference": {"checkpoints"},
    "graphs": {"checkpoints"},
    "runners": {"checkpoints"},
    "doctor": {"runners"},
    "web": {"runners"},
    "exports": {"graphs", "runners", "checkpoints"},
    "checks": {"exports", "graphs", "runners", "checkpoints", "reference"},
    "cli": {"checks", "exports", "runners", "checkpoints", "doctor", "web"},
    "api": {"checks", "exports", "runners", "checkpoints"},
    "__main__": {"cli"},
    "tiny": set(),
}
"""What each part may import beside itself and CONTRACT."""
MOST_LINES = 250
MOST_MODULES = 12
"""At the top of a folder; a little more than what a reader keeps in mind."""
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
    """Neither is needed to install, to export or to run (A6, H3)."""
    for name, path in modules().items():
        roots = {module.partition(".")[0] for module in imports(path)}
        assert not roots & {"torch", "transformers"}, name


def test_every_part_has_a_place_in_the_order() -> None:
    parts = {part_of(module) for module in modules() if "." in module}
    assert parts == LAYERS.keys() | CONTRACT


@pytest.mark.parametrize("part", [*LAYERS, *sorted(CONTRACT)])
def test_imports_go_one_way(part: str) -> None:
    """cli -> checks -> exports -> graphs | runners -> checkpoints -> contract; graphs and runners never meet."""
    allowed = LAYERS.get(part, set()) | CONTRACT | {part}
    for name, path in modules().items():
        if part_of(name) != part or name == RUNS_ELSEWHERE:
            continue
        parts = {part_of(module) for module in imports(path) if module.startswith("qwen_onnx.")}
        parts -= {"__version__"}
        assert parts <= allowed, f"{name} imports {parts - allowed}"


def test_contract_imports_nothing_heavy() -> None:
    for name, path in modules().items():
        if part_of(name) in CONTRACT:
            roots = {module.partition(".")[0] for module in imports(path)}
            assert not roots & {"numpy", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "tokenizers"}, name


def test_files_are_small() -> None:
    for name, path in modules().items():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= MOST_LINES, f"{name} has {lines} lines"


def test_folders_are_small_and_say_in_a_sentence_what_belongs_there() -> None:
    for path in modules().values():
        if path.name != "__init__.py":
            continue
        others = [other for other in path.parent.glob("*.py") if other != path]
        assert len(others) <= MOST_MODULES, f"{path.parent} has {len(others)} modules"
        sentence = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert sentence, path
        assert sentence.endswith("."), path


def test_names_are_the_fields_own() -> None:
    """Names of modules, classes, functions and parameters, in the words that people of this field use."""
    banned = {
        "manager", "helper", "helpers", "util", "utils", "chooser", "making", "showing", "running", "feeds",
    }  # fmt: skip
    for name, path in modules().items():
        found = {*name.split("."), *_defined(path)}
        words = {word for each in found for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", each)}
        assert not {word.lower() for word in words} & banned, name


def _defined(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg


def test_graphs_can_be_read_in_an_afternoon() -> None:
    """The model within 250 lines, all of graphs/ within 1,600; more only where new families come in."""
    sizes = {
        name: len(path.read_text(encoding="utf-8").splitlines())
        for name, path in modules().items()
        if part_of(name) == "graphs"
    }
    assert sizes["qwen_onnx.graphs.model"] < 250
    assert sum(sizes.values()) <= 1600


def test_executors_are_told_apart_by_their_methods_alone() -> None:
    """No `isinstance` of the runner's own classes, and none is copied to make another."""
    own = {
        "Executor",
        "FixedShape",
        "Growing",
        "LiveSlice",
        "TwoGraphs",
        "LongContext",
        "LogitsModel",
        "Runner",
    }
    for name, path in modules().items():
        if not name.startswith("qwen_onnx.runners."):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                assert not {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)} & own, (
                    name
                )
            assert ast.unparse(node.func) != "copy.copy", name


def test_a_lowering_is_data() -> None:
    """No class of the model is made another by a weight format, a norm or a cache: the table combines them."""
    tree = ast.parse(modules()["qwen_onnx.graphs.model"].read_text(encoding="utf-8"))
    of_model = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    assert {"Attention", "MLP", "DecoderLayer", "QwenModel", "QwenForCausalLM"} <= of_model
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and part_of(name) == "graphs":
                assert not {ast.unparse(base).rpartition(".")[2] for base in node.bases} & of_model, node.name


def test_runners_build_no_graph() -> None:
    """An export runs without the libraries that made it."""
    for name, path in modules().items():
        if name.startswith("qwen_onnx.runners."):
            roots = {module.partition(".")[0] for module in imports(path)}
            assert not roots & {"onnx", "onnx_ir", "onnxscript"}, name


def test_importing_the_package_loads_nothing_heavy() -> None:
    """`--help` and `import qwen_onnx` take no seconds."""
    loaded = loaded_after("import qwen_onnx")
    assert {name for name in loaded if name.startswith("qwen_onnx")} == {"qwen_onnx", "qwen_onnx.errors"}
    assert not loaded & {
        "huggingface_hub", "jinja2", "ml_dtypes", "numpy", "onnx", "onnx_ir", "onnxruntime", "onnxscript",
        "rich", "safetensors", "tokenizers", "torch", "transformers", "typer",
    }  # fmt: skip


def test_running_an_export_loads_nothing_that_makes_one(tmp_path: Path) -> None:
    """No second of imports before the first token, and no megabytes for what is not used."""
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
    made_by = {name for name in loaded if name.startswith(("qwen_onnx.graphs", "qwen_onnx.exports"))}
    assert made_by <= {"qwen_onnx.exports", "qwen_onnx.exports.options"}  # what `export` can be asked for


def test_the_oracle_shares_nothing_with_the_graphs() -> None:
    """A wrong formula cannot stand on both sides of a comparison."""
    path = modules()["qwen_onnx.reference"]
    ours = {module for module in imports(path) if module.startswith("qwen_onnx")}
    assert ours
    assert all(
        module.startswith(("qwen_onnx.checkpoints.config", "qwen_onnx.checkpoints.rope")) for module in ours
    )
