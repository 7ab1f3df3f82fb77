"""Prefill and decode graphs against the float64 reference, run without a runner.

Of the `static` and `static-capture` lowerings; what lies in unread slots of the cache is in exports.DirectCache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qwen_onnx.reference import reference_logits
from support.checkpoints import CONFIGS
from support.exports import IDS, DirectCache, Exported, LeftPadded
from support.tolerances import EXACT, F32, F32_ORDER, assert_close, difference

Export = Callable[..., Exported]

SLICED = [
    *((name, "f32", "static") for name in CONFIGS),
    *((name, dtype, "static") for name in ("qwen2", "qwen3") for dtype in ("f16", "bf16")),
]
WHOLE = [
    *((name, "f32", "static-capture") for name in ("qwen2", "qwen2_yarn", "qwen3", "qwen3_head_dim_48")),
    *((name, "f32", "static-grouped") for name in ("qwen2", "qwen2_14_2", "qwen3", "qwen3_head_dim_48")),
    *((name, "f16", "static-capture") for name in ("qwen2_14_2", "qwen2_head_dim_2")),
]
"""Attend over the whole cache. In f16 these are what heads get whose size GroupQueryAttention does not take, and
compute in f16; the f16 and bf16 graphs of `static` compute in f32."""
EVERY_EXPORT = [*SLICED, *WHOLE]
SEVERAL_STEPS = [
    ("qwen2", "static"),
    ("qwen3", "static"),
    ("qwen2_yarn", "static"),
    ("qwen2", "static-capture"),
    ("qwen2", "static-grouped"),
]


def check(batch: LeftPadded, logits: np.ndarray) -> None:
    """Rows that have a token yet have its logits; rows of padding only are garbage, but finite."""
    assert np.isfinite(logits).all()
    for row, found in enumerate(logits):
        if (wanted := batch.wanted(row)) is not None:
            assert_close(found, wanted, batch.cache.tolerance)


@pytest.mark.parametrize(("name", "dtype", "lowering"), EVERY_EXPORT)
def test_every_batch_length_and_past(name: str, dtype: str, lowering: str, exported: Export) -> None:
    """A past of 0 and one token in the prefill graph among them."""
    for batch_size in (1, 2, 3):
        for past in (0, 1, 9):
            for length in (1, 2, 17):
                cache = DirectCache(
                    exported(name, dtype), batch_size, capacity=32, bound=length != 2, lowering=lowering
                )
                batch = LeftPadded(cache, [0] * batch_size)
                if past:
                    check(batch, batch.step(past))
                check(batch, batch.step(length, entry="prefill"))
                check(batch, batch.step(1, entry="decode"))


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[int], list[int], bool]:
    """Pads of 1 to 3 rows, and the tokens of each step: a past of 0-60 in chunks, 1-97 at once, 3 decodes."""
    past = draw(st.integers(0, 60))
    cut = draw(st.integers(0, past))
    length = draw(st.integers(1, 97))
    total = past + length
    # At most 120 of its own tokens a row, for which the shortest context has positions.
    pads = draw(st.lists(st.integers(max(0, total - 120), total - 1), min_size=1, max_size=3))
    return pads, [step for step in (cut, past - cut, length, 1, 1, 1) if step], draw(st.booleans())


@pytest.mark.parametrize(("name", "dtype", "lowering"), EVERY_EXPORT)
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(history=histories())
def test_any_history_of_left_padded_rows(
    name: str, dtype: str, lowering: str, history: tuple[list[int], list[int], bool], exported: Export
) -> None:
    """Positions count from each row's beginning; padding and stale slots are not read; chunks may be padding only."""
    pads, steps, bound = history
    batch = LeftPadded(DirectCache(exported(name, dtype), len(pads), bound=bound, lowering=lowering), pads)
    for queries in steps:
        check(batch, batch.step(queries))


@pytest.mark.parametrize(("name", "dtype", "lowering"), EVERY_EXPORT)
def test_longest_prompt_after_the_longest_past(
    name: str, dtype: str, lowering: str, exported: Export
) -> None:
    """The ends of the ranges above, which a random search may not try."""
    for steps, pads in (([97], [0, 96]), ([60, 60], [0, 0]), ([60, 97], [37, 60, 156])):
        batch = LeftPadded(DirectCache(exported(name, dtype), len(pads), lowering=lowering), pads)
        for queries in [*steps, 1]:
            check(batch, batch.step(queries))


@pytest.mark.parametrize(("name", "dtype", "lowering"), SLICED)  # the others want padding on the left
def test_ragged_rows_padded_on_the_right(name: str, dtype: str, lowering: str, exported: Export) -> None:
    """Logits are of each row's last token, and each row is written from its own end on."""
    model = exported(name, dtype)
    cache, held = DirectCache(model, 3, capacity=48, lowering=lowering), [0, 0, 0]

    def step(queries: int, own: Sequence[int]) -> None:
        """`own` tokens of each row, and whatever follows them as padding, written from the row's own end on."""
        starts, ends = list(held), [have + count for have, count in zip(held, own, strict=True)]
        ids = np.stack([IDS[row, start : start + queries] for row, start in enumerate(starts)])
        mask = (np.arange(max(ends)) < np.array(ends)[:, None]).astype(np.int64)
        logits = cache.step(ids, mask, starts)
        for row, end in enumerate(ends):
            assert_close(logits[row], model.wanted(IDS[row, :48])[end - 1], cache.tolerance)
        held[:] = ends

    step(7, [3, 7, 5])
    step(5, [4, 2, 5])
    for _ in range(4):
        step(1, [1, 1, 1])


@pytest.mark.parametrize(
    ("name", "dtype", "lowering"),
    [
        ("qwen2", "f32", "static"),
        ("qwen2", "f16", "static"),
        ("qwen3", "bf16", "static"),
        ("qwen2", "f32", "static-capture"),
        ("qwen2", "f32", "static-grouped"),
        ("qwen2_14_2", "f16", "static-capture"),
    ],
)
@pytest.mark.parametrize("bound", [True, False])
def test_a_row_that_may_look_at_nothing_is_finite(
    name: str, dtype: str, lowering: str, bound: bool, exported: Export
) -> None:
    """No NaN of a softmax over nothing gets into the cache; DirectCache looks there."""
    batch = LeftPadded(DirectCache(exported(name, dtype), 3, bound=bound, lowering=lowering), [12, 5, 0])
    for queries in (5, 7, 1, 1):
        check(batch, batch.step(queries))


@pytest.mark.parametrize(
    ("name", "lowering"),
    [
        *((name, "static") for name in CONFIGS),
        *((name, "static-capture") for name in CONFIGS),
        ("qwen3", "static-grouped"),
    ],
)
def test_64_greedy_ids_are_those_of_the_reference(name: str, lowering: str, exported: Export) -> None:
    """Each id is the reference's choice after the ids before it, and so all are."""
    model = exported(name)
    batch = LeftPadded(DirectCache(model, 1, lowering=lowering), [0], IDS[:1].copy())
    logits = batch.step(23)
    for slot in range(23, 23 + 64):
        batch.ids[0, slot] = logits[0].argmax()
        logits = batch.step(1)
    wanted = model.wanted(batch.ids[0, : 23 + 64])
    assert wanted[22:-1].argmax(axis=-1).tolist() == batch.ids[0, 23 : 23 + 64].tolist()


@pytest.mark.parametrize(("name", "lowering"), SEVERAL_STEPS)
def test_whole_chunked_and_stepwise_prefill_agree(name: str, lowering: str, exported: Export) -> None:
    """A step of several tokens on a filled cache sees as much of it as single steps do."""

    def run(steps: Sequence[int], entry: str | None = None) -> np.ndarray:
        batch = LeftPadded(DirectCache(exported(name), 2, lowering=lowering), [0, 4])
        return np.stack([batch.step(queries, entry=entry) for queries in steps][-3:])

    whole = run([12, 1, 1, 1])
    assert_close(run([7, 5, 1, 1, 1]), whole, F32_ORDER)
    assert_close(run([1] * 15), whole, F32_ORDER)
    assert_close(run([1] * 15, "prefill"), whole, F32_ORDER)


@pytest.mark.parametrize(("name", "lowering"), SEVERAL_STEPS)
def test_bound_and_plain_runs_are_equal(name: str, lowering: str, exported: Export) -> None:
    """At every batch size and step, though buffers are then read and written in one run."""
    for batch_size in (1, 2, 3):
        bound, plain = (
            LeftPadded(
                DirectCache(exported(name), batch_size, bound=mode, lowering=lowering), range(batch_size)
            )
            for mode in (True, False)
        )
        for queries in [6, 9] + [1] * 20:
            assert_close(bound.step(queries), plain.step(queries), EXACT)


@pytest.mark.parametrize(
    ("name", "overrides"), [("qwen2", {"max_position_embeddings": 64}), ("qwen2_yarn", {}), ("qwen3", {})]
)
@pytest.mark.parametrize("prompt", [31, 32, 33, 60])
def test_decode_after_prompts_around_a_threshold(
    name: str, overrides: dict[str, int], prompt: int, exported: Export
) -> None:
    """Around half of the positions, 64 here, and around the 32 that YaRN stretches."""
    batch = LeftPadded(DirectCache(exported(name, **overrides), 1), [0])
    for queries in (prompt, 1, 1, 1, 1):
        check(batch, batch.step(queries))
    assert batch.length <= exported(name, **overrides).manifest.context_length


@pytest.mark.parametrize("name", ["qwen2_yarn", "qwen2_yarn_new", "qwen2_linear"])
def test_stretched_positions_beyond_the_original_length(name: str, exported: Export) -> None:
    """rope_scaling counts up to position 127, the original length being 32; without it the logits are others."""
    model = exported(name)
    batch = LeftPadded(DirectCache(model, 1), [0])
    logits = batch.step(100)
    plain = dataclasses.replace(model.config, rope_scaling=None)
    ignored = reference_logits(plain, model.tensors.__getitem__, IDS[0, :100], last=1)
    assert difference(logits, ignored) > 0.1
    for _ in range(28):
        check(batch, batch.step(1))
    assert batch.length == model.config.context_length


def test_positions_are_read_not_counted(exported: Export) -> None:
    """Each row's own position_ids, with gaps and a late start."""
    model = exported("qwen2_yarn")
    positions = np.stack([np.arange(3, 128, 4), np.arange(32)])
    ids = IDS[:2, :32]
    cache = DirectCache(model, 2)
    logits = cache.step(ids, np.ones((2, 32), np.int64), [0, 0], position_ids=positions)
    for row in range(2):
        wanted = reference_logits(
            model.config, model.tensors.__getitem__, ids[row], positions=positions[row], last=1
        )
        assert_close(logits[row], wanted[0], F32)


@pytest.mark.parametrize(("name", "dtype"), [("qwen2", "f32"), ("qwen2_14_2", "f16")])
def test_a_graph_for_capture_needs_no_mask_of_the_live_length(
    name: str, dtype: str, exported: Export
) -> None:
    """A captured graph replays with the mask of its first step: slots after a query are hidden by their place.

    The same bits, whether the mask ends at the live length or goes on with ones.
    """
    runs = []
    for after in (0, 1):
        cache = DirectCache(exported(name, dtype), 2, capacity=32, lowering="static-capture")
        steps = [(0, 5), (5, 9), (9, 10), (10, 11)]
        runs.append(
            [
                cache.step(IDS[:2, start:stop], np.ones((2, stop), np.int64), [start] * 2, after=after)
                for start, stop in steps
            ]
        )
    for short, full in zip(*runs, strict=True):
        assert_close(full, short, EXACT)
