"""int8 and int4 exports: what lies in the file, what the graphs make of it, and what a user is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import psutil
import pytest

from qwen_onnx import UserError, contract, export, load
from qwen_onnx.checkpoints.checkpoint import open_checkpoint
from qwen_onnx.checkpoints.safetensors_file import read_header
from qwen_onnx.cli.completion import complete
from qwen_onnx.contract.manifest import read_manifest
from qwen_onnx.contract.quant import QuantConfig
from qwen_onnx.exports.quantization.blocks import Blocks, dequantize
from qwen_onnx.reference import reference_logits
from qwen_onnx.runners.model import buffers, open_graph
from qwen_onnx.runners.model.executors import two_graphs
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime import providers
from support.chats import copy_export, tiny
from support.checkpoints import CONFIGS, write_checkpoint
from support.command import command
from support.damage import change_manifest, forge
from support.exports import IDS, ON_CPU, decode_all, past_names
from support.int8_products import assert_as_a_kernel, reference_in_int8
from support.tolerances import F32, INT8_EDGE, assert_close

TOKENS = 24
CASES = [
    ("qwen2", "int8", 32),
    ("qwen2", "int4", 32),
    ("qwen2_untied", "int4", 128),  # rows of 64 weights, so that blocks are no longer than that
    ("qwen2_14_2", "int4", 16),
    ("qwen3", "int8", 128),
    ("qwen3_head_dim_48", "int4", 64),
]


class Quantized:
    """An export, and the float64 logits of the weights that its bytes stand for."""

    def __init__(self, folder: Path, name: str, dtype: str, block_size: int) -> None:
        write_checkpoint(folder / "checkpoint", CONFIGS[name])
        self.checkpoint = open_checkpoint(folder / "checkpoint")
        self.folder = export(
            folder / "checkpoint", folder / "export", dtype=dtype, block_size=block_size
        ).folder
        self.manifest = read_manifest(self.folder)
        self.stored = read_header(self.folder / contract.WEIGHTS_FILE)

    def read(self, name: str) -> np.ndarray:
        if (quant := self.manifest.quantized.get(name)) is None:
            return self.stored[name].numpy()
        stem, columns = name.removesuffix("weight"), self.checkpoint.tensors[name].shape[1]
        zero_points = self.stored[stem + "zero_points"].numpy() if quant.zero_points else None
        blocks = Blocks(
            self.stored[stem + "qweight"].numpy(), self.stored[stem + "scales"].numpy(), zero_points
        )
        return dequantize(blocks, columns, quant)

    def wanted(self, ids: np.ndarray) -> np.ndarray:
        return reference_logits(self.checkpoint.config, self.read, ids)

    def wanted_in_int8(self, ids: np.ndarray) -> np.ndarray:
        """As the CPU's kernels are to compute it."""
        block_size = max(quant.block_size for quant in self.manifest.quantized.values())
        with reference_in_int8(block_size):
            return self.wanted(ids)


@pytest.fixture(scope="module")
def exported_blocks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Quantized]:
    made: dict[tuple[Any, ...], Quantized] = {}

    def make(*case: Any) -> Quantized:
        if case not in made:
            made[case] = Quantized(tmp_path_factory.mktemp("blocks"), *case)
        return made[case]

    return make


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_graphs_compute_with_the_weights_in_the_file(
    case: tuple[str, str, int], exported_blocks: Callable[..., Quantized], tmp_path: Path
) -> None:
    """With f32 activations, and with those of 8 bits where the oracle rounds them too."""
    model = exported_blocks(*case)
    ids = IDS[0, :TOKENS]
    wanted = model.wanted(ids)
    folder = copy_export(model.folder, tmp_path / "exact")
    for name in ("prefill", "decode", "greedy", "score", "decode.grouped"):
        path = folder / f"{name}.onnx"
        graph = onnx.load(path, load_external_data=False)
        for node in graph.graph.node:
            for attribute in node.attribute:
                if attribute.name == "accuracy_level":
                    attribute.i = 0
        onnx.save(graph, path)
    forge(folder)
    found = {}
    for at in (folder, model.folder):
        runner = Runner(at, ON_CPU)
        cache = runner.new_cache()
        rows = [runner.prefill(cache, IDS[:1, :10]), *decode_all(runner, cache, IDS[:1, 10:TOKENS])]
        found[at] = np.concatenate(rows)
    assert_close(found[folder], wanted[9:], F32)
    assert_as_a_kernel(found[model.folder], model.wanted_in_int8(ids)[9:], wanted[9:])
    layers = model.manifest.num_hidden_layers
    session = onnxruntime.InferenceSession(str(folder / "decode.onnx"), providers=["CPUExecutionProvider"])
    graph = model.manifest.graph("decode", "cpu")
    spec = graph.inputs[-1]
    shape = (1, int(spec.shape[1]), 4, int(spec.shape[3]))
    of_lowering = {
        "static": {
            contract.ATTENTION_MASK: np.ones((1, 1), np.int64),
            contract.POSITION_IDS: np.zeros((1, 1), np.int64),
            contract.WRITE_INDICES: np.zeros(1, np.int64),
        },
        "contrib": {
            contract.SEQLENS_K: np.zeros(1, np.int32),
            contract.TOTAL_SEQUENCE_LENGTH: np.array(1, np.int32),
        },
    }
    assert graph.lowering == ("static" if spec.shape[3] % 16 else "contrib")
    inputs = of_lowering[graph.lowering] | {contract.INPUT_IDS: IDS[:1, :1]}
    inputs |= {name: np.zeros(shape, np.float32) for name in past_names(layers)}
    assert_close(session.run([contract.LOGITS], inputs)[0][:, 0], wanted[:1], F32)


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_matrices_lie_in_blocks_and_once(
    case: tuple[str, str, int], exported_blocks: Callable[..., Quantized]
) -> None:
    """No float copy lies beside the integers, no second copy of a tied head; the manifest has each QuantConfig."""
    model, (_, dtype, block_size) = exported_blocks(*case), case
    matrices = {name for name, tensor in model.checkpoint.tensors.items() if len(tensor.shape) == 2}
    assert model.manifest.quantized.keys() == matrices
    bits = contract.QUANTIZED[dtype]
    for name in matrices:
        stem, shape = name.removesuffix("weight"), model.checkpoint.tensors[name].shape
        size = min(block_size, shape[1] & -shape[1])
        assert model.manifest.quantized[name] == QuantConfig(bits, size, bits == 4, "F16")
        count = shape[1] // size
        assert model.stored[stem + "qweight"].shape == (shape[0], count * size * bits // 8)
        assert model.stored[stem + "scales"].shape == (shape[0], count)
        if bits == 4:
            assert model.stored[stem + "zero_points"].shape == (shape[0], -(-count // 2))
        assert name not in model.stored
    others = model.checkpoint.tensors.keys() - matrices
    assert model.stored.keys() - {"rotary.cos", "rotary.sin"} == others | {
        name.removesuffix("weight") + part
        for name in matrices
        for part in ("qweight", "scales", "zero_points")
        if bits == 4 or part != "zero_points"
    }
    assert ("lm_head.qweight" in model.stored) is not model.checkpoint.config.tie_word_embeddings


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_greedy_on_device_chooses_as_the_host(dtype: str, exported_blocks: Callable[..., Quantized]) -> None:
    folder = exported_blocks("qwen2", dtype, 32).folder
    ids = [
        [
            token.token_id
            for token in load(folder, provider="cpu", greedy_on_device=on_device).generate(
                [5, 6, 7], max_new_tokens=24, ignore_eos=True
            )
        ]
        for on_device in (False, True)
    ]
    assert ids[0] == ids[1]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_long_contexts_go_on_where_short_ones_ended(
    case: tuple[str, str, int], exported_blocks: Callable[..., Quantized], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two graphs go on with one cache, before and after its buffers grow."""
    model = exported_blocks(*case)
    monkeypatch.setattr(two_graphs, "LONG", 12)
    monkeypatch.setattr(buffers, "SMALLEST_CAPACITY", 8)
    opened: list[str] = []
    real = open_graph.open_session
    monkeypatch.setattr(
        open_graph, "open_session", lambda path, *a, **b: opened.append(path.name) or real(path, *a, **b)
    )
    runner = Runner(model.folder, ON_CPU)
    cache = runner.new_cache()
    in_int8, in_f32 = model.wanted_in_int8(IDS[0, :40]), model.wanted(IDS[0, :40])
    found = [runner.prefill(cache, IDS[:1, :10]), *decode_all(runner, cache, IDS[:1, 10:30])]
    found += [runner.prefill(cache, IDS[:1, 30:35]), *decode_all(runner, cache, IDS[:1, 35:40])]
    at = [9, *range(10, 30), 34, *range(35, 40)]
    assert_as_a_kernel(np.concatenate(found), in_int8[at], in_f32[at])
    fused = runner.graph.lowering == "contrib"
    assert opened.count("decode.grouped.onnx") == (1 if fused else 0)
    cache.truncate(3)
    again = np.concatenate(decode_all(runner, cache, IDS[:1, 3:20]))
    assert_as_a_kernel(again, in_int8[3:20], in_f32[3:20])


def test_where_memory_is_short_one_graph_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second graph, which takes the weights' memory once more, is not opened."""
    monkeypatch.setattr(two_graphs, "LONG", 12)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    ids = IDS[:1, :40]
    found = []
    for batch_size in (1, 2):  # several rows stay on it in any case
        runner = Runner(tiny("int8"), ON_CPU)
        cache = runner.new_cache(batch_size=batch_size)
        rows = np.repeat(ids, batch_size, axis=0)
        found.append(np.concatenate([x[:1] for x in decode_all(runner, cache, rows)]))
        assert runner.executor._long is None
    assert_close(found[0], found[1], INT8_EDGE)


@pytest.mark.usefixtures("few_windows")
def test_a_head_in_more_bits_than_the_layers(tmp_path: Path) -> None:
    folder = export("tiny", tmp_path / "out", dtype="int4", head_bits=8).folder
    quantized = read_manifest(folder).quantized
    assert quantized["model.embed_tokens.weight"] == QuantConfig(8, 64, False, "F16")
    assert quantized["model.layers.0.mlp.up_proj.weight"] == QuantConfig(4, 64, True, "F16")  # rows of 192
    assert command("check", folder, "--against", "tiny").code == 0
    ran = command("run", folder, "-p", "What is the capital of France?", "--provider", "cpu")
    assert ran.out == "The capital of France is Paris.\n"


@pytest.mark.usefixtures("few_windows")
def test_a_head_in_blocks_of_its_own(tmp_path: Path) -> None:
    """--head-block-size counts for embedding and head, --block-size for the layers."""
    ran = command(
        "export", "tiny", tmp_path / "out", "--dtype", "int4", "--block-size", 128, "--head-block-size", 32
    )
    assert ran.code == 0
    quantized = read_manifest(tmp_path / "out").quantized
    assert quantized["model.embed_tokens.weight"] == QuantConfig(4, 32, True, "F16")
    assert quantized["model.layers.0.mlp.up_proj.weight"] == QuantConfig(4, 64, True, "F16")  # rows of 192
    assert command("check", tmp_path / "out", "--against", "tiny").code == 0


def test_the_head_has_smaller_blocks_than_the_layers() -> None:
    """They lose the most at the least cost; where nothing is calibrated, int4 has small ones everywhere."""
    for dtype, wanted in (("int8", {64, 32}), ("int4", {128, 64})):
        assert {quant.block_size for quant in read_manifest(tiny(dtype)).quantized.values()} == wanted


HELD_OUT = json.loads(Path(__file__).parents[1].joinpath("tiny").joinpath("held_out.json").read_text())


@pytest.mark.parametrize(("dtype", "least", "answers"), [("int8", 0.99, 40), ("int4", 0.95, 38)])
@pytest.mark.thorough
def test_held_out_text_of_tiny(dtype: str, least: float, answers: int) -> None:
    """Top-1 agreement with f32 at every position of the held-out chats, and their answers as f32 gives them."""
    plain, quantized = (load(tiny(kind), provider="cpu", threads=1) for kind in ("f32", dtype))
    agree, same = [], 0
    for item in HELD_OUT:
        ids = plain.prompt_ids(item["messages"]) + plain.tokenizer.encode(item["answer"])
        best = []
        for chat in (plain, quantized):
            cache = chat.runner.new_cache()
            first = chat.runner.prefill(cache, np.array([ids[:1]]))
            best.append(
                np.concatenate([first, *decode_all(chat.runner, cache, np.array([ids[1:]]))]).argmax(-1)
            )
        agree.append(best[0] == best[1])
        texts = [complete(chat, item["messages"], {"max_new_tokens": 64}).text for chat in (plain, quantized)]
        same += texts[0] == texts[1]
    assert np.concatenate(agree).mean() >= least
    assert same >= answers


@pytest.mark.parametrize(("dtype", "kl"), [("int8", 1e-3), ("int4", 1e-1)])
def test_check_reports_what_quantizing_cost(dtype: str, kl: float, tmp_path: Path) -> None:
    folder = copy_export(tiny(dtype), tmp_path / "tiny")
    ran = command("check", folder, "--against", "tiny")
    assert ran.code == 0, ran.err
    line, of_weights = (line for line in ran.err.splitlines() if "quality:" in line)
    assert "rounded weights alone" in of_weights
    assert float(line.partition("KL ")[2].split()[0]) < kl
    how = "bit for bit" if dtype == "int8" else "calibrated, each matrix near its own"
    assert f"weights: the checkpoint's, as {dtype}, {how}" in ran.err
    weights = folder / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    place = read_header(weights)["model.layers.2.mlp.up_proj.scales"]
    data[place.offset + 3] ^= 0x40
    weights.write_bytes(bytes(data))
    assert command("check", folder, "--against", "tiny").code == 1


def test_a_chat_in_four_bits_answers() -> None:
    ran = command("run", tiny("int4"), "-p", "What is the capital of France?", "--provider", "cpu")
    assert ran.out == "The capital of France is Paris.\n"
    assert "matrices to 4 bits in blocks of 128 with zero points" in command("info", tiny("int4")).out


def test_wrong_options_are_refused_in_one_line(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for arguments, words in (
        (("--dtype", "int4", "--block-size", "48"), "--block-size 48: one of 16, 32, 64, 128 wanted"),
        (("--dtype", "f16", "--block-size", "32"), "--block-size is for int8 and int4"),
        (("--dtype", "bf16", "--head-bits", "8"), "--head-bits is for int8 and int4"),
        (("--dtype", "f32", "--head-block-size", "32"), "--head-block-size is for int8 and int4"),
        (("--dtype", "int4", "--head-block-size", "48"), "--head-block-size 48: one of 16, 32, 64, 128"),
        (("--dtype", "int4", "--head-bits", "3"), "--head-bits 3: one of 4, 8 wanted"),
        (("--dtype", "int2"), "--dtype 'int2': one of f32, f16, bf16, int8, int4 wanted"),
        (("--dtype", "int8", "--link"), "drop --link"),
    ):
        assert words in command("export", "tiny", out, *arguments).error
    assert not out.exists()
    with pytest.raises(UserError, match="block_size 0: one of 16, 32, 64, 128 wanted"):
        export("tiny", out, dtype="int8", block_size=0)


def test_auto_is_the_cpu_where_an_export_has_no_other_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export that runs on a CPU does so in a machine with a GPU too."""
    folder = copy_export(tiny("int4"), tmp_path / "tiny")
    graphs = read_manifest(folder).graphs
    change_manifest(folder, graphs=tuple(graph for graph in graphs if "cpu" in graph.providers))
    monkeypatch.setattr(providers, "missing_library", lambda provider: None)
    ran = command("run", folder, "-p", "Hi", "--max-new-tokens", 2)
    assert (ran.code, ran.err) == (0, "provider: cpu\n")
    assert "no prefill graph for cuda" in command("run", folder, "-p", "Hi", "--provider", "cuda").error


def test_a_matrix_with_nan_is_named(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path / "checkpoint", CONFIGS["qwen2"])
    file = tmp_path / "checkpoint" / "model.safetensors"
    name = "model.layers.1.mlp.down_proj.weight"
    data, place = bytearray(file.read_bytes()), read_header(file)[name]
    data[place.offset : place.offset + 4] = np.float32("nan").tobytes()
    file.write_bytes(bytes(data))
    assert tensors[name].dtype == np.float32
    with pytest.raises(UserError, match=rf"{name}: .*NaN"):
        export(tmp_path / "checkpoint", tmp_path / "out", dtype="int8")
    assert not (tmp_path / "out").exists()


def test_prompts_go_in_small_chunks_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 tokens at a time are as fast as 512, and their activations take less memory."""
    write_checkpoint(tmp_path / "checkpoint", CONFIGS["qwen2"] | {"max_position_embeddings": 512})
    ids = np.resize(IDS[:1], (1, 300))
    runs: list[int] = []
    real = onnxruntime.InferenceSession.run_with_iobinding

    def count(session: Any, binding: Any, options: Any = None) -> None:
        runs.append(session.get_inputs()[0].name == "input_ids")
        real(session, binding, options)

    monkeypatch.setattr(onnxruntime.InferenceSession, "run_with_iobinding", count)
    for dtype, wanted in (("int8", 3), ("f32", 1)):
        runner = Runner(export(tmp_path / "checkpoint", tmp_path / dtype, dtype=dtype).folder, ON_CPU)
        runs.clear()
        runner.prefill(runner.new_cache(), ids)
        assert sum(runs) == wanted
