"""Options, each declared once: a field of a dataclass, with its bounds, its help and its names elsewhere.

Command-line flags, `/set`, keys of batch lines, generation_config.json and Python's keywords derive from it.
What somebody asks for is a mapping of names to values; of it the dataclass is made, complete and verified.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from qwen_onnx.errors import UserError
from qwen_onnx.errors import option as called
from qwen_onnx.option_kinds import Name

P = ParamSpec("P")
Made = TypeVar("Made")
Returned = TypeVar("Returned")
Owner = TypeVar("Owner")
Subject = TypeVar("Subject")

Given = Mapping[str, object]
"""What was asked for: values by field name. None is as good as a name that is not there."""


SAME = "="


class Kind(Protocol):
    """What values an option takes."""

    @property
    def wanted(self) -> str:
        """In words, as `a number of 0 or more`."""
        ...

    @property
    def typed(self) -> Any:
        """As the command line reads it."""
        ...

    def accepts(self, value: Any) -> bool:
        """Whether it is one."""
        ...

    def parse(self, text: str) -> object:
        """What somebody typed for a value; it need not be one."""
        ...


@dataclasses.dataclass(frozen=True)
class Option:
    """What is known of a field beside its type and default."""

    kind: Kind
    help: str
    panel: str | None = None
    """Of the help that its flag stands in; None: it has no flag."""
    flag: str | None = None
    """As `--think/--no-think`; None: made of the field's name."""
    metavar: str | None = None
    read: Callable[[Any], object] | None = None
    """Makes the value of what the command line gives, as a schema of a file's name; None: it is the value."""
    flag_kind: Kind | None = None
    """What the command line gives, where it is not a value, as in another unit."""
    config_key: str | None = None
    """In generation_config.json, where it is read there; SAME: the field's name."""
    setting: str | None = None
    """What `/set` calls it, where it does; SAME: the field's name."""
    of_lines: bool = False
    """It is a key of batch lines."""
    hidden: bool = False
    """Its flag is not in the help, for few have a use for it."""
    only_with: str | None = None
    """The switch that it has a use with only: whoever asks for it wants that on."""
    about: str = ""
    """What docstrings say; `help`, which is one short line, where it is empty."""


def declare(
    default: Any,
    kind: Kind,
    help: str,
    panel: str | None = None,
    *,
    flag: str | None = None,
    metavar: str | None = None,
    read: Callable[[Any], object] | None = None,
    flag_kind: Kind | None = None,
    config_key: str | None = None,
    setting: str | None = None,
    of_lines: bool = False,
    hidden: bool = False,
    only_with: str | None = None,
    about: str = "",
    hash: bool = True,
) -> Any:
    """A field of a set of options: see Option; a default that is callable makes the default."""
    option = Option(
        kind, help, panel, flag, metavar, read, flag_kind, config_key, setting, of_lines, hidden, only_with,
        about,
    )  # fmt: skip
    if callable(default):
        return dataclasses.field(default_factory=default, hash=hash, metadata={"option": option})
    return dataclasses.field(default=default, hash=hash, metadata={"option": option})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """A set of options; each is verified as it is made.

    Raises:
        UserError: a value of the wrong kind or out of range.
    """

    def __post_init__(self) -> None:
        for name, option in declared(type(self)).items():
            value = getattr(self, name)
            if isinstance(option.kind, Name) and isinstance(value, str):
                value = option.kind.meant(value)
                object.__setattr__(self, name, value)
            if value is not None or default_of(type(self), name) is not None:
                verify(called(name), value, option.kind)


def verify(name: str, value: object, kind: Kind) -> None:
    """Raises UserError where it is no value of this kind."""
    if not kind.accepts(value):
        raise UserError(f"{name} {value!r}: {kind.wanted} wanted")


def declared(kind: type[Options]) -> Mapping[str, Option]:
    """The options of a set by field name, in order, their other names in words."""
    found = {}
    for field in dataclasses.fields(kind):
        option: Option = field.metadata["option"]
        config_key = field.name if option.config_key == SAME else option.config_key
        setting = field.name if option.setting == SAME else option.setting
        found[field.name] = dataclasses.replace(option, config_key=config_key, setting=setting)
    return found


def default_of(kind: type[Options], name: str) -> object:
    """What holds where nobody says anything."""
    field = next(field for field in dataclasses.fields(kind) if field.name == name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def given(kind: type[Options], values: Given) -> dict[str, Any]:
    """The values that say something, each of them known.

    Raises:
        UserError: a name that no option has, and which there are.
    """
    if unknown := [name for name in values if name not in declared(kind)]:
        raise UserError(f"{unknown[0]!r} is no option{_nearest(unknown[0], declared(kind))}")
    return {name: value for name, value in values.items() if value is not None}


def made(kind: Callable[..., Made], values: Given) -> Made:
    """The set, of what is given.

    Raises:
        UserError: an unknown name, or a value of the wrong kind or out of range.
    """
    return kind(**given(cast(type[Options], kind), values))


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    meant = f": {near[0]}?" if near else ""
    return f"{meant}; the options are {', '.join(known)}"


def function_options(
    kind: Callable[P, Options],
) -> Callable[[Callable[[Subject, Given], Returned]], Callable[Concatenate[Subject, P], Returned]]:
    """Gives a function the options of a set as keywords; it takes them as a mapping, its last parameter `options`."""
    return lambda function: taking(function, kind)


def method_options(
    kind: Callable[P, Options],
) -> Callable[
    [Callable[[Owner, Subject, Given], Returned]], Callable[Concatenate[Owner, Subject, P], Returned]
]:
    """As function_options, for a method."""
    return lambda method: taking(method, kind)


def taking(function: Callable[..., Any], kind: Any) -> Any:
    """The function with keywords in the place of its `options`; their types are for the caller to say."""
    *own, _ = inspect.signature(function).parameters.values()
    names = {parameter.name for parameter in own}

    def called(*args: Any, **keywords: Any) -> Any:
        leading = {name: keywords.pop(name) for name in names & keywords.keys()}
        return function(*args, **leading, options=keywords)

    functools.update_wrapper(called, function)
    keyword = functools.partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    options = [
        keyword(field.name, default=default_of(kind, field.name), annotation=field.type)
        for field in dataclasses.fields(kind)
    ]
    called.__signature__ = inspect.signature(function).replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    lines = [f"    {name}: {option.about or option.help}" for name, option in declared(kind).items()]
    called.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", "Options:", *lines])
    return called
