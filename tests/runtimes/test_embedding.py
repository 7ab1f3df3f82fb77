"""docs/embedding.md: its programs run as they are, without this package, and give the runner's answers."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from environments import RUNTIMES, prepare

from qwen_onnx import export, load
from qwen_onnx.runners.chat import Chat
from support.chats import tiny

DOCS = Path(__file__).parents[2] / "docs"
TURNS = ["Repeat after me: cloud river", "What is 3 plus 4?"]


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embedding") / "tiny"
    return export("tiny", folder, dtype="f32", target="portable").folder


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts for Node, beside the packages that they import."""
    installed = prepare(next(runtime for runtime in RUNTIMES if runtime.name == "onnxruntime-node")).folder
    folder = tmp_path_factory.mktemp("scripts")
    for script in (*installed.glob("*.mjs"), installed / "package.json", DOCS / "embedding" / "loop.mjs"):
        name = "embedding_loop.mjs" if script.parent != installed else script.name
        shutil.copy(script, folder / name)
    (folder / "node_modules").symlink_to(installed / "node_modules")
    return folder


def prompts(chat: Chat) -> list[str]:
    """One that ends in an end token, and one that does not."""
    return [chat.template.render([{"role": "user", "content": TURNS[0]}]), "The capital of"]


def wanted(chat: Chat, prompt: str, count: int = 24) -> list[int]:
    return [token.token_id for token in chat.generate(prompt, max_new_tokens=count)]


def printed(*command: str | Path) -> Any:
    run = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_the_loop_in_python(portable: Path) -> None:
    chat = load(tiny(), provider="cpu")
    for prompt in prompts(chat):
        # Isolated: nothing is found but what is installed.
        assert printed(
            sys.executable, "-I", DOCS / "embedding" / "loop.py", portable, prompt, "24"
        ) == wanted(chat, prompt)


def test_the_loop_in_python_imports_nothing_of_ours() -> None:
    tree = ast.parse((DOCS / "embedding" / "loop.py").read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"json", "sys", "pathlib", "numpy", "onnxruntime", "tokenizers"}


def test_every_file_that_the_page_of_docs_names_exists() -> None:
    text = (DOCS / "embedding.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert {"embedding/loop.py", "embedding/loop.mjs", "web.md"} <= set(links)
    assert not [link for link in links if not (DOCS / link).exists()]


@pytest.mark.runtimes
def test_the_loop_in_node(portable: Path, scripts: Path) -> None:
    chat = load(tiny(), provider="cpu")
    for prompt in prompts(chat):
        assert printed("node", scripts / "embedding_loop.mjs", portable, prompt, "24") == wanted(chat, prompt)
