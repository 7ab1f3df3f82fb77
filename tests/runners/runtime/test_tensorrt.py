"""TensorRT's shape ranges, engine folders and options. What they do on hardware is not tested here."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qwen_onnx import UserError
from qwen_onnx.contract import ATTENTION_MASK, BATCH, INPUT_IDS, POSITION_IDS, SEQUENCE
from qwen_onnx.contract.manifest import TensorSpec
from qwen_onnx.runners.runtime.nvidia import tensorrt
from qwen_onnx.runners.runtime.nvidia.tensorrt import Profile
from qwen_onnx.runners.runtime.session import import_onnxruntime
from support.exports import past_names

PROVIDER = "TensorrtExecutionProvider"
MIN, OPT, MAX = (f"trt_profile_{kind}_shapes" for kind in ("min", "opt", "max"))
COUNTS = st.integers(1, 1 << 20)


def graph_inputs(layers: int = 2, heads: int = 2) -> tuple[TensorSpec, ...]:
    """Of a graph in the portable lowering, as its manifest lists them."""
    total = "past_sequence_length + sequence_length"
    cache = (BATCH, heads, "past_sequence_length", 64)
    return (
        TensorSpec(INPUT_IDS, "int64", (BATCH, SEQUENCE)),
        TensorSpec(ATTENTION_MASK, "int64", (BATCH, total)),
        TensorSpec(POSITION_IDS, "int64", (BATCH, SEQUENCE)),
        *(TensorSpec(name, "float16", cache) for name in past_names(layers)),
    )


def parse(option: str) -> dict[str, list[int]]:
    """As ONNX Runtime reads it: cut at commas, then at the colon, then at each x."""
    shapes = {}
    for part in option.split(","):
        name, shape = part.split(":")
        assert name not in shapes, "twice would be a second profile"
        shapes[name] = [int(length) for length in shape.split("x")]
    return shapes


def refused(options: dict[str, str]) -> str:
    """What ONNX Runtime's binding has against the options; nothing of it needs TensorRT's libraries."""
    try:
        import_onnxruntime().SessionOptions().add_provider(PROVIDER, options)
    except Exception as error:  # without TensorRT it fails after it has read the options
        fault = re.search(r"Invalid TensorRT EP option.*|\[ERROR\] \[TensorRT\].*", str(error))
        return fault.group() if fault else ""
    return ""


@given(layers=st.integers(1, 8), heads=st.integers(1, 16), capacity=COUNTS, chunk=COUNTS, batch=COUNTS)
def test_one_profile_holds_every_run(layers: int, heads: int, capacity: int, chunk: int, batch: int) -> None:
    """Of every input with a free length: a run outside it would rebuild the engine for minutes."""
    inputs = graph_inputs(layers, heads)
    ranges = tensorrt.profile(inputs, capacity=capacity, prefill_chunk=chunk, batch_size=batch)
    options = {option: parse(value) for option, value in tensorrt.profile_options(ranges).items()}
    assert set(options) == {MIN, OPT, MAX}
    for shapes in options.values():
        assert list(shapes) == [spec.name for spec in inputs]
        new, past = shapes[INPUT_IDS][1], shapes[past_names(1)[0]][2]
        assert shapes[ATTENTION_MASK] == [batch, past + new]
        assert shapes[INPUT_IDS] == shapes[POSITION_IDS] == [batch, new]
        for name in past_names(layers):
            assert shapes[name] == [batch, heads, past, 64]
    for name in options[MIN]:
        triples = zip(options[MIN][name], options[OPT][name], options[MAX][name], strict=True)
        assert all(low <= best <= high for low, best, high in triples)
    cache = past_names(1)[0]
    assert (options[MIN][cache][2], options[MAX][cache][2]) == (0, capacity)
    assert (options[MIN][INPUT_IDS][1], options[MAX][INPUT_IDS][1]) == (1, chunk)


@pytest.mark.parametrize(("capacity", "past"), [(1, 1), (2, 1), (3, 2), (4096, 2048)])
def test_engines_are_tuned_for_decode(capacity: int, past: int) -> None:
    """Single tokens are what most runs compute."""
    ranges = tensorrt.profile(graph_inputs(1), capacity=capacity, prefill_chunk=512)
    assert tensorrt.profile_options(ranges)[OPT] == (
        f"input_ids:1x1,attention_mask:1x{past + 1},position_ids:1x1,"
        f"past_key_values.0.key:1x2x{past}x64,past_key_values.0.value:1x2x{past}x64"
    )


def test_fixed_inputs_are_in_no_profile() -> None:
    """ONNX Runtime would count one input more than are dynamic, and build again."""
    fixed = TensorSpec("scale", "float32", (1, 4))
    ranges = tensorrt.profile((fixed, *graph_inputs()), capacity=8, prefill_chunk=4)
    assert all("scale" not in option for option in tensorrt.profile_options(ranges).values())


@pytest.mark.parametrize("number", [0, -1])
@pytest.mark.parametrize("name", ["capacity", "prefill_chunk", "batch_size"])
def test_impossible_ranges_are_refused(name: str, number: int) -> None:
    numbers = {"capacity": 8, "prefill_chunk": 4, "batch_size": 1} | {name: number}
    with pytest.raises(UserError, match=f"a {name.replace('_', ' ')} of {number} found, 1 or more wanted"):
        tensorrt.profile(graph_inputs(), **numbers)


def test_an_unknown_dimension_is_named() -> None:
    """As of a graph of another lowering."""
    inputs = (*graph_inputs(), TensorSpec("cache", "float16", (BATCH, 2, "cache_capacity", 64)))
    with pytest.raises(UserError, match="input cache: dimension 'cache_capacity' found, one of batch_size"):
        tensorrt.profile(inputs, capacity=8, prefill_chunk=4)


@pytest.mark.parametrize("name", ["past:0", "a,b", ""])
def test_a_name_that_breaks_the_syntax_is_refused(name: str) -> None:
    """ONNX Runtime would cut it, and find no range for the input."""
    ranges = tensorrt.profile((TensorSpec(name, "int64", (BATCH,)),), capacity=8, prefill_chunk=4)
    with pytest.raises(UserError, match="without ':' and ','"):
        tensorrt.profile_options(ranges)


def key(**changes: Any) -> dict[str, Any]:
    """Everything that an engine depends on, with some of it changed."""
    return {
        "graph_sha256": "a" * 64,
        "weights_sha256": {"weights.safetensors": "b" * 64, "extra.safetensors": "c" * 64},
        "tensorrt_version": "10.13.2",
        "gpu": "NVIDIA H200",
        "compute_capability": "9.0",
        "onnxruntime_version": "1.31.1",
        "profile": tensorrt.profile(graph_inputs(), capacity=8, prefill_chunk=4),
    } | changes


def other_profiles() -> list[Profile]:
    """Each differs from the one of `key` in one of its three shapes."""
    ranges: Profile = key()["profile"]
    fields = {field.name: getattr(ranges, field.name) for field in dataclasses.fields(Profile)}
    return [Profile(**fields | {name: {**shapes, INPUT_IDS: (1, 3)}}) for name, shapes in fields.items()]


CHANGES: list[dict[str, Any]] = [
    {"graph_sha256": "d" * 64},
    {"weights_sha256": {"weights.safetensors": "d" * 64, "extra.safetensors": "c" * 64}},
    {"weights_sha256": {"weights.safetensors": "c" * 64, "extra.safetensors": "b" * 64}},
    {"weights_sha256": {"weights.safetensors": "b" * 64}},
    {"tensorrt_version": "10.13.2 "},
    {"gpu": "NVIDIA H100"},
    {"gpu": "NVIDIA-H200"},
    {"compute_capability": "9.0 "},
    {"onnxruntime_version": "1.32.0"},
    *({"profile": ranges} for ranges in other_profiles()),
]


def test_the_same_engine_has_the_same_folder() -> None:
    """It is found at the next start, and not built again."""
    folder = tensorrt.engine_folder(Path("cache"), **key())
    weights = dict(reversed(key()["weights_sha256"].items()))
    assert folder == tensorrt.engine_folder(Path("cache"), **key(weights_sha256=weights))
    assert folder.parent == Path("cache")
    assert re.fullmatch(r"trt10\.13\.2-sm9\.0-NVIDIA-H200-[0-9a-f]{16}", folder.name)


def test_each_change_is_another_folder() -> None:
    """No engine of other weights, or of another GPU, is taken for this one."""
    folders = {tensorrt.engine_folder(Path("cache"), **key(**change)) for change in [{}, *CHANGES]}
    assert len(folders) == len(CHANGES) + 1


@given(gpu=st.text(), version=st.text(), capability=st.text())
@example(gpu="G" * 300, version="1" * 300, capability="9" * 300)
def test_any_name_makes_a_safe_folder(gpu: str, version: str, capability: str) -> None:
    """A GPU may be called `Quadro RTX 6000/8000`, and a driver may say nothing."""
    changes = {"gpu": gpu, "tensorrt_version": version, "compute_capability": capability}
    folder = tensorrt.engine_folder(Path("cache"), **key(**changes))
    assert folder.parent == Path("cache")
    assert re.fullmatch(r"trt[A-Za-z0-9.-]{0,130}-[0-9a-f]{16}", folder.name)


@pytest.mark.parametrize("name", ["plain", "two words", "für 日本", "a,b:c;d=e", "100%'\"$x"])
def test_paths_reach_the_provider_as_they_are(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.platform", "linux")
    for folder in (tmp_path / name, Path(name)):
        options = tensorrt.tensorrt_options(folder, key()["profile"])
        assert options["trt_engine_cache_path"] == options["trt_timing_cache_path"] == str(tmp_path / name)


def test_a_path_that_the_provider_cannot_open_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows it reads names in the code page, and would find no engine."""
    with pytest.raises(UserError, match="set QWEN_ONNX_ENGINES to a plain one"):
        tensorrt.tensorrt_options(Path(os.fsdecode(b"latin-\xfc")), key()["profile"])
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(UserError, match="set QWEN_ONNX_ENGINES to a plain one"):
        tensorrt.tensorrt_options(Path("/für"), key()["profile"])
    assert tensorrt.tensorrt_options(Path("/a b"), key()["profile"])


def test_engines_and_timings_are_kept_and_no_precision_is_named() -> None:
    """TensorRT 11 has no flags for precision: the graph's own types hold."""
    options = tensorrt.tensorrt_options(Path("/cache"), key()["profile"])
    assert options["trt_engine_cache_enable"] == options["trt_timing_cache_enable"] == "True"
    assert options["trt_engine_cache_prefix"] == "qwen"
    assert options | tensorrt.profile_options(key()["profile"]) == options
    assert not [name for name in options if re.search("fp16|bf16|int8|precision", name)]
    larger = tensorrt.tensorrt_options(Path("/cache"), key()["profile"], workspace=1 << 33)
    assert larger == options | {"trt_max_workspace_size": "8589934592"}
    assert all(isinstance(value, str) for value in larger.values())
    with pytest.raises(UserError, match="a TensorRT workspace of 0 bytes found"):
        tensorrt.tensorrt_options(Path("/cache"), key()["profile"], workspace=0)


@pytest.mark.gpu_wheel
@pytest.mark.skipif(
    PROVIDER not in import_onnxruntime().get_available_providers(),
    reason="this onnxruntime is built without the TensorRT provider",
)
def test_onnxruntime_takes_every_option(tmp_path: Path) -> None:
    """Its own parser is asked; of one that it does not know, no session would open."""
    options = tensorrt.tensorrt_options(tmp_path / "two words", key()["profile"], workspace=1 << 30)
    assert refused(options) == ""
    assert refused(options | {"trt_nonsense": "1"}) == "Invalid TensorRT EP option: trt_nonsense"
    assert "should be 'True' or 'False'" in refused(options | {"trt_engine_cache_enable": "1"})
    capi = Path(import_onnxruntime().__file__).parent / "capi"
    for library in capi.glob("*onnxruntime_providers_tensorrt.*"):
        content = library.read_bytes()
        assert not [name for name in options if name.encode() not in content]


def test_only_engine_files_are_engines(tmp_path: Path) -> None:
    assert tensorrt.cached_engines(tmp_path / "missing") == []
    names = ["qwen_12_1_0_sm90.engine", "qwen_12_0_0_sm90.engine"]
    for name in (*names, "qwen_12_0_0_sm90.profile", "TensorrtExecutionProvider_cache_sm90.timing"):
        (tmp_path / name).write_bytes(b"1")
    (tmp_path / "folder.engine").mkdir()
    assert [path.name for path in tensorrt.cached_engines(tmp_path)] == sorted(names)
    with pytest.raises(UserError, match=names[0]):
        tensorrt.cached_engines(tmp_path / names[0])


def test_an_engine_written_again_was_built(tmp_path: Path) -> None:
    """It is not reported as cached because a file was there before."""
    engine = tmp_path / "qwen_12_0_0_sm90.engine"
    empty = tensorrt.engine_stamps(tmp_path)
    assert tensorrt.engine_state(empty, empty) == "none"
    engine.write_bytes(b"1")
    os.utime(engine, ns=(0, 1_000))
    first = tensorrt.engine_stamps(tmp_path)
    assert tensorrt.engine_state(empty, first) == "built"
    assert tensorrt.engine_state(first, tensorrt.engine_stamps(tmp_path)) == "cached"
    os.utime(engine, ns=(0, 2_000_000_000))
    again = tensorrt.engine_stamps(tmp_path)
    assert tensorrt.engine_state(first, again) == "built"
    (tmp_path / "qwen_12_1_0_sm90.engine").write_bytes(b"1")
    assert tensorrt.engine_state(again, tensorrt.engine_stamps(tmp_path)) == "built"


def test_engines_lie_in_the_users_cache_or_where_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(tensorrt.ENGINES_VARIABLE, raising=False)
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name, *, appauthor: tmp_path / name)
    assert tensorrt.default_engine_cache() == tmp_path / "qwen-onnx" / "engines"
    monkeypatch.setenv(tensorrt.ENGINES_VARIABLE, str(tmp_path / "my engines"))
    assert tensorrt.default_engine_cache() == tmp_path / "my engines"
    monkeypatch.setenv(tensorrt.ENGINES_VARIABLE, "~/engines")
    assert tensorrt.default_engine_cache() == Path.home() / "engines"
