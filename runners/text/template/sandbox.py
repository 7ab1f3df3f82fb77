"""The Jinja environment of chat templates: transformers' settings, in a sandbox that also bounds the work.

A template comes with the model, from strangers: it may neither reach Python nor keep the machine busy.
"""

import json
from collections.abc import Iterable, Sized
from datetime import datetime
from operator import length_hint
from types import BuiltinMethodType, FunctionType
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from qwen_onnx.runners.text.template.bounds import bounding_filters, check_operation, put_bounds
from qwen_onnx.runners.text.template.methods import allowed, bounded_arguments, bounded_filters, bounded_tests
from qwen_onnx.runners.text.template.sizes import METER, Meter, bounded_join, meter_of

# To compile a longer one takes long; the longest of real ones have a fifth of that.
_LONGEST_TEMPLATE = 2**17
# What is found by a longer key takes its time to compare with the key.
_LONGEST_KEY = 2**16
_LONGEST_REFUSAL = 2**12
_LONGEST_DATE = 2**8


class RefusalError(TemplateError):
    """What a template raises by `raise_exception`."""


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles templates whose rendering stays within bounds; what oversteps them raises SecurityError.

    Bounded are the size written out of each value that is made (16 MiB; 32 characters for each element), and the work
    of a render: 300,000 loop rounds, calls and the like, of which 1,024 bytes made or gone over count as one. So a
    render takes seconds and a few hundred MB. There are only filters, tests and methods whose costs are known.
    """

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters |= {"tojson": _tojson}
        self.filters = bounded_filters(self.filters) | bounding_filters()
        self.tests = bounded_tests(self.tests)
        self.globals |= {
            "namespace": _NamedValues,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        del self.globals["lipsum"]  # makes any amount of text, and no chat has a use for it

    def bounded_template(self, source: str) -> Template:
        """Compile `source`. Raises TemplateSyntaxError, and SecurityError when it is too long."""
        if len(source) > _LONGEST_TEMPLATE:
            raise SecurityError(f"a template of more than {_LONGEST_TEMPLATE >> 10} KiB")
        tree = self.parse(source)
        put_bounds(tree)
        return Template.from_code(self, self.compile(tree), self.make_globals(None))

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Join what a template, a macro or a block has written: Jinja comes here for each of them."""
        return bounded_join(pieces)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator, unless its result would be out of proportion."""
        meter = meter_of(context)
        check_operation(meter, operator, left, right)
        return meter.made(self.binop_table[operator](left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Make a call of the template, counted as work. (The signature is Jinja's.)"""
        meter = meter_of(__context)
        meter.spend(1 + (len(args) + len(kwargs)) // 16)
        if isinstance(__obj, LoopContext):
            # A recursive loop calls itself with what it goes over next.
            meter.spend(sum(len(arg) for arg in args if isinstance(arg, Sized)))
        elif isinstance(__obj, BuiltinMethodType):
            args, kwargs = bounded_arguments(meter, __obj, args, kwargs)
        elif isinstance(__obj, FunctionType) and (wrapped := getattr(__obj, "__wrapped__", None)):
            args, kwargs = bounded_arguments(meter, wrapped, args, kwargs)  # Jinja wraps `str.format`
        elif not isinstance(__obj, Macro):
            # A macro is given its arguments; anything else may go over them.
            for name, arg in (*enumerate(args), *kwargs.items()):
                if name not in ("_loop_vars", "_block_vars"):
                    meter.use(arg)
            if __obj in (dict, _NamedValues) and args:
                meter.hashed(length_hint(args[0]))
        return meter.made(super().call(__context, __obj, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Fetch an item, by a key that is soon hashed and compared."""
        if isinstance(argument, str) and len(argument) > _LONGEST_KEY:
            raise SecurityError(f"a key of more than {_LONGEST_KEY} characters")
        if isinstance(argument, tuple | range):
            raise SecurityError(f"a {type(argument).__name__} as a key")
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Refuse, beyond Jinja's rules, what is fetched from a class: `dict.update(d, …)` would change d."""
        known = allowed(obj, attr)
        if known is not None:
            return known
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

    def __repr__(self) -> str:
        # Not its values, among which it may be itself.
        return "<Namespace>"


def _raise_exception(message: object) -> NoReturn:
    raise RefusalError(str(message)[:_LONGEST_REFUSAL])


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format[:_LONGEST_DATE])


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
