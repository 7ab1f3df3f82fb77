"""A loaded model among threads, signals and a long life."""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import numpy as np
import pytest

from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.options import SessionOptions
from support.chats import endless
from support.exports import IDS, Exported
from support.patience import PATIENCE

Export = Callable[..., Exported]
ON_CPU = SessionOptions(provider="cpu", threads=1)
THREADS = 8
POINTS = 60
"""At which a prompt is cancelled."""


def greedy_ids(runner: Runner, prompt: np.ndarray, count: int) -> list[int]:
    cache = runner.new_cache()
    logits, ids = runner.prefill(cache, prompt), []
    for _ in range(count):
        ids.append(int(logits[0].argmax()))
        logits = runner.decode(cache, np.array([[ids[-1]]]))
    return [*ids, *map(int, logits[0, :5] * 1e4)]  # some of the logits, that a wrong number shows too


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int4"])
def test_eight_threads_on_one_model(dtype: str, exported: Export) -> None:
    """Each gets the ids that it would get alone."""
    runner = Runner(exported("qwen2", dtype).folder, ON_CPU, prefill_chunk=16)
    prompts = [
        IDS[row % 3 : row % 3 + 1, start : start + 20 + row] for row in range(12) for start in (0, 30, 60)
    ]
    wanted = [greedy_ids(runner, prompt, 12) for prompt in prompts]
    begin = threading.Barrier(THREADS)

    def all_of_them(thread: int) -> list[list[int]]:
        begin.wait()
        order = random.Random(thread).sample(range(len(prompts)), len(prompts))
        found = {number: greedy_ids(runner, prompts[number], 12) for number in order}
        return [found[number] for number in range(len(prompts))]

    with ThreadPoolExecutor(THREADS) as pool:
        for found in pool.map(all_of_them, range(THREADS)):
            assert found == wanted


def test_caches_made_by_many_threads_at_once(exported: Export) -> None:
    """No two caches get one idle buffer."""
    runner = Runner(exported("qwen2", "int4").folder, ON_CPU)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def make(_: int) -> None:
        for _ in range(300):
            caches = [runner.new_cache(), runner.new_cache()]
            assert caches[0].buffers is not caches[1].buffers
            del caches

    try:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(make, range(THREADS)))
    finally:
        sys.setswitchinterval(before)


# Ctrl-C.


def said_ids(chat: Chat, prompt: list[int]) -> list[int]:
    return [token.token_id for token in chat.generate(prompt, max_new_tokens=4, ignore_eos=True)]


@pytest.fixture
def prompts() -> tuple[list[int], list[int]]:
    """A first turn, and one that goes on from it: several chunks, and a cache that has to grow."""
    text = np.random.default_rng(3).integers(0, 300, 300).tolist()
    return text[:40], text


def count_lines(function: Callable[[], Any]) -> int:
    """How many lines of the runner's code a call goes through."""
    lines = itertools.count()
    _traced(function, lambda: next(lines))
    return next(lines)


def cancel_at(line: int, function: Callable[[], Any]) -> None:
    """Call it, with a KeyboardInterrupt at the so-manieth of these lines."""
    left = iter(range(line))

    def step() -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        _traced(function, step)


def _traced(function: Callable[[], Any], step: Callable[[], Any]) -> None:
    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if "runners" not in frame.f_code.co_filename:
            return None
        if event == "line":
            step()
        return trace

    before = sys.gettrace()  # of a measurement of coverage
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)


def test_a_cancelled_prompt_leaves_a_usable_cache(prompts: tuple[list[int], list[int]]) -> None:
    """Wherever Ctrl-C strikes, between any two lines."""
    first, whole = prompts
    runner = Runner(endless(), ON_CPU, prefill_chunk=256)
    wanted = said_ids(Chat(runner), whole)
    lines = count_lines(lambda: said_ids(Chat(runner), whole))
    assert lines > 300
    for line in sorted(random.Random(0).sample(range(1, lines), POINTS)):
        chat = Chat(runner)
        said_ids(chat, first)
        cancel_at(line, lambda chat=chat: said_ids(chat, whole))  # type: ignore[misc]
        assert said_ids(chat, whole) == wanted, f"cancelled at line {line}"


@pytest.mark.skipif(sys.platform == "win32", reason="signals are another thing there")
@pytest.mark.thorough
def test_signals_in_the_middle_of_a_prompt(prompts: tuple[list[int], list[int]]) -> None:
    """As above, by real signals, at any moment."""
    first, whole = prompts
    runner = Runner(endless(), ON_CPU, prefill_chunk=32)
    wanted = said_ids(Chat(runner), whole)
    chat = Chat(runner)
    said_ids(chat, first)
    rng, cancelled, took = random.Random(0), 0, 0.1
    deadline = time.monotonic() + PATIENCE
    with alarms():
        while cancelled < 12:  # about half of them strike, since what it takes now is known from the last one
            assert time.monotonic() < deadline, "no signal came in time: this tested nothing"
            chat = Chat(runner)
            said_ids(chat, first)
            begun = time.perf_counter()
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, took))
                    said_ids(chat, whole)
                    took = time.perf_counter() - begun
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:  # before the timer is off, and so perhaps after the answer
                cancelled += 1
            assert said_ids(chat, whole) == wanted


class alarms:  # noqa: N801
    """SIGALRM as Ctrl-C."""

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGALRM, signal.default_int_handler)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGALRM, self._before)


# A long life.

SOAK = """
import random, sys
from pathlib import Path
from qwen_onnx.memory import anonymous_memory
from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.options import SessionOptions
folder, count = Path(sys.argv[1]), int(sys.argv[2])
chat = Chat(Runner(folder, SessionOptions(provider="cpu", threads=1)))
rng = random.Random(0)
for number in range(count + 1):
    if number % (count // 20) == 0:
        print(number, anonymous_memory(), flush=True)
    prompt = [rng.randrange(300) for _ in range(rng.randrange(1, 120))]
    tokens = chat.generate(prompt, max_new_tokens=rng.randrange(1, 16))
    for made, _ in enumerate(tokens):
        if made > 10 and number % 7 == 0:
            break  # the reader left
"""


def soak(count: int, dtype: str) -> float:
    """Bytes that memory grows by in 100 answers, by least squares, after the first fifth of them."""
    run = [sys.executable, "-c", SOAK, str(endless(dtype)), str(count)]
    lines = subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()
    numbers, sizes = np.array([line.split() for line in lines], np.float64)[4:].T
    slope = float(np.polyfit(numbers, sizes, 1)[0]) * 100
    print(f"{dtype}: {slope / 1e6:.3f} MB more in 100 answers, {sizes[-1] / 1e6:.0f} MB after {count}")
    return slope


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_after_200_answers() -> None:
    """Nothing is kept of an answer."""
    assert soak(200, "f32") < 4e6


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["f32", "int4"])
def test_memory_after_2000_answers(dtype: str) -> None:
    """As above, to a narrower bound, in a process that serves for days."""
    assert soak(2000, dtype) < 1e6


@pytest.mark.parametrize("dtype", ["f32", "int4"])
def test_threads_of_a_session_change_no_id(dtype: str, exported: Export) -> None:
    """Explicitly, since a worker of the tests keeps to one core and would take one thread."""
    folder = exported("qwen2", dtype).folder
    one, four = (Runner(folder, SessionOptions(provider="cpu", threads=threads)) for threads in (1, 4))
    assert greedy_ids(one, IDS[:1, :30], 12)[:12] == greedy_ids(four, IDS[:1, :30], 12)[:12]
