"""Measures f32, f16 and bf16 exports of a random 0.5B checkpoint on a GPU, and transformers beside them.

Each part runs in a process of its own, in the order of importance, while the minutes last: what fails or does not
fit is named and the rest goes on. `--provider cpu --toy` rehearses all of it on any machine.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_subject import DTYPES, MODES, Job, Setting, fault
from gpu_table import markdown

from qwen_onnx.runners.runtime.nvidia.driver import driver, gpus
from qwen_onnx.runners.runtime.session import installed_distributions

_LEAST_S = {"exports": 30.0, "peers, batch 1": 30.0, "peers, batch 8": 30.0}
"""A part that has less time left is not begun; 8 s where nothing is said, and no time at all for a toy."""
_PACKAGES = ("numpy", "onnx", "onnx-ir", "onnxscript", "ml_dtypes", "safetensors", "torch", "transformers")


def plan(provider: str) -> Iterator[tuple[str, str, Setting | None]]:
    """Names and parts in the order of importance, and what is asked of the part."""
    yield from (
        (name, name, None) for name in ("exports", "proof", "capture, batch 1", "correctness", "breakdown")
    )
    for name in ("f32, batch 1", "no capture, batch 1", "greedy on device, batch 1", "batch 8"):
        yield name, name, None
    for batch in (1, 8):
        if provider != "cpu":  # there is no device whose memory could be measured
            for setting in (Setting(dtype, mode, batch) for mode in MODES for dtype in DTYPES):
                yield f"memory, {setting.dtype}, {setting.mode}, batch {batch}", "memory", setting
        yield f"peers, batch {batch}", f"peers, batch {batch}", None


def run_part(job: Job, seconds: float) -> dict[str, Any]:
    """What a part reported from a process of its own, with `error` where it did not come to its end."""
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        asked, result, log = (Path(folder) / name for name in ("job.json", "result.json", "log"))
        asked.write_text(json.dumps(dataclasses.asdict(job), default=str))
        command = [sys.executable, str(Path(__file__).resolve()), "--part", str(asked)]
        with log.open("w") as output:
            # A session of its own, so that what torch's compiler starts ends with it.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
            try:
                code = process.wait(seconds)
                error = None if code == 0 else f"exit code {code}: {_last_line(log)}"
            except subprocess.TimeoutExpired:
                error = f"stopped after {seconds:.0f} s (time)"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        found: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
    if error is not None:
        found["error"] = found.get("error", error)
    return found | {"seconds": time.perf_counter() - begun}


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def be_part(asked: Path) -> int:
    """In the process of a part: do it, and leave what it reports beside the file that asked for it."""
    from gpu_parts import PARTS

    raw, result, reported = json.loads(asked.read_text()), asked.with_name("result.json"), dict[str, Any]()
    job = Job(**{**raw, "scratch": Path(raw["scratch"]), "profiles": Path(raw["profiles"])})

    def report(found: dict[str, Any]) -> None:
        reported.update(found)
        beside = result.with_suffix(".new")
        beside.write_text(json.dumps(reported))
        beside.replace(result)  # whole or not at all: this process may be stopped at any time

    try:
        PARTS[job.part](job, report)
    except Exception as error:
        report({"error": fault(error)})
    # Not the usual way out: a library that fails while it is unloaded would spoil what was measured.
    os._exit(0)


def machine() -> dict[str, Any]:
    """Where it runs."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    system = {"platform": platform.platform(), "cores": cores, "memory_bytes": memory}
    return system | {"python": platform.python_version()}


def versions() -> dict[str, str | None]:
    """Of what is installed; the proof says which ONNX Runtime was imported."""
    found: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found | dict(entry.split() for entry in installed_distributions())


def measure(options: argparse.Namespace, out: Path, scratch: Path) -> dict[str, Any]:
    """All parts; everything that was found. It is written to `out` after each part, in case the next is the last."""
    begun = time.perf_counter()
    profiles = out / "profiles"
    profiles.mkdir(parents=True, exist_ok=True)
    devices = gpus() if options.provider != "cpu" else []
    found: dict[str, Any] = {
        "command": shlex.join(["python", "bench/gpu.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(), "versions": versions(),
        "gpu": dataclasses.asdict(devices[0]) if devices else None,
        "driver": dataclasses.asdict(driver()) if options.provider != "cpu" else None,
        "environment": {name: value for name, value in os.environ.items() if name.startswith("ORT_")},
        "provider": options.provider, "toy": options.toy, "minutes": options.minutes,
        "parts": {}, "not_run": [], "errors": {},
    }  # fmt: skip
    job = Job("", scratch, profiles, options.provider, options.toy)
    found |= {"sizes": job.sizes._asdict(), "shape": job.shape}
    for name, part, setting in plan(options.provider):
        left = 60 * options.minutes - (time.perf_counter() - begun)
        if left <= (0 if options.toy else _LEAST_S.get(part, 8.0)):
            found["not_run"].append(name)
            continue
        result = run_part(dataclasses.replace(job, part=part, setting=setting), left)
        found["parts"][name] = result
        if "error" in result:
            found["errors"][name] = result["error"]
        for where, line in result.get("errors", {}).items():
            found["errors"][f"{name}: {where}"] = line
        found["seconds"] = time.perf_counter() - begun
        (out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
        print(
            f"{found['seconds']:6.1f} s: {name}: {result.get('error', 'done')}", file=sys.stderr, flush=True
        )
    found["seconds"] = time.perf_counter() - begun
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.0, help="what does not fit is not run")
    parser.add_argument("--out", type=Path, help="folder for the table, the JSON and the profiles")
    parser.add_argument("--provider", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--toy", action="store_true", help="two layers and a few tokens: a rehearsal, not a figure"
    )
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        return be_part(options.part)
    with tempfile.TemporaryDirectory() as folder:
        out, scratch = options.out or Path(folder) / "out", Path(folder) / "scratch"
        out.mkdir(parents=True, exist_ok=True)
        scratch.mkdir()
        found = measure(options, out.resolve(), scratch)
        table, line = markdown(found), json.dumps(found, allow_nan=False)
        (out / "table.md").write_text(table)
        (out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"{table}\n{line}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
