"""Flags made of declared options: a command gets them as one mapping of what was given."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from qwen_onnx.options import Option, Options, declared, verify

NAMES: dict[str, str | None] = {}
"""Flags of the commands, by field name."""
METAVARS = {bool: "", int: "N", float: "X", Path: "PATH"}


def flags(
    parameter: str, kind: type[Options], *, only: Collection[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replaces a parameter of a command by the flags of a set of options; it gets what was given, by field name.

    Args:
        only: of these fields; of all where none is named.
    """
    options = {
        name: option for name, option in declared(kind).items() if option.panel and (not only or name in only)
    }

    NAMES.update({name: _flag(name, option) for name, option in options.items()})

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **values: Any) -> Any:
            typed = {name: values.pop(name) for name in options}
            given = {
                name: _read(name, options[name], value)
                for name, value in typed.items()
                if value not in (None, [])
            }
            return command(*args, **values, **{parameter: given})

        functools.update_wrapper(called, command)
        signature = inspect.signature(command, eval_str=True)
        own = [each for name, each in signature.parameters.items() if name != parameter]
        added = [_parameter(name, option) for name, option in options.items()]
        called.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        called.__annotations__ = {each.name: each.annotation for each in (*own, *added)}
        return called

    return decorate


def _parameter(name: str, option: Option) -> inspect.Parameter:
    """A flag whose value is None where it was not given."""
    choices: tuple[str, ...] = getattr(option.kind, "choices", ())
    names = _flag(name, option).split()
    found = typer.Option(
        *names,
        help=option.help,
        metavar=option.metavar or METAVARS.get(option.kind.typed, "TEXT"),
        rich_help_panel=option.panel,
        show_default=False,
        hidden=option.hidden,
        autocompletion=None if not choices else lambda: [*choices],
    )
    kind = inspect.Parameter.KEYWORD_ONLY
    annotation = cast(Any, Annotated)[option.kind.typed | None, found]
    return inspect.Parameter(name, kind, default=None, annotation=annotation)


def _flag(name: str, option: Option) -> str:
    if option.flag:
        return option.flag
    spelled = name.replace("_", "-")
    return f"--{spelled}/--no-{spelled}" if option.kind.typed is bool else f"--{spelled}"


def _read(name: str, option: Option, value: Any) -> object:
    """The option's value of what was typed.

    Raises:
        UserError: it is none, with the flag's name.
    """
    kind = option.flag_kind or (None if option.read else option.kind)
    for each in value if isinstance(value, list) else [value]:
        if kind is not None:
            verify(_flag(name, option).split("/")[0].split()[0], each, kind)
    return option.read(value) if option.read else tuple(value) if isinstance(value, list) else value
