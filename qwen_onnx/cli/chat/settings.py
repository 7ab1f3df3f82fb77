"""`/set NAME VALUE`: one option of a request, changed by what somebody typed."""

from __future__ import annotations

from typing import Any

from qwen_onnx.errors import UserError
from qwen_onnx.option_kinds import Switch
from qwen_onnx.options import Given, declared, made
from qwen_onnx.runners.sampling.request import Request


def settings() -> dict[str, str]:
    """What can be set, as `/params` and generation_config.json name it, and the fields of Request that they are."""
    return {option.setting: name for name, option in declared(Request).items() if option.setting}


def changed(asked: Given, setting: str, text: str) -> dict[str, Any]:
    """What is asked with one value changed; no text, or `default`, is as if it had not been asked for.

    Raises:
        UserError: no such name, or a value of another kind or out of range.
    """
    if setting not in settings():
        raise UserError(f"/set {setting}: not one of {', '.join(settings())}")
    name = settings()[setting]
    others = {other: value for other, value in asked.items() if other != name}
    if text in ("", "default"):
        return others
    kind = declared(Request)[name].kind
    value = kind.parse(text)
    if value is None:  # what JSON's null is
        return others
    if isinstance(kind, Switch) and not kind.accepts(value):
        raise UserError(f"/set {setting} {text}: on, off or default wanted")
    made(Request, {name: value})
    return {**others, name: value}
