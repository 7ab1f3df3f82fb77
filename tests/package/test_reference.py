"""The reference is the oracle, so it is itself checked: by hand here, and against transformers where marked."""

from __future__ import annotations

import dataclasses
import math
import tracemalloc
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from qwen_onnx import reference
from qwen_onnx.checkpoints.config import QwenConfig, parse_config
from qwen_onnx.reference import (
    linear,
    reference_logits,
    rms_norm,
    rope_cos_sin,
    rope_frequencies,
    rotate,
    silu,
    softmax,
)
from support.checkpoints import (
    CONFIGS,
    QWEN2,
    QWEN2_UNTIED,
    QWEN2_YARN,
    QWEN3,
    QWEN3_BIAS,
    RawConfig,
    random_tensors,
    write_checkpoint,
)

IDS = np.random.default_rng(7).integers(0, 320, 97)

QWEN2_5_7B_YARN: RawConfig = {
    **QWEN2,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 32_768,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
}


def max_difference(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    assert np.isfinite(a).all()
    assert np.isfinite(b).all()
    return float(np.abs(a - b).max())


# The pieces, by hand.


def test_rms_norm_of_a_known_vector() -> None:
    # Mean square 12.5, with eps 25: the root is 5.
    x, weight = np.array([[3.0, 4.0], [-3.0, 4.0]]), np.array([1.0, 10.0], np.float16)
    np.testing.assert_allclose(rms_norm(x, weight, eps=12.5), [[0.6, 8.0], [-0.6, 8.0]], rtol=1e-15)


def test_rms_norm_of_zeros_is_zero_and_not_nan() -> None:
    assert not rms_norm(np.zeros((2, 4)), np.ones(4), eps=1e-6).any()


def test_silu_is_exact_where_the_textbook_formula_overflows() -> None:
    x = np.array([-1e4, -710.0, -30.0, -1.0, 0.0, 1.0, 1e4])
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        y = silu(x)
    want = [0.0, 0.0, -2.8072868906517897e-12, -0.26894142136999512, 0.0, 0.73105857863000488, 1e4]
    np.testing.assert_allclose(y, want, rtol=1e-15, atol=1e-300)


def test_softmax_takes_scores_of_any_size_and_masked_ones() -> None:
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        y = softmax(np.array([[1e5, 1e5 - math.log(3), -np.inf], [-1e5, -np.inf, -np.inf]]))
    # 1e-10: the logarithm was added to a number of 1e5.
    np.testing.assert_allclose(y, [[0.75, 0.25, 0.0], [1.0, 0.0, 0.0]], rtol=1e-10)


def test_linear_is_the_same_in_row_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(5, 8)), rng.normal(size=(23, 8)).astype(np.float32)
    bias = rng.normal(size=23).astype(np.float32)
    want = x @ weight.astype(np.float64).T + bias
    for elements in (1, 8 * 7, 8 * 23):  # one row at a time, a last block that is short, one block
        monkeypatch.setattr(reference, "_BLOCK_ELEMENTS", elements)
        assert max_difference(linear(x, weight, bias), want) < 1e-14  # the order of 8 additions


def test_no_whole_matrix_becomes_float64() -> None:
    weight = np.ones((20_000, 512), np.float16)  # 80 MB in float64
    tracemalloc.start()
    linear(np.ones((1, 512)), weight)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40e6


def test_swiglu_passes_the_gate_and_not_the_other_branch_through_silu() -> None:
    weights = {
        "mlp.gate_proj.weight": [[2.0]],
        "mlp.up_proj.weight": [[3.0]],
        "mlp.down_proj.weight": [[10.0]],
    }
    y = reference._mlp(lambda name: np.array(weights[name]), "mlp", np.array([[0.5]]))
    np.testing.assert_allclose(y, [[0.73105857863000488 * 1.5 * 10]], rtol=1e-15)  # silu(1) * 1.5 * 10


def test_attention_divides_scores_by_the_root_of_head_dim() -> None:
    """One head of 4, every projection the identity, no rotation: scores 0 and 4 become 0 and 2."""
    config = dataclasses.replace(
        parse_config({**QWEN2, "hidden_size": 4, "num_attention_heads": 1, "num_key_value_heads": 1}),
        qkv_bias=False,
    )
    x = np.array([[0.0, 1.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0]])
    y = reference._attention(config, lambda name: np.eye(4), "", x, np.ones((2, 2)), np.zeros((2, 2)))
    seen = 1 / (1 + math.exp(-2.0))
    want = np.array([[0.0, 1.0, 0.0, 0.0], [2 * seen, 1 - seen, 0.0, 0.0]])
    np.testing.assert_allclose(y, want, rtol=1e-14)


# The rotation.


def test_rotation_turns_half_pairs_counter_clockwise() -> None:
    """Dimension i pairs with i + H/2, and the sign of sin counts: a wrong choice would keep every norm."""
    cos, sin = np.cos([[0.5, 2.0]]), np.sin([[0.5, 2.0]])
    x = np.array([[[1.0, 0.0, 0.0, 1.0]]])  # pair 0 is (1, 0), pair 1 is (0, 1)
    want = [[[math.cos(0.5), -math.sin(2.0), math.sin(0.5), math.cos(2.0)]]]
    np.testing.assert_allclose(rotate(x, cos, sin), want, rtol=1e-15)


def test_default_frequencies_are_powers_of_theta() -> None:
    inv_freq, attention_factor = rope_frequencies(parse_config({**QWEN2, "head_dim": 8}))
    np.testing.assert_allclose(inv_freq, [1.0, 0.1, 0.01, 0.001], rtol=1e-15)
    assert attention_factor == 1.0


def test_linear_scaling_divides_every_frequency() -> None:
    raw = {**QWEN2, "head_dim": 8, "rope_scaling": {"type": "linear", "factor": 2.5}}
    inv_freq, attention_factor = rope_frequencies(parse_config(raw))
    np.testing.assert_allclose(inv_freq, [0.4, 0.04, 0.004, 0.0004], rtol=1e-15)
    assert attention_factor == 1.0


@pytest.mark.parametrize("name", ["qwen2", "qwen2_yarn"])
def test_rotation_keeps_norms_and_depends_on_distances_only(name: str) -> None:
    config = parse_config(CONFIGS[name])
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, 1, config.head_dim))

    def rotated(x: np.ndarray, position: int) -> np.ndarray:
        y: np.ndarray = rotate(x, *rope_cos_sin(config, np.array([position])))
        return y.reshape(-1)

    factor = rope_frequencies(config)[1]
    np.testing.assert_allclose(np.linalg.norm(rotated(q, 77)), factor * np.linalg.norm(q), rtol=1e-14)
    near, far = (rotated(q, 5 + shift) @ rotated(k, 2 + shift) for shift in (0, 100))
    np.testing.assert_allclose(near, far, rtol=1e-12)
    assert abs(near - rotated(q, 6) @ rotated(k, 2)) > 1e-3


@pytest.mark.parametrize(
    ("position", "pair", "cos", "sin"),
    [
        (0, 0, 1.1386294361119891, 0.0),
        (0, 63, 1.1386294361119891, 0.0),
        (32_767, 0, 1.1184339663385303, 0.2135004817815865),
        (32_767, 23, -0.88671450777458449, 0.7142929192444669),
        (32_767, 30, -1.0814001244519898, -0.35644180957896511),
        (32_767, 40, 0.12960682399777613, 1.1312290059726703),
        (32_767, 63, 1.138570605678132, 0.011574483419916939),
        (40_000, 0, 0.3673075931766334, 1.0777579156635756),
        (40_000, 23, -1.0154173069523408, 0.5151744224263874),
        (40_000, 30, 0.18470665598285637, -1.1235481493982966),
        (40_000, 40, -0.23455495363360354, 1.1142086727838032),
        (40_000, 63, 1.1385417669534305, 0.01412931998598888),
    ],
)
def test_yarn_as_qwen2_5_uses_it(position: int, pair: int, cos: float, sin: float) -> None:
    """Worked out apart, in 40 digits: pairs to 23 keep their frequency, pairs from 40 turn 4 times slower.

    The ramp's ends are 23.596 and 39.651 before rounding, and both cos and sin carry 0.1 ln 4 + 1.
    """
    cos_SR, sin_SR = rope_cos_sin(parse_config(QWEN2_5_7B_YARN), np.array([position]))
    # An angle of 40,000 radians has a rounding error of 4e-12 in float64.
    np.testing.assert_allclose([cos_SR[0, pair], sin_SR[0, pair]], [cos, sin], rtol=0, atol=1e-11)


def test_yarn_attention_factor() -> None:
    attention_factor = rope_frequencies(parse_config(QWEN2_5_7B_YARN))[1]
    assert attention_factor == pytest.approx(1.1386294361119891, rel=1e-15)
    assert attention_factor == pytest.approx(0.1 * math.log(4) + 1, rel=1e-15)


@pytest.mark.parametrize(
    ("theta", "original", "options", "ratio"),
    [
        # Ends at -2.0 and 1.4, so 0 and 2: halfway to a quarter is 0.625.
        (1e4, 32, {}, [1, 0.625, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25]),
        # Ends at -5.2 and 34.8, so 0 and head_dim - 1 = 15: three quarters are taken off in 15 steps.
        (2.0, 128, {}, [1, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65]),
        # Ends at 2.193 and 4.000 as they are: pair 3 goes 0.807 of the 1.806 in between.
        (1e4, 628, {"beta_fast": 8, "truncate": False}, [1, 1, 1, 0.665058, 0.25, 0.25]),
        # Both ends at 2.016: a step.
        (1e4, 128, {"beta_fast": 2, "beta_slow": 2, "truncate": False}, [1, 1, 1, 0.25, 0.25, 0.25]),
    ],
)
def test_yarn_ramp_by_hand(theta: float, original: int, options: RawConfig, ratio: list[float]) -> None:
    """The clamps of the ramp's ends, the ends not rounded, and a ramp of no width."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": original, **options}
    raw = {**QWEN2, "rope_theta": theta}
    scaled = rope_frequencies(parse_config({**raw, "rope_scaling": yarn}))[0]
    plain = rope_frequencies(parse_config(raw))[0]
    np.testing.assert_allclose((scaled / plain)[: len(ratio)], ratio, rtol=2e-6)  # six digits given


# The whole model.


@pytest.mark.parametrize("name", CONFIGS)
def test_reads_every_tensor_and_one_layer_at_a_time(name: str) -> None:
    """Biases, norms and head too; no two layers need be in memory at once."""
    raw = CONFIGS[name]
    tensors, order = random_tensors(raw), []

    def read(tensor: str) -> np.ndarray:
        order.append(tensor)
        return tensors[tensor]

    logits = reference_logits(parse_config(raw), read, IDS[:5])
    assert logits.shape == (5, raw["vocab_size"])
    assert logits.dtype == np.float64
    assert 3 < np.abs(logits).max() < 20
    assert set(order) == set(tensors)
    layers = [int(tensor.split(".")[2]) for tensor in order if ".layers." in tensor]
    assert layers == sorted(layers)


def test_a_tied_model_does_not_read_a_stored_head() -> None:
    tensors = random_tensors(QWEN2, lm_head="own")
    without = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    config = parse_config(QWEN2)
    want = reference_logits(config, without.__getitem__, IDS[:5])
    assert max_difference(reference_logits(config, tensors.__getitem__, IDS[:5]), want) == 0


@pytest.mark.parametrize("missing", ["lm_head.weight", "model.layers.1.self_attn.k_proj.bias"])
def test_a_missing_tensor_is_a_key_error(missing: str) -> None:
    tensors = random_tensors(QWEN2_UNTIED)
    del tensors[missing]
    with pytest.raises(KeyError, match=missing):
        reference_logits(parse_config(QWEN2_UNTIED), tensors.__getitem__, IDS[:5])


def test_takes_read_only_bfloat16_memory_maps(tmp_path: Path) -> None:
    tensors = random_tensors(QWEN3, dtype="BF16")

    def read(name: str) -> np.ndarray:
        tensor = tensors[name]
        tensor.tofile(tmp_path / name)
        return np.memmap(tmp_path / name, tensor.dtype, "r", shape=tensor.shape)

    config = parse_config(QWEN3)
    as_float64 = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    mapped = reference_logits(config, read, IDS[:9])
    assert type(mapped) is np.ndarray
    assert max_difference(mapped, reference_logits(config, as_float64.__getitem__, IDS[:9])) == 0


def test_no_overflow_with_weights_far_too_large() -> None:
    tensors = random_tensors(QWEN2, scale=1e3)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        logits = reference_logits(parse_config(QWEN2), tensors.__getitem__, IDS)
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_a_later_token_changes_no_earlier_logit(name: str) -> None:
    config, tensors = parse_config(CONFIGS[name]), random_tensors(CONFIGS[name])
    changed = IDS[:12].copy()
    changed[7] = (changed[7] + 1) % 320
    a, b = (reference_logits(config, tensors.__getitem__, ids) for ids in (IDS[:12], changed))
    assert max_difference(a[:7], b[:7]) == 0
    assert (np.abs(a - b).max(axis=-1)[7:] > 1e-3).all()


def test_a_prefix_has_the_logits_of_the_whole() -> None:
    config, tensors = parse_config(QWEN2), random_tensors(QWEN2)
    whole = reference_logits(config, tensors.__getitem__, IDS)
    prefix = reference_logits(config, tensors.__getitem__, IDS[:40].tolist())
    assert max_difference(prefix, whole[:40]) < 1e-12  # sums of another length are blocked differently


def test_grouped_heads_equal_full_heads_with_repeated_weights() -> None:
    """Query head n reads key/value head n // group; interleaved groups would differ."""
    tensors = random_tensors(QWEN3_BIAS)
    full = {**QWEN3_BIAS, "num_key_value_heads": QWEN3_BIAS["num_attention_heads"]}
    repeated = dict(tensors)
    for name, tensor in tensors.items():
        if ".k_proj." in name or ".v_proj." in name:
            heads = tensor.reshape(QWEN3_BIAS["num_key_value_heads"], QWEN3_BIAS["head_dim"], -1)
            repeated[name] = np.repeat(heads, 2, axis=0).reshape(-1, *tensor.shape[1:])
    grouped = reference_logits(parse_config(QWEN3_BIAS), tensors.__getitem__, IDS)
    want = reference_logits(parse_config(full), repeated.__getitem__, IDS)
    assert max_difference(grouped, want) < 1e-12  # matrices of another size are blocked differently


def test_last_returns_the_last_rows() -> None:
    config, tensors = parse_config(QWEN2_UNTIED), random_tensors(QWEN2_UNTIED)
    whole = reference_logits(config, tensors.__getitem__, IDS)
    for last in (1, 3, len(IDS)):
        logits = reference_logits(config, tensors.__getitem__, IDS, last=last)
        assert max_difference(logits, whole[-last:]) < 1e-12  # as above


@pytest.mark.parametrize("name", ["qwen2", "qwen2_yarn", "qwen3"])
def test_positions_count_by_their_distances_only(name: str) -> None:
    config, tensors = parse_config(CONFIGS[name]), random_tensors(CONFIGS[name])
    want = reference_logits(config, tensors.__getitem__, IDS[:20])
    shifted, stretched = (
        reference_logits(config, tensors.__getitem__, IDS[:20], positions=positions)
        for positions in (np.arange(20) + 1000, np.arange(20) * 2)
    )
    assert max_difference(shifted, want) < 1e-10  # angles of 1,000 radians
    assert max_difference(stretched, want) > 0.1


@pytest.mark.parametrize(
    ("ids", "last", "positions"),
    [
        ([], None, None),
        ([[1, 2]], None, None),
        ([1, 2], 0, None),
        ([1, 2], 3, None),
        ([1, 2], None, [0]),
        ([1, -1], None, None),
        ([1, 320], None, None),
    ],
)
def test_refuses_what_indexing_would_quietly_accept(ids: Any, last: int | None, positions: Any) -> None:
    tensors = random_tensors(QWEN2)
    with pytest.raises(ValueError, match="token_ids"):
        reference_logits(parse_config(QWEN2), tensors.__getitem__, ids, last=last, positions=positions)


# Against transformers.

FLOAT64_TOLERANCE = 1e-12
"""On logits of order 10, both sides in float64: 5e-14 was seen; a wrong formula shows above 1e-3."""
FLOAT32_TOLERANCE = 1e-4
"""On logits of order 10, transformers as it is: float64 weights and products, but float32 norms, softmax and
RoPE angles, each off by 6e-8 of its value (an angle of 127 radians by 4e-6) and carried through 3 layers:
2e-5 was seen."""


class _Float64Torch(ModuleType):
    """Stands for `torch` inside transformers' Qwen modules: there, float32 now means float64.

    So transformers' own formulas are evaluated, unchanged, in the precision of the reference.
    """

    def __getattr__(self, name: str) -> Any:
        import torch

        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


@pytest.fixture(params=["float64", "as it is"])
def tolerance(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """Patches transformers, or not, and tells how near it then comes."""
    pytest.importorskip("transformers", minversion="5.0")  # rope_parameters is a spelling of version 5
    if request.param == "as it is":
        return FLOAT32_TOLERANCE
    _patch_to_float64(monkeypatch)
    return FLOAT64_TOLERANCE


def _patch_to_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import modeling_rope_utils
    from transformers.models.qwen2 import modeling_qwen2
    from transformers.models.qwen3 import modeling_qwen3

    for module in (modeling_qwen2, modeling_qwen3, modeling_rope_utils):
        monkeypatch.setattr(module, "torch", _Float64Torch("torch"))


def _transformers_logits(folder: Path, ids: np.ndarray, *, positions: np.ndarray | None = None) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # the matrices are tiny
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    position_ids = None if positions is None else torch.tensor(positions[None])
    with torch.no_grad():
        logits = model(torch.tensor(ids[None]), position_ids=position_ids).logits
    assert logits.dtype == torch.float64
    return np.asarray(logits[0].numpy())


@pytest.mark.transformers
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_transformers(name: str, tolerance: float, tmp_path: Path) -> None:
    """97 tokens: three times the original length of the YaRN models."""
    tensors = write_checkpoint(tmp_path, CONFIGS[name])
    logits = reference_logits(parse_config(CONFIGS[name]), tensors.__getitem__, IDS)
    assert max_difference(logits, _transformers_logits(tmp_path, IDS)) < tolerance


@pytest.mark.transformers
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_equals_transformers_reading_shards_of_any_dtype(
    dtype: Any, tolerance: float, tmp_path: Path
) -> None:
    tensors = write_checkpoint(tmp_path, QWEN3, dtype=dtype, shards=3, lm_head="copy")
    logits = reference_logits(parse_config(QWEN3), tensors.__getitem__, IDS)
    assert max_difference(logits, _transformers_logits(tmp_path, IDS)) < tolerance


@pytest.mark.transformers
@pytest.mark.parametrize("name", ["qwen2", "qwen2_yarn", "qwen2_yarn_new", "qwen2_linear", "qwen3"])
def test_equals_transformers_at_far_positions(name: str, tolerance: float, tmp_path: Path) -> None:
    """Gaps and a late start, the last position the last of the stretched context."""
    tensors = write_checkpoint(tmp_path, CONFIGS[name])
    positions = np.arange(3, 128, 4)
    ids = IDS[: len(positions)]
    logits = reference_logits(parse_config(CONFIGS[name]), tensors.__getitem__, ids, positions=positions)
    assert max_difference(logits, _transformers_logits(tmp_path, ids, positions=positions)) < tolerance


_YARN = QWEN2_5_7B_YARN["rope_scaling"]


@pytest.mark.transformers
@pytest.mark.parametrize(
    "raw",
    [
        QWEN2_5_7B_YARN,
        QWEN2_YARN,
        {**QWEN2_5_7B_YARN, "rope_scaling": {**_YARN, "truncate": False}},
        {**QWEN2_5_7B_YARN, "rope_scaling": {**_YARN, "beta_fast": 16, "beta_slow": 2.5}},
        {**QWEN2_5_7B_YARN, "rope_scaling": {**_YARN, "beta_fast": 8, "beta_slow": 8, "truncate": False}},
        {**QWEN2_5_7B_YARN, "rope_scaling": {**_YARN, "attention_factor": 1.25}},
        {**QWEN2_5_7B_YARN, "rope_scaling": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.5}},
        {**QWEN2_5_7B_YARN, "rope_scaling": {**_YARN, "mscale": 0.7}},
        {**QWEN2_5_7B_YARN, "rope_scaling": {**_YARN, "factor": 1.0}},
        {**QWEN2_5_7B_YARN, "rope_scaling": {**_YARN, "original_max_position_embeddings": 6}},
        {**QWEN2_5_7B_YARN, "rope_scaling": {**_YARN, "original_max_position_embeddings": 2}},
        {**QWEN2_5_7B_YARN, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        {**QWEN2_5_7B_YARN, "original_max_position_embeddings": 8192},
        {**QWEN2_5_7B_YARN, "rope_scaling": {"rope_type": "linear", "factor": 3}},
        {**QWEN2_5_7B_YARN, "rope_theta": 12.0, "rope_scaling": None},
        {**QWEN2_5_7B_YARN, "rope_theta": 1_000.0},
        {**QWEN2_5_7B_YARN, "rope_theta": 12.0},
    ],
)
def test_rope_frequencies_equal_those_of_transformers(
    raw: RawConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every option of YaRN, the clamps of its ramp (theta 12: past the last pair) and a ramp of no width."""
    pytest.importorskip("transformers", minversion="5.0")
    _patch_to_float64(monkeypatch)
    from transformers import Qwen2Config
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    # from_dict takes its dictionaries apart: it must not change those of the other cases.
    theirs = Qwen2RotaryEmbedding(
        Qwen2Config.from_dict({**raw, "rope_scaling": dict(raw["rope_scaling"] or {})})
    )
    config: QwenConfig = parse_config(raw)
    inv_freq, attention_factor = rope_frequencies(config)
    want = theirs.inv_freq.numpy()
    assert want.dtype == np.float64
    assert np.isfinite(want).all()
    assert np.isfinite(inv_freq).all()
    np.testing.assert_allclose(inv_freq, want, rtol=1e-13)  # a few roundings of float64
    assert attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-15)
