"""The loop: on scripted logits where only the loop matters, and on an export where the cache does."""

from __future__ import annotations

import collections.abc
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import onnxruntime
import pytest

from qwen_onnx.errors import NonFiniteLogitsError, UserError
from qwen_onnx.runners.generate import generate
from qwen_onnx.runners.model.buffers import CacheMemory
from qwen_onnx.runners.model.executors.executor import Executor
from qwen_onnx.runners.model.kv_cache import KVCache
from qwen_onnx.runners.model.logits_model import LogitsModel
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.output import FinishReason, Token
from qwen_onnx.runners.sampling.request import Request
from qwen_onnx.runners.sequence import Sequence
from qwen_onnx.runners.text.vocabulary import Vocabulary
from support.answers import ids, opened
from support.caches import attention_spec
from support.chats import endless
from support.exports import IDS, ON_CPU, Exported

VOCAB, EOS = 20, 13
NO_HOLES = np.empty(0, np.int64)
PROMPT = IDS[0, :12].tolist()

Ids = collections.abc.Sequence[int]
Script = collections.abc.Sequence[int | Ids | BaseException]


class ScriptedExecutor(Executor):
    """The ids of a script are the best ones, step after step, whatever comes in.

    Of several rows, or where several tokens are scored, a step is one id for each.
    """

    def __init__(self, script: Script, *, chooses: bool, scores: bool) -> None:
        super().__init__(CacheMemory(attention_spec(1), "cpu", {}))
        self.script, self.chooses, self.scores = list(script), chooses, scores
        self.calls: list[Any] = []
        """Ids that came in: of one row as a list, of several as a list of lists."""

    def advance(self, cache: KVCache, input_ids: np.ndarray, start: int) -> None:
        cache.logits = self._next(cache, input_ids)

    def score(self, cache: KVCache, input_ids: np.ndarray, start: int, count: int) -> np.ndarray:
        logits = self._next(cache, input_ids)
        assert len(logits) == count == input_ids.shape[1]
        return logits[None]

    def _next(self, cache: KVCache, input_ids: np.ndarray) -> np.ndarray:
        self.calls.append(input_ids.tolist() if cache.batch_size > 1 else input_ids[0].tolist())
        step = self.script.pop(0)
        if isinstance(step, BaseException):
            raise step
        # The id, then its neighbors: each a little less likely.
        apart = np.abs(np.arange(VOCAB) - np.reshape(step, (-1, 1)))
        return (10.0 - apart).astype(np.float32)

    def chosen(self, cache: KVCache) -> np.ndarray:
        return cache.logits.argmax(axis=-1)


class Scripted(LogitsModel):
    """A model that says what a script says; a real cache counts its slots."""

    def __init__(
        self, script: Script, context_length: int = 100, *, chooses: bool = False, scores: bool = False
    ) -> None:
        self.scripted = ScriptedExecutor(script, chooses=chooses, scores=scores)
        super().__init__(self.scripted, vocab_size=VOCAB, context_length=context_length)
        self.cache = self.new_cache()
        self.stages: list[str] = []

    @property
    def calls(self) -> list[Any]:
        return self.scripted.calls

    def prefill(self, *arguments: Any) -> np.ndarray:
        self.stages.append("prefill")
        return super().prefill(*arguments)

    def decode(self, *arguments: Any) -> np.ndarray:
        self.stages.append("decode")
        return super().decode(*arguments)

    def prefill_greedy(self, *arguments: Any) -> np.ndarray:
        self.stages.append("prefill_greedy")
        return super().prefill_greedy(*arguments)

    def decode_greedy(self, *arguments: Any) -> np.ndarray:
        self.stages.append("decode_greedy")
        return super().decode_greedy(*arguments)

    def logits(self, cache: KVCache) -> np.ndarray:
        self.stages.append("logits")
        return super().logits(cache)


def sequence_of(
    model: LogitsModel,
    prompt: Ids = (1, 2, 3),
    *,
    eos: Collection[int] = (EOS,),
    size: int = VOCAB,
    holes: np.ndarray = NO_HOLES,
    **options: Any,
) -> Sequence:
    vocabulary = Vocabulary(size, holes, eos)
    return Sequence(
        prompt, Request(**options), vocabulary, context_length=model.context_length, speculate=model.scores
    )


def generated(
    model: Scripted | Runner,
    prompt: Ids = (1, 2, 3),
    *,
    cache: KVCache | None = None,
    **options: Any,
) -> list[Token]:
    """The tokens of one answer; a script's model keeps its cache from one to the next."""
    cache = cache or (model.cache if isinstance(model, Scripted) else model.new_cache())
    return [token for _, token in generate(model, [sequence_of(model, prompt, **options)], cache)]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_exactly_max_new_tokens(count: int) -> None:
    """No step is computed whose token nobody gets."""
    model = Scripted([4, 5, 6, 7, 8, 9])
    steps = generated(model, max_new_tokens=count)
    assert ids(steps) == [4, 5, 6, 7, 8][:count]
    assert [step.finish_reason for step in steps[:-1]] == [None] * max(0, count - 1)
    assert not steps or steps[-1].finish_reason is FinishReason.LENGTH
    assert model.calls == [[1, 2, 3], [4], [5], [6], [7]][:count]
    assert model.stages == ["prefill", *["decode"] * 4][:count]


@pytest.mark.parametrize("options", [{}, {"top_logits": 2}, {"logprobs": 1}], ids=["", "top", "logprobs"])
def test_ids_that_the_device_chose(options: dict[str, int]) -> None:
    """They are those that the host would choose; logits are read from the device where they are asked for only."""
    model = Scripted([4, 5, EOS, 6], chooses=True)
    steps = generated(model, **options)
    assert ids(steps) == [4, 5, EOS]
    assert [step.finish_reason for step in steps] == [None, None, FinishReason.EOS]
    assert model.calls == [[1, 2, 3], [4], [5]]
    stages = ["prefill_greedy", "decode_greedy", "decode_greedy"]
    assert model.stages == [name for stage in stages for name in (stage, *(["logits"] if options else []))]
    wanted = generated(Scripted([4, 5, EOS, 6]), **options)
    for step, by_host in zip(steps, wanted, strict=True):
        assert step.top_logits == by_host.top_logits
        assert (step.logprob, step.top_logprobs) == (by_host.logprob, by_host.top_logprobs)


def test_guesses_are_kept_up_to_the_first_wrong_one() -> None:
    """What comes after it is computed from the right id, and the cache holds right ids only."""
    model = Scripted([3, [1, 2, 9, 0], 4, 5], scores=True)
    steps = generated(model, [1, 2, 3, 1, 2], max_new_tokens=6)
    assert ids(steps) == [3, 1, 2, 9, 4, 5]
    assert model.calls == [[1, 2, 3, 1, 2], [3, 1, 2, 3], [9], [4]]
    assert model.cache.token_ids.tolist() == [1, 2, 3, 1, 2, 3, 1, 2, 9, 4]


def test_no_more_is_guessed_than_is_wanted() -> None:
    """And of right guesses none is kept behind the end of the answer."""
    model = Scripted([3, [1, 2, 9]], scores=True)
    assert ids(generated(model, [1, 2, 3, 1, 2], max_new_tokens=4)) == [3, 1, 2, 9]
    assert model.calls == [[1, 2, 3, 1, 2], [3, 1, 2]]
    ended = Scripted([3, [1, 2, 3, 4]], scores=True)
    steps = generated(ended, [1, 2, 3, 1, 2], eos=[1])
    assert (ids(steps), steps[-1].finish_reason) == ([3, 1], FinishReason.EOS)
    assert ended.cache.token_ids.tolist() == [1, 2, 3, 1, 2, 3]


def test_an_end_token_ends() -> None:
    """It is part of the answer, and the last of it."""
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
    """A full context ends the answer; it is no error."""
    steps = generated(Scripted([4] * 100, context_length=64), [1] * tokens)
    # The last token needs no slot: nothing is computed after it.
    assert len(steps) == 64 - tokens + 1
    assert steps[-1].finish_reason is FinishReason.CONTEXT
    assert {step.finish_reason for step in steps[:-1]} == {None}


def test_ids_without_a_token_are_never_chosen() -> None:
    """Neither rows of the embedding beyond the tokenizer's ids, nor gaps between its ids; nor are they reported."""
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
    model = Scripted([4, 5, 6, 0])
    generated(model, max_new_tokens=3)
    model.calls.clear()
    (token,) = generated(model, second, max_new_tokens=1)
    assert model.calls == [computed]
    assert token.cached_tokens == len(second) - len(computed)
    assert model.cache.length == len(second)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), NonFiniteLogitsError("NaN"), UserError("no memory")])
def test_an_error_in_the_middle_passes_and_the_next_answer_is_right(error: BaseException) -> None:
    model = Scripted([4, 5, error, 6, 7])
    with pytest.raises(type(error)):
        generated(model, max_new_tokens=9)
    assert ids(generated(model, [1, 2, 3, 4, 9], max_new_tokens=2)) == [6, 7]
    assert model.calls[-2:] == [[9], [6]]


# Several sequences.


def together(model: Scripted, sequences: list[Sequence]) -> list[tuple[int, int, FinishReason | None]]:
    """What comes, in its order: the index of the sequence, the id, and why it ended."""
    places = {sequence: index for index, sequence in enumerate(sequences)}
    tokens = generate(model, sequences)
    return [(places[sequence], token.token_id, token.finish_reason) for sequence, token in tokens]


def test_rows_take_their_own_tokens_until_the_last_has_ended() -> None:
    """A row that has ended goes along, and gives no more tokens."""
    model = Scripted([[4, 5, 6], [EOS, 7, 8], [1, 9, EOS], [1, EOS, 1], [1, 1, 1]])
    sequences = [sequence_of(model, prompt) for prompt in ([1, 2, 3], [4], [5, 6])]
    sequences.insert(1, sequence_of(model, [9], max_new_tokens=0))
    assert together(model, sequences) == [
        (0, 4, None), (2, 5, None), (3, 6, None),
        (0, EOS, FinishReason.EOS), (2, 7, None), (3, 8, None),
        (2, 9, None), (3, EOS, FinishReason.EOS),
        (2, EOS, FinishReason.EOS),
    ]  # fmt: skip
    assert model.calls == [
        [[1, 2, 3], [0, 0, 4], [0, 5, 6]],
        [[4], [5], [6]],
        [[EOS], [7], [8]],
        [[EOS], [9], [EOS]],
    ]


def test_a_row_whose_slots_are_full_goes_on_alone() -> None:
    """Padding took slots of the short row; it ends where it would alone."""
    model = Scripted([[4, 5], [6, 7], [8, 9], 10, 11, 12, 14], context_length=8)
    found = together(model, [sequence_of(model, prompt) for prompt in ([1, 2, 3, 4, 5, 6], [7, 8])])
    assert [token_id for row, token_id, _ in found if row == 0] == [4, 6, 8]
    assert [token_id for row, token_id, _ in found if row == 1] == [5, 7, 9, 10, 11, 12, 14]
    assert [reason for *_, reason in found if reason] == [FinishReason.CONTEXT] * 2
    assert model.calls[3:] == [[7, 8, 5, 7, 9], [10], [11], [12]]


def test_without_sequences_nothing_is_computed() -> None:
    model = Scripted([])
    assert together(model, []) == []
    assert together(model, [sequence_of(model, [1], max_new_tokens=0)] * 2) == []


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


@pytest.mark.parametrize("tokens", [64, 65, 200])
def test_a_prompt_without_room_for_an_answer(tokens: int, runs: list[Any]) -> None:
    chat = opened(endless(), max_context=64)
    with pytest.raises(UserError, match=rf"\b{tokens}\b.*\b64\b"):
        next(chat.generate([1] * tokens))
    with pytest.raises(UserError, match="empty"):
        next(chat.generate([]))
    assert not runs


def test_reused_prefix_gives_the_ids_of_a_fresh_cache(runner: Runner, runs: list[Any]) -> None:
    """Rewound slots still hold what was said before; it has no effect."""
    cache = runner.new_cache()
    said = ids(generated(runner, PROMPT, cache=cache, size=320, max_new_tokens=10))
    grown, edited = [*PROMPT, *said, 17, 4], [*PROMPT[:6], 9, 9, *PROMPT[8:]]
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

    def begun() -> Any:
        tokens = generate(runner, [sequence_of(runner, PROMPT, eos=(), size=320, max_new_tokens=12)], cache)
        assert [next(tokens)[1].token_id for _ in range(5)] == wanted[:5]
        return tokens

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    begun().close()
    assert ids(generated(runner, PROMPT, cache=cache, size=320, max_new_tokens=12)) == wanted
    tokens = begun()
    with monkeypatch.context() as patch:
        patch.setattr(onnxruntime.InferenceSession, "run_with_iobinding", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(tokens)
    assert cache.length == len(PROMPT) + 4
    assert ids(generated(runner, PROMPT, cache=cache, size=320, max_new_tokens=12)) == wanted
