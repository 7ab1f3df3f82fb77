"""Steps of fixed shapes, as CUDA captures them, with real numbers: the graphs for CUDA run on the CPU provider."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnxruntime
import pytest

from qwen_onnx import contract
from qwen_onnx.runners.model import buffers
from support.cuda.graphs_on_cpu import (
    LONG,
    LONG_IDS,
    TOLERANCE,
    OnCpu,
    addresses,
    names_of,
    note_uploads,
    opened,
)
from support.cuda.graphs_on_cpu import on_cpu as on_cpu
from support.exports import IDS, ON_CPU, decode_all, open_on_cpu
from support.tolerances import EXACT, assert_close

DTYPES = ["f32", "f16"]
"""Of which f32 runs the `static-capture` graphs and f16 the `contrib` graphs."""

LENGTHS = {"f32": contract.WRITE_INDICES, "f16": contract.SEQLENS_K}
"""The input that tells a step where the row ends."""


# Against the reference, and against plain runs.


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_prefill_in_chunks_then_decode(name: str, dtype: str, chunk: int, on_cpu: OnCpu) -> None:
    model = on_cpu(name, dtype)
    runner = opened(model, ON_CPU, prefill_chunk=chunk)
    cache, wanted = runner.new_cache(), model.wanted(IDS[0, :60])
    assert_close(runner.prefill(cache, IDS[:1, :40])[0], wanted[39], TOLERANCE[dtype])
    found = np.concatenate(decode_all(runner, cache, IDS[:1, 40:60]))
    assert_close(found, wanted[40:], TOLERANCE[dtype])
    assert cache.length == 60


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_bound_run_is_the_plain_run(batch_size: int, on_cpu: OnCpu) -> None:
    """Step after step, and so are the keys and values."""
    model = on_cpu("qwen2")
    runner, session = opened(model, ON_CPU), open_on_cpu(model.path("prefill", "static-capture"))
    cache = runner.new_cache(batch_size=batch_size)
    states = runner.cache_spec.states
    names = [state.past for state in states]
    past = {
        name: np.zeros(buffer.shape(), np.float32) for name, buffer in zip(names, cache.buffers, strict=True)
    }

    def plain(start: int, stop: int) -> np.ndarray:
        inputs = {
            contract.INPUT_IDS: np.ascontiguousarray(IDS[:batch_size, start:stop]),
            contract.ATTENTION_MASK: np.ones((batch_size, cache.capacity), np.int64),
            contract.POSITION_IDS: np.tile(np.arange(start, stop), (batch_size, 1)),
            contract.WRITE_INDICES: np.full(batch_size, start),
        }
        wanted = [contract.LOGITS, *(state.present for state in states)]
        logits, *present = session.run(wanted, inputs | past)
        past.update(zip(names, present, strict=True))
        return np.asarray(logits)[:, 0]

    assert_close(runner.prefill(cache, IDS[:batch_size, :9]), plain(0, 9), EXACT)
    for slot in range(9, 29):
        found = runner.decode(cache, IDS[:batch_size, slot : slot + 1])
        assert_close(found, plain(slot, slot + 1), EXACT)
    for name, buffer in zip(names, cache.buffers, strict=True):
        assert_close(buffer.numpy(), past[name], EXACT)


# Padding.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [1, 4, 512])
def test_left_padded_rows_are_each_prompt_alone(dtype: str, chunk: int, on_cpu: OnCpu) -> None:
    """Also a row that is padding for whole chunks."""
    model = on_cpu("qwen2", dtype)
    runner = opened(model, ON_CPU, prefill_chunk=chunk)
    lengths, longest = [3, 5, 17], 17
    ids, mask = np.full((3, longest), 7), np.zeros((3, longest), np.int64)
    for row, length in enumerate(lengths):
        ids[row, -length:], mask[row, -length:] = IDS[row, :length], 1
    cache = runner.new_cache(batch_size=3)
    logits = runner.prefill(cache, ids, mask)
    for step in range(8):
        for row, length in enumerate(lengths):
            wanted = model.wanted(IDS[row, :40])[length + step - 1]
            assert_close(logits[row], wanted, TOLERANCE[dtype])
        logits = runner.decode(cache, np.array([[IDS[row, n + step]] for row, n in enumerate(lengths)]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 4])
def test_rows_join_with_padding_between(dtype: str, width: int, on_cpu: OnCpu) -> None:
    """A second message that only some rows have leaves the others' tokens alone."""
    model = on_cpu("qwen2", dtype)
    runner = opened(model, ON_CPU)
    cache = runner.new_cache(batch_size=2)
    runner.prefill(cache, IDS[:2, :6])
    ids, mask = np.full((2, width), 7), np.zeros((2, width), np.int64)
    ids[0], mask[0] = IDS[0, 6 : 6 + width], 1
    first = runner.prefill(cache, ids, mask)[0]
    assert_close(first, model.wanted(IDS[0, :40])[5 + width], TOLERANCE[dtype])
    logits = runner.decode(cache, np.array([[IDS[0, 6 + width]], [IDS[1, 6]]]))
    assert_close(logits[0], model.wanted(IDS[0, :40])[6 + width], TOLERANCE[dtype])
    assert_close(logits[1], model.wanted(IDS[1, :40])[6], TOLERANCE[dtype])


# Addresses, and what is copied.


@pytest.mark.parametrize("dtype", DTYPES)
def test_addresses_are_constant_within_a_capacity(
    dtype: str, on_cpu: OnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured graph reads for ever what it read at first: no array is made anew."""
    runner = opened(on_cpu("qwen2", dtype, **LONG), ON_CPU)
    seen: dict[int, set[tuple[int, ...]]] = {}
    cache, bound = runner.new_cache(), []
    runner.prefill(cache, LONG_IDS[:1, :50])
    for kind in ("bind_ortvalue_input", "bind_ortvalue_output", "bind_input", "bind_output"):
        real = getattr(onnxruntime.IOBinding, kind)

        def note(self: Any, name: str, *rest: Any, real: Any = real) -> None:
            bound.append((cache.capacity, name))
            real(self, name, *rest)

        monkeypatch.setattr(onnxruntime.IOBinding, kind, note)
    for slot in range(50, 550):
        runner.decode(cache, LONG_IDS[:1, slot : slot + 1])
        seen.setdefault(cache.capacity, set()).add(addresses(cache))
    assert {capacity: len(each) for capacity, each in seen.items()} == {256: 1, 512: 1, 1024: 1}
    assert len(set.union(*seen.values())) == 3
    of_grow = (contract.GROW_FROM, contract.GROW_INTO, contract.GROW_RESULT)
    steady = [(capacity, name) for capacity, name in bound if name not in of_grow]
    # Bound once for each capacity, but for the first, which the prefill had.
    assert len(steady) == len(set(steady))
    assert {capacity for capacity, _ in steady} == {512, 1024}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_step_uploads_the_token_and_the_lengths_only(
    dtype: str, batch_size: int, on_cpu: OnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing as long as the capacity, and no new array."""
    runner = opened(on_cpu("qwen2", dtype), ON_CPU)
    cache = runner.new_cache(batch_size=batch_size)
    pads = np.arange(9) >= np.arange(batch_size)[:, None]
    runner.prefill(cache, IDS[:batch_size, :9], pads.astype(np.int64))
    runner.decode(cache, IDS[:batch_size, 9:10])
    uploaded = note_uploads(monkeypatch)

    def refuse(*_: Any) -> None:
        raise AssertionError("a new value was made")

    for maker in (
        "ortvalue_from_numpy",
        "ortvalue_from_shape_and_type",
        "ortvalue_from_numpy_with_onnx_type",
    ):
        monkeypatch.setattr(onnxruntime.OrtValue, maker, refuse)
    of_dtype = {
        "f32": contract.POSITION_IDS,
        "f16": contract.TOTAL_SEQUENCE_LENGTH,
    }  # the latter on a CPU only
    wanted = {contract.INPUT_IDS, LENGTHS[dtype], of_dtype[dtype]}
    for slot in range(10, 20):
        uploaded.clear()
        runner.decode(cache, IDS[:batch_size, slot : slot + 1])
        assert sorted(names_of(uploaded, cache)) == sorted(wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ids_that_the_caller_changes_in_place_are_seen(dtype: str, on_cpu: OnCpu) -> None:
    """Though the ids are kept, to compare the next ones with."""
    model = on_cpu("qwen2", dtype)
    runner = opened(model, ON_CPU)
    cache, ids = runner.new_cache(), np.zeros((1, 1), np.int64)
    for slot in range(12):
        ids[0, 0] = IDS[0, slot]
        logits = runner.decode(cache, ids)
        assert_close(logits[0], model.wanted(IDS[0, :60])[slot], TOLERANCE[dtype])


# Growth and rewinding.


@pytest.mark.parametrize("dtype", DTYPES)
def test_growing_changes_no_bit(dtype: str, on_cpu: OnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """At capacities 8, 16, 32, 64 and 100; slots beyond the length are zeros."""
    monkeypatch.setattr(buffers, "SMALLEST_CAPACITY", 8)
    model = on_cpu("qwen2", dtype)
    runner = opened(model, dataclasses.replace(ON_CPU, max_context=100))
    cache, ids, capacities = runner.new_cache(batch_size=2), IDS[:2, :100], []
    logits = [runner.prefill(cache, ids[:, :5])]
    for slot in range(5, 100):
        before = [np.array(buffer.numpy()) for buffer in cache.buffers]
        logits.append(runner.decode(cache, ids[:, slot : slot + 1]))
        capacities.append(cache.capacity)
        for old, buffer in zip(before, cache.buffers, strict=True):
            new = buffer.numpy()
            assert (new[:, :, :slot] == old[:, :, :slot]).all()
            assert not new[:, :, slot + 1 :].any()
    assert sorted(set(capacities)) == [8, 16, 32, 64, 100]
    for row in range(2):
        wanted = model.wanted(ids[row])[4:]
        assert_close(np.stack(logits)[:, row], wanted, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rewound_cache_continues_like_a_fresh_one(dtype: str, on_cpu: OnCpu) -> None:
    """Though the graph still reads what lies beyond the length: its mask has a column for every slot."""
    runner = opened(on_cpu("qwen2", dtype), ON_CPU)
    rewound, fresh = runner.new_cache(), runner.new_cache()
    runner.prefill(rewound, IDS[:1, :7])
    runner.prefill(rewound, IDS[1:2, :30])
    decode_all(runner, rewound, IDS[1:2, 30:35])
    rewound.truncate(7)
    runner.prefill(fresh, IDS[:1, :7])
    for start, stop in ((7, 8), (8, 13), (13, 14), (14, 15)):
        found, wanted = (runner.prefill(cache, IDS[:1, start:stop]) for cache in (rewound, fresh))
        assert_close(found, wanted, EXACT)


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_that_was_rewound_is_no_padding(dtype: str, on_cpu: OnCpu) -> None:
    """The mask, which is copied to the device only when it changes, is copied then."""
    model = on_cpu("qwen2", dtype)
    runner = opened(model, ON_CPU)
    cache = runner.new_cache()
    runner.prefill(cache, np.concatenate([[[7, 7, 7]], IDS[:1, :5]], axis=1), np.array([[0, 0, 0, *[1] * 5]]))
    decode_all(runner, cache, IDS[:1, 5:7])
    cache.truncate(0)
    found = np.concatenate(decode_all(runner, cache, IDS[1:2, :8]))
    assert_close(found, model.wanted(IDS[1, :60])[:8], TOLERANCE[dtype])
