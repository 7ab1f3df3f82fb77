"""Times one engine on one model, in a process of its own; bench/peers.py starts it. Prints one line of JSON.

python bench/peers_child.py ENGINE MODEL THREADS

All are given the same ids, a prompt and then a token at a time; logits or a token come back to the host.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

PROMPTS = (128, 512)
STEPS = 32
CONTEXT = 1024


class Subject(NamedTuple):
    """A loaded model."""

    prompt: Callable[[list[int]], None]
    """Forget everything, and compute these ids up to the first token."""
    step: Callable[[], None]
    """One more token."""


def ours(model: str, threads: int, **options: Any) -> Subject:
    from qwen_onnx.runners.model.runner import Runner
    from qwen_onnx.runners.runtime.options import SessionOptions

    runner = Runner(Path(model), SessionOptions(provider="cpu", threads=threads, **options))
    cache, state = runner.new_cache(), {"next": 0}

    def prompt(ids: list[int]) -> None:
        cache.truncate(0)
        state["next"] = int(runner.prefill(cache, np.array([ids])).argmax())

    def step() -> None:
        state["next"] = int(runner.decode(cache, np.array([[state["next"]]])).argmax())

    return Subject(prompt, step)


def ours_prepacked(model: str, threads: int) -> Subject:
    return ours(model, threads, prepack=True)


def llama_cpp(model: str, threads: int) -> Subject:
    import llama_cpp

    llama = llama_cpp.Llama(
        model,
        n_ctx=CONTEXT,
        n_threads=threads,
        n_threads_batch=threads,
        n_batch=512,
        n_ubatch=512,
        verbose=False,
    )
    vocab, state = llama.n_vocab(), {"next": 0}

    def run(ids: list[int]) -> None:
        llama.eval(ids)
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(llama.ctx), (vocab,))
        state["next"] = int(logits.argmax())

    def prompt(ids: list[int]) -> None:
        llama.reset()
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llama.ctx), True)
        run(ids)

    return Subject(prompt, lambda: run([state["next"]]))


def genai(model: str, threads: int) -> Subject:
    import onnxruntime_genai as og

    config = og.Config(model)
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    loaded, state = og.Model(config), dict[str, Any]()

    def prompt(ids: list[int]) -> None:
        params = og.GeneratorParams(loaded)
        params.set_search_options(do_sample=False, max_length=CONTEXT, min_length=CONTEXT)
        state["generator"] = og.Generator(loaded, params)
        state["generator"].append_tokens(np.array([ids], np.int32))
        step()

    def step() -> None:
        state["generator"].generate_next_token()
        state["generator"].get_next_tokens()

    return Subject(prompt, step)


def transformers(model: str, threads: int) -> Subject:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    state = dict[str, Any]()

    @torch.no_grad()
    def run(ids: list[int], past: Any) -> None:
        out = loaded(torch.tensor([ids]), past_key_values=past, use_cache=True, logits_to_keep=1)
        state.update(past=out.past_key_values, next=int(out.logits[0, -1].argmax()))

    return Subject(lambda ids: run(ids, None), lambda: run([state["next"]], state["past"]))


ENGINES: dict[str, Callable[[str, int], Subject]] = {
    "ours": ours, "ours_prepacked": ours_prepacked, "llama_cpp": llama_cpp, "genai": genai,
    "transformers": transformers,
}  # fmt: skip


def anonymous() -> int:
    """Bytes of private memory."""
    found = re.search(r"RssAnon:\s*(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def import_engine(engine: str) -> None:
    """Before the clock starts, and before memory is looked at."""
    if engine.startswith("ours"):
        import qwen_onnx.runners.model.runner  # noqa: F401
        from qwen_onnx.runners.runtime.session import import_onnxruntime

        import_onnxruntime()
    elif engine == "llama_cpp":
        import llama_cpp  # noqa: F401
    elif engine == "genai":
        import onnxruntime_genai  # noqa: F401
    else:
        import torch  # noqa: F401
        from transformers import AutoModelForCausalLM  # noqa: F401


def main() -> None:
    engine, model, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    import_engine(engine)
    before, begun = anonymous(), time.perf_counter()
    subject = ENGINES[engine](model, threads)
    found: dict[str, float] = {"load_s": time.perf_counter() - begun}
    ids = np.random.default_rng(0).integers(0, 32_000, max(PROMPTS)).tolist()
    subject.prompt(ids[:64])  # warm up
    for tokens in PROMPTS:
        times = []
        for _ in range(3 if tokens < 256 else 1):
            begun = time.perf_counter()
            subject.prompt(ids[:tokens])
            times.append(1e3 * (time.perf_counter() - begun))
        found[f"ttft_{tokens}_ms"] = statistics.median(times)
    subject.prompt(ids[:128])
    times = []
    for _ in range(STEPS):
        begun = time.perf_counter()
        subject.step()
        times.append(time.perf_counter() - begun)
    found["tokens_per_s"] = 1 / statistics.median(times)
    found["anonymous_mb"] = (anonymous() - before) / 1e6
    print(json.dumps(found))


if __name__ == "__main__":
    main()
