"""docs/faults.md, chapter F: the cache, how it is bound, and what of CUDA graphs a CPU can show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto

from qwen_onnx import UserError, contract
from qwen_onnx.contract.manifest import read_manifest
from qwen_onnx.runners.model import buffers
from qwen_onnx.runners.model.runner import Runner
from support.chats import endless
from support.checkpoints import QWEN3_HEAD_DIM_48, write_checkpoint
from support.command import command
from support.cuda import kernels
from support.cuda.graphs_on_cpu import GREEDY_ON_CPU, addresses
from support.cuda.graphs_on_cpu import on_cpu as on_cpu
from support.cuda.graphs_on_cpu import opened as opened_for_cuda
from support.cuda.kernels import lacking, types_of
from support.exports import (
    IDS,
    ON_CPU,
    DirectCache,
    Exported,
    LeftPadded,
    decode_all,
    past_names,
    present_names,
)
from support.field_runs import exported_as, follow, greedy, opened
from support.tolerances import EXACT, F32, F32_ORDER, assert_close

Export = Callable[..., Exported]


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A cache that grows; heads of 48, a head of its own."""
    folder = tmp_path_factory.mktemp("portable")
    write_checkpoint(folder / "m", QWEN3_HEAD_DIM_48)
    return Exported(folder / "m", exported_as(folder / "m", folder / "out", target="portable"), "f32")


@pytest.mark.parametrize("kind", ["host", "device", "growing"])
def test_f1_the_cache_never_crosses_to_the_host(
    kind: str, portable: Exported, exported: Export, on_cpu: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step only ids go in and only logits come out, however long the cache is."""
    monkeypatch.setattr(buffers, "SMALLEST_CAPACITY", 16)
    if kind == "growing":
        runner = Runner(portable.folder, ON_CPU)
    elif kind == "device":
        runner = opened_for_cuda(on_cpu("qwen3", "f16"), ON_CPU)
    else:
        runner = Runner(exported("qwen3").folder, ON_CPU)
    moved = list[int]()
    value = onnxruntime.OrtValue
    read, write, from_numpy = value.numpy, value.update_inplace, value.ortvalue_from_numpy

    def noted_read(own: Any) -> np.ndarray:
        assert len(own.shape()) < 4, "a part of the cache was read"
        moved.append(read(own).nbytes)
        return read(own)

    monkeypatch.setattr(value, "numpy", noted_read)
    monkeypatch.setattr(
        value, "update_inplace", lambda own, array: moved.append(array.nbytes) or write(own, array)
    )
    cache = runner.new_cache(batch_size=2)
    runner.prefill(cache, IDS[:2, :9])
    decode_all(runner, cache, IDS[:2, 9:30])
    monkeypatch.setattr(
        value, "ortvalue_from_numpy", lambda array, *to: moved.append(array.nbytes) or from_numpy(array, *to)
    )
    moved.clear()
    runner.decode(cache, IDS[:2, 30:31])
    held = cache.nbytes // cache.capacity * cache.length
    of_cache = 2 * runner.manifest.num_hidden_layers if kind == "growing" else 0
    assert sum(moved) < 2 * (320 * 4 + 8 * (3 + cache.length)) + of_cache
    assert sum(moved) < held / 2


def test_f2_a_past_of_no_length_can_be_bound(portable: Exported) -> None:
    """A tensor of no bytes has no address: it is bound by value, and by a null pointer."""
    session = portable.session("prefill", "portable")
    manifest = portable.manifest
    shape = (1, manifest.num_key_value_heads, 0, manifest.head_dim)
    inputs = {
        contract.INPUT_IDS: IDS[:1, :7],
        contract.ATTENTION_MASK: np.ones((1, 7), np.int64),
        contract.POSITION_IDS: np.arange(7)[None],
    }
    for by_pointer in (False, True):
        binding = session.io_binding()
        for name, array in inputs.items():
            binding.bind_ortvalue_input(
                name, onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))
            )
        for name in past_names(manifest.num_hidden_layers):
            if by_pointer:
                binding.bind_input(name, "cpu", 0, np.float32, shape, 0)
            else:
                empty = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, np.float32))
                binding.bind_ortvalue_input(name, empty)
        binding.bind_output(contract.LOGITS)
        session.run_with_iobinding(binding)
        logits = binding.get_outputs()[0].numpy()
        assert_close(logits[0, -1], portable.wanted(IDS[0, :7])[-1], F32)


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_f3_bound_runs_are_plain_runs(batch_size: int, exported: Export) -> None:
    """Over buffers in place as over new arrays, at every step and batch size, for views of any strides."""
    model, found = exported("qwen3_head_dim_48"), []
    for bound in (True, False):
        batch = LeftPadded(DirectCache(model, batch_size, bound=bound), [0, 2, 1][:batch_size])
        found.append(np.stack([batch.step(5), *(batch.step(1) for _ in range(20))]))
    assert_close(found[0], found[1], EXACT)
    runner = Runner(model.folder, ON_CPU)
    plain, strided = runner.new_cache(batch_size=batch_size), runner.new_cache(batch_size=batch_size)
    ids = IDS[:batch_size, :14]
    views = (np.asfortranarray(ids[:, :12]), np.repeat(ids, 2, axis=1)[:, 24::2])
    assert not views[0].flags.c_contiguous or batch_size == 1
    for whole, view in zip((ids[:, :12], ids[:, 12:]), views, strict=True):
        assert_close(runner.prefill(strided, view), runner.prefill(plain, whole), EXACT)


@pytest.mark.parametrize(("name", "dtype"), [("qwen3", "f16"), ("qwen2_yarn", "f32")])
def test_f4_addresses_stay_and_ids_are_equal(
    name: str, dtype: str, on_cpu: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured graph reads the addresses of its first step: no step moves what it reads or writes."""
    monkeypatch.setattr(buffers, "SMALLEST_CAPACITY", 100)
    model = on_cpu(name, dtype)
    host, device = opened_for_cuda(model, ON_CPU), opened_for_cuda(model, GREEDY_ON_CPU)
    for runner in (host, device):
        cache, seen = runner.new_cache(), set()
        choose = runner.prefill_greedy if runner.chooses else runner.prefill
        choose(cache, IDS[:1, :5])
        for slot in range(5, 40):
            (runner.decode_greedy if runner.chooses else runner.decode)(cache, IDS[:1, slot : slot + 1])
            if slot > 6:
                seen.add(addresses(cache))
        assert len(seen) == 1
    wanted = greedy(host, IDS[:1, :9], None, 64)[0]
    cache = device.new_cache()
    chosen = [device.prefill_greedy(cache, IDS[:1, :9])]
    while len(chosen) < 64:
        chosen.append(device.decode_greedy(cache, chosen[-1][:, None]))
    assert np.concatenate(chosen).tolist() == wanted.tolist()


FOLLOWS_SHAPES = {"Squeeze", "Unsqueeze", "Gather", "Concat", "Add", "Sub", "Mul"}
TAKES_SHAPES = {
    "Range": {0, 1, 2},
    "Reshape": {1},
    "Slice": {1, 2, 3, 4},
    "Expand": {1},
    "ConstantOfShape": {0},
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("qwen2_yarn", "f32"), ("qwen2_untied", "bf16"), ("qwen3_head_dim_48", "f16"), ("qwen2_14_2", "f16"),
     ("qwen3_bias", "f32"), ("qwen3_head_dim_48", "int4")],
)  # fmt: skip
def test_f5_nothing_of_a_decode_step_is_on_the_host(
    name: str, dtype: str, exported: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every node has a kernel on CUDA, and what is made of shapes only says how large other tensors are."""
    folder = exported(name, "f32" if dtype == "int4" else dtype).folder
    if dtype == "int4":
        folder = exported_as(exported(name).checkpoint, tmp_path / "out", dtype=dtype)
    manifest = read_manifest(folder)
    spec = manifest.graph("decode", "cuda")
    model = onnx.load(folder / spec.file, load_external_data=False)
    monkeypatch.setattr(kernels, "NAMES", {**kernels.NAMES, TensorProto.UINT8: "uint8"})
    assert lacking(model, types_of(model)) == set()
    assert not {node.op_type for node in model.graph.node} & {"ArgMax", "NonZero", "If", "Loop", "Size"}
    on_host = {tensor.name for tensor in model.graph.initializer if not tensor.external_data}
    shapes = set[str]()
    for node in model.graph.node:
        if node.op_type == "Shape":
            shapes.update(node.output)
            continue
        taken = {index for index, value in enumerate(node.input) if value in shapes}
        if taken and node.op_type in FOLLOWS_SHAPES and set(node.input) <= shapes | on_host:
            shapes.update(node.output)
        else:
            assert taken <= TAKES_SHAPES.get(node.op_type, set()), node.name


def test_f6_outputs_of_the_wrong_length_are_refused_and_both_ways_of_binding_agree(
    portable: Exported,
) -> None:
    """A present is written to buffers that are given, or made by ONNX Runtime, and holds all earlier tokens."""
    session, manifest = portable.session("prefill", "portable"), portable.manifest
    pasts = past_names(manifest.num_hidden_layers)
    presents = present_names(manifest.num_hidden_layers)
    heads, size = manifest.num_key_value_heads, manifest.head_dim
    kept: list[Any] = []  # a binding does not keep the arrays that it reads and writes

    def from_numpy(array: np.ndarray) -> Any:
        kept.append(onnxruntime.OrtValue.ortvalue_from_numpy(array))
        return kept[-1]

    def step(
        past: dict[str, Any], start: int, stop: int, length: int | None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """With outputs of `length` given, or made by ONNX Runtime; the logits, and the next step's past."""
        binding = session.io_binding()
        binding.bind_ortvalue_input(contract.INPUT_IDS, from_numpy(np.ascontiguousarray(IDS[:1, start:stop])))
        binding.bind_ortvalue_input(contract.ATTENTION_MASK, from_numpy(np.ones((1, stop), np.int64)))
        binding.bind_ortvalue_input(contract.POSITION_IDS, from_numpy(np.arange(start, stop)[None]))
        binding.bind_output(contract.LOGITS)
        for name, value in past.items():
            binding.bind_ortvalue_input(name, value)
        for name in presents:
            if length is None:
                binding.bind_output(name)
            else:
                binding.bind_ortvalue_output(
                    name, from_numpy(np.full((1, heads, length, size), np.nan, np.float32))
                )
        session.run_with_iobinding(binding)
        logits, *present = binding.get_outputs()
        return logits.numpy()[0, -1], dict(zip(pasts, present, strict=True))

    none = {name: from_numpy(np.zeros((1, heads, 0, size), np.float32)) for name in pasts}
    for given in (True, False):
        past = none
        for start, stop in ((0, 9), (9, 10), (10, 13), (13, 14)):
            logits, past = step(past, start, stop, stop if given else None)
            assert_close(logits, portable.wanted(IDS[0, :14])[stop - 1], F32)
    for wrong in (8, 10):
        with pytest.raises(Exception, match=r"(?i)shape|dim"):
            step(none, 0, 9, wrong)


@pytest.mark.parametrize("length", [63, 64, 65, 200])
def test_f9_prompts_around_the_context(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that leaves no room is refused before any compute, and both numbers are named."""
    ids = np.random.default_rng(length).integers(1, 360, length).tolist()
    chat = opened(endless(), max_context=64)
    if length == 63:
        tokens = list(chat.generate(ids, max_new_tokens=50, ignore_eos=True))
        assert [token.finish_reason for token in tokens] == [None, "context"]
        return
    monkeypatch.setattr(chat.runner, "prefill", lambda *_: pytest.fail("computed"))
    with pytest.raises(UserError, match=rf"prompt has {length} tokens, the context holds 64"):
        list(chat.generate(ids, max_new_tokens=1))
    given = ("--prompt-ids", ",".join(map(str, ids)), "--max-new-tokens", 1, "--max-context", 64)
    error = command("run", endless(), *given, "--provider", "cpu").error
    assert str(length) in error
    assert "64" in error


def test_f9_new_tokens_are_counted_alone() -> None:
    tokens = list(
        opened(endless(), max_context=64).generate(list(range(1, 51)), max_new_tokens=5, ignore_eos=True)
    )
    assert (len(tokens), tokens[-1].finish_reason) == (5, "length")


@pytest.mark.parametrize("target", ["onnxruntime", "portable"])
def test_f10_chunks_after_a_prompt_are_the_whole_prompt(
    target: str, portable: Exported, exported: Export
) -> None:
    """7, 5 and three single tokens give the logits of 12 and three."""
    model = portable if target == "portable" else exported("qwen3_head_dim_48")
    follow(model, [7, 5], 3)
    follow(model, [12], 3)


def test_f10_a_turn_computes_only_what_is_new_until_history_is_edited() -> None:
    """An edited history is computed anew from where it differs, and answered as a new chat answers it."""
    talk = [{"role": "user", "content": "Hello, dog!"}]
    chat = opened(endless())
    first = list(chat.generate(talk, max_new_tokens=8, ignore_eos=True))
    assert first[0].cached_tokens == 0
    said = "".join(token.text for token in first)
    more = [*talk, {"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
    second = list(chat.generate(more, max_new_tokens=8))
    assert second[0].cached_tokens >= first[0].prompt_tokens
    edited = [{"role": "user", "content": "Hello, fox!"}, *more[1:]]
    found = list(chat.generate(edited, max_new_tokens=8, top_logits=1))
    assert 0 < found[0].cached_tokens < first[0].prompt_tokens
    fresh = list(opened(endless()).generate(edited, max_new_tokens=8, top_logits=1))
    assert [token.token_id for token in found] == [token.token_id for token in fresh]
    for own, other in zip(found, fresh, strict=True):
        assert abs(own.top_logits[0][1] - other.top_logits[0][1]) < F32_ORDER.bound
