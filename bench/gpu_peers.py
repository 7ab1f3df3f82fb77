"""transformers on the same checkpoint, prompt and steps: eager, and compiled with a static cache."""

from __future__ import annotations

import gc
import inspect
import time
from typing import Any

import numpy as np
from gpu_device import device
from gpu_subject import (
    CAPTURE,
    Ids,
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

from qwen_onnx.errors import UserError

EAGER, COMPILED = "transformers eager", "transformers compiled"
_DTYPES = ("f16", "bf16")


class Peer:
    """transformers in one setting. The token stays on the device for the next step, and is read to the host too."""

    captures: bool | None = None

    def __init__(self, job: Job, setting: Setting) -> None:
        import torch
        from transformers import AutoModelForCausalLM, StaticCache

        self._torch: Any = torch
        self._compiled = setting.mode == COMPILED
        self._batch = setting.batch
        place = "cuda" if job.provider == "cuda" else "cpu"
        if place == "cuda" and not torch.cuda.is_available():
            raise UserError("torch finds no CUDA device")
        dtype = {"f16": torch.float16, "bf16": torch.bfloat16}[setting.dtype]
        begun = time.perf_counter()
        load: Any = AutoModelForCausalLM.from_pretrained
        model = load(job.scratch / "model", dtype=dtype, local_files_only=True)
        self._model = model.to(place).eval()
        self.load_s: float | None = time.perf_counter() - begun
        self._prompt = torch.from_numpy(job.prompt(setting.batch)).to(place)
        takes = inspect.signature(type(model).forward).parameters
        # As older versions of transformers have it, and newer ones.
        self._cache_name = "cache" if "cache" in takes else "past_key_values"
        self._wants_cache_position = "cache_position" in takes
        self._cache: Any = None
        self._step, self.how = self._computed, "eager, dynamic cache"
        if self._compiled:
            slots = job.sizes.prompt + job.sizes.new
            self._cache = StaticCache(config=model.config, max_cache_len=slots)
            # Inductor takes a minute, and without a device there is nothing to learn from it.
            how: dict[str, Any] = {"mode": "reduce-overhead"} if place == "cuda" else {"backend": "eager"}
            self._step = torch.compile(self._computed, **how)
            (option,) = how.items()
            self.how = f"torch.compile {'='.join(option)} of the decode step, static cache"

    def prepare(self) -> None:
        """An empty cache."""
        from transformers import DynamicCache

        if self._compiled:
            self._cache.reset()
        else:
            self._cache = DynamicCache(config=self._model.config)

    def start(self) -> Ids:
        """Prefill, never compiled."""
        self._positions = self._torch.arange(self._prompt.shape[1], device=self._prompt.device)
        with self._torch.no_grad():
            self._ids = self._computed(self._prompt, self._positions)
        self._positions = self._positions[-1:] + 1
        return self._read()

    def step(self, ids: Ids) -> Ids:
        """A decode step from the token that the device chose."""
        with self._torch.no_grad():
            if self._compiled:
                self._torch.compiler.cudagraph_mark_step_begin()
            # A copy, for what a captured graph returns is overwritten by its next run.
            self._ids = self._step(self._ids, self._positions).clone()
            self._positions = self._positions + 1
        return self._read()

    def _computed(self, ids: Any, positions: Any) -> Any:
        """The best ids [batch, 1] after these [batch, S]."""
        named: dict[str, Any] = {
            self._cache_name: self._cache,
            "position_ids": positions[None].expand(self._batch, -1),
        }
        if self._wants_cache_position:
            named["cache_position"] = positions
        found = self._model(input_ids=ids, use_cache=True, logits_to_keep=1, **named)
        return found.logits[:, -1].argmax(-1, keepdim=True)

    def _read(self) -> Ids:
        return np.array(self._ids[:, 0].tolist(), np.int64)


def peers(job: Job, report: Report, batch: int) -> None:
    """transformers and this package with capture, in turns; one type after the other."""
    result: dict[str, Any] = {"rows": [], "errors": {}, "versions": {}}
    report(result)
    import torch
    import transformers

    result["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    cuda = device(job.provider)
    bandwidth = cuda.copy_bandwidth(job.sizes.copied) if cuda else None
    for dtype in _DTYPES[:1] if job.toy else _DTYPES:  # to trace the model takes seconds, however small it is
        settings = [Setting(dtype, mode, batch) for mode in (CAPTURE, EAGER, COMPILED)]
        _of_dtype(job, report, result, settings, bandwidth)
        gc.collect()


def _of_dtype(
    job: Job, report: Report, result: dict[str, Any], settings: list[Setting], bandwidth: float | None
) -> None:
    subjects: dict[str, Subject] = {}
    names = {f"{setting.dtype}, {setting.mode}": setting for setting in settings}
    for name, setting in names.items():
        try:
            subjects[name] = Ours(job, setting) if setting.mode == CAPTURE else Peer(job, setting)
        except Exception as error:  # of torch or CUDA, which share no base class
            result["errors"][name] = fault(error)
    before = list(result["rows"])

    def note(samples: dict[str, Samples]) -> None:
        rows = [summary(job, names[name], taken, bandwidth) for name, taken in samples.items()]
        compare(rows, next((row for row in rows if row["setting"] == CAPTURE), None))
        result["rows"] = [*before, *rows]
        report(result)

    report(result)
    if any(isinstance(subject, Peer) for subject in subjects.values()):
        take_turns(subjects, job.sizes, result["errors"], note)
