"""The layout for Triton: what config.pbtxt says, and model.py run against a stand-in for Triton's Python module.

config.pbtxt is read by protobuf's own parser, against the fields and names of Triton's model_config.proto.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qwen_onnx
from qwen_onnx import NonFiniteLogitsError, UserError, load
from qwen_onnx.exports.layouts import triton
from qwen_onnx.exports.layouts.triton import config_pbtxt, model_source, verify_name, write_triton
from support import triton_stub
from support.chats import endless, tiny
from support.triton import LONG_S, Asked, Serve, Server, assert_solo, parameters, parsed, said, solo
from support.triton import _stub as _stub  # for every test here: Triton's module is the stand-in

pytestmark = pytest.mark.thorough
SLOWLY_S = 0.05
"""Seconds for each of some 4,000 tokens: minutes, in which the rest of a test has its turn."""

HI = "Hello!"
SUM = "What is 3 plus 4?"


# config.pbtxt


def test_the_configuration_is_what_triton_reads() -> None:
    config = parsed(config_pbtxt(name="Qwen2.5-0.5B"))
    assert {key: config[key] for key in ("name", "backend", "max_batch_size")} == {
        "name": "Qwen2.5-0.5B",
        "backend": "python",
        "max_batch_size": 0,
    }
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert config["instance_group"] == [{"kind": "KIND_CPU", "count": 1, "gpus": []}]
    assert all(value["dims"] == [1] for value in config["input"] + config["output"])
    assert all(value["optional"] for value in config["input"])
    assert {name: value["string_value"] for name, value in config["parameters"].items()} == {
        "provider": "auto",
        "threads": "auto",
        "max_context": "auto",
        "sequences": "4",
    }


def test_the_configuration_has_what_was_chosen() -> None:
    text = config_pbtxt(name="m", provider="cpu", threads=2, max_context=512, sequences=3)
    assert {name: value["string_value"] for name, value in parsed(text)["parameters"].items()} == {
        "provider": "cpu",
        "threads": "2",
        "max_context": "512",
        "sequences": "3",
    }


@pytest.mark.parametrize("name", ["", "a b", 'a"', "a/b", "..", "a\nb", "é", "x" * 201])
def test_names_that_triton_does_not_take(name: str) -> None:
    """Triton would not load such a repository, or no URL would reach the model."""
    for refuse in (lambda: verify_name(name), lambda: config_pbtxt(name=name)):
        with pytest.raises(UserError, match="no name for a model"):
            refuse()


# model.py


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    servers = []

    def start(export: Path, *, sequences: int = 4, **changes: Any) -> Server:
        folder = tmp_path / "repository" / "model"
        if not folder.exists():
            shutil.copytree(export, folder / triton.EXPORT_FOLDER, copy_function=os.link)
        write_triton(folder, name="model", provider="cpu", threads=1, sequences=sequences)
        servers.append(Server(folder, **changes))
        return servers[-1]

    yield start
    for server in servers:
        for asked in server.asked:
            asked.sender.cancelled = True
        if server.model._worker.is_alive():
            server.finalize()


def test_the_files_are_those_of_the_package(tmp_path: Path) -> None:
    write_triton(tmp_path / "m", name="m")
    assert (tmp_path / "m" / "1" / "model.py").read_text() == model_source()
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"m/config.pbtxt", "m/1/model.py"}


def test_the_model_reads_the_inputs_of_the_configuration(serve: Serve) -> None:
    """Every input of config.pbtxt is read, and no other. Of outputs see Asked.rows."""
    server = serve(tiny())
    (asked,) = server.ask({"prompt": HI, "max_new_tokens": 1})
    assert asked.request.asked == {value["name"] for value in server.config["input"]}
    assert asked.reasons == ["length"]


TALK = [*said("My name is Ada."), {"role": "assistant", "content": "Hello, Ada!"}, *said("What is my name?")]


@pytest.mark.parametrize(
    ("inputs", "prompt", "count"),
    [
        ({"prompt": SUM}, said(SUM), None),
        ({"prompt": SUM, "max_new_tokens": 3}, said(SUM), 3),
        ({"prompt": "def add(", "raw": True, "max_new_tokens": 12}, "def add(", 12),
        ({"prompt": HI, "raw": False}, said(HI), None),
        ({"messages": json.dumps(TALK)}, TALK, None),
    ],
)
def test_an_answer_is_the_runner_s(
    inputs: dict[str, Any], prompt: Any, count: int | None, serve: Serve
) -> None:
    (asked,) = serve(tiny()).ask(inputs)
    assert_solo(asked, tiny(), prompt, count)


def test_pieces_do_not_split_characters(serve: Serve) -> None:
    """Random weights say broken and several-byte characters; Asked.text decodes each piece by itself."""
    (asked,) = serve(endless()).ask({"prompt": HI, "max_new_tokens": 80})
    ids, text, _ = solo(endless(), said(HI), 80)
    assert (asked.ids, asked.text) == (ids, text)
    assert not text.isascii()
    assert "" in {row["text"].decode() for row in asked.rows[:-1]}, "no token that ends within a character"


QUESTIONS = [HI, SUM, "Spell stone.", "Capital of Japan?", "Count from 3 to 6."]


@pytest.mark.parametrize("sequences", [1, 2, 8])
def test_many_at_once_are_as_if_alone(sequences: int, serve: Serve) -> None:
    """Each has a cache of its own, also where there are more requests than caches."""
    server = serve(tiny(), sequences=sequences)
    asked = server.ask(*({"prompt": text} for text in QUESTIONS))
    for text in reversed(QUESTIONS):
        asked += server.ask({"prompt": text})
    for one, text in zip(asked, [*QUESTIONS, *reversed(QUESTIONS)], strict=True):
        assert_solo(one, tiny(), said(text))
    assert len(server.model._idle) <= sequences


def test_callers_in_threads_are_served(serve: Serve) -> None:
    """Triton calls from one thread; nothing here depends on that."""
    server = serve(tiny(), sequences=3)
    asked: list[list[Asked]] = [[] for _ in QUESTIONS]

    def call(index: int) -> None:
        asked[index] = server.ask({"prompt": QUESTIONS[index]})

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(QUESTIONS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    for own, text in zip(asked, QUESTIONS, strict=True):
        assert_solo(own[0], tiny(), said(text))


def test_nobody_waits_for_another_s_answer_to_end(serve: Serve) -> None:
    """A token of each in turn: a short answer that comes later is not behind a long one."""
    server = serve(endless())
    begun, released = threading.Event(), threading.Event()

    def slowly(
        asked: Asked,
    ) -> None:  # its thousands of tokens would be done while this thread waits for its turn
        begun.set()
        released.wait(SLOWLY_S)

    (long,) = server.ask({"prompt": HI}, on_send=slowly)
    assert begun.wait(LONG_S)
    (short,) = server.ask({"prompt": SUM, "max_new_tokens": 10})
    short.wait()
    assert not long.sender.ended.is_set(), "the long answer is too short for this test"
    released.set()
    places = [place for place, asked in enumerate(server.order) if asked is short]
    assert all(later - earlier == 2 for earlier, later in itertools.pairwise(places))
    long.sender.cancelled = True
    long.wait()


# Cancelled.


def cancel_at(count: int) -> Callable[[Asked], None]:
    """Cancel while the response of this number is sent."""

    def on_send(asked: Asked) -> None:
        asked.sender.cancelled |= len(asked.sender.responses) + 1 == count

    return on_send


def test_a_cancelled_answer_stops_within_a_token(serve: Serve) -> None:
    """Its cache is free for the next request."""
    server = serve(endless(), sequences=1)
    (asked,) = server.ask({"prompt": HI}, on_send=cancel_at(5))
    assert asked.error == (triton_stub.TritonError.CANCELLED, "cancelled")
    assert len(asked.ids) == 5
    (later,) = server.ask({"prompt": HI, "max_new_tokens": 20})
    assert_solo(later, endless(), said(HI), 20)


def test_one_that_is_cancelled_does_not_disturb_the_others(serve: Serve) -> None:
    server = serve(endless())
    (gone,) = server.ask({"prompt": SUM}, on_send=cancel_at(3))
    (stays,) = server.ask({"prompt": HI, "max_new_tokens": 30})
    assert_solo(stays, endless(), said(HI), 30)
    assert len(gone.ids) == 3


def test_one_that_waits_can_be_cancelled(serve: Serve) -> None:
    """Nothing is computed for it, and its client does not wait for the answer before it."""
    server = serve(endless(), sequences=1)
    released = threading.Event()
    (long,) = server.ask({"prompt": HI}, on_send=lambda asked: released.wait(SLOWLY_S))
    late = Asked(server, {"prompt": SUM}, lambda asked: None)
    caller = threading.Thread(target=server.model.execute, args=([late.request],))
    caller.start()
    time.sleep(0.05)
    assert caller.is_alive(), "there was room"
    late.sender.cancelled = True
    caller.join(LONG_S)
    assert late.error == (triton_stub.TritonError.CANCELLED, "cancelled")
    assert late.ids == []
    assert not long.sender.ended.is_set()
    released.set()
    long.sender.cancelled = True
    long.wait()


# What cannot be answered.


def strings(*values: bytes) -> np.ndarray:
    return np.array(values, np.object_)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "give prompt or messages"),
        ({"prompt": HI, "messages": json.dumps(TALK)}, "give prompt or messages"),
        ({"prompt": HI, "max_new_tokens": 0}, "max_new_tokens 0: 1 or more"),
        ({"prompt": HI, "max_new_tokens": -3}, "max_new_tokens -3: 1 or more"),
        ({"prompt": "", "raw": True}, "the prompt is empty"),
        ({"prompt": strings(b"\xff\xfe")}, "prompt: not UTF-8"),
        ({"prompt": strings(b"a", b"b")}, r"prompt: one value wanted, found shape \[2\]"),
        ({"prompt": strings()}, r"prompt: one value wanted, found shape \[0\]"),
        ({"messages": "[{"}, "messages: not JSON"),
        ({"messages": "[" * 100_000}, "messages: not JSON"),
        ({"messages": "[]"}, "messages: a list of"),
        ({"messages": "[1, 2]"}, "messages: a list of"),
        ({"messages": '{"role": "user"}'}, "messages: a list of"),
        ({"messages": json.dumps(TALK), "raw": True}, "raw is for prompt"),
        ({"messages": r'[{"role": "user", "content": "\ud800"}]'}, "not valid Unicode"),
        ({"prompt": "word " * 5000}, "the context holds"),
    ],
)
def test_a_wrong_input_is_an_error_of_its_own_request(
    inputs: dict[str, Any], message: str, serve: Serve
) -> None:
    """The other requests of the same call are answered."""
    server = serve(tiny(), sequences=2)
    before, wrong, after = server.ask({"prompt": HI}, inputs, {"prompt": SUM})
    code, line = wrong.error or (None, "")
    assert code == triton_stub.TritonError.INVALID_ARG, line
    assert re.search(message, line), line
    assert "\n" not in line
    assert wrong.ids == []
    assert_solo(before, tiny(), said(HI))
    assert_solo(after, tiny(), said(SUM))
    for _ in range(2):  # its room is free again
        assert_solo(server.ask({"prompt": HI})[0], tiny(), said(HI))


def test_a_client_that_is_lost_harms_nobody(serve: Serve) -> None:
    """What `send` raises ends that answer, and not the thread that serves all."""
    server = serve(tiny(), sequences=1)

    def fail(asked: Asked) -> None:
        raise triton_stub.TritonModelException("connection lost")

    (lost,) = server.ask({"prompt": HI}, on_send=fail)
    lost.wait()
    assert lost.sender.responses == []
    assert_solo(server.ask({"prompt": SUM})[0], tiny(), said(SUM))
    assert any("connection lost" in line for line in triton_stub.Logger.lines)


def failing(*arguments: Any, **options: Any) -> Any:
    raise RuntimeError("out of order")


OUT_OF_ORDER = (triton_stub.TritonError.INTERNAL, "RuntimeError: out of order")


def test_a_fault_of_ours_is_an_internal_error(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends that answer, and not the thread that serves all."""
    server = serve(tiny(), sequences=1)
    with monkeypatch.context() as patch:
        patch.setattr(server.model._runner, "decode", failing)
        (asked,) = server.ask({"prompt": HI})
        assert asked.error == OUT_OF_ORDER
        assert len(asked.ids) == 1
    assert_solo(server.ask({"prompt": SUM})[0], tiny(), said(SUM))


def test_logits_that_are_no_numbers_are_an_internal_error(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is not called wrong."""
    server = serve(tiny())

    def overflows(*arguments: Any) -> Any:
        raise NonFiniteLogitsError("not finite")

    with monkeypatch.context() as patch:
        patch.setattr(server.model._runner, "prefill", overflows)
        (asked,) = server.ask({"prompt": HI})
        assert asked.error == (triton_stub.TritonError.INTERNAL, "NonFiniteLogitsError: not finite")


def test_no_memory_for_another_cache_harms_nobody(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The place of a request that got no cache is free again."""
    server = serve(endless(), sequences=2)
    released = threading.Event()
    (long,) = server.ask({"prompt": HI}, on_send=lambda asked: released.wait(SLOWLY_S))
    with monkeypatch.context() as patch:
        patch.setattr(server.module, "Chat", failing)
        for _ in range(3):
            assert server.ask({"prompt": SUM})[0].error == OUT_OF_ORDER
    beside = server.ask({"prompt": SUM, "max_new_tokens": 5})[0].wait()
    assert not long.sender.ended.is_set(), "the long answer is too short for this test"
    released.set()
    long.sender.cancelled = True
    long.wait()
    assert_solo(beside, endless(), said(SUM), 5)


# Loading and unloading.


def refusal(start: Callable[[], Any]) -> str:
    with pytest.raises(triton_stub.TritonModelException) as caught:
        start()
    line = str(caught.value)
    assert line
    assert "\n" not in line
    return line


def test_what_cannot_be_loaded_is_one_line(serve: Serve, tmp_path: Path) -> None:
    write_triton(tmp_path / "empty", name="empty")
    assert "export" in refusal(lambda: Server(tmp_path / "empty"))
    assert "decoupled" in refusal(lambda: serve(tiny(), model_transaction_policy={"decoupled": False}))
    for wrong, words in [
        ({"provider": "gpu"}, "gpu"),
        ({"threads": "many"}, "config.pbtxt: threads 'many': a whole number above 0 wanted, or auto"),
        ({"threads": "0"}, "threads '0'"),
        ({"sequences": "-1"}, "sequences '-1'"),
        ({"max_context": "99999999"}, "99999999"),
    ]:
        assert words in refusal(lambda wrong=wrong: serve(tiny(), parameters=parameters(**wrong)))


def test_parameters_are_those_of_the_runner(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """And an instance on a GPU sees no other; without parameters, as an edited configuration may be, all is auto."""
    asked: list[dict[str, Any]] = []
    visible: list[str | None] = []

    def opened(folder: Path, **options: Any) -> Any:
        asked.append(options)
        visible.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        return load(folder, provider="cpu", threads=1)

    monkeypatch.setattr(qwen_onnx, "load", opened)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    serve(tiny(), parameters=parameters(provider="cuda", threads="3", max_context="64"))
    serve(tiny(), parameters={}, kind="GPU")
    assert asked == [
        {"provider": "cuda", "threads": 3, "max_context": 64},
        {"provider": "auto", "threads": None, "max_context": None},
    ]
    assert visible == ["-1", "1"]


def test_finalize_waits_for_what_runs(serve: Serve) -> None:
    """Answers end whole when the model is unloaded."""
    server, gate = serve(endless()), threading.Event()
    asked = server.ask(
        {"prompt": HI, "max_new_tokens": 60},
        {"prompt": SUM, "max_new_tokens": 40},
        on_send=lambda asked: None if gate.wait(LONG_S) else pytest.fail("never let through"),
    )
    unloading = threading.Thread(target=server.finalize)
    unloading.start()
    unloading.join(0.2)
    assert unloading.is_alive(), "nothing was waited for"
    gate.set()
    unloading.join(LONG_S)
    assert all(each.sender.ended.is_set() for each in asked)
    assert not server.model._worker.is_alive()
    assert_solo(asked[0], endless(), said(HI), 60)
    assert_solo(asked[1], endless(), said(SUM), 40)


def test_finalize_of_an_idle_model_ends(serve: Serve) -> None:
    server = serve(tiny())
    server.finalize()
    assert not server.model._worker.is_alive()


def test_the_log_names_what_computes(serve: Serve) -> None:
    serve(tiny())
    assert triton_stub.Logger.lines == ["model: cpu, float32"]
