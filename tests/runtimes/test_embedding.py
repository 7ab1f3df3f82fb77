"""docs/embedding.md: its programs run as they are, without this package, and give the runner's answers."""

from __future__ import annotations

import ast
import contextlib
import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
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


def answers(turns: list[str]) -> list[str]:
    """What the runner says to one turn after the other."""
    chat, messages = load(tiny(), provider="cpu"), []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        text = "".join(token.text for token in chat.generate(messages))
        messages.append({"role": "assistant", "content": text})
    return [message["content"] for message in messages[1::2]]


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
    assert {"embedding/loop.py", "embedding/loop.mjs", "web/"} <= set(links)
    assert not [link for link in links if not (DOCS / link).exists()]


@pytest.mark.runtimes
def test_the_loop_in_node(portable: Path, scripts: Path) -> None:
    chat = load(tiny(), provider="cpu")
    for prompt in prompts(chat):
        assert printed("node", scripts / "embedding_loop.mjs", portable, prompt, "24") == wanted(chat, prompt)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """A plain file server, as the page needs no other."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, scripts: Path, portable: Path) -> Path:
    """The page, set up by the commands of docs/embedding.md."""
    folder = shutil.copytree(DOCS / "web", tmp_path_factory.mktemp("site") / "page")
    (folder / "node_modules").symlink_to((scripts / "node_modules").resolve())
    text = (DOCS / "embedding.md").read_text(encoding="utf-8")
    commands = re.findall(r"^(?:mkdir ort|cp node_modules/.*)$", text, re.MULTILINE)
    assert len(commands) == 4
    subprocess.run(["sh", "-ec", "\n".join(commands)], cwd=folder, check=True)
    shutil.copytree(portable, folder / "tiny")
    return folder


def drive(scripts: Path, folder: Path, url: str, turns: list[str]) -> dict[str, Any]:
    cases, result = folder / "cases.json", folder / "result.json"
    pictures = os.environ.get("QWEN_ONNX_SCREENSHOTS")
    cases.write_text(json.dumps({"url": url, "turns": turns, "screenshots": pictures}), encoding="utf-8")
    command = ["node", str(scripts / "drive_page.mjs"), str(cases), str(result)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert run.returncode == 0, run.stderr
    return json.loads(result.read_text(encoding="utf-8"))


@pytest.mark.runtimes
def test_the_page_chats(site: Path, scripts: Path, tmp_path: Path) -> None:
    with served(site) as url:
        found = drive(scripts, tmp_path, url, TURNS)
    assert found["console"] == []
    assert found["status"] == "tiny · f32 · WebAssembly, 1 thread"
    assert found["answers"] == answers(TURNS)
    speed = r"\d+ tokens?( · \d+\.\d tokens/s)? · first token after \d+ ms"
    numbers = [line.rpartition(" · ") for line in found["numbers"]]
    assert all(re.fullmatch(speed, before) for before, _, _ in numbers)
    assert all("tokens/s" in before for before, _, _ in numbers[:2])
    cached = [tuple(map(int, re.findall(r"\d+", end))) for _, _, end in numbers]
    (none, first), (kept, second), (again, _) = cached  # of the prompt's tokens
    assert none == 0
    assert first < kept < second
    assert again == first - 1, "a new chat with the same prompt: the cache is cut back to it"
    # It came bit by bit; Stop leaves what had come; New chat leaves nothing.
    begun = [text for text in found["seen"] if found["answers"][0].startswith(text)]
    assert len(begun) > 2
    assert begun == sorted(begun, key=len)
    assert found["answers"][0].startswith(found["stopped"])
    assert len(found["stopped"]) < len(found["answers"][0])
    assert found["left"] == 0


@pytest.mark.runtimes
@pytest.mark.parametrize(("query", "missing"), [("?model=nowhere", "nowhere/"), ("", "ort/")])
def test_the_page_names_what_is_missing(
    site: Path, scripts: Path, tmp_path: Path, query: str, missing: str
) -> None:
    """On the page itself, not in the console alone, and it does not go on loading."""
    broken = shutil.copytree(site, tmp_path / "page", symlinks=True)
    shutil.rmtree(broken / missing, ignore_errors=True)
    with served(broken) as url:
        found = drive(scripts, tmp_path, url + query, [])
    assert missing in found["error"]
    assert found["status"] == "Not loaded"
