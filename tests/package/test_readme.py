"""The README's commands, as written, in order, in one folder; the Hub is a local server with the bundled model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import qwen_onnx
from support.hub_server import Hub, serve

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TINY = Path(qwen_onnx.__file__).parent / "tiny"
# These make environments of their own; .ci/run runs them.
OF_CI = {"make demo", "make test", "pip install ."}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    return [line for block in blocks("sh") for line in block.splitlines() if line.strip()]


@pytest.fixture
def environment(tmp_path):
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


def test_the_first_command_does_the_main_job_and_the_second_passes_the_tests():
    assert commands()[:2] == ["make demo", "make test"]


def test_the_commands_that_make_environments_are_run_by_ci():
    ci = (ROOT / ".ci" / "run").read_text() + (ROOT / "Makefile").read_text()
    for command in OF_CI:
        assert command.replace("pip install", "pip install -q") in ci or command in ci


def test_every_other_command_works_as_written(environment, tmp_path):
    for command in commands():
        if command in OF_CI:
            continue
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        # What goes into a file says nothing.
        assert done.stdout.strip() or ">" in command or "--out" in command, command


def test_the_python_example_works_as_written(environment, tmp_path):
    (example,) = blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", example],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Ada" in done.stdout


def test_every_file_the_readme_names_exists():
    for name in re.findall(r"`([\w./]+\.(?:py|md))`", README):
        places = (ROOT, ROOT / "qwen_onnx", ROOT / "graphs", ROOT / "runners")
        assert any((place / name).exists() for place in places), name
