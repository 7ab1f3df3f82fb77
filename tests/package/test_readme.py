"""README and docs: their commands as written, what they print, and that whatever they name exists."""

from __future__ import annotations

import fnmatch
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import qwen_onnx
from support.hub_server import Hub, serve

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PACKAGE = Path(qwen_onnx.__file__).parent
TINY = PACKAGE / "tiny"
OF_CI = ("make ", "pip install")
"""Commands that make environments of their own; .ci/run runs them, or the tests of other runtimes do."""
# Node, npm and a browser: tests/runtimes run these.
ELSEWHERE = (
    "node ",
    "npm ",
    "cp ",
    "xz ",
    "python -m http.server",
)
MOST_WORDS = 1500
SECTIONS = [
    "Why this", "Two commands", "Install", "Which dtype", "Run", "Export", "Python", "Results", "Supported models",
    "Not measured", "More",
]  # fmt: skip


def blocks(path: Path, language: str) -> list[str]:
    """What stands in fences of a language; "" for none."""
    text = path.read_text(encoding="utf-8")
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for found, block in fenced if found == language]


def commands(path: Path) -> list[str]:
    return [line for block in blocks(path, "sh") for line in block.splitlines() if line.strip()]


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A shell in which `qwen-onnx` is this installation's and the Hub is ours."""
    files = {path.name: path.read_bytes() for path in TINY.iterdir() if path.is_file()}
    hub = Hub(repos={"Qwen/Qwen2.5-0.5B-Instruct": files})
    with serve(hub) as serving:
        yield {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HF_ENDPOINT": serving.url,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "QWEN_ONNX_CACHE": str(tmp_path / "cache"),
        }


def run_all(path: Path, folder: Path, environment: dict[str, str]) -> str:
    """Run every command of a page, in order, in one folder; all that they printed."""
    shutil.copytree(ROOT / "docs", folder / "docs", dirs_exist_ok=True)
    printed = ""
    for command in commands(path):
        if command.startswith((*OF_CI, *ELSEWHERE)):
            continue
        done = subprocess.run(
            command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        # What goes into a file says nothing, and what is removed on stderr only.
        assert done.stdout.strip() or ">" in command or "--out" in command or "cache rm" in command, command
        printed += done.stdout + done.stderr
    return printed


def test_the_first_command_does_the_main_job_and_the_second_passes_the_tests() -> None:
    assert commands(README)[:2] == ["make demo", "make test"]


def test_readme_is_short_and_in_the_order_of_a_newcomer_s_questions() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.split()) <= MOST_WORDS
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SECTIONS
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert pictures == [
        "docs/pictures/checkpoint_to_text.svg",
        "docs/pictures/chat.svg",
        "bench/front.png",
        "docs/pictures/web.png",
    ]
    assert text.index(pictures[0]) < text.index("## Two commands")


def test_commands_that_make_environments_are_run_by_ci() -> None:
    ci = (ROOT / ".ci" / "run").read_text() + (ROOT / "Makefile").read_text()
    for path in (README, ROOT / "docs" / "contributing.md"):
        for command in commands(path):
            if command.startswith("make "):
                assert all(target in ci for target in command.split()[1:]), command


def test_files_that_the_makefile_names_are_there() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    lists = re.findall(r"(?m)^(?:QUICK|OF_WHEEL) := ((?:.*\\\n)*.*)$", text)
    tests = [name for names in lists for name in names.replace("\\", " ").split()]
    assert len(tests) > 15
    scripts = re.findall(r"(?:bench|tests|docs)/[\w/.]+", text)
    for path in [*(ROOT / "tests" / name for name in tests), *(ROOT / name for name in scripts)]:
        assert path.exists(), path


def test_readme_s_commands_work_and_print_what_it_shows(environment: dict[str, str], tmp_path: Path) -> None:
    printed = run_all(README, tmp_path, environment)
    shown = [line for block in blocks(README, "") for line in block.splitlines()]
    assert len(shown) > 5
    for line in shown:
        # Seconds and peak memory are those of the machine that wrote the page.
        pattern = re.sub(r"\d+(\\\.\d+)?(?=\\ (s|MB)\b)", r"[0-9.]+", re.escape(line))
        if line != "Nice to meet you, Ada!":  # of the Python example
            assert re.search(f"^{pattern}$", printed, re.MULTILINE), line


@pytest.mark.docs
@pytest.mark.parametrize("path", [path for path in DOCS if blocks(path, "sh")], ids=lambda path: path.stem)
def test_commands_of_docs_work(path: Path, environment: dict[str, str], tmp_path: Path) -> None:
    if path.stem != "contributing":  # whose commands are make's
        assert run_all(path, tmp_path, environment)


@pytest.mark.docs
def test_all_pages_work_in_one_folder_and_git_ignores_what_they_write(
    environment: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "clone"
    folder.mkdir()
    for path in (README, *DOCS):
        if path.stem != "contributing":
            run_all(path, folder, environment)
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()]
    written = {path.name for path in folder.iterdir()} - {"docs"}
    assert len(written) > 8
    for name in written:
        assert any(fnmatch.fnmatch(name, pattern) for pattern in ignored), name


@pytest.mark.parametrize("path", [README, ROOT / "docs" / "python.md"], ids=lambda path: path.stem)
def test_python_examples_work(path: Path, environment: dict[str, str], tmp_path: Path) -> None:
    (example,) = blocks(path, "python")
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Nice to meet you, Ada!" in done.stdout
    if "generate_batch" in example:
        assert "['3 plus 4 is 7.', 'The capital of France is Paris.']" in done.stdout


def test_the_table_of_sizes_is_the_computed_one() -> None:
    spec = importlib.util.spec_from_file_location("sizes", ROOT / "bench" / "sizes.py")
    assert spec is not None
    assert spec.loader is not None
    sizes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sizes)
    rows = re.findall(r"^\| Qwen[\d.]+-[\d.]+B \|.*$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert [row.split(" | ")[0].strip("| ") for row in rows] == [*sizes.MODELS]
    for model in ("Qwen2.5-0.5B", "Qwen3-0.6B"):  # `python bench/sizes.py` makes them all, in ten seconds
        assert sizes.row(model) in rows


def places(name: str, page: Path) -> list[Path]:
    return [folder / name for folder in (page.parent, ROOT, PACKAGE, PACKAGE / "exports")]


@pytest.mark.parametrize("path", [README, *DOCS, ROOT / "bench" / "README.md"], ids=lambda path: path.stem)
def test_what_a_page_names_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r"`([\w./]+/[\w./]*|[\w./]+\.(?:py|md))`", text):
        if name.startswith(("export.json", "NAME", "onnx/", "qwen-onnx/", "ort/")) or name.endswith(".onnx"):
            continue
        assert any(place.exists() for place in places(name, path)), name
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (path.parent / link).exists(), link
    for module in re.findall(r"`(qwen_onnx(?:\.\w+)+)`", text):
        parts, found = module.split("."), None
        for end in range(len(parts), 0, -1):
            if importlib.util.find_spec(".".join(parts[:end])):
                found = importlib.import_module(".".join(parts[:end]))
                for name in parts[end:]:
                    found = getattr(found, name)
                break
        assert found is not None, module
