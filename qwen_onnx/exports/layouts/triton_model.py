"""Serves the export beside this file with Triton's Python backend, one response for each token.

One thread makes all answers, a token of each in turn: nobody waits for another's answer to end, and threads would
only share the same cores. CUDA graphs belong to the thread that captured them, so it stays the same one.
"""

from __future__ import annotations

import collections
import json
import os
import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

import qwen_onnx
from qwen_onnx.runners.chat import Chat, Message, Token

_POLL_S = 0.1
"""Seconds between two looks at whether a request that waits for its turn was cancelled."""


class _Question(NamedTuple):
    """A request as read: nothing of it lies in Triton's memory, which is gone when `execute` returns."""

    prompt: str | list[Message]
    max_new_tokens: int | None


class _Answer(NamedTuple):
    """An answer as it comes."""

    sender: Any
    chat: Chat
    tokens: Iterator[Token]


class TritonPythonModel:
    """What the Python backend makes one of for each instance, in a process of its own."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the export.

        Args:
            args: `model_repository` is the model's folder, `model_config` the configuration as JSON.

        Raises:
            TritonModelException: the export or a parameter is unusable, in one line.
        """
        config = json.loads(args["model_config"])
        if not pb_utils.using_decoupled_model_transaction_policy(config):
            raise pb_utils.TritonModelException("config.pbtxt: model_transaction_policy must be decoupled")
        if args["model_instance_kind"] == "GPU":
            # The runner takes the first GPU it sees; before CUDA starts in this process.
            os.environ["CUDA_VISIBLE_DEVICES"] = args["model_instance_device_id"]
        parameters = config.get("parameters", {})
        try:
            sequences = _whole_number(parameters, "sequences") or 1
            first = qwen_onnx.load(
                Path(args["model_repository"], args["model_version"], "export"),
                provider=_parameter(parameters, "provider"),
                threads=_whole_number(parameters, "threads"),
                max_context=_whole_number(parameters, "max_context"),
            )
        except qwen_onnx.UserError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        pb_utils.Logger.log_info(f"{args['model_name']}: {first.runner.describe()}")
        self._runner = first.runner
        self._idle = [first]
        """Conversations that go on with whoever comes next; only the worker takes and returns them."""
        self._room = threading.Semaphore(sequences)
        self._arrived: queue.SimpleQueue[tuple[Any, _Question] | None] = queue.SimpleQueue()
        # A daemon, since the process must end though Triton were gone without a word.
        self._worker = threading.Thread(target=self._work, name="answers", daemon=True)
        self._worker.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Take requests in; their answers are sent as they are made, after this has returned.

        Returns when there is room for each, so that more requests stay in Triton's queue, or go to another instance.
        """
        for request in requests:
            sender = request.get_response_sender()
            try:
                question = _question(request)
                while not self._room.acquire(timeout=_POLL_S):
                    if sender.is_cancelled():
                        raise _CancelledError
            except Exception as error:
                _refuse(sender, error)
            else:
                self._arrived.put((sender, question))

    def finalize(self) -> None:
        """Wait for the answers that have begun, however long they are."""
        self._arrived.put(None)
        self._worker.join()

    def _work(self) -> None:
        """A token of each answer in turn, until all are made and `finalize` was called."""
        answers: collections.deque[_Answer] = collections.deque()
        accepting = True
        while accepting or answers:
            try:
                arrived = self._arrived.get(block=not answers)
            except queue.Empty:
                answer = answers.popleft()
                if self._next_token(answer):
                    answers.append(answer)
                else:
                    self._idle.append(answer.chat)
                    self._room.release()
                continue
            if arrived is None:
                accepting = False
                continue
            sender, question = arrived
            try:
                # All share one runner, so the weights are in memory once.
                chat = self._idle.pop() if self._idle else Chat(self._runner)
            except Exception as error:  # no memory for another cache
                _refuse(sender, error)
                self._room.release()
                continue
            tokens = chat.generate(question.prompt, max_new_tokens=question.max_new_tokens)
            answers.append(_Answer(sender, chat, tokens))

    def _next_token(self, answer: _Answer) -> bool:
        """Make and send a token; True while the answer goes on."""
        try:
            if answer.sender.is_cancelled():
                raise _CancelledError
            token = next(answer.tokens)
            flags = 0 if token.finish_reason is None else pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            answer.sender.send(_response(token), flags=flags)
        except Exception as error:  # whatever it is, the other answers go on
            _refuse(answer.sender, error)
            return False
        return token.finish_reason is None


class _CancelledError(Exception):
    """The client wants no more of it."""


def _question(request: Any) -> _Question:
    """Raises UserError where inputs are missing, contradict each other or say nothing."""
    prompt, messages = _text(request, "prompt"), _text(request, "messages")
    raw, max_new_tokens = _input(request, "raw"), _input(request, "max_new_tokens")
    if (prompt is None) == (messages is None):
        raise qwen_onnx.UserError("give prompt or messages, one of them")
    if max_new_tokens is not None and max_new_tokens < 1:
        raise qwen_onnx.UserError(f"max_new_tokens {max_new_tokens}: 1 or more wanted")
    if messages is not None and raw:
        raise qwen_onnx.UserError("raw is for prompt, not for messages")
    count = None if max_new_tokens is None else int(max_new_tokens)
    if prompt is not None:
        return _Question(prompt if raw else [{"role": "user", "content": prompt}], count)
    return _Question(_conversation(messages or ""), count)


def _conversation(text: str) -> list[Message]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise qwen_onnx.UserError(f"messages: not JSON ({error})") from None
    if not isinstance(found, list) or not found or not all(isinstance(item, dict) for item in found):
        raise qwen_onnx.UserError('messages: a list of {"role": ..., "content": ...} wanted, as JSON')
    return found


def _text(request: Any, name: str) -> str | None:
    value = _input(request, name)
    try:
        return None if value is None else bytes(value).decode()
    except UnicodeDecodeError as error:
        raise qwen_onnx.UserError(f"{name}: not UTF-8 ({error.reason} at byte {error.start})") from None


def _input(request: Any, name: str) -> Any:
    """The one value of an input, None where the request has none."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    values = tensor.as_numpy()
    if values.size != 1:
        raise qwen_onnx.UserError(f"{name}: one value wanted, found shape {list(values.shape)}")
    return values.flat[0]


def _response(token: Token) -> Any:
    reason = token.finish_reason or ""
    return pb_utils.InferenceResponse(
        output_tensors=[
            pb_utils.Tensor("text", np.array([token.text.encode()], np.object_)),
            pb_utils.Tensor("token_id", np.array([token.token_id], np.int64)),
            pb_utils.Tensor("finish_reason", np.array([reason.encode()], np.object_)),
        ]
    )


def _refuse(sender: Any, error: Exception) -> None:
    """End a request with an error; whatever becomes of that is for the log only, since the client may be gone."""
    if isinstance(error, _CancelledError):
        answer = pb_utils.TritonError("cancelled", pb_utils.TritonError.CANCELLED)
    elif isinstance(error, qwen_onnx.UserError) and not isinstance(error, qwen_onnx.NonFiniteLogitsError):
        answer = pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
    else:
        answer = pb_utils.TritonError(f"{type(error).__name__}: {error}", pb_utils.TritonError.INTERNAL)
        pb_utils.Logger.log_error(answer.message())
    try:
        response = pb_utils.InferenceResponse(error=answer)
        sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    except Exception as lost:
        pb_utils.Logger.log_error(f"an error could not be sent ({lost}): {answer.message()}")


def _parameter(parameters: dict[str, dict[str, str]], name: str) -> str:
    """A parameter of config.pbtxt; `auto` where there is none."""
    return parameters.get(name, {}).get("string_value", "auto")


def _whole_number(parameters: dict[str, dict[str, str]], name: str) -> int | None:
    """The same as a number of 1 or more; None for `auto`."""
    text = _parameter(parameters, name)
    if text == "auto":
        return None
    if not (text.isascii() and text.isdigit() and int(text)):
        raise qwen_onnx.UserError(f"config.pbtxt: {name} {text!r}: a whole number above 0 wanted, or auto")
    return int(text)
