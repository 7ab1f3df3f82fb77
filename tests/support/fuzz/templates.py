"""Chat templates from strangers: good ones damaged, and bad ones put together of what attacks are made of."""

from __future__ import annotations

import random

from support.text_fixtures import QWEN3_LIKE, QWEN25_LIKE

VALUES = (
    "messages", "messages[0]", "messages[0].content", "tools", "''", "'x'", "[]", "{}", "0", "1", "-1", "none",
    "10 ** 12", "range(99999)", "range(10 ** 9)", "namespace", "namespace(a=1)", "cycler", "cycler('a')", "joiner",
    "dict", "raise_exception", "strftime_now", "self", "loop", "caller", "varargs", "kwargs", "lipsum", "undefined",
    "messages.__class__", "''.__class__.__mro__", "(1).__class__", "eos_token", "'%s' % 1", "'{0.__class__}'",
    "'PW' ~ 'NED' if self.__init__.__globals__ else ''", "().__class__.__base__.__subclasses__()", "('a',) * 3",
    "config", "x.y.z", "[1, [2, [3]]]", "{'a': {'b': messages}}", "'x' * 1000", "true", "'%99999999d' % 1",
    "[[[1] * 999] * 999] * 999", "('a' * 10 ** 6)", "(x, x)", "[x, x]", "{'a': x, 'b': x}", "namespace(a=x, b=x)",
    "'ab' ~ 'a' * 99999", "range(0, 10 ** 5 * (2 ** 61 - 1), 2 ** 61 - 1)", "'%s%9999s' * 999", "'{0:9999}' * 999",
)  # fmt: skip
ATTRIBUTES = (
    "__class__", "__globals__", "__init__", "__mro__", "__subclasses__()", "__builtins__", "__dict__", "__code__",
    "append(1)", "clear()", "pop()", "update(role='x')", "sort()", "format(1)", "format_map({})", "join([1])",
    "content", "role", "mro()", "gi_frame", "f_globals", "func_globals", "im_func", "__getattribute__('x')",
    "split('')", "ljust(10 ** 12)", "zfill(10 ** 9)", "encode()", "translate({})", "expandtabs(10 ** 9)",
    "replace('', 'x')", "strip()", "items()", "splitlines()", "count('')", "maketrans('a', 'b')", "rjust(299999)",
    "replace('a', 'b' * 10 ** 5)", "join(x)", "format(x, x)", "format(*x)", "rfind(x)", "rsplit(x)", "strip(x)",
    "keys().mapping", "to_bytes(10 ** 9, 'big')", "translate([x] * 99)", "expandtabs(tabsize=99999)", "get(x)",
)  # fmt: skip
FILTERS = (
    "attr('__class__')", "map(attribute='__class__')", "map('attr', '__init__')", "list", "join", "join('x')",
    "tojson(indent=10 ** 9)", "string", "int", "float", "length", "first", "last", "random", "reverse", "sort",
    "batch(10 ** 9)", "slice(10 ** 9)", "center(10 ** 9)", "indent(10 ** 9)", "wordwrap(1)", "format(1, 2)",
    "groupby('role')", "selectattr('x', '__init__')", "select('undefined')", "map('upper')", "sum", "pprint",
    "urlize", "striptags", "filesizeformat", "default(messages)", "dictsort", "items", "truncate(1)", "no_such",
    "forceescape", "tojson", "unique", "replace('', 'xx')", "xmlattr", "batch(2)", "slice(3)", "wordcount",
    "replace('a', 'b' * 10 ** 5)", "map('replace', 'a', x)", "join('a' * 10 ** 6)", "indent('x' * 10 ** 6)",
    "select('in', x)", "select('odd')", "tojson(indent=99999)", "sum(start=[])", "map('repeated part')", "trim(x)",
    "round(-299999)", "int(base=16)", "format(x)", "format(*x)", "unique | list", "title", "sort(attribute=x)",
)  # fmt: skip
STATEMENTS = (
    "{{% for i in {value} %}}{body}{{% endfor %}}",
    "{{% for i in {value} recursive %}}{{{{ loop({value}) }}}}{{% endfor %}}",
    "{{% if {value} %}}{body}{{% elif {value} %}}{body}{{% else %}}{body}{{% endif %}}",
    "{{% set x = {value} %}}{body}",
    "{{% set x %}}{body}{{% endset %}}{{{{ x }}}}",
    "{{% macro f(a) %}}{body}{{{{ f({value}) }}}}{{% endmacro %}}{{{{ f(1) }}}}",
    "{{% call f({value}) %}}{body}{{% endcall %}}",
    "{{% filter {filter} %}}{body}{{% endfilter %}}",
    "{{% include {value} %}}",
    "{{% import {value} as m %}}{body}",
    "{{% extends {value} %}}",
    "{{% block b %}}{body}{{% endblock %}}",
    "{{% raw %}}{body}",
    "{{% generation %}}{body}{{% endgeneration %}}",
    "{{% break %}}",
    "{{% set ns = namespace() %}}{{% set ns.x = {value} %}}",
    "{{% set ns = namespace(s='x') %}}{{% for i in range(9) %}}"
    "{{% set ns.s = ns.s ~ {value} ~ ns.s %}}{{% endfor %}}",
    "{{% set ns = namespace(l={value}) %}}{{% for i in range(60) %}}{{% set ns.l = (ns.l, ns.l) %}}{{% endfor %}}"
    "{{% set x = ns.l %}}{body}{{{{ {{x: x}} }}}}",
    "{{% set x = {value} %}}{{% for i in range(99999) %}}{body}{{% endfor %}}",
    "{{% do {value} %}}",
    "{{% with x = {value} %}}{body}{{% endwith %}}",
    "{{# {body}",
    "{{% autoescape true %}}{body}",
)
OPERATORS = ("+", "*", "**", "%", "~", "//", "-", "in", "is", "==", "<", "and")


def damaged_template(rng: random.Random) -> str:
    """One of either kind."""
    if rng.random() < 0.7:
        return "".join(_statement(rng, 3) for _ in range(rng.randrange(1, 4)))
    text = rng.choice((QWEN25_LIKE, QWEN3_LIKE))
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(text) + 1)
        end = min(len(text), at + rng.choice((0, 1, 5, 40)))
        marks = ("", "{%", "%}", "{{", "}}", "-", "'", "\\", "\0", "(" * 300)
        text = text[:at] + rng.choice((*marks, _expression(rng, 2), text[at:end] * 3)) + text[end:]
    return text


def _statement(rng: random.Random, depth: int) -> str:
    if depth == 0 or rng.random() < 0.4:
        return "{{ " + _expression(rng, 3) + " }}"
    form = rng.choice(STATEMENTS)
    body = _statement(rng, depth - 1)
    return form.format(value=_expression(rng, 2), body=body, filter=rng.choice(FILTERS))


def _expression(rng: random.Random, depth: int) -> str:
    value = rng.choice((*VALUES, "i", "x", "ns", "f"))
    for _ in range(rng.randrange(depth + 1)):
        match rng.randrange(6):
            case 0:
                value = f"({value}).{rng.choice(ATTRIBUTES)}"
            case 1:
                value = f"{value} | {rng.choice(FILTERS)}"
            case 2:
                value = f"({value}) {rng.choice(OPERATORS)} ({rng.choice(VALUES)})"
            case 3:
                value = f"({value})[{rng.choice((*VALUES, ':', '::-1', '-1', repr('__class__')))}]"
            case 4:
                value = f"({value})({rng.choice((*VALUES, ''))})"
            case _:
                value = f"[{value}, {rng.choice(VALUES)}]"
    return value
