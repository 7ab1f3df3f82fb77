"""The cache on a real export: growth, rewinding, addresses, and what of it may cross to the host."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto

from qwen_onnx.contract.cache_spec import StateSpec
from qwen_onnx.errors import OutOfMemoryError
from qwen_onnx.runners.model import buffers, kv_cache
from qwen_onnx.runners.model.buffers import CacheMemory
from qwen_onnx.runners.model.kv_cache import GrowingCache, KVCache
from qwen_onnx.runners.model.runner import Runner
from support.caches import attention_spec
from support.exports import IDS, ON_CPU, DirectCache, Exported, LeftPadded, decode_all
from support.tolerances import EXACT, F32_ORDER, Tolerance, assert_close

Export = Callable[..., Exported]
LONG = {"max_position_embeddings": 1024}


@pytest.fixture
def runner(exported: Export) -> Runner:
    return Runner(exported("qwen2").folder, ON_CPU)


@pytest.mark.parametrize(
    ("dtype", "passed", "bound"),
    # Decode in f32 reads all slots, so sums are of another length; buffers there grow by an eighth, in whole blocks.
    [("f16", [8, 16, 32, 64, 100], EXACT), ("f32", [*range(8, 80, 8), 88, 100], F32_ORDER)],
)
def test_growing_changes_nothing(
    dtype: str, passed: list[int], bound: Tolerance, exported: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dataclasses.replace(ON_CPU, max_context=100)
    ids, runner = IDS[:2, :100], Runner(exported("qwen2", dtype).folder, options)

    def run(smallest: int) -> tuple[np.ndarray, list[int]]:
        monkeypatch.setattr(buffers, "SMALLEST_CAPACITY", smallest)
        monkeypatch.setattr(kv_cache, "BLOCK", 8)
        cache = runner.new_cache(batch_size=2)
        logits, capacities = [runner.prefill(cache, ids[:, :5])], [cache.capacity]
        for slot in range(5, 100):
            logits.append(runner.decode(cache, ids[:, slot : slot + 1]))
            capacities.append(cache.capacity)
        return np.stack(logits), capacities

    (grown, capacities), (whole, _) = run(8), run(100)
    assert sorted(set(capacities)) == passed
    assert capacities[8 - 5] == 8  # no growth before it is needed
    assert_close(grown, whole, bound)


def test_capacities_are_buckets_up_to_the_limit(exported: Export) -> None:
    """Few sizes of buffer, and none much larger than what it holds."""
    runner = Runner(exported("qwen2", **LONG).folder, dataclasses.replace(ON_CPU, max_context=600))
    cache, found = runner.new_cache(), []
    for _ in range(6):
        runner.prefill(cache, IDS[:1, :100])
        found.append((cache.length, cache.capacity))
    assert found == [(100, 256), (200, 256), (300, 320), (400, 448), (500, 512), (600, 600)]
    assert cache.nbytes == 3 * 2 * 2 * 600 * 16 * 4
    assert [buffer.shape() for buffer in cache.buffers] == [[1, 2, 600, 16]] * 6


@pytest.mark.parametrize("kind", [KVCache, GrowingCache])
@pytest.mark.parametrize(
    ("tight", "sizes"),
    [(False, [4, 8, 16, 32, 64, 70]), (True, [4, 8, 12, 16, 20, 24, 28, 32, 36, 44, 52, 60, 68, 70])],
)
def test_a_cache_has_the_smallest_size_that_holds_it(
    kind: type[KVCache], tight: bool, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last slot, whether tokens are appended or read from a file; what fits is not moved."""
    monkeypatch.setattr(buffers, "SMALLEST_CAPACITY", 4)
    monkeypatch.setattr(kv_cache, "BLOCK", 4)
    monkeypatch.setattr(CacheMemory, "_copy", lambda *_: None)
    memory = CacheMemory(attention_spec(1), "cpu", {}, tight=tight, starts_empty=kind is GrowingCache)
    for length in range(1, 71):
        wanted = next(size for size in sizes if size >= length)
        appended, filled = (kind(memory, batch_size=1, limit=70) for _ in range(2))
        ids = np.arange(length, dtype=np.int64)[None]
        appended.append(ids, None)
        filled.fill(ids[0], (np.full((2, length, 4), 7, np.float32) for _ in memory.spec.states))
        for cache in (appended, filled):
            assert (cache.length, cache.capacity) == (length, wanted)
            assert cache.full_mask.tolist() == [[1] * wanted]
            assert cache.token_ids.tolist() == ids[0].tolist()
        held = list(appended.buffers)
        appended.append(np.zeros((1, wanted - length), np.int64), None)
        assert appended.capacity == wanted
        assert all(now is before for now, before in zip(appended.buffers, held, strict=True))


def test_addresses_are_constant_between_growths(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured CUDA graph would read the buffers of its first step for ever."""
    monkeypatch.setattr(buffers, "SMALLEST_CAPACITY", 16)
    cache = runner.new_cache()
    runner.prefill(cache, IDS[:1, :3])
    seen: dict[int, set[tuple[int, ...]]] = {}
    for slot in range(3, 40):
        runner.decode(cache, IDS[:1, slot : slot + 1])
        seen.setdefault(cache.capacity, set()).add(tuple(buffer.data_ptr() for buffer in cache.buffers))
    assert list(seen) == [16, 80]
    assert [len(addresses) for addresses in seen.values()] == [1, 1]


def test_cache_never_comes_to_the_host(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step only the small inputs and the logits do."""
    monkeypatch.setattr(buffers, "SMALLEST_CAPACITY", 16)
    cache, fed = runner.new_cache(), []
    from_numpy = onnxruntime.OrtValue.ortvalue_from_numpy

    def refuse(*_: Any) -> None:
        raise AssertionError("a value was read back")

    def count(array: np.ndarray, *device: Any) -> Any:
        fed.append(array.nbytes)
        return from_numpy(array, *device)

    monkeypatch.setattr(onnxruntime.OrtValue, "numpy", refuse)
    for reading in ("copy_outputs_to_cpu", "get_outputs"):
        monkeypatch.setattr(onnxruntime.IOBinding, reading, refuse)
    runner.prefill(cache, IDS[:1, :10])
    decode_all(runner, cache, IDS[:1, 10:40])
    assert cache.capacity == 80
    monkeypatch.setattr(onnxruntime.OrtValue, "ortvalue_from_numpy", count)
    monkeypatch.setattr(onnxruntime.OrtValue, "update_inplace", lambda value, array: fed.append(array.nbytes))
    runner.decode(cache, IDS[:1, 40:41])
    assert sum(fed) == 3 * 8  # id, position, write index
    fed.clear()
    runner.prefill(cache, IDS[:1, 41:43])
    assert sum(fed) == 2 * 8 + 8 * 43 + 2 * 8 + 8 + 4 * 320  # mask too; room for the logits


def test_cache_is_written_in_place(exported: Export, capfd: pytest.CaptureFixture[str]) -> None:
    """Where past and present are one buffer, ONNX Runtime's log mentions no copy of it."""
    for bound in (True, False):
        model = Exported(exported("qwen2").checkpoint, exported("qwen2").folder, "f32")
        path = model.path("prefill")
        model._sessions[path] = onnxruntime.InferenceSession(str(path))  # with its warnings
        batch = LeftPadded(DirectCache(model, 2, bound=bound), [0, 0])
        capfd.readouterr()
        for _ in range(3):
            batch.step(2, entry="prefill")
        assert ("in-place" in capfd.readouterr().err) is not bound


def test_bf16_buffers_never_meet_numpy() -> None:
    """ONNX Runtime takes no bf16 array and gives none back: buffers are made by shape and type."""
    memory = CacheMemory(attention_spec(2, dtype="bfloat16", size=8), "cpu", {})
    cache = KVCache(memory, batch_size=3, limit=64)
    found = [(buffer.element_type(), buffer.shape()) for buffer in cache.buffers]
    assert found == [(TensorProto.BFLOAT16, [3, 2, 64, 8])] * 4
    assert cache.nbytes == 4 * 3 * 2 * 64 * 8 * 2


def test_rewound_cache_continues_like_a_fresh_one(runner: Runner) -> None:
    """An edited history sees nothing of the tokens that it replaced."""
    rewound, fresh = runner.new_cache(), runner.new_cache()
    runner.prefill(rewound, IDS[:1, :7])
    runner.prefill(rewound, IDS[1:2, :30])
    rewound.truncate(7)
    assert rewound.shared_prefix(IDS[0, :30].tolist()) == 7
    runner.prefill(fresh, IDS[:1, :7])
    for cache_ids in (IDS[:1, 7:12], IDS[:1, 12:13], IDS[:1, 13:14]):
        found, wanted = runner.prefill(rewound, cache_ids), runner.prefill(fresh, cache_ids)
        assert_close(found, wanted, EXACT)


MEMORY = CacheMemory(attention_spec(1), "cpu", {})


def append(cache: KVCache, rows: list[list[int]]) -> None:
    mask = np.array(rows)
    cache.append(np.full_like(mask, 5), mask)


def test_counts_are_of_tokens_and_not_of_padding() -> None:
    cache = KVCache(MEMORY, batch_size=2, limit=64)
    append(cache, [[1, 1], [1, 1]])
    assert cache.counts(2).tolist() == [2, 2]
    append(cache, [[1, 1, 1], [0, 0, 1]])
    append(cache, [[1], [1]])
    assert [cache.counts(end).tolist() for end in (2, 4, 6)] == [[2, 2], [4, 2], [6, 4]]
    cache.truncate(3)
    assert cache.counts(3).tolist() == [3, 2]
    cache.truncate(2)  # nothing is padded any more
    assert cache.counts(2).tolist() == [2, 2]


def test_full_mask_hides_padding_only_and_stays_the_same_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes with padding, growth and rewinding, and with nothing else."""
    monkeypatch.setattr(buffers, "SMALLEST_CAPACITY", 4)
    monkeypatch.setattr(CacheMemory, "_copy", lambda *_: None)
    cache = KVCache(MEMORY, batch_size=2, limit=16)
    append(cache, [[1, 1], [0, 1]])
    first = cache.full_mask
    assert first.tolist() == [[1, 1, 1, 1], [0, 1, 1, 1]]
    append(cache, [[1], [1]])
    assert cache.full_mask is first
    append(cache, [[1, 1], [1, 1]])  # grows
    assert cache.full_mask.tolist() == [[1] * 8, [0] + [1] * 7]
    append(cache, [[1], [0]])
    assert cache.full_mask.tolist() == [[1] * 8, [0, 1, 1, 1, 1, 0, 1, 1]]
    cache.truncate(5)
    assert cache.full_mask.tolist() == [[1] * 8, [0] + [1] * 7]
    cache.truncate(0)
    assert cache.full_mask.tolist() == [[1] * 8, [1] * 8]


def test_a_renewed_cache_holds_zeros() -> None:
    """In slots too that the next answer does not write: steps may attend over all slots."""
    cache = KVCache(MEMORY, batch_size=1, limit=16)
    append(cache, [[0, 1, 1]])
    assert cache.padded
    cache.binding = "bound to the old buffers"
    for buffer in cache.buffers:
        buffer.update_inplace(np.full(buffer.shape(), np.nan, np.float32))
    cache.renew()
    assert (cache.length, cache.binding, cache.padded) == (0, None, False)
    assert len(cache.buffers) == 2
    assert all((buffer.numpy() == 0).all() for buffer in cache.buffers)
    append(cache, [[1]])
    assert cache.mask.tolist() == [[1]]


def test_what_fills_a_cache_is_all_that_it_holds() -> None:
    """Whatever was in it before, padding too."""
    cache = KVCache(MEMORY, batch_size=1, limit=16)
    append(cache, [[0, 0, 1, 1]])
    assert cache.full_mask[0, :4].tolist() == [0, 0, 1, 1]
    rows = (np.full((2, 2, 4), 7, np.float32) for _ in MEMORY.spec.states)
    cache.fill(np.array([3, 4]), rows)
    assert (cache.length, cache.padded, cache.token_ids.tolist()) == (2, False, [3, 4])
    assert (cache.mask == 1).all()
    assert (cache.full_mask == 1).all()


def test_buffers_of_a_cache_that_is_gone_serve_the_next_one_of_its_batch() -> None:
    """ONNX Runtime releases no captured graph: it goes with the buffers."""
    memory = CacheMemory(attention_spec(1), "cpu", {}, keep=True)
    cache = KVCache(memory, batch_size=2, limit=64)
    append(cache, [[0, 1], [1, 1]])
    cache.binding = "what was bound"
    held = cache.buffers
    beside = KVCache(memory, batch_size=2, limit=64)
    assert beside.buffers is not held
    del cache
    gc.collect()
    other = KVCache(memory, batch_size=1, limit=64)
    assert other.binding is None
    again = KVCache(memory, batch_size=2, limit=64)
    assert again.buffers is held
    assert again.binding == "what was bound"
    assert (again.length, again.counts(0).tolist(), again.shared_prefix([5, 5])) == (0, [0, 0], 0)
    assert again.full_mask.tolist() == [[1] * 64] * 2
    assert memory.idle == []


def test_idle_buffers_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another batch, they would lie there for ever."""
    memory = CacheMemory(attention_spec(1), "cpu", {}, keep=True)
    gone = [KVCache(memory, batch_size=2, limit=64) for _ in range(2)]
    gone.clear()
    gc.collect()
    assert memory.idle is not None
    assert len(memory.idle) == 2
    real, full = onnxruntime.OrtValue.ortvalue_from_numpy, False

    def allocate(*arguments: Any) -> Any:
        if memory.idle or full:
            raise RuntimeError("Failed to allocate memory\nat line 7")
        return real(*arguments)

    monkeypatch.setattr(onnxruntime.OrtValue, "ortvalue_from_numpy", allocate)
    cache = KVCache(memory, batch_size=1, limit=64)
    assert [buffer.shape() for buffer in cache.buffers] == [[1, 2, 64, 4]] * 2
    assert memory.idle == []
    full = True
    with pytest.raises(OutOfMemoryError, match="64 tokens x 1 does not fit"):
        KVCache(memory, batch_size=1, limit=64)


def test_500_steps_take_no_memory(exported: Export) -> None:
    """No arena keeps a block for every length, and no output is held."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("the resident size now is known on Linux only")
    runner = Runner(exported("qwen2", **LONG).folder, ON_CPU)
    cache = runner.new_cache()
    runner.prefill(cache, np.tile(IDS[:1], 4)[:, :513])  # from here on the capacity is 1,024
    decode_all(runner, cache, IDS[:1, :10])
    gc.collect()
    before = int(statm.read_text().split()[1])
    for slot in range(500):
        runner.decode(cache, IDS[:1, slot % 160 : slot % 160 + 1])
    pages = int(statm.read_text().split()[1]) - before
    assert pages * 4096 < 8e6  # a leak of one step's cache would be 500 x 0.4 MB
    assert cache.capacity == 1024


@pytest.mark.parametrize("working", [0, 3])
def test_a_failed_growth_leaves_a_cache_that_works(
    working: int, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though memory ran out when only some of the buffers had grown."""
    monkeypatch.setattr(buffers, "SMALLEST_CAPACITY", 16)
    cache, fresh, left = runner.new_cache(), runner.new_cache(), working
    runner.prefill(cache, IDS[:1, :15])
    real = CacheMemory._allocate

    def fail(self: CacheMemory, state: StateSpec, batch_size: int, slots: int) -> Any:
        nonlocal left
        left -= slots > 16
        if left < 0 and slots > 16:
            raise MemoryError
        return real(self, state, batch_size, slots)

    with monkeypatch.context() as patch:
        patch.setattr(CacheMemory, "_allocate", fail)
        with pytest.raises(MemoryError):
            runner.prefill(cache, IDS[:1, 15:20])
    held = cache.length
    assert held in (0, 15)  # all or nothing
    assert cache.shared_prefix(IDS[0, :15].tolist()) == held
    found = runner.prefill(cache, IDS[:1, held:30])
    assert_close(found, runner.prefill(fresh, IDS[:1, :30]), F32_ORDER)
