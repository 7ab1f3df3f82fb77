"""The parts of bench/gpu.py, each run in a process of its own and told what to do by a Job."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from checkpoint import write_checkpoint
from gpu_device import Cuda, PeakMemory, device
from gpu_peers import peers
from gpu_subject import (
    CAPTURE,
    DTYPES,
    GREEDY,
    MODES,
    NO_CAPTURE,
    Job,
    Ours,
    Report,
    Samples,
    Setting,
    Subject,
    compare,
    fault,
    summary,
    take_turns,
)
from gpu_trace import breakdown, onnxruntime_profile, profiled_sessions, session_of

from qwen_onnx import export
from qwen_onnx.checks.tolerances import OF_TYPE, logit_bound
from qwen_onnx.contract.manifest import read_manifest
from qwen_onnx.runners.runtime.options import SessionOptions
from qwen_onnx.runners.runtime.session import open_session

_PROFILED_STEPS = 4
_COMPUTED = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def exports(job: Job, report: Report) -> None:
    """The checkpoint, and its exports."""
    begun = time.perf_counter()
    write_checkpoint(job.scratch / "model", job.shape)
    result: dict[str, Any] = {"checkpoint_s": time.perf_counter() - begun, "export_s": {}}
    for dtype in DTYPES:
        done = export(job.scratch / "model", job.scratch / dtype, dtype=dtype)
        result["export_s"][dtype] = done.seconds
        report(result)


def proof(job: Job, report: Report) -> None:
    """Where it really runs: providers, memory of the device, nodes of a decode step that is not captured."""
    cuda = device(job.provider)
    result: dict[str, Any] = {
        "onnxruntime": onnxruntime.__version__,
        "onnxruntime_cuda": getattr(onnxruntime, "cuda_version", "") or None,
        "copy_bandwidth_bytes_per_s": cuda.copy_bandwidth(job.sizes.copied) if cuda else None,
        "dtypes": {},
        "errors": {},
    }
    report(result)
    for dtype in DTYPES:
        try:
            result["dtypes"][dtype] = _proof(job, dtype, cuda)
        except Exception as error:
            result["errors"][dtype] = fault(error)
        report(result)


def _proof(job: Job, dtype: str, cuda: Cuda | None) -> dict[str, Any]:
    before = cuda.used() if cuda else 0
    sessions = job.profiles / "sessions"
    sessions.mkdir(exist_ok=True)
    with profiled_sessions(sessions):
        subject = Ours(job, Setting(dtype, NO_CAPTURE, 1))
    executor, attribute = session_of(subject)
    session = getattr(executor, attribute)
    ids = subject.start()
    for _ in range(2 + _PROFILED_STEPS):  # the cache grows in the first
        ids = subject.step(ids)
    used = cuda.used() - before if cuda else None
    file = job.profiles / f"onnxruntime-{dtype}.json"
    shutil.move(session.end_profiling(), file)
    found = {
        "how": subject.how, "providers": session.get_providers(), "graph": subject.runner.graph.file,
        "lowering": subject.runner.graph.lowering, "device_memory_bytes": used,
        "profile": onnxruntime_profile(file, _PROFILED_STEPS),
    }  # fmt: skip
    del (
        subject,
        executor,
        session,
    )  # the profiles of the other sessions are written now, and nobody needs them
    gc.collect()
    shutil.rmtree(sessions, ignore_errors=True)
    return found


def timed(settings: list[Setting]) -> Callable[[Job, Report], None]:
    """A part that times these settings, and f16 with capture beside them."""

    def part(job: Job, report: Report) -> None:
        control = Setting("f16", CAPTURE, settings[0].batch)
        wanted = settings if control in settings else [control, *settings]
        cuda, errors = device(job.provider), dict[str, str]()
        bandwidth = cuda.copy_bandwidth(job.sizes.copied) if cuda else None
        names = {_name(setting): setting for setting in wanted}
        subjects: dict[str, Subject] = {}
        for name, setting in names.items():
            try:
                subjects[name] = Ours(job, setting)
            except Exception as error:
                errors[name] = fault(error)

        def note(samples: dict[str, Samples]) -> None:
            rows = {name: summary(job, names[name], taken, bandwidth) for name, taken in samples.items()}
            compare(list(rows.values()), rows.get(_name(control)))
            own = [row for name, row in rows.items() if names[name] in settings]
            report({"rows": own, "control": rows.get(_name(control)), "errors": errors})

        report({"rows": [], "control": None, "errors": errors})
        take_turns(subjects, job.sizes, errors, note)

    return part


def _name(setting: Setting) -> str:
    return f"{setting.dtype}, {setting.mode}, batch {setting.batch}"


def correctness(job: Job, report: Report) -> None:
    """Logits along the greedy ids of f32 on the CPU provider, and then along random ones; all are fed those ids."""
    count = job.sizes.checked
    reference, fed = _along(Ours(job, Setting("f32", CAPTURE, 1), "cpu"), _continuation(job), count)
    result: dict[str, Any] = {"greedy_steps": count, "random_steps": count, "rows": [], "errors": {}}
    wanted, against = reference, "f32 on the CPU provider"
    for dtype in ("f32", "f16", "bf16"):
        try:
            subject = Ours(job, Setting(dtype, CAPTURE, 1))
            found, _ = _along(subject, fed, 0)
        except Exception as error:
            result["errors"][dtype] = fault(error)
            report(result)
            continue
        largest = float(np.abs(wanted).max())
        layers = subject.runner.manifest.num_hidden_layers
        row = {
            "dtype": dtype, "how": subject.how, "against": against, "largest_logit": largest,
            "max_logit_difference": float(np.abs(found - wanted).max()),
            "bound": logit_bound(_COMPUTED[dtype], layers=layers, largest=largest),
            "bound_is_for": OF_TYPE[_COMPUTED[dtype]].reason,
            **_parting(found[:count], reference[:count]),
            "random_steps_of_equal_best_ids": int(_agree(found, reference)[count:].sum()),
        }  # fmt: skip
        result["rows"].append(row)
        report(result)
        if dtype == "f32":
            wanted, against = found, f"f32 on {job.provider}"


def _continuation(job: Job) -> np.ndarray:
    """Random ids to go on with: a random model soon repeats itself when it goes on with its own."""
    return np.random.default_rng(2).integers(0, job.shape["vocab_size"], 2 * job.sizes.checked)


def _along(subject: Ours, ids: np.ndarray, greedy: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits [steps, vocab] after the prompt and after each id but the last; the first ids are its own choice.

    Also all ids that were fed.
    """
    fed, found = ids.copy(), [subject.runner.prefill(subject.cache, subject.prompt)[0]]
    for step in range(len(ids) - 1):
        if step < greedy:
            fed[step] = found[-1].argmax()
        found.append(subject.runner.decode(subject.cache, fed[step].reshape(1, 1))[0])
    return np.stack(found), fed


def _agree(found: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """[steps]: the best ids are the same."""
    return np.asarray(found.argmax(axis=-1) == reference.argmax(axis=-1))


def _parting(found: np.ndarray, reference: np.ndarray) -> dict[str, Any]:
    """Up to the first step whose best id is another, both would have chosen the same ids by themselves."""
    distinct = len(set(reference.argmax(axis=-1).tolist()))
    result: dict[str, Any] = {
        "ids_equal": True,
        "distinct_ids": distinct,
        "parts_at_step": None,
        "margin_there": None,
    }
    apart = np.flatnonzero(~_agree(found, reference))
    if apart.size:
        second, best = np.partition(reference[apart[0]], -2)[-2:]
        result |= {"ids_equal": False, "parts_at_step": int(apart[0]), "margin_there": float(best - second)}
    return result


def memory(job: Job, report: Report) -> None:
    """Device memory of one setting, above what the CUDA context alone takes."""
    assert job.setting is not None
    setting, cuda = Setting(*job.setting), Cuda()
    baseline = cuda.used()
    with PeakMemory(cuda) as watched:
        one_node = open_session(
            _grow_file(job, setting.dtype), job.provider, SessionOptions(provider=job.provider, threads=1)
        )
        provider = cuda.used() - baseline  # of ONNX Runtime itself: kernels, handles
        subject = Ours(job, setting)
        loaded = cuda.used() - baseline
        ids = subject.start()
        for _ in range(job.sizes.new):
            ids = subject.step(ids)
    weights = sum(
        spec.size for name, spec in subject.runner.manifest.files.items() if name.endswith(".safetensors")
    )
    del one_node
    peak, cache = watched.peak - baseline, subject.cache.nbytes
    report({
        "dtype": setting.dtype, "setting": setting.mode, "batch": setting.batch, "load_s": subject.load_s,
        "peak_bytes": peak, "provider_bytes": provider, "loaded_bytes": loaded, "weights_bytes": weights,
        "cache_bytes": cache, "ratio": peak / (weights + cache),
    })  # fmt: skip


def _grow_file(job: Job, dtype: str) -> Path:
    folder = job.scratch / dtype
    name: str = read_manifest(folder).graph("grow", job.provider).file
    return folder / name


PARTS: dict[str, Callable[[Job, Report], None]] = {
    "exports": exports,
    "proof": proof,
    "capture, batch 1": timed([Setting("f16", CAPTURE, 1), Setting("bf16", CAPTURE, 1)]),
    "correctness": correctness,
    "breakdown": breakdown,
    "f32, batch 1": timed([Setting("f32", CAPTURE, 1)]),
    "no capture, batch 1": timed([Setting(dtype, NO_CAPTURE, 1) for dtype in DTYPES]),
    "greedy on device, batch 1": timed([Setting(dtype, GREEDY, 1) for dtype in DTYPES]),
    "batch 8": timed([Setting(dtype, mode, 8) for mode in MODES for dtype in DTYPES]),
    "memory": memory,
    "peers, batch 1": lambda job, report: peers(job, report, 1),
    "peers, batch 8": lambda job, report: peers(job, report, 8),
}
"""In the order of importance; `memory` once for each setting."""
