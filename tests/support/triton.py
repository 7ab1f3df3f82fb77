"""A stand-in for Triton's server around the written model.py."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory, text_format

from qwen_onnx import load
from qwen_onnx.exports.layouts import triton
from support import triton_stub
from support.patience import PATIENCE

NUMPY = {"TYPE_STRING": "O", "TYPE_BOOL": "?", "TYPE_INT32": "i4", "TYPE_INT64": "i8"}
LONG_S = PATIENCE


def _config_class() -> Any:
    """Those fields of inference.ModelConfig that are used here, with their names and types."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="model_config.proto", package="inference", syntax="proto3")
    enums = {
        "DataType": ["TYPE_INVALID", "TYPE_BOOL", "TYPE_INT32", "TYPE_INT64", "TYPE_FP32", "TYPE_STRING"],
        "Kind": ["KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL"],
    }
    for name, values in enums.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    plain = {"string": field.TYPE_STRING, "int32": field.TYPE_INT32, "bool": field.TYPE_BOOL}
    tensor = {"name": "string", "data_type": "DataType", "dims": "*int32"}
    messages = {
        "ModelInput": {**tensor, "optional": "bool"},
        "ModelOutput": tensor,
        "ModelInstanceGroup": {"kind": "Kind", "count": "int32", "gpus": "*int32"},
        "ModelTransactionPolicy": {"decoupled": "bool"},
        "ModelParameter": {"string_value": "string"},
        "ModelConfig": {
            "name": "string",
            "backend": "string",
            "max_batch_size": "int32",
            "input": "*ModelInput",
            "output": "*ModelOutput",
            "instance_group": "*ModelInstanceGroup",
            "model_transaction_policy": "ModelTransactionPolicy",
            "parameters": "*ModelConfig.ParametersEntry",
        },
    }
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        targets = [(message, fields)]
        if name == "ModelConfig":
            entry = message.nested_type.add(name="ParametersEntry")
            entry.options.map_entry = True
            targets.append((entry, {"key": "string", "value": "ModelParameter"}))
        for target, own in targets:
            for number, (key, kind) in enumerate(own.items(), start=1):
                made = target.field.add(name=key, number=number, label=field.LABEL_OPTIONAL)
                if kind.startswith("*"):
                    made.label, kind = field.LABEL_REPEATED, kind[1:]
                if kind in plain:
                    made.type = plain[kind]
                else:
                    made.type = field.TYPE_ENUM if kind in enums else field.TYPE_MESSAGE
                    made.type_name = f".inference.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("inference.ModelConfig"))


def parsed(text: str) -> dict[str, Any]:
    """config.pbtxt as Triton hands it to model.py, in JSON."""
    config = text_format.Parse(text, _config_class()())
    found: dict[str, Any] = json_format.MessageToDict(
        config, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return found


class Server:
    """Does with a model's folder what Triton does, in this process."""

    def __init__(self, folder: Path, *, kind: str = "CPU", **changes: Any) -> None:
        self.config = parsed((folder / triton.CONFIG_FILE).read_text()) | changes
        spec = importlib.util.spec_from_file_location("model", folder / triton.MODEL_FILE)
        assert spec is not None
        assert spec.loader is not None
        self.module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)
        self.model = self.module.TritonPythonModel()
        self.asked: list[Asked] = []
        self.order: list[Asked] = []
        """Whose response it was, of all that were sent."""
        self.model.initialize(
            {
                "model_config": json.dumps(self.config),
                "model_instance_kind": kind,
                "model_instance_device_id": "1",
                "model_repository": str(folder),
                "model_version": "1",
                "model_name": self.config["name"],
            }
        )

    def ask(
        self, *many: dict[str, Any], on_send: Callable[[Asked], None] = lambda asked: None
    ) -> list[Asked]:
        """Give requests to one call of `execute`. `on_send` is told of each response before it is sent."""
        asked = [Asked(self, inputs, on_send) for inputs in many]
        in_time(lambda: self.model.execute([each.request for each in asked]))
        for each in asked:
            each.request.release()
        return asked

    def finalize(self) -> None:
        in_time(self.model.finalize)


def in_time(call: Callable[[], object]) -> None:
    """In a thread, so that a fault is a failure, and not a test that never ends. Nothing may come back."""
    returned: list[object] = []
    thread = threading.Thread(target=lambda: returned.append(call()), daemon=True)
    thread.start()
    thread.join(LONG_S)
    assert returned == [None], "raised, or did not return"


@dataclasses.dataclass(eq=False)
class Asked:
    """A request and what came of it."""

    server: Server
    inputs: dict[str, Any]
    on_send: Callable[[Asked], None]

    def __post_init__(self) -> None:
        known = {value["name"]: value for value in self.server.config["input"]}
        arrays = {}
        for name, value in self.inputs.items():
            if isinstance(value, np.ndarray):  # what Triton itself would not let through
                arrays[name] = value
                continue
            value = value.encode() if isinstance(value, str) else value
            arrays[name] = np.array([value], NUMPY[known[name]["data_type"]])
        self.request = triton_stub.Request(arrays, self._sent)
        self.sender = self.request.sender
        self.server.asked.append(self)

    def _sent(self, sender: triton_stub.Sender) -> None:
        self.server.order.append(self)
        self.on_send(self)

    def wait(self) -> Asked:
        assert self.sender.ended.wait(LONG_S), "no final flag"
        return self

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The outputs of each response without an error, as the configuration has them."""
        wanted = {value["name"]: NUMPY[value["data_type"]] for value in self.server.config["output"]}
        rows = []
        for response in self.wait().sender.responses:
            if response.error() is None:
                arrays = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
                assert {name: array.dtype for name, array in arrays.items()} == {
                    name: np.dtype(kind) for name, kind in wanted.items()
                }
                assert {array.shape for array in arrays.values()} == {(1,)}
                rows.append({name: array[0] for name, array in arrays.items()})
        return rows

    @property
    def ids(self) -> list[int]:
        return [int(row["token_id"]) for row in self.rows]

    @property
    def text(self) -> str:
        """Each piece is text by itself."""
        return "".join(row["text"].decode() for row in self.rows)

    @property
    def reasons(self) -> list[str]:
        return [row["finish_reason"].decode() for row in self.rows]

    @property
    def error(self) -> tuple[int, str] | None:
        """Of the last response; no other may have one."""
        *others, last = self.wait().sender.responses
        assert all(response.error() is None for response in others)
        error = last.error()
        return None if error is None else (error.code(), error.message())


Serve = Callable[..., Server]


def solo(export: Path, prompt: Any, count: int | None = None) -> tuple[list[int], str, str]:
    """Ids, text and reason of the runner itself."""
    return _solo(export, json.dumps(prompt), count)


@functools.cache
def _solo(export: Path, prompt: str, count: int | None) -> tuple[list[int], str, str]:
    chat = load(export, provider="cpu", threads=1)
    tokens = list(chat.generate(json.loads(prompt), max_new_tokens=count))
    text = "".join(token.text for token in tokens)
    return [token.token_id for token in tokens], text, str(tokens[-1].finish_reason)


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def assert_solo(asked: Asked, export: Path, prompt: Any, count: int | None = None) -> None:
    assert asked.error is None
    ids, text, reason = solo(export, prompt, count)
    assert (asked.ids, asked.text) == (ids, text)
    assert asked.reasons == [""] * (len(ids) - 1) + [reason]


def parameters(**values: str) -> dict[str, Any]:
    return {name: {"string_value": value} for name, value in values.items()}


@pytest.fixture(autouse=True)
def _stub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", triton_stub)
    monkeypatch.setattr(triton_stub.Logger, "lines", [])
