"""What programs ask of a Chat: text in one line, `async for`, `with`, several threads, and weights to share."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import qwen_onnx
from qwen_onnx import Chat, Token, UserError, load
from qwen_onnx.options import declared
from qwen_onnx.runners.model.logits_model import LogitsModel
from qwen_onnx.runners.sampling.request import Request
from support.chats import endless, tiny
from support.patience import PATIENCE
from support.refusals import refused

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
HI = [{"role": "user", "content": "Hi"}]


def ids(chat: Chat, prompt: Any, count: int = 12) -> list[int]:
    return [token.token_id for token in chat.generate(prompt, max_new_tokens=count, temperature=0)]


def test_m6_a_question_gives_the_answer_as_text() -> None:
    with load(tiny(), provider="cpu", threads=1) as chat:
        assert chat(QUESTION) == ANSWER
        assert chat([{"role": "user", "content": QUESTION}]) == ANSWER
        assert chat(QUESTION, max_new_tokens=2) == "The capital"
        assert chat.complete(chat.template.render([{"role": "user", "content": QUESTION}])) == ANSWER
        assert chat.complete([{"role": "user", "content": QUESTION}], stop=" is") == "The capital of France"
        assert chat.complete(chat.prompt_ids([{"role": "user", "content": QUESTION}])) == ANSWER


def test_m6_a_text_to_complete_is_no_question() -> None:
    chat = load(endless(), provider="cpu", threads=1)
    raw = "".join(token.text for token in chat.generate("Once upon", max_new_tokens=8))
    asked = "".join(
        token.text for token in chat.generate([{"role": "user", "content": "Once upon"}], max_new_tokens=8)
    )
    assert raw != asked
    assert chat.complete("Once upon", max_new_tokens=8) == raw
    assert chat("Once upon", max_new_tokens=8) == asked


@pytest.mark.parametrize("name", ["__call__", "complete", "generate", "generate_async"])
def test_m6_an_unknown_keyword_names_the_known_ones(name: str) -> None:
    def ask() -> None:
        answer = getattr(chat, name)(HI, temprature=1)
        if name == "generate":
            next(answer)
        elif name == "generate_async":
            asyncio.run(anext(answer))

    chat = load(endless(), provider="cpu", threads=1)
    refused(ask, mentions=("'temprature'", "temperature?", "max_new_tokens"))
    documented = getattr(Chat, name).__doc__
    assert "temperature: " in documented


def test_m6_names_that_programs_import() -> None:
    for name in qwen_onnx.__all__:
        assert getattr(qwen_onnx, name) is not None
    wanted = {"Chat", "Token", "FinishReason", "Request", "SamplingParams", "SessionOptions", "ExportOptions"}
    assert wanted <= {*qwen_onnx.__all__}
    chat = load(endless(), provider="cpu", threads=1)
    token = next(chat.generate(HI))
    assert isinstance(chat, qwen_onnx.Chat)
    assert isinstance(token, qwen_onnx.Token)


def test_m6_a_repr_says_what_it_is() -> None:
    chat = load(tiny("int8"), provider="cpu", threads=1, max_context=64)
    assert repr(chat) == f"<Chat tiny as int8 on cpu, 0 of 64 tokens, {tiny('int8')}>"
    list(chat.generate([1, 2, 3], max_new_tokens=2, ignore_eos=True))
    assert "4 of 64 tokens" in repr(chat)
    chat.close()
    assert repr(chat) == "<Chat, closed>"


def test_m6_closed_it_holds_nothing_and_says_so() -> None:
    with load(endless(), provider="cpu", threads=1) as chat:
        answer = chat.generate(HI)
        next(answer)
        held = weakref.ref(chat.runner)
    refused(next, answer, mentions=("was closed",))
    del answer
    gc.collect()
    assert held() is None, "the weights are still in memory"
    chat.close()
    for ask in (
        lambda: chat("Hi"), lambda: list(chat.generate(HI)), lambda: chat.score("Hi there"), lambda: chat.rewind([1]),
        lambda: chat.context_used, lambda: chat.save("x"), lambda: chat.load("x"),
        lambda: chat.generate_each(["a"], [{}]).__next__(),
    ):  # fmt: skip
        refused(ask, mentions=("was closed",))


def test_m6_two_chats_share_weights() -> None:
    """Each has its own conversation, and outlives the other."""
    first = load(endless(), provider="cpu", threads=1)
    second = Chat(first.runner)
    assert second.runner is first.runner
    a, b = first.generate(HI, max_new_tokens=12), second.generate("Other", max_new_tokens=12)
    mixed = [(x.token_id, y.token_id) for x, y in zip(a, b, strict=True)]
    assert [x for x, _ in mixed] == ids(load(endless(), provider="cpu", threads=1), HI)
    first.close()
    assert ids(second, "Other") == [y for _, y in mixed]


async def collect(chat: Chat, prompt: Any, count: int) -> list[Token]:
    return [token async for token in chat.generate_async(prompt, max_new_tokens=count, temperature=0)]


def test_m6_tokens_come_by_async_for_and_the_loop_goes_on() -> None:
    chat = load(endless(), provider="cpu", threads=1)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async def main() -> list[Token]:
        beside = asyncio.create_task(tick())
        tokens = await collect(chat, HI, 12)
        beside.cancel()
        return tokens

    tokens = asyncio.run(main())
    assert [token.token_id for token in tokens] == ids(load(endless(), provider="cpu", threads=1), HI)
    assert tokens[-1].finish_reason == "length"
    assert ticks > 12, "the event loop stood still"


def test_m6_several_chats_answer_in_one_event_loop() -> None:
    first = load(endless(), provider="cpu", threads=1)
    prompts = ["One", "Two", "Three"]

    async def main() -> list[list[Token]]:
        return await asyncio.gather(*(collect(Chat(first.runner), prompt, 20) for prompt in prompts))

    found = [[token.token_id for token in tokens] for tokens in asyncio.run(main())]
    assert found == [ids(first, prompt, 20) for prompt in prompts]


def test_m6_a_cancelled_answer_ends_and_the_next_one_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that is being made is waited for: a thread cannot be stopped."""
    chat = load(endless(), provider="cpu", threads=1)
    begun, go_on, steps = threading.Event(), threading.Event(), []
    decode = LogitsModel.decode

    def slow(self: LogitsModel, *args: Any) -> Any:
        steps.append(threading.get_ident())
        if len(steps) == 3:
            begun.set()
            assert go_on.wait(PATIENCE)
        return decode(self, *args)

    monkeypatch.setattr(LogitsModel, "decode", slow)

    async def main() -> None:
        task = asyncio.create_task(collect(chat, HI, 100))
        await asyncio.to_thread(begun.wait, PATIENCE)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert len(steps) == 3
    assert threading.main_thread().ident not in steps
    monkeypatch.undo()
    assert ids(chat, HI) == ids(load(endless(), provider="cpu", threads=1), HI)


def test_m6_an_async_answer_left_early_can_be_closed() -> None:
    chat = load(endless(), provider="cpu", threads=1)

    async def main() -> int:
        answer = chat.generate_async(HI)
        async for _ in answer:
            break
        await answer.aclose()  # type: ignore[attr-defined]
        with pytest.raises(UserError, match="max_new_tokens"):
            await anext(chat.generate_async(HI, max_new_tokens=-1))
        return len(await collect(chat, HI, 5))

    assert asyncio.run(main()) == 5


@pytest.mark.parametrize("dtype", ["f32", "int8"])
def test_k13_one_chat_in_eight_threads_gives_right_ids_or_an_error(dtype: str) -> None:
    """Of answers that overlap the last one goes on."""
    chat = load(endless(dtype), provider="cpu", threads=1)
    prompts = [f"Question {number}: what?" * (1 + number) for number in range(8)]
    alone = [ids(Chat(chat.runner), prompt, 40) for prompt in prompts]
    whole = 0
    for _ in range(3):
        barrier = threading.Barrier(8)

        def ask(number: int, barrier: threading.Barrier = barrier) -> list[int] | str:
            barrier.wait()
            made: list[int] = []
            try:
                for token in chat.generate(prompts[number], max_new_tokens=40, temperature=0):
                    made.append(token.token_id)
            except UserError as error:
                assert made == alone[number][: len(made)], "wrong ids came before the error"
                return str(error)
            return made

        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(ask, range(8)))
        for number, answer in enumerate(found):
            if isinstance(answer, str):
                assert "another answer was begun" in answer
            else:
                assert answer == alone[number]
                whole += 1
    assert whole >= 3, "each time one of them is whole"


@pytest.mark.parametrize("dtype", ["f32", "int8"])
def test_k13_whole_texts_of_eight_threads_come_one_after_the_other(dtype: str) -> None:
    chat = load(endless(dtype), provider="cpu", threads=1)
    prompts = [f"{number} apples" for number in range(8)]
    alone = [Chat(chat.runner).complete(prompt, max_new_tokens=20) for prompt in prompts]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda prompt: chat.complete(prompt, max_new_tokens=20), prompts)) == alone


@pytest.mark.parametrize("dtype", ["f32", "int8"])
def test_k13_chats_of_one_runner_in_eight_threads_are_each_alone(dtype: str) -> None:
    first = load(endless(dtype), provider="cpu", threads=1)
    prompts = [f"{number} pears" * (1 + number) for number in range(8)]
    alone = [ids(Chat(first.runner), prompt, 30) for prompt in prompts]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda prompt: ids(Chat(first.runner), prompt, 30), prompts)) == alone


def test_k13_what_else_touches_the_cache_waits_for_the_step(tmp_path: Any) -> None:
    """Saving, rewinding and scoring beside an answer harm none of them."""
    chat = load(endless(), provider="cpu", threads=1)
    alone = ids(load(endless(), provider="cpu", threads=1), HI, 120)
    done = threading.Event()

    def disturb() -> int:
        count = 0
        while not done.is_set():
            chat.save(tmp_path / "session")
            chat.rewind([])
            chat.score([1, 2, 3])
            count += 1
        return count

    with ThreadPoolExecutor(1) as threads:
        disturbed = threads.submit(disturb)
        try:
            found = ids(chat, HI, 120)
        finally:
            done.set()
        assert disturbed.result() > 0
    assert found == alone


@pytest.mark.parametrize(
    ("prompts", "found"),
    [
        ("hi", "'hi'"),
        (b"hi", "bytes"),
        ({"role": "user"}, "dict"),
        (iter(["hi"]), "list_iterator"),
        (5, "int"),
    ],
)
@pytest.mark.parametrize("name", ["generate_batch", "generate_each"])
def test_one_prompt_in_the_place_of_several_is_refused(name: str, prompts: Any, found: str) -> None:
    """Each character of a string would be a prompt of its own."""
    chat = load(endless(), provider="cpu", threads=1)
    more = ([{}],) if name == "generate_each" else ()
    refused(
        lambda: list(getattr(chat, name)(prompts, *more)),
        mentions=("a list of prompts wanted", f"found {found}"),
    )


@pytest.mark.parametrize("prompt", [b"hi", bytearray(b"hi"), memoryview(b"hi"), {"role": "user"}, {5: 6}])
def test_bytes_are_no_token_ids(prompt: Any) -> None:
    chat = load(endless(), provider="cpu", threads=1)
    for ask in (
        lambda: chat(prompt), lambda: chat.complete(prompt), lambda: next(chat.generate(prompt)),
        lambda: chat.score(prompt), lambda: chat.rewind(prompt), lambda: chat.prompt_ids(prompt),
        lambda: list(chat.generate_batch([prompt])), lambda: chat.verified_ids(prompt, {}),
    ):  # fmt: skip
        refused(ask, mentions=("a prompt is a text", f"found {type(prompt).__name__}"))


def test_the_package_lists_its_names() -> None:
    code = "import qwen_onnx; print(*dir(qwen_onnx))"
    listed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert {*qwen_onnx.__all__, "__doc__"} <= {*listed.split()}


def test_none_is_what_was_not_given() -> None:
    chat = load(endless(), provider="cpu", threads=None)
    nothing: dict[str, Any] = dict.fromkeys(
        option for option in declared(Request) if option != "max_new_tokens"
    )
    assert chat.request(nothing) == chat.request({})
    assert chat.complete([1, 2], max_new_tokens=4, **nothing) == chat.complete([1, 2], max_new_tokens=4)
