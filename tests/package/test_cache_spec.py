"""CacheSpec: graphs declare what it says, runners allocate it, sizes and names come of it, manifests hold it.

Most specs here are of no known model: layers of different shapes, states of one size, slots in other dimensions.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from qwen_onnx.checkpoints.config import parse_config
from qwen_onnx.checkpoints.safetensors_file import read_header
from qwen_onnx.contract import BATCH, CAPACITY, LARGER_CAPACITY, PAST, SHRINK_LENGTH, WEIGHTS_FILE
from qwen_onnx.contract.cache_spec import CacheSpec, StateSpec
from qwen_onnx.contract.manifest import GraphSpec, Manifest, TensorSpec, read_manifest, write_manifest
from qwen_onnx.exports.graph_file import StoredParameter, save_graph
from qwen_onnx.exports.layouts import layout
from qwen_onnx.exports.layouts.genai import write_genai_config
from qwen_onnx.exports.plan import GraphPlan, _resizing, build_planned, graph_spec
from qwen_onnx.exports.writer import Writer
from qwen_onnx.graphs.build import build_decoder, build_resize_cache, build_truncate_cache
from qwen_onnx.graphs.cache import Precision
from qwen_onnx.runners.model import buffers
from qwen_onnx.runners.model.buffers import CacheMemory
from qwen_onnx.runners.model.executors.live_slice import LiveSlice
from qwen_onnx.runners.model.kv_cache import GrowingCache, KVCache
from qwen_onnx.runners.model.logits_model import LogitsModel
from support.checkpoints import QWEN2
from support.exports import IDS, Exported, open_on_cpu
from support.hybrid import HYBRID, WINDOW, hybrid_spec
from support.refusals import refused
from support.tolerances import EXACT, F32, assert_close

CONFIG = parse_config(QWEN2)
F32_PRECISION = Precision(ir.DataType.FLOAT, ir.DataType.FLOAT)
SPEC = hybrid_spec(CONFIG)
NAMES = ["0.key", "0.value", "1.total", "1.count", "2.values", "2.window"]
RECURRENT = CacheSpec((StateSpec(0, "state", "recurrent", "float32", (BATCH, 3, 5)),))
MIXED = CacheSpec(
    (
        StateSpec(0, "key", "full_attention", "bfloat16", (BATCH, 2, CAPACITY, 16)),
        StateSpec(0, "value", "full_attention", "float16", (BATCH, 2, CAPACITY, 8)),
        StateSpec(1, "state", "recurrent", "float32", (BATCH, 7)),
    )
)


def shapes(values: list[Any]) -> list[list[int]]:
    return [value.shape() for value in values]


# Names and sizes.


def test_names_are_of_layer_and_state() -> None:
    assert [state.past for state in SPEC.states] == [f"past_key_values.{name}" for name in NAMES]
    assert [state.present for state in SPEC.states] == [f"present.{name}" for name in NAMES]
    assert SPEC.name == "float32, cache_capacity"
    assert RECURRENT.name == "float32, fixed"


def test_sizes_are_of_rows_and_slots_where_there_are_slots() -> None:
    assert [state.slot_axis for state in SPEC.states] == [2, 2, None, None, 1, None]
    assert [state.sizes(batch_size=3, slots=10) for state in SPEC.states] == [
        (3, 2, 10, 16), (3, 2, 10, 16), (3, 32), (3, 1), (3, 10, 32), (3, WINDOW, 32),
    ]  # fmt: skip
    assert [state.fixed_sizes for state in SPEC.states] == [
        (None, 2, None, 16), (None, 2, None, 16), (None, 32), (None, 1), (None, None, 32), (None, WINDOW, 32),
    ]  # fmt: skip


def test_bytes_of_a_token_are_those_of_its_slots() -> None:
    assert SPEC.slot_bytes == 4 * (2 * 16 + 2 * 16 + 32)
    fixed = 4 * (32 + 1 + WINDOW * 32)
    for rows, slots in ((1, 1), (1, 10), (3, 0), (3, 100)):
        assert SPEC.nbytes(batch_size=rows, slots=slots) == rows * (fixed + slots * SPEC.slot_bytes)
    assert MIXED.slot_bytes == 2 * (2 * 16) + 2 * (2 * 8)
    assert MIXED.nbytes(batch_size=2, slots=5) == 2 * (5 * MIXED.slot_bytes + 4 * 7)
    assert RECURRENT.slot_bytes == 0
    assert RECURRENT.nbytes(batch_size=2, slots=1000) == 2 * 15 * 4


def test_only_states_that_keep_every_token_rewind() -> None:
    attention = CacheSpec(SPEC.states[:2])
    assert attention.rewinds
    assert not SPEC.rewinds
    assert not CacheSpec(SPEC.states[:3]).rewinds
    assert not CacheSpec((*SPEC.states[:2], SPEC.states[5])).rewinds


@pytest.mark.parametrize(
    "values",
    [
        {"layer": -1},
        {"name": "a key"},
        {"name": ""},
        {"name": "a.b"},
        {"dtype": "int64"},
        {"dtype": "float64"},
        {"shape": ()},
        {"shape": (1, 2, CAPACITY, 16)},
        {"shape": (BATCH, 2, "slots", 16)},
        {"shape": (BATCH, 2, BATCH, 16)},
        {"shape": (BATCH, CAPACITY, CAPACITY, 16)},
        {"shape": (BATCH, CAPACITY, PAST, 16)},
        {"shape": (BATCH, 0, CAPACITY, 16)},
        {"shape": (BATCH, -2, CAPACITY, 16)},
        {"shape": (BATCH, 2**31, CAPACITY, 16)},
        {"shape": (BATCH, 2, 16)},
        {"kind": "recurrent"},
    ],
    ids=str,
)
def test_states_that_cannot_be_are_refused(values: dict[str, Any]) -> None:
    right = StateSpec(0, "key", "full_attention", "float32", (BATCH, 2, CAPACITY, 16))
    with pytest.raises(ValueError, match=r"state tensor|slots"):
        dataclasses.replace(right, **values)


def test_a_cache_has_states_and_each_name_once() -> None:
    for states in ((), (SPEC.states[0], SPEC.states[0])):
        with pytest.raises(ValueError, match="a cache without state tensors, or with two of one name"):
            CacheSpec(states)


# Graphs.


def declared(values: list[ir.Value]) -> list[tuple[str, str, tuple[int | str, ...]]]:
    """Name, type and shape of inputs or outputs."""
    return [
        (str(value.name), ir.DataType(value.dtype).numpy().name, tuple(
            size if isinstance(size, int) else str(size) for size in value.shape
        ))
        for value in values
    ]  # fmt: skip


def test_decoders_declare_the_states_as_inputs_and_outputs() -> None:
    graph = build_decoder(CONFIG, F32_PRECISION, HYBRID, positions=128).graph
    inputs, outputs = declared(list(graph.inputs)), declared(list(graph.outputs))
    assert inputs[-6:] == [(state.past, state.dtype, state.shape) for state in SPEC.states]
    assert outputs[-6:] == [(state.present, state.dtype, state.shape) for state in SPEC.states]
    assert [name for name, *_ in inputs[:-6]] == [
        "input_ids", "attention_mask", "position_ids", "write_indices",
    ]  # fmt: skip
    assert [name for name, *_ in outputs[:-6]] == ["logits"]


@pytest.mark.parametrize("entry", ["grow", "shrink"])
def test_each_shape_with_slots_has_a_graph_that_resizes_it(entry: str) -> None:
    """Two here: keys and values are alike, and what has no slots is never resized."""
    plan = GraphPlan(f"{entry}.onnx", entry, HYBRID, F32_PRECISION, ("cpu",))
    plans = list(_resizing(CONFIG, plan))
    assert [(own.file, own.state) for own in plans] == [
        (f"{entry}.onnx", SPEC.states[0]),
        (f"{entry}.1.onnx", SPEC.states[4]),
    ]
    for own in plans:
        assert own.state is not None
        graph = build_planned(own, CONFIG, 128).graph
        names = (CAPACITY, LARGER_CAPACITY) if entry == "grow" else (PAST, SHRINK_LENGTH)
        found = dict(zip(("small", "other"), (graph.inputs[0], graph.outputs[0]), strict=True))
        for value, name in zip(found.values(), names, strict=True):
            wanted = tuple(
                name if axis == own.state.slot_axis else size for axis, size in enumerate(own.state.shape)
            )
            assert declared([value])[0][1:] == (own.state.dtype, wanted)


@pytest.mark.parametrize("build", [build_resize_cache, build_truncate_cache])
def test_a_state_without_slots_cannot_be_resized(build: Callable[[StateSpec], ir.Model]) -> None:
    with pytest.raises(ValueError, match=r"past_key_values\.1\.total has no slots"):
        build(SPEC.states[2])


# Memory.


def resize_sessions(
    spec: CacheSpec, build: Callable[[StateSpec], ir.Model] = build_resize_cache
) -> dict[Any, Any]:
    """By type and fixed sizes, as open_graph makes them."""
    return {
        state.resize_key: onnxruntime.InferenceSession(
            ir.to_proto(build(state)).SerializeToString(), providers=["CPUExecutionProvider"]
        )
        for state in spec.states
        if state.slot_axis is not None
    }


@pytest.mark.parametrize("spec", [SPEC, MIXED, RECURRENT], ids=["hybrid", "mixed", "recurrent"])
def test_memory_is_zeros_of_each_states_shape_and_type(spec: CacheSpec) -> None:
    memory = CacheMemory(spec, "cpu", {})
    values = memory.values(3, 10)
    assert shapes(values) == [[*state.sizes(batch_size=3, slots=10)] for state in spec.states]
    assert [value.element_type() for value in values] == [
        buffers.ELEMENT_TYPES[state.dtype] for state in spec.states
    ]
    for state, value in zip(spec.states, values, strict=True):
        assert not memory.read(state, value, 10).any()
    cache = KVCache(memory, batch_size=3, limit=10)
    assert cache.nbytes == spec.nbytes(batch_size=3, slots=10)


def test_tensors_that_start_without_slots_have_all_of_their_other_sizes() -> None:
    memory = CacheMemory(SPEC, "cpu", {}, starts_empty=True)
    cache = GrowingCache(memory, batch_size=2, limit=100)
    assert shapes(cache.buffers) == [
        [2, 2, 0, 16],
        [2, 2, 0, 16],
        [2, 32],
        [2, 1],
        [2, 0, 32],
        [2, WINDOW, 32],
    ]


def filled(cache: KVCache) -> list[np.ndarray]:
    """Random numbers in every buffer."""
    rng, arrays = np.random.default_rng(0), []
    for state, value in zip(cache.spec.states, cache.buffers, strict=True):
        bits = rng.integers(0, 2**14, value.shape()).astype(np.uint16)
        kind = buffers.HOST_TYPES[state.dtype]
        arrays.append(bits if kind is np.uint16 else bits.astype(kind))
        value.update_inplace(buffers._over(state, arrays[-1].copy()))
    return arrays


@pytest.mark.parametrize("spec", [SPEC, MIXED, RECURRENT], ids=["hybrid", "mixed", "recurrent"])
def test_buffers_grow_where_they_have_slots(spec: CacheSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they hold stays in front; a state without slots stays the very tensor that it was."""
    monkeypatch.setattr(buffers, "SMALLEST_CAPACITY", 4)
    cache = KVCache(CacheMemory(spec, "cpu", resize_sessions(spec)), batch_size=1, limit=100)
    cache.append(np.ones((1, 4), np.int64), None)
    before, values = filled(cache), list(cache.buffers)
    cache.append(np.ones((1, 7), np.int64), None)
    assert cache.capacity == 16
    assert shapes(cache.buffers) == [[*state.sizes(batch_size=1, slots=16)] for state in spec.states]
    for state, array, old, new in zip(spec.states, before, values, cache.buffers, strict=True):
        assert (new is old) is (state.slot_axis is None)
        held = cache.memory.read(state, new, 4)
        np.testing.assert_array_equal(held, array[0])
        if state.slot_axis is not None:
            beyond = cache.memory.read(state, new, 16).take(range(4, 16), state.slot_axis - 1)
            assert not beyond.any()


@pytest.mark.parametrize("spec", [SPEC, MIXED, RECURRENT], ids=["hybrid", "mixed", "recurrent"])
def test_what_was_read_fills_another_cache(spec: CacheSpec) -> None:
    memory = CacheMemory(spec, "cpu", resize_sessions(spec))
    first, second = (KVCache(memory, batch_size=1, limit=100) for _ in range(2))
    first.append(np.arange(9)[None], None)
    filled(first)
    rows = list(first.read())
    sizes = [state.sizes(batch_size=1, slots=9)[1:] for state in spec.states]
    assert [row.shape for row in rows] == sizes
    second.fill(first.token_ids, iter(rows))
    assert second.length == 9
    for one, other in zip(rows, second.read(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_cache_that_cannot_rewind_begins_again() -> None:
    """What it can go on from is all of it or nothing."""
    cache = KVCache(CacheMemory(SPEC, "cpu", {}), batch_size=1, limit=100)
    cache.append(np.array([[5, 6, 7]]), None)
    filled(cache)
    assert cache.shared_prefix([5, 6, 7, 8]) == 3
    assert cache.shared_prefix([5, 6]) == 0
    assert cache.shared_prefix([5, 6, 8]) == 0
    cache.truncate(3)
    assert cache.length == 3
    cache.truncate(2)
    assert cache.length == 0
    for state, value in zip(SPEC.states, cache.buffers, strict=True):
        assert not cache.memory.read(state, value, cache.capacity).any()


# All of it together.


@pytest.fixture
def model(exported: Callable[..., Exported], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LogitsModel:
    """The hybrid decoder over an export's weights; its caches begin with 4 slots."""
    monkeypatch.setattr(buffers, "SMALLEST_CAPACITY", 4)
    folder = exported("qwen2").folder
    shutil.copy(folder / WEIGHTS_FILE, tmp_path)
    places = {
        name: StoredParameter(WEIGHTS_FILE, tensor.offset, tensor.nbytes)
        for name, tensor in read_header(folder / WEIGHTS_FILE).items()
    }
    decoder = build_decoder(CONFIG, F32_PRECISION, HYBRID, positions=128)
    save_graph(decoder, tmp_path / "prefill.onnx", places)
    memory = CacheMemory(SPEC, "cpu", resize_sessions(SPEC))
    executor = LiveSlice(open_on_cpu(tmp_path / "prefill.onnx"), memory, vocab_size=CONFIG.vocab_size)
    return LogitsModel(executor, vocab_size=CONFIG.vocab_size, context_length=128, prefill_chunk=17)


def test_chunks_steps_and_batches_carry_the_same_states(model: LogitsModel) -> None:
    ids, rows = IDS[:2, :40], []
    for row in range(2):
        cache = model.new_cache()
        rows.append([model.decode(cache, ids[row : row + 1, slot : slot + 1])[0] for slot in range(40)])
        assert cache.capacity == 64
        assert cache.buffers[3].numpy().tolist() == [[40.0]]
    for begin in (1, 5, 17, 18, 39):
        cache = model.new_cache(batch_size=2)
        found = [model.prefill(cache, ids[:, :begin])]
        found += [model.decode(cache, ids[:, slot : slot + 1]) for slot in range(begin, 40)]
        assert_close(np.stack(found, axis=1), np.stack([row[begin - 1 :] for row in rows]), F32)
        assert cache.nbytes == SPEC.nbytes(batch_size=2, slots=cache.capacity)


def test_a_rewound_conversation_is_computed_anew(model: LogitsModel) -> None:
    ids = IDS[:1, :30]
    cache, other = model.new_cache(), model.new_cache()
    model.prefill(cache, ids)
    cache.truncate(cache.shared_prefix(ids[0, :20].tolist()))
    assert_close(model.prefill(cache, ids[:, :20]), model.prefill(other, ids[:, :20]), EXACT)


def test_a_step_that_fails_leaves_no_state_of_it(model: LogitsModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of a step cannot be taken back, so that the cache is empty after it."""
    ids = IDS[:1, :30]
    cache, other = model.new_cache(), model.new_cache()
    model.prefill(cache, ids[:, :10])
    with monkeypatch.context() as patch:
        patch.setattr(model.executor, "logits", lambda held: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.prefill(cache, ids[:, 10:20])
    assert cache.length == 0
    assert_close(model.prefill(cache, ids), model.prefill(other, ids), EXACT)


# Manifests.


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory, exported: Callable[..., Exported]) -> Manifest:
    """Of an export whose decoder is the hybrid one."""
    decoder = GraphPlan("prefill.onnx", "prefill", HYBRID, F32_PRECISION, ("cpu",))
    plans = [decoder, *_resizing(CONFIG, GraphPlan("grow.onnx", "grow", HYBRID, F32_PRECISION, ("cpu",)))]
    graphs = [
        graph_spec(plan, build_planned(plan, CONFIG, 128), SPEC.name if plan is decoder else None)
        for plan in plans
    ]
    return dataclasses.replace(exported("qwen2").manifest, graphs=tuple(graphs), caches={SPEC.name: SPEC})


def test_a_manifest_keeps_the_cache(manifest: Manifest, tmp_path: Path) -> None:
    write_manifest(tmp_path, manifest)
    found = read_manifest(tmp_path)
    assert found == manifest
    assert found.caches[found.graph("prefill", "cpu").cache or ""] == SPEC
    grow = [graph.inputs[0].shape for graph in found.graphs if graph.entry == "grow"]
    assert grow == [(BATCH, 2, CAPACITY, 16), (BATCH, CAPACITY, 32)]


def changed_state(manifest: Manifest, number: int, **values: Any) -> Manifest:
    """Another state in the cache; graphs are as they were."""
    states = list(SPEC.states)
    states[number] = dataclasses.replace(states[number], **values)
    return dataclasses.replace(manifest, caches={SPEC.name: CacheSpec(tuple(states))})


def changed_graph(manifest: Manifest, **values: Any) -> Manifest:
    decoder, *others = manifest.graphs
    return dataclasses.replace(manifest, graphs=(dataclasses.replace(decoder, **values), *others))


def renamed(specs: tuple[TensorSpec, ...], old: str, new: str) -> tuple[TensorSpec, ...]:
    return tuple(dataclasses.replace(spec, name=new) if spec.name == old else spec for spec in specs)


@pytest.mark.parametrize(
    ("change", "mentions"),
    [
        (lambda m: changed_state(m, 2, shape=(BATCH, 33)), "another past_key_values.1.total than its cache"),
        (
            lambda m: changed_state(m, 5, shape=(BATCH, 5, 32)),
            "another past_key_values.2.window than its cache",
        ),
        (lambda m: changed_state(m, 4, dtype="float16"), "another past_key_values.2.values than its cache"),
        (lambda m: changed_state(m, 3, name="number"), "another past_key_values.1.number than its cache"),
        (lambda m: changed_state(m, 3, layer=3), "has no cache of 3 layers"),
        (
            lambda m: dataclasses.replace(m, caches={"other": SPEC}),
            "a cache 'float32, cache_capacity', which",
        ),
        (lambda m: changed_graph(m, cache=None), "a cache None, which the export does not describe"),
        (
            lambda m: changed_graph(m, outputs=renamed(m.graphs[0].outputs, "present.1.total", "total")),
            "another past_key_values.1.total than its cache",
        ),
        (
            lambda m: dataclasses.replace(m, caches={SPEC.name: CacheSpec(SPEC.states[2:])}),
            "has no cache of 3 layers",
        ),
        (lambda m: dataclasses.replace(m, num_key_value_heads=4), "not of 4 heads of 16"),
    ],
)
def test_manifests_whose_graphs_have_another_cache_are_refused(
    change: Callable[[Manifest], Manifest], mentions: str, manifest: Manifest, tmp_path: Path
) -> None:
    write_manifest(tmp_path, change(manifest))
    refused(read_manifest, tmp_path, mentions=("prefill.onnx", mentions, "export the model again"))


def test_graphs_that_are_no_decoders_have_no_cache(manifest: Manifest) -> None:
    specs: dict[str, GraphSpec] = {graph.file: graph for graph in manifest.graphs}
    assert {file: graph.cache for file, graph in specs.items()} == {
        "prefill.onnx": SPEC.name,
        "grow.onnx": None,
        "grow.1.onnx": None,
    }


def test_caches_of_one_name_are_told_apart() -> None:
    """By a number, where two graphs of an export carry different tensors of one type."""
    other = CacheSpec(SPEC.states[:2])
    writer = object.__new__(Writer)
    writer.caches = {}
    names = [writer._name_of(spec) for spec in (SPEC, other, SPEC, other)]
    assert names == [SPEC.name, f"{SPEC.name}, 2"] * 2
    assert writer.caches == {SPEC.name: SPEC, f"{SPEC.name}, 2": other}


def test_states_of_one_shape_and_two_types_are_resized_by_two_graphs() -> None:
    narrow, wide = (StateSpec(0, name, "full_attention", dtype, (BATCH, 2, CAPACITY, 16))
                    for name, dtype in (("key", "float16"), ("value", "float32")))  # fmt: skip
    assert narrow.resize_key != wide.resize_key
    assert narrow.fixed_sizes == wide.fixed_sizes


def test_genai_is_told_of_one_key_and_one_value_of_one_shape_only(tmp_path: Path) -> None:
    """Its file has room for no more, so that other caches are refused."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    export = layout.Exported(
        tmp_path,
        CONFIG,
        "f32",
        128,
        (0,),
        cache=SPEC,
        model_file="model.onnx",
        weights_files=[],
        file_counts={},
    )
    refused(write_genai_config, export, mentions=("onnxruntime-genai", "layout='plain'"))
    assert not (tmp_path / "genai_config.json").exists()
