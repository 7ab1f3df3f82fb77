"""generate_ids: on scripted logits where only the loop matters, and on an export where the cache does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import onnxruntime
import pytest

from qwen_onnx.errors import NonFiniteLogitsError, UserError
from qwen_onnx.manifest import TensorSpec
from qwen_onnx.runners.generate import FinishReason, GeneratedId, GenerationOptions, generate_ids
from qwen_onnx.runners.model.kv_cache import KVCache
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.text.vocabulary import Vocabulary
from support.exports import IDS, ON_CPU, Exported

VOCAB, EOS = 20, 13
NO_HOLES = np.empty(0, np.int64)
PROMPT = IDS[0, :12].tolist()


class Scripted:
    """Makes the given ids one after the other, whatever it is asked; a real cache counts its slots."""

    def __init__(self, script: Sequence[int | BaseException], context_length: int = 100) -> None:
        self.script, self.context_length = list(script), context_length
        self.calls: list[list[int]] = []
        spec = TensorSpec("past", "float32", ("batch_size", 1, "cache_capacity", 2))
        self.cache = KVCache(spec, 1, "cpu", batch_size=1, limit=context_length)

    def prefill(self, cache: KVCache, input_ids: np.ndarray) -> np.ndarray:
        self.calls.append(input_ids[0].tolist())
        step = self.script.pop(0)
        if isinstance(step, BaseException):
            raise step
        cache.append(input_ids, np.ones_like(input_ids), lambda small, large: None)
        # The id, then its neighbours: each a little less likely.
        return (10.0 - np.abs(np.arange(VOCAB) - step))[None].astype(np.float32)

    decode = prefill

    @property
    def chooses(self) -> bool:
        return False

    @property
    def scores(self) -> bool:
        return False

    def score(self, cache: KVCache, input_ids: np.ndarray, count: int) -> np.ndarray:
        raise AssertionError("this model scores nothing")

    def prefill_greedy(self, cache: KVCache, input_ids: np.ndarray) -> np.ndarray:
        raise AssertionError("this model chooses nothing")

    decode_greedy = prefill_greedy

    def logits(self, cache: KVCache) -> np.ndarray:
        raise AssertionError("the logits were returned already")


class Choosing(Scripted):
    """As Scripted, but it chooses the ids, as a device does; its logits are to be asked for."""

    def __init__(self, script: Sequence[int | BaseException], context_length: int = 100) -> None:
        super().__init__(script, context_length)
        self.stages: list[str] = []
        self._last = np.empty(0, np.float32)

    @property
    def chooses(self) -> bool:
        return True

    def prefill_greedy(self, cache: KVCache, input_ids: np.ndarray) -> np.ndarray:
        self.stages.append("prefill")
        return self._choose(cache, input_ids)

    def decode_greedy(self, cache: KVCache, input_ids: np.ndarray) -> np.ndarray:
        self.stages.append("decode")
        return self._choose(cache, input_ids)

    def logits(self, cache: KVCache) -> np.ndarray:
        self.stages.append("logits")
        return self._last

    def _choose(self, cache: KVCache, input_ids: np.ndarray) -> np.ndarray:
        self._last = Scripted.prefill(self, cache, input_ids)
        return self._last.argmax(axis=-1)


def generated(
    model: Scripted | Runner,
    prompt: Sequence[int] = (1, 2, 3),
    *,
    cache: KVCache | None = None,
    eos: Collection[int] = (EOS,),
    size: int = VOCAB,
    holes: np.ndarray = NO_HOLES,
    **options: Any,
) -> list[GeneratedId]:
    cache = cache or (model.cache if isinstance(model, Scripted) else model.new_cache())
    vocabulary = Vocabulary(size, holes, eos)
    steps = generate_ids(model, cache, list(prompt), GenerationOptions(**options), vocabulary)
    return list(steps)


def ids(steps: Sequence[GeneratedId]) -> list[int]:
    return [step.token_id for step in steps]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_exactly_max_new_tokens(count: int) -> None:
    """One too many, one too few, or a step computed whose token nobody gets."""
    model = Scripted([4, 5, 6, 7, 8, 9])
    steps = generated(model, max_new_tokens=count)
    assert ids(steps) == [4, 5, 6, 7, 8][:count]
    assert [step.finish_reason for step in steps[:-1]] == [None] * max(0, count - 1)
    assert not steps or steps[-1].finish_reason is FinishReason.LENGTH
    assert model.calls == [[1, 2, 3], [4], [5], [6], [7]][:count]


@pytest.mark.parametrize("options", [{}, {"top_logits": 2}], ids=["", "top"])
def test_ids_that_the_device_chose(options: dict[str, int]) -> None:
    """Logits copied from the device at each step, that nobody asked for; a prompt that takes the decode's way."""
    model = Choosing([4, 5, EOS, 6])
    steps = generated(model, **options)
    assert ids(steps) == [4, 5, EOS]
    assert [step.finish_reason for step in steps] == [None, None, FinishReason.EOS]
    assert model.calls == [[1, 2, 3], [4], [5]]
    stages = [["prefill"], ["decode"], ["decode"]]
    assert model.stages == [name for stage in stages for name in (*stage, *(["logits"] if options else []))]
    wanted = generated(Scripted([4, 5, EOS, 6]), **options)
    assert [step.top_logits for step in steps] == [step.top_logits for step in wanted]


def test_an_end_token_ends() -> None:
    """Ids after the end; the end token lost, or the one before it made twice; no reason given."""
    model = Scripted([4, 5, EOS, 6])
    steps = generated(model)
    assert [(step.token_id, step.finish_reason) for step in steps] == [
        (4, None),
        (5, None),
        (EOS, FinishReason.EOS),
    ]
    assert model.calls == [[1, 2, 3], [4], [5]]


def test_the_end_as_the_first_and_as_the_last_token() -> None:
    assert [step.finish_reason for step in generated(Scripted([EOS]))] == [FinishReason.EOS]
    last = generated(Scripted([4, EOS]), max_new_tokens=2)[-1]
    assert last.finish_reason is FinishReason.EOS  # it ended by itself: nothing was cut


def test_ignore_eos_goes_on() -> None:
    steps = generated(Scripted([4, EOS, 5, EOS]), ignore_eos=True, max_new_tokens=4)
    assert ids(steps) == [4, EOS, 5, EOS]
    assert steps[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("tokens", [1, 62, 63])
def test_context_is_filled_to_the_last_slot(tokens: int) -> None:
    """max_length that counts the prompt; an error instead of an end when the context is full."""
    steps = generated(Scripted([4] * 100, context_length=64), [1] * tokens)
    # The last token needs no slot: nothing is computed after it.
    assert len(steps) == 64 - tokens + 1
    assert steps[-1].finish_reason is FinishReason.CONTEXT
    assert {step.finish_reason for step in steps[:-1]} == {None}


@pytest.mark.parametrize("tokens", [64, 65, 200])
def test_a_prompt_without_room_for_an_answer(tokens: int) -> None:
    model = Scripted([4] * 100, context_length=64)
    with pytest.raises(UserError, match=rf"\b{tokens}\b.*\b64\b"):
        generated(model, [1] * tokens)
    with pytest.raises(UserError, match="empty"):
        generated(model, [])
    assert not model.calls


def test_ids_without_a_token_are_never_chosen() -> None:
    """Rows of the embedding beyond the tokenizer's ids, and gaps between its ids: decoding them crashes."""
    beyond = generated(Scripted([18, 19, 3]), size=10, max_new_tokens=3, top_logits=20)
    assert ids(beyond) == [9, 9, 3]
    gaps = generated(Scripted([5, 8]), holes=np.array([5, 6, 8]), max_new_tokens=2, top_logits=20)
    assert ids(gaps) == [4, 7]
    for steps, nameless in ((beyond, set(range(10, 20))), (gaps, {5, 6, 8})):
        for step in steps:
            assert not nameless & {token_id for token_id, _ in step.top_logits}
            assert step.top_logits[0][0] == step.token_id


def test_top_logits_are_sorted_and_carry_their_logits() -> None:
    (step,) = generated(Scripted([4]), max_new_tokens=1, top_logits=3)
    assert step.top_logits == ((4, 10.0), (3, 9.0), (5, 9.0))  # of equals, the lower id first
    assert generated(Scripted([4]), max_new_tokens=1)[0].top_logits == ()


@pytest.mark.parametrize(
    ("second", "computed"),
    [
        ([1, 2, 3, 4, 5, 9, 9], [9, 9]),  # goes on: the answer's last id is in no slot yet
        ([1, 2, 3, 4, 5, 6, 9], [6, 9]),
        ([1, 2, 8, 4], [8, 4]),  # edited
        ([7, 2, 3], [7, 2, 3]),  # another
        ([1, 2, 3], [3]),  # the same again: the last id's logits are what is needed
        ([1], [1]),
    ],
)
def test_only_what_the_cache_does_not_hold_is_computed(second: list[int], computed: list[int]) -> None:
    """Every turn of a chat re-reads the whole history; or a changed history is taken for the old one."""
    model = Scripted([4, 5, 6, 0])
    generated(model, max_new_tokens=3)
    model.calls.clear()
    generated(model, second, max_new_tokens=1)
    assert model.calls == [computed]
    assert model.cache.length == len(second)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), NonFiniteLogitsError("NaN"), UserError("no memory")])
def test_an_error_in_the_middle_passes_and_the_next_answer_is_right(error: BaseException) -> None:
    model = Scripted([4, 5, error, 6, 7])
    with pytest.raises(type(error)):
        generated(model, max_new_tokens=9)
    assert ids(generated(model, [1, 2, 3, 4, 9], max_new_tokens=2)) == [6, 7]
    assert model.calls[-2:] == [[9], [6]]


# On an export.


@pytest.fixture
def runner(exported: Callable[..., Exported]) -> Runner:
    return Runner(exported("qwen2").folder, ON_CPU)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Each run of the model: one a step, for these prompts are shorter than a chunk."""
    found: list[Any] = []
    real = onnxruntime.InferenceSession.run_with_iobinding

    def note(session: Any, binding: Any, *options: Any) -> None:
        found.append(session)
        real(session, binding, *options)

    monkeypatch.setattr(onnxruntime.InferenceSession, "run_with_iobinding", note)
    return found


def test_reused_prefix_gives_the_ids_of_a_fresh_cache(runner: Runner, runs: list[Any]) -> None:
    """Rewound slots that still hold the old turn; positions that count it."""
    cache = runner.new_cache()
    answer = ids(generated(runner, PROMPT, cache=cache, size=320, max_new_tokens=10))
    grown, edited = [*PROMPT, *answer, 17, 4], [*PROMPT[:6], 9, 9, *PROMPT[8:]]
    for prompt in (grown, edited, PROMPT):
        runs.clear()
        found = ids(generated(runner, prompt, cache=cache, size=320, max_new_tokens=8))
        assert len(runs) == 8
        assert found == ids(generated(runner, prompt, size=320, max_new_tokens=8))


def test_an_answer_cut_short_keeps_the_session_usable(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between two tokens (the generator is closed) and within one (the run is interrupted)."""
    wanted = ids(generated(runner, PROMPT, size=320, max_new_tokens=12))
    cache = runner.new_cache()
    options = GenerationOptions(max_new_tokens=12)
    steps = generate_ids(runner, cache, PROMPT, options, Vocabulary(320))
    assert [next(steps).token_id for _ in range(5)] == wanted[:5]
    steps.close()
    assert ids(generated(runner, PROMPT, cache=cache, size=320, max_new_tokens=12)) == wanted

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    steps = generate_ids(runner, cache, PROMPT, options, Vocabulary(320))
    assert [next(steps).token_id for _ in range(5)] == wanted[:5]
    with monkeypatch.context() as patch:
        patch.setattr(onnxruntime.InferenceSession, "run_with_iobinding", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(steps)
    assert cache.length == len(PROMPT) + 4
    assert ids(generated(runner, PROMPT, cache=cache, size=320, max_new_tokens=12)) == wanted
