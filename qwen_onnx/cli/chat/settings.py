"""`/set NAME VALUE`: one value of a request, changed by what somebody typed."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from qwen_onnx.cli.options import parse_logit_bias
from qwen_onnx.errors import UserError
from qwen_onnx.runners.sampling.params import SamplingOptions
from qwen_onnx.runners.sampling.request import GenerationRequest

_OF_SAMPLING = tuple(field.name for field in dataclasses.fields(SamplingOptions))
_OF_REQUEST = ("max_new_tokens", "min_new_tokens", "stop", "ignore_eos", "logprobs", "top_logits")
_THINK = "think"
NAMES = (*_OF_SAMPLING, *_OF_REQUEST, _THINK)
"""What can be set, as `/params` and generation_config.json name it."""


def changed(request: GenerationRequest, name: str, text: str) -> GenerationRequest:
    """The request with one value changed; no text, or `default`, is as if nothing had been asked.

    Raises:
        UserError: no such name, or a value of another kind or out of range.
    """
    if name not in NAMES:
        raise UserError(f"/set {name}: not one of {', '.join(NAMES)}")
    value = None if text in ("", "default") else _value(name, text)
    if name == _THINK:
        if value not in (True, False, None):
            raise UserError(f"/set think {text}: on, off or default wanted")
        return dataclasses.replace(request, enable_thinking=value)
    if name in _OF_SAMPLING:
        values: dict[str, Any] = {name: value}
        return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, **values))
    if value is None:
        value = getattr(GenerationRequest(), name)
    values = {name: value}
    return dataclasses.replace(request, **values)


def _value(name: str, text: str) -> object:
    if name == "logit_bias":
        return parse_logit_bias(text)
    if text in ("on", "off"):
        return text == "on"
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = text
    if name == "stop" and not isinstance(found, list):  # one string: in quotes, or as it was typed
        return [found if isinstance(found, str) else text]
    return found
