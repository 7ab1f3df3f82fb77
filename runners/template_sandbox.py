"""The Jinja environment of chat templates: transformers' settings, in a sandbox that also bounds the work.

A template comes with the model, from strangers: it may neither reach Python nor keep the machine busy.
"""

import json
from collections.abc import Iterable, Sized
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from qwen_onnx.runners.template_bounds import (
    METER,
    Meter,
    bounded_join,
    bounding_filters,
    check_count,
    check_operation,
    counted,
    put_bounds,
    spend,
)


class RefusalError(TemplateError):
    """What a template raises by `raise_exception`."""


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles templates whose rendering stays within bounds; what oversteps them raises SecurityError.

    Bounded are each text (16 MiB) and the work of a render (300,000 loop rounds and calls; long texts count too).
    What a filter allocates on its way to a text is bounded by its inputs only.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters |= {"tojson": _tojson} | bounding_filters()
        self.globals |= {
            "namespace": _NamedValues,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        del self.globals["lipsum"]  # makes any amount of text, and no chat has a use for it

    def bounded_template(self, source: str) -> Template:
        """Compile `source`. Raises TemplateSyntaxError."""
        tree = self.parse(source)
        put_bounds(tree)
        return Template.from_code(self, self.compile(tree), self.make_globals(None))

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Join what a template, a macro or a block has written: Jinja comes here for each of them."""
        return bounded_join(pieces)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an intercepted operator, unless its result would be out of proportion."""
        check_operation(operator, left, right)
        return counted(context, super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Make a call of the template, counted as work. (The signature is Jinja's.)"""
        # A recursive loop calls itself with what it goes over next.
        recursion = isinstance(__obj, LoopContext) and args and isinstance(args[0], Sized)
        spend(__context, 1 + len(args[0]) if recursion else 1)
        if isinstance(getattr(__obj, "__self__", None), str | bytes):
            for arg in args:
                check_count(arg)
        return counted(__context, super().call(__context, __obj, *args, **kwargs))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Refuse, beyond Jinja's rules, what is fetched from a class: `dict.update(d, …)` would change d."""
        return not isinstance(obj, type) and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Refuse at once: what Jinja returns here fails when it is used, but prints as nothing."""
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__}")


def render_bounded(template: Template, variables: dict[str, object]) -> str:
    """Render what `bounded_template` compiled. Raises whatever the template raises."""
    return template.render({**variables, METER: Meter()})


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it only scopes."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _NamedValues(Namespace):
    """Jinja's namespace, without names such as `__call__`, by which it could pass for something else."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"namespace attribute {name!r}")
        super().__setitem__(name, value)


def _raise_exception(message: object) -> NoReturn:
    raise RefusalError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own tojson escapes <, >, & and ' for HTML: the model would read \u003c.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
