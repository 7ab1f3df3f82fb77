"""docs/faults.md, chapter B: what f16 and bf16 can hold, and where a graph says f32 instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto

from qwen_onnx.checkpoints.safetensors_file import read_header
from qwen_onnx.checks import check
from qwen_onnx.contract import LOGITS
from qwen_onnx.contract.manifest import read_manifest
from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.model.buffers import CacheMemory
from qwen_onnx.runners.model.kv_cache import KVCache
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.options import SessionOptions
from qwen_onnx.runners.runtime.session import provider_options
from support import f16, portable
from support.chats import copy_export, endless, tiny
from support.checkpoints import QWEN2, QWEN3, QWEN3_BIAS, RawConfig, random_tensors, write_checkpoint
from support.command import command
from support.damage import forge, poke
from support.exports import IDS, DirectCache, Exported, LeftPadded, open_on_cpu
from support.f16 import Run, attend_in_f16, norm_in_f16
from support.field_runs import element_types, export_tensors, exported_as, graphs, opened
from support.strict import not_finite
from support.tolerances import F16, F32_ORDER, NARROW_ON_CPU, assert_close, difference

pytestmark = pytest.mark.thorough

Export = Callable[..., Exported]
F16_MAX = float(np.finfo(np.float16).max)


def large_biases(raw: RawConfig) -> dict[str, np.ndarray]:
    """Queries and keys of 200 and more, as Qwen2's biases make them: scores of hundreds of thousands."""
    tensors = random_tensors(raw, seed=5)
    signs = np.random.default_rng(6).choice([-200, 200], raw["head_dim"]).astype(np.float32)
    for part, heads in (("q", raw["num_attention_heads"]), ("k", raw["num_key_value_heads"])):
        tensors[f"model.layers.0.self_attn.{part}_proj.bias"] = np.tile(signs, heads)
    return tensors


def large_states(raw: RawConfig, size: float) -> dict[str, np.ndarray]:
    """A channel of `size` in every state; in Qwen3 queries and keys of hundreds before their norms, too."""
    tensors = random_tensors(raw, seed=7)
    tensors["model.embed_tokens.weight"][:, 9] = size
    for name, tensor in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor *= 400
        if name.endswith(("layernorm.weight", "model.norm.weight")):
            tensor *= size / 20  # the norm of such a state leaves little of the other channels
            tensor[9] = 0.1
    return tensors


@pytest.mark.parametrize("lowering", ["contrib", "static-capture", "portable"])
def test_b1_scores_beyond_f16_stay_finite(lowering: str, tmp_path: Path) -> None:
    """Where scores pass 65,504, every value of every node is finite, and the logits are right."""
    size = 72 if lowering == "static-capture" else 128  # 72: no fused attention, which wants multiples of 16
    raw = {
        **QWEN2,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": size,
    }
    model = export_tensors(tmp_path, raw, large_biases(raw), "f16")
    if lowering == "portable":
        ran = portable.run(model)
    else:
        ran = [(step.values, step.wanted) for step in Run(model, lowering).ran]
    for values, wanted in ran:
        assert not_finite(values) == []
        assert_close(values[LOGITS][:, 0], wanted, F16)
    scores = [np.abs(value).max() for name, value in ran[0][0].items() if "layers.0.self_attn" in name]
    assert max(scores) > F16_MAX  # so that the input is what it is said to be


def test_b1_numbers_that_are_none_are_an_error_and_no_exclamation_marks(tmp_path: Path) -> None:
    """NaN logits are an error of one line in each way of choosing: no token, as 0, is chosen from them."""
    folder = copy_export(endless(), tmp_path / "export")
    poke(folder, "model.norm.weight", lambda norm: norm * 1e38)
    forge(folder)
    for flags in ((), ("--temperature", 1), ("--greedy-on-device",), ("--speculate",)):
        ran = command("run", folder, "-p", "Hi", "--provider", "cpu", *flags)
        assert "not finite" in ran.error


@pytest.mark.parametrize("size", [300, 3000])
@pytest.mark.parametrize("lowering", ["contrib", "static-capture", "portable"])
def test_b2_norms_of_large_states_are_those_of_f32(lowering: str, size: float, tmp_path: Path) -> None:
    """A state whose square f16 cannot hold has the right norm; those of Qwen3's queries and keys too."""
    size_of_head = 24 if lowering == "static-capture" else 32
    raw = {**QWEN3, "num_hidden_layers": 2, "head_dim": size_of_head, "tie_word_embeddings": False}
    model = export_tensors(tmp_path, raw, large_states(raw, size), "f16")
    if lowering == "portable":
        ran = portable.run(model)
    else:
        ran = [(step.values, step.wanted) for step in Run(model, lowering).ran]
    for values, wanted in ran:
        assert not_finite(values) == []
        assert_close(values[LOGITS][:, 0], wanted, F16)
    halves = [value for value in ran[0][0].values() if value.dtype == np.float16]
    assert max(float(np.abs(value).max()) for value in halves) ** 2 > F16_MAX


@pytest.mark.parametrize("change", [attend_in_f16, norm_in_f16])
def test_b3_a_graph_that_a_cpu_forgives_is_caught(change: f16.Change, tmp_path: Path) -> None:
    """The interpreter that tests go by sees an overflow in f16 that a CPU, computing in f32, does not have."""
    raw = {**QWEN2, "num_hidden_layers": 2, "head_dim": 72, "tie_word_embeddings": False}
    tensors = large_biases(raw) if change is attend_in_f16 else large_states(raw, 3000)
    run = Run(export_tensors(tmp_path, raw, tensors, "f16"), "static-capture", change)
    found = not_finite(run.ran[0].values)
    assert found if change is attend_in_f16 else run.distance > 10 * F16.bound


@pytest.mark.parametrize("reuse", [True, False])
def test_b4_f16_on_a_cpu_answers_whatever_buffers_are_reused(reuse: bool, exported: Export) -> None:
    """25 tokens, and then one: no two lengths of an input have one name, so no buffer of another shape is used."""
    model = exported("qwen3_head_dim_48", "f16")
    for path in (model.path("prefill"), model.path("decode")):
        model._sessions[path] = open_on_cpu(path, enable_mem_pattern=reuse, enable_mem_reuse=reuse)
    batch = LeftPadded(DirectCache(model, 2), [0, 3])
    for queries in (25, 1, 1):
        logits = batch.step(queries)
        wanted = [batch.wanted(row) for row in range(2)]
        assert_close(logits, np.stack([row for row in wanted if row is not None]), NARROW_ON_CPU)
    for spec in model.manifest.graphs:
        shapes = {value.shape for value in spec.inputs if value.name == "input_ids" or len(value.shape) == 4}
        names = [dim for shape in shapes for dim in shape[1:] if isinstance(dim, str)]
        assert len(names) == len(set(names)), (spec.file, names)


def test_b4_run_says_nothing_of_f16_but_the_answer() -> None:
    ran = command("run", tiny("f16"), "-p", "What is 3 plus 4?", "--provider", "cpu")
    assert (ran.code, ran.out) == (
        0,
        command("run", tiny(), "-p", "What is 3 plus 4?", "--provider", "cpu").out,
    )


LEVELS = ("DISABLE_ALL", "ENABLE_BASIC", "ENABLE_EXTENDED", "ENABLE_ALL")


def logits_at(path: Path, level: str) -> np.ndarray:
    """Of 11 tokens of two rows, the graph as it is and nothing before."""
    session = open_on_cpu(
        path, graph_optimization_level=getattr(onnxruntime.GraphOptimizationLevel, f"ORT_{level}")
    )
    length, inputs = 11, dict[str, np.ndarray]()
    sizes = {"batch_size": 2, "sequence_length": length, "total_sequence_length": length, "cache_capacity": 16,
             "past_sequence_length": 0, "past_sequence_length + sequence_length": length}  # fmt: skip
    kinds = {
        "tensor(int64)": "int64",
        "tensor(int32)": "int32",
        "tensor(float)": "f4",
        "tensor(float16)": "f2",
    }
    for value in session.get_inputs():
        shape = [sizes.get(dim, dim) for dim in value.shape]
        inputs[value.name] = np.zeros(shape, kinds[value.type])
    known = {
        "input_ids": IDS[:2, :length],
        "position_ids": np.tile(np.arange(length), (2, 1)),
        "seqlens_k": np.full(2, length - 1, np.int32),
        "total_sequence_length": np.array(length, np.int32),
    }
    inputs |= {name: value for name, value in known.items() if name in inputs}
    if "attention_mask" in inputs:
        inputs["attention_mask"][:] = 1
    return np.asarray(session.run([LOGITS], inputs)[0])


@pytest.mark.parametrize(
    "file", ["prefill.onnx", "prefill.cpu.onnx", "score.cpu.onnx", "prefill.tensorrt.onnx"]
)
def test_b5_f16_loads_and_agrees_at_every_optimization_level(file: str, exported: Export) -> None:
    """No fusion makes an f16 node for which a CPU has no kernel, and there are no Constant nodes to trip over."""
    path = exported("qwen3_bias", "f16").folder / file
    assert "Constant" not in {node.op_type for node in onnx.load(path, load_external_data=False).graph.node}
    first, *others = (logits_at(path, level) for level in LEVELS)
    bound = NARROW_ON_CPU if ".cpu." in file else F16
    for other in others:
        assert_close(other, first, bound)


def test_b6_bf16_never_passes_through_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """No array holds bf16: caches are opaque and zero, logits leave the graph in f32."""
    manifest = read_manifest(endless("bf16"))
    for entry in ("prefill", "decode", "greedy"):
        graph = manifest.graph(entry, "cuda")
        kinds = {value.name: value.dtype for value in (*graph.inputs, *graph.outputs)}
        assert kinds["present.0.key"] == "bfloat16"
        assert kinds["logits"] == "float32"
    spec = manifest.caches[manifest.graph("decode", "cuda").cache or ""]
    cache = KVCache(CacheMemory(spec, "cpu", {}), batch_size=2, limit=300)
    assert len(cache.buffers) == 2 * manifest.num_hidden_layers
    assert {buffer.element_type() for buffer in cache.buffers} == {TensorProto.BFLOAT16}
    read, real = list[str](), onnxruntime.OrtValue.numpy
    monkeypatch.setattr(onnxruntime.OrtValue, "numpy", lambda own: read.append(own.data_type()) or real(own))
    tokens = list(opened(endless("bf16")).generate("Hi", max_new_tokens=5))
    assert len(tokens) == 5
    assert "tensor(bfloat16)" not in read


@pytest.mark.parametrize(
    ("options", "weights", "cache"),
    [
        ({"dtype": "f16"}, {"F16"}, {"float16", "float32"}),
        ({"dtype": "f16", "target": "portable"}, {"F16"}, {"float16"}),
        ({"dtype": "int8"}, {"U8", "F16", "F32"}, {"float16", "float32"}),
    ],
)
def test_b7_types_are_those_asked_for(
    options: dict[str, Any], weights: set[str], cache: set[str], tmp_path: Path
) -> None:
    """Weights and caches are of the dtype, but for caches of graphs that compute in f32; logits are f32."""
    write_checkpoint(tmp_path / "m", QWEN3_BIAS)
    folder = exported_as(tmp_path / "m", tmp_path / "out", **options)
    stored = read_header(folder / "weights.safetensors")
    assert {tensor.dtype for name, tensor in stored.items() if not name.startswith("rotary.")} == weights
    assert {stored["rotary.cos"].dtype, stored["rotary.sin"].dtype} == {"F32"}
    found = set()
    for spec, model in graphs(folder):
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode="contrib" not in spec.lowering)
        for value in (*spec.inputs, *spec.outputs):
            if value.name == LOGITS:
                assert value.dtype == "float32", spec.file
            if value.name.startswith(("past_key_values.", "present.")):
                found.add(value.dtype)
                # f32 is the cache of those that compute in f32: the CPU's own graphs.
                assert value.dtype == "float16" or spec.providers == ("cpu",), spec.file
    assert found == cache


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_b8_precision_is_in_the_graph(name: str, exported: Export) -> None:
    """Products of weights are f16 and what needs f32 says so: no flag of an engine's builder decides it."""
    model = exported(name, "f16")
    proto = onnx.load(model.path("prefill", "portable"), load_external_data=False)
    types, stored = (
        element_types(proto),
        {tensor.name for tensor in proto.graph.initializer if tensor.external_data},
    )
    of_weights = 0
    for node in proto.graph.node:
        kinds = {types[value] for value in (*node.input, *node.output)}
        if node.op_type == "MatMul" and "self_attn/" not in node.name:
            of_weights += 1
            assert kinds == {TensorProto.FLOAT16}, node.name
        elif node.op_type in ("MatMul", "Softmax", "ReduceMean", "Sqrt", "Div"):
            assert kinds == {TensorProto.FLOAT}, node.name
    assert of_weights > 7 * model.config.num_hidden_layers
    assert {types[name] for name in stored if not name.startswith("rotary.")} == {TensorProto.FLOAT16}


def test_b11_tf32_is_off_unless_asked_for_and_is_told() -> None:
    assert provider_options("cuda")["use_tf32"] == "0"
    assert provider_options("cuda", tf32=True)["use_tf32"] == "1"
    for provider in ("cuda", "tensorrt"):
        runner = opened(endless()).runner
        runner.provider = provider
        assert "TF32 off" in runner.describe()  # what `check` prints of how it ran


@pytest.mark.parametrize("file", ["prefill.onnx", "prefill.cuda.onnx", "prefill.tensorrt.onnx", "score.onnx"])
def test_b12_fusions_change_nothing(file: str, exported: Export) -> None:
    """All of them against none, on each f32 graph of any length."""
    path = exported("qwen3_bias").folder / file
    none, every = (logits_at(path, level) for level in ("DISABLE_ALL", "ENABLE_ALL"))
    assert_close(every, none, F32_ORDER)


def test_b12_quantized_graphs_too(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", QWEN3_BIAS)
    path = exported_as(tmp_path / "m", tmp_path / "out", dtype="int8") / "prefill.onnx"
    none, every = (logits_at(path, level) for level in ("DISABLE_ALL", "ENABLE_ALL"))
    assert difference(every, none) < 0.05


def test_b12_one_rewriting_can_be_left_out() -> None:
    """Every level, and no fusion at all, gives the same text; a level that is none is refused."""
    asked = ("run", tiny(), "-p", "What is 3 plus 4?", "--provider", "cpu")
    for options in (
        *(("--optimization-level", level) for level in ("disabled", "basic", "extended", "all")),
        ("--disable-optimizer", "SkipLayerNormFusion", "--disable-optimizer", "ConstantFolding"),
    ):
        assert command(*asked, *options).out == "3 plus 4 is 7.\n"
    assert "--optimization-level 'most'" in command(*asked, "--optimization-level", "most").error


def test_b12_the_options_reach_onnx_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = onnxruntime.InferenceSession.__init__

    def note(self: Any, path: str, settings: Any, **more: Any) -> None:
        seen.append((settings.graph_optimization_level, more["disabled_optimizers"]))
        real(self, path, settings, **more)

    monkeypatch.setattr(onnxruntime.InferenceSession, "__init__", note)
    options = SessionOptions(provider="cpu", optimization_level="basic", disabled_optimizers=("GeluFusion",))
    Runner(tiny(), options)
    assert set(map(str, seen)) == {str((onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC, {"GeluFusion"}))}


@pytest.mark.parametrize(
    ("harmful", "said"), [("extended", "right with --optimization-level basic"), ("", "no less")]
)
def test_b12_check_finds_the_level_that_did_harm(
    harmful: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the highest level at which the ids are right, or says that none is."""
    folder = copy_export(tiny(), tmp_path / "out")
    assert command("check", folder, "--provider", "cpu").code == 0
    real = check.check_golden
    harmless = ("disabled", "basic") if harmful else ()

    def judged(chat: Chat, manifest: Any) -> Any:
        found = real(chat, manifest)
        return dataclasses.replace(found, ok=chat.runner.options.optimization_level in harmless)

    monkeypatch.setattr(check, "check_golden", judged)
    ran = command("check", folder, "--provider", "cpu")
    assert ran.code == 1
    assert said in ran.out
