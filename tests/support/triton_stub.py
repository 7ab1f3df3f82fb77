"""Stands in for `triton_python_backend_utils`: what model.py may use of it, refusing what the real one refuses.

Written from its documentation. The names are Triton's; `Request`, `Sender` and `ended` are for the tests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class TritonModelException(Exception):  # noqa: N818
    pass


class TritonError:
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        if array.dtype.kind in "US":
            raise TritonModelException("fixed-width strings: np.object_ wanted")
        self._name, self._array = name, array
        self.released = False

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        assert not self.released, "a request's memory is gone when execute returns"
        return self._array


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor] | None = None, error: TritonError | None = None) -> None:
        self._tensors, self._error = output_tensors or [], error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def error(self) -> TritonError | None:
        return self._error


class Logger:
    lines: list[str] = []  # noqa: RUF012

    @classmethod
    def log_info(cls, line: str) -> None:
        cls.lines.append(line)

    @classmethod
    def log_error(cls, line: str) -> None:
        cls.lines.append(line)


class Sender:
    """Keeps what is sent. `on_send` is told of each response before it counts, and may raise as for a lost client."""

    def __init__(self, on_send: Callable[[Sender], None]) -> None:
        self.responses: list[InferenceResponse] = []
        self.ended = threading.Event()
        self.cancelled = False
        self._on_send, self._closed = on_send, False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException("unsupported flag")
        if response is None and not flags:
            raise TritonModelException("a response must be provided when the flags are zero")
        if self._closed:
            raise TritonModelException("response sender has been closed")
        self._closed = flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL
        try:
            self._on_send(self)
            if response is not None:
                self.responses.append(response)
        finally:
            if self._closed:
                self.ended.set()

    def is_cancelled(self) -> bool:
        return self.cancelled


class Request:
    """An InferenceRequest as `execute` gets it."""

    def __init__(self, inputs: dict[str, np.ndarray], on_send: Callable[[Sender], None]) -> None:
        self.tensors = {name: Tensor(name, array) for name, array in inputs.items()}
        self.sender = Sender(on_send)
        self.asked: set[str] = set()
        """Names of the inputs that were looked for."""

    def get_response_sender(self) -> Sender:
        return self.sender

    def release(self) -> None:
        for tensor in self.tensors.values():
            tensor.released = True


def get_input_tensor_by_name(request: Request, name: str) -> Tensor | None:
    request.asked.add(name)
    return request.tensors.get(name)


def using_decoupled_model_transaction_policy(config: dict[str, Any]) -> bool:
    return bool(config.get("model_transaction_policy", {}).get("decoupled", False))
