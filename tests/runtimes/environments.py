"""The runtimes, and how each is installed once, in an environment of its own under a cache folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import platformdirs

from qwen_onnx.exports.publish.temporary_folders import hold

SCRIPTS = Path(__file__).parent
PATIENCE = 1200  # seconds of an installation


class Runtime(NamedTuple):
    """What runs the export, by a script beside this file."""

    name: str
    script: str
    packages: tuple[str, ...] = ()
    """Of PyPI; none where this interpreter has it. Scripts in node/ have a package.json."""
    layout: str = "plain"
    """Of the export, see contract.LAYOUTS."""
    quick: bool = False
    """Installed and run in CI."""
    seconds: int = 300
    programs: tuple[str, ...] = ()
    """That must be on the PATH already."""
    variables: Mapping[str, str] = MappingProxyType({})
    needs: str = ""
    """What whoever embeds the export in it must know."""


RUNTIMES = (
    Runtime("onnxruntime", "run_onnxruntime.py", quick=True),
    Runtime(
        "onnxruntime-genai",
        "run_genai.py",
        ("onnxruntime-genai",),
        layout="onnxruntime-genai",
        quick=True,
        needs="`get_logits()` before `append_tokens` of a next turn: it leaves out the last id otherwise",
    ),
    Runtime(
        "openvino",
        "run_openvino.py",
        ("openvino",),
        quick=True,
        needs="`INFERENCE_PRECISION_HINT` f32: its default is bf16 where the processor has that",
    ),
    Runtime(
        "optimum",
        "run_optimum.py",
        # What optimum-onnx 0.1 is made for; transformers 5 has another cache.
        ("optimum-onnx[onnxruntime]", "transformers>=4.57,<4.58", "torch"),
        layout="optimum",
        needs="transformers 4.57",
    ),
    Runtime("reference", "run_reference.py", seconds=900),
    Runtime(
        "tract", "run_tract.py", ("tract>=0.23",), needs="outputs taken in order: it names them after nodes"
    ),
    Runtime("iree", "run_iree.py", ("iree-base-compiler[onnx]", "iree-base-runtime"), seconds=900),
    Runtime("tvm", "run_tvm.py", ("apache-tvm", "onnx"), seconds=900),
    Runtime(
        "mnn",
        "run_mnn.py",
        ("MNN", "onnx"),
        needs="f16 weights inside the file (`onnx.save`); ids of 32 bits",
    ),
    Runtime(
        "tinygrad",
        "run_tinygrad.py",
        ("tinygrad",),
        seconds=1800,
        programs=("clang",),
        variables=MappingProxyType({"DEV": "CPU"}),
        needs="clang; in f32 every node realized at once",
    ),
    Runtime("onnx2torch", "run_onnx2torch.py", ("onnx2torch", "torch")),
    Runtime("onnx2pytorch", "run_onnx2pytorch.py", ("onnx2pytorch", "torch")),
    # Whose only releases are early ones, which pip takes only when they are asked for.
    Runtime("nxrt", "run_nxrt.py", ("nxrt>=0.1.0.dev6",)),
    Runtime("onnxruntime-node", "node/run_onnxruntime_node.mjs", quick=True),
    Runtime("onnxruntime-web", "node/run_onnxruntime_web.mjs", quick=True),
    Runtime("chromium", "node/run_chromium.mjs", quick=True, seconds=600, programs=("chromium",)),
    Runtime("transformers.js", "node/run_transformers_js.mjs", layout="transformers.js", quick=True),
)


class NotInstalledError(Exception):
    """Why a runtime could not be installed, in one line."""


class Prepared(NamedTuple):
    """An installed runtime."""

    command: list[str]
    """To which CASES.json and RESULT.json are added."""
    folder: Path
    """Where it must run."""
    variables: dict[str, str]


def cache_folder() -> Path:
    """Where environments are kept: `$QWEN_ONNX_RUNTIMES`, or `runtimes` in the user's cache folder."""
    default = platformdirs.user_cache_path("qwen-onnx", appauthor=False) / "runtimes"
    return Path(os.environ.get("QWEN_ONNX_RUNTIMES") or default)


def prepare(runtime: Runtime) -> Prepared:
    """Install the runtime, unless it is.

    Raises:
        NotInstalledError: a program is missing, or an installation failed.
    """
    in_node = runtime.script.startswith("node/")
    for program in (*runtime.programs, *(["node", "npm"] if in_node else [])):
        if shutil.which(program) is None:
            raise NotInstalledError(f"no {program} on the PATH")
    variables = {**os.environ, **runtime.variables}
    if in_node:
        folder = _npm_install()
        return Prepared(["node", Path(runtime.script).name], folder, variables)
    python = _pip_install(runtime) if runtime.packages else sys.executable
    return Prepared([str(python), str(SCRIPTS / runtime.script)], SCRIPTS, variables)


def _pip_install(runtime: Runtime) -> Path:
    packages = ["numpy", *runtime.packages]
    folder = cache_folder() / runtime.name
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    with _held(folder):
        if not _is_complete(folder, recipe := "\n".join(packages)):
            venv.create(folder, clear=True, with_pip=True)
            _install([str(python), "-m", "pip", "install", "-q", *packages], folder)
            _complete(folder, recipe)
    return python


def _npm_install() -> Path:
    """One folder for all of them; the scripts beside the packages, from where Node looks for those."""
    if not (SCRIPTS / "node" / "package.json").is_file():
        raise NotInstalledError("no node/package.json")
    folder = cache_folder() / "node"
    with _held(folder):
        shutil.copytree(SCRIPTS / "node", folder, dirs_exist_ok=True)
        if not _is_complete(folder, recipe := (folder / "package.json").read_text(encoding="utf-8")):
            _install([shutil.which("npm") or "npm", "install", "--no-audit", "--no-fund"], folder)
            _complete(folder, recipe)
    return folder


def _install(command: list[str], folder: Path) -> None:
    # Else onnxruntime-node downloads CUDA libraries.
    variables = {**os.environ, "ONNXRUNTIME_NODE_INSTALL": "skip"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        raise NotInstalledError(f"{command[-1]}: not installed after {PATIENCE} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or [
            "no error is shown"
        ]
        raise NotInstalledError(lines[-1].strip())


def _is_complete(folder: Path, recipe: str) -> bool:
    marker = folder / "complete"
    return marker.is_file() and marker.read_text(encoding="utf-8") == recipe


def _complete(folder: Path, recipe: str) -> None:
    (folder / "complete").write_text(recipe, encoding="utf-8")


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Tests in several processes install a runtime once."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(hold(folder))
                break
            except BlockingIOError:
                time.sleep(0.5)
        yield
