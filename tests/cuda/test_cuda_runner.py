"""What the runner asks of a GPU at each step: counted by the stand-ins, which compute nothing."""

# ruff: noqa: F811 - a test's parameter has the name of the fixture that is imported

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.cuda.fixtures import stand_ins  # noqa: F401
from support.cuda.runs import LAYERS, VOCAB, Told, shaped, told  # noqa: F401
from support.marks import but_first

DTYPES = ["f32", "f16", "bf16"]
Shaped = Callable[[str], Path]

UPLOADED = {"f32": [8, 8, 8], "f16": [8, 4], "bf16": [8, 4]}
"""Bytes a row: the token, and the position and slot; or the token and the length."""

LOGITS = 4 * VOCAB

DECODE = """
folder, capture, greedy, batch_size = sys.argv[1], sys.argv[2] == "True", sys.argv[3] == "True", int(sys.argv[4])
runner = opened(folder, cuda_graph=capture, greedy_on_device=greedy)
weights, before = counts().bytes_allocated, counts()
talk = Conversation(runner, batch_size)
talk.prefill(40)
first, *steady = talk.steps(5)
talk.prefill(255)
left = talk.steps(1)
grown, *later = talk.steps(5)
talk.prefill(700)
_, *last = talk.steps(3)
total = counts() - before
tell(first=first, steady=steady, left=left, grown=grown, later=later, last=last, capacity=talk.cache.capacity,
     total=vars(total), read=talk.read, weights=weights, cache=talk.cache.nbytes, peak=counts().peak_bytes)
"""


Decoded = Callable[[str, bool, bool, int], SimpleNamespace]


@pytest.fixture(scope="session")
def decoded(shaped: Shaped, told: Told) -> Decoded:
    """What DECODE told of (dtype, capture, greedy, batch_size)."""
    return functools.cache(
        lambda dtype, capture, greedy, batch_size: told(DECODE, shaped(dtype), capture, greedy, batch_size)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch_size", but_first([1, 8]))
def test_a_captured_step_is_one_launch(dtype: str, batch_size: int, decoded: Decoded) -> None:
    """Beside it the small inputs go up and the logits come down; no kernel, no allocation, no copy of the cache."""
    found = decoded(dtype, True, False, batch_size)
    wanted = {
        "graph_launches": 1,
        "copies": len(UPLOADED[dtype]) + 1,
        "bytes_to_device": sum(UPLOADED[dtype]) * batch_size,
        "bytes_to_host": LOGITS * batch_size,
    }
    assert found.steady == [wanted] * 4
    (left,) = found.left  # a prompt in between needs no new capture
    assert left["graph_launches"] == 1
    assert {"captures", "kernel_launches", "mallocs"}.isdisjoint(left)
    assert found.later == [wanted] * 4
    assert found.last == [wanted] * 2
    assert wanted["bytes_to_device"] < 64 * batch_size
    assert found.total["bytes_to_host"] == LOGITS * batch_size * found.read, "the cache is no one's to read"
    # Each size of the buffers is captured once.
    assert [step["captures"] for step in (found.first, found.grown)] == [1, 1]
    assert (found.total["captures"], found.total["illegal_during_capture"], found.capacity) == (3, 0, 1024)


@pytest.mark.parametrize(
    ("dtype", "batch_size"), but_first([("f16", 8), ("f32", 1), ("f16", 1), ("bf16", 1)])
)
def test_a_greedy_step_reads_the_token_only(dtype: str, batch_size: int, decoded: Decoded) -> None:
    """The device goes on from its own token: nothing is copied to it, and no logits are read."""
    found = decoded(dtype, True, True, batch_size)
    wanted = {"graph_launches": 1, "copies": 1, "bytes_to_host": 8 * batch_size}
    assert found.steady == [wanted] * 4
    assert found.later == [wanted] * 4
    assert found.last == [wanted] * 2
    assert (found.total["captures"], found.total["illegal_during_capture"]) == (3, 0)
    assert found.total["bytes_to_host"] == 8 * batch_size * found.read


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("greedy", [False, True])
def test_steps_without_capture(dtype: str, greedy: bool, decoded: Decoded) -> None:
    """A step allocates nothing, copies ids and logits only, and has as many operations as fused operators give."""
    found = decoded(dtype, False, greedy, 1)
    for step in (*found.steady, *found.later, *found.last):
        assert {"mallocs", "frees", "graph_launches"}.isdisjoint(step)
        assert step["bytes_to_host"] == (8 if greedy else LOGITS)
        assert step.get("bytes_to_device", 0) == (0 if greedy else sum(UPLOADED[dtype]))
    assert (found.total["captures"], found.capacity) == (0, 1024)
    assert found.total["bytes_to_host"] == (8 if greedy else LOGITS) * found.read
    assert found.last[0] == found.last[1]
    step = found.last[0]
    of_binding = 1 if greedy else 1 + len(UPLOADED[dtype])
    operations = step["kernel_launches"] + step["library_calls"] + step["copies"] - of_binding
    assert operations <= (32 if dtype == "f32" else 12) * LAYERS + (20 if greedy else 8)


@pytest.mark.parametrize(("dtype", "batch_size"), [("f32", 1), ("f16", 8), ("bf16", 1)])
def test_memory_is_the_weights_and_the_cache(
    dtype: str, batch_size: int, shaped: Shaped, decoded: Decoded
) -> None:
    """Weights are held once. What small buffers leave in the arena is at most the cache once more."""
    found = decoded(dtype, True, False, batch_size)
    file = (shaped(dtype) / "weights.safetensors").stat().st_size
    assert found.weights <= 1.01 * file + (2 << 20)
    small_model = 8 << 20  # what arenas round up to, and activations
    assert found.peak <= 1.35 * (found.weights + found.cache) + small_model
