"""Runners, caches and threads beside each other on "cuda", a device that is full, and what closing gives back."""

# ruff: noqa: F811 - a test's parameter has the name of the fixture that is imported

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.cuda.fixtures import stand_ins  # noqa: F401
from support.cuda.runs import Told, shaped, told  # noqa: F401
from support.marks import but_first

pytestmark = pytest.mark.thorough

DTYPES = ["f32", "f16"]
Shaped = Callable[[str], Path]

TOGETHER = """
runners = [opened(folder, greedy_on_device=greedy) for folder, greedy in zip(sys.argv[1:3], (False, True))]
talks = [Conversation(runner) for runner in (*runners, *runners)]
for talk in talks: talk.prefill(40)
first = [talk.steps(1)[0] for talk in talks]
rounds = [[talk.steps(1)[0] for talk in talks] for _ in range(3)]
tell(first=first, rounds=rounds, total=vars(counts()))
"""


@pytest.mark.thorough
def test_two_models_and_two_caches_of_each(shaped: Shaped, told: Told) -> None:
    """Each cache captures a graph of its own, and replays that one."""
    found = told(TOGETHER, shaped("f32"), shaped("f16"))
    assert [step["captures"] for step in found.first] == [1] * 4
    for steps in found.rounds:
        assert [step["graph_launches"] for step in steps] == [1] * 4
        assert not {"kernel_launches", "library_calls", "mallocs"} & {name for step in steps for name in step}
    assert (found.total["captures"], found.total["illegal_during_capture"]) == (4, 0)


POOL = """
runner = opened(sys.argv[1])
def converse(batch_size=1):
    talk = Conversation(runner, batch_size)
    talk.prefill(40)
    return talk.steps(2)
before = counts()
first, again, batch, last = converse(), converse(), converse(2), converse()
total = counts() - before
talk = Conversation(runner)
talk.prefill(300)
talk.steps(2)
del talk
gc.collect()
grown = converse()
tell(first=first, again=again, batch=batch, last=last, grown=grown, captures=total.captures)
"""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.thorough
def test_the_next_conversation_captures_nothing(dtype: str, shaped: Shaped, told: Told) -> None:
    """Its buffers and captured graph are those of a conversation that is gone: ONNX Runtime releases no graph."""
    found = told(POOL, shaped(dtype))
    assert found.captures == 2  # a batch of 2 has buffers of its own
    for first, second in (found.again, found.last, found.grown):
        assert (first["graph_launches"], second["graph_launches"]) == (1, 1)
        assert "kernel_launches" not in first


THREADS = """
runner = opened(sys.argv[1], greedy_on_device=sys.argv[2] == "True")
talk = Conversation(runner)
talk.prefill(40)
rounds = [talk.steps(2)]
def elsewhere(): rounds.append(talk.steps(3))
for _ in range(2):
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    rounds.append(talk.steps(2))
tell(rounds=rounds, length=talk.cache.length, illegal=counts().illegal_during_capture)
"""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("greedy", but_first([False, True]))
def test_another_thread_captures_again(dtype: str, greedy: bool, shaped: Shaped, told: Told) -> None:
    """ONNX Runtime keeps captured graphs by thread: each thread captures, and none is steps ahead of the cache."""
    found = told(THREADS, shaped(dtype), greedy)
    captures = [[step.get("captures", 0) for step in steps] for steps in found.rounds]
    assert captures == [[1, 0], [1, 0, 0], [0, 0], [1, 0, 0], [0, 0]]
    launches = [step["graph_launches"] for steps in found.rounds for step in steps]
    assert launches == [2 if greedy and new else 1 for steps in captures for new in steps]
    assert (found.length, found.illegal) == (40 + 2 + 3 + 2 + 3 + 2, 0)


LAST_SLOTS = """
runner = opened(sys.argv[1], greedy_on_device=True)
talk = Conversation(runner)
talk.prefill(254)
tell(steps=talk.steps(5), capacity=talk.cache.capacity, illegal=counts().illegal_during_capture)
"""


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_graph_that_runs_ahead_does_not_leave_the_buffers(dtype: str, shaped: Shaped, told: Told) -> None:
    """Its first run takes three steps, so in the last slots it runs eagerly, and is captured in larger buffers."""
    found = told(LAST_SLOTS, shaped(dtype))
    assert [step.get("captures", 0) for step in found.steps] == [0, 0, 1, 0, 0]
    assert [step.get("graph_launches", 0) for step in found.steps] == [0, 0, 2, 1, 1]
    assert (found.capacity, found.illegal) == (512, 0)


FULL = """
runner = opened(sys.argv[1], cuda_graph=sys.argv[2] == "True")
talk = Conversation(runner, 8)
talk.prefill(255)
talk.steps(1)
os.environ["QWEN_STAND_IN_FAIL_MALLOC_ABOVE"] = str(counts().bytes_allocated + (1 << 20))
messages = []
for _ in range(3):
    try:
        talk.prefill(talk.cache.length + 300)
    except UserError as error:
        messages.append(str(error))
left = (talk.cache.length, talk.cache.capacity)
talk.prefill(40)
small = talk.steps(3)
del os.environ["QWEN_STAND_IN_FAIL_MALLOC_ABOVE"]
talk.prefill(400)
tell(messages=messages, left=left, small=small, large=talk.steps(3), capacity=talk.cache.capacity)
"""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capture", but_first([True, False]))
def test_a_device_that_is_full_is_told_of_in_one_line(
    dtype: str, capture: bool, shaped: Shaped, told: Told
) -> None:
    """Memory that ran out while buffers grew leaves an empty small cache, which works and captures anew."""
    found = told(FULL, shaped(dtype), capture)
    assert len(found.messages) == 3
    for message in found.messages:
        assert "does not fit" in message or "ONNX Runtime failed" in message
        assert "\n" not in message
    length, capacity = found.left
    assert length <= capacity == 256
    for steps in (found.small, found.large):
        assert [step.get("captures", 0) for step in steps] == [int(capture), 0, 0]
    assert found.capacity == 512


CLOSE = """
start, left = counts().bytes_allocated, []
for _ in range(3):
    runner = opened(sys.argv[1], greedy_on_device=sys.argv[2] == "True")
    weights = counts().bytes_allocated - start
    talk = Conversation(runner)
    talk.prefill(300)
    talk.steps(3)
    cache = talk.cache.nbytes
    del runner, talk
    gc.collect()
    left.append(counts().bytes_allocated - start)
tell(left=left, weights=weights, cache=cache)
"""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("greedy", but_first([False, True]))
def test_closing_gives_the_memory_back(dtype: str, greedy: bool, shaped: Shaped, told: Told) -> None:
    """Only the arena of caches stays, which ONNX Runtime keeps and which serves the next runner."""
    found = told(CLOSE, shaped(dtype), greedy)
    assert found.left[2] == found.left[1] == found.left[0]
    assert found.left[0] <= 2 * found.cache + (2 << 20) < found.weights / 10
