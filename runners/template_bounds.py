"""Bounds on what rendering a chat template may cost: text joined, loop rounds, calls, counts, numbers."""

import re
from collections.abc import Callable, Iterable, Sequence, Sized
from itertools import islice
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context

LARGEST_TEXT = 16 * 2**20
MOST_WORK = 300_000
MOST_BITS = 4096
# So many characters computed count as one loop round: a render computes at most 600 million.
_CHARACTERS_A_ROUND = 2048

# Names with a space: a template can neither read nor set them.
METER = "work meter"
_ROUNDS = "bounded rounds"
_TEXT = "bounded text"
_COUNT = "bounded count"

_COUNTING_FILTERS = frozenset({"batch", "center", "indent", "slice", "tojson", "wordwrap"})
_TOO_LONG = f"more than {LARGEST_TEXT >> 20} MiB of text"
_WIDE_FORMAT = re.compile(r"\d{7}|\*")


class Meter:
    """Counts the work of one render; a render finds it among its variables as METER."""

    spent = 0


def put_bounds(tree: nodes.Template) -> None:
    """Put the filters of `bounding_filters` around what loops go over, and what joins and filters return."""
    for node in list(tree.find_all((nodes.For, nodes.Concat, nodes.Filter))):
        match node:
            case nodes.For():
                node.iter = _filtered(node.iter, _ROUNDS)
            case nodes.Concat():
                node.nodes = [_filtered(nodes.Concat(node.nodes, lineno=node.lineno), _TEXT)]
            case nodes.Filter():
                if node.name in _COUNTING_FILTERS:
                    node.args = [_filtered(arg, _COUNT) for arg in node.args]
                    for pair in node.kwargs:
                        pair.value = _filtered(pair.value, _COUNT)
                inner = nodes.Filter(*(getattr(node, field) for field in node.fields), lineno=node.lineno)
                # In place: the parent, which may be a filter block, goes on holding a filter.
                node.node, node.name, node.args, node.kwargs = inner, _TEXT, [], []
                node.dyn_args = node.dyn_kwargs = None


def bounding_filters() -> dict[str, Callable[..., Any]]:
    """Return, by their names in a bounded template, the filters that hold it within bounds."""
    return {_ROUNDS: _bounded_rounds, _TEXT: _bounded_text, _COUNT: _bounded_count}


def spend(context: Context, work: int) -> None:
    """Count loop rounds, calls or the like. Raises SecurityError when a render has made too many."""
    meter = context[METER]
    meter.spent += work
    if meter.spent > MOST_WORK:
        raise SecurityError(f"more work than {MOST_WORK} loop rounds and calls")


def counted(context: Context, value: Any) -> Any:
    """Return a computed value; a text counts as work. Raises SecurityError when it is too long."""
    if isinstance(value, str | bytes):
        if len(value) > LARGEST_TEXT:
            raise SecurityError(_TOO_LONG)
        spend(context, len(value) // _CHARACTERS_A_ROUND)
    return value


def bounded_join(pieces: Iterable[str]) -> str:
    """Join pieces of text. Raises SecurityError, before it is joined, when the text is too long."""
    kept: list[str] = []
    length = 0
    for piece in pieces:
        kept.append(piece)
        length += len(piece)
        if length > LARGEST_TEXT:
            raise SecurityError(_TOO_LONG)
    return "".join(kept)


def check_count(value: object) -> None:
    """Raise SecurityError for a number that no width, indent or count needs."""
    if isinstance(value, int) and value > MOST_WORK:
        raise SecurityError(f"a width or count above {MOST_WORK}")


def check_operation(operator: str, left: object, right: object) -> None:
    """Raise SecurityError when the result of `+`, `*`, `**` or `%` would be out of proportion."""
    match operator, left, right:
        case "%", str(), _:
            too_large = _WIDE_FORMAT.search(left) is not None
        case "**", int(), int():
            too_large = left.bit_length() * right > MOST_BITS
        case "*", int(), int():
            too_large = left.bit_length() + right.bit_length() > MOST_BITS
        case ("*", int(count), Sequence() as items) | ("*", Sequence() as items, int(count)):
            too_large = len(items) * count > _longest(items)
        case "+", Sequence(), Sequence():
            too_large = len(left) + len(right) > _longest(left)
        case _:
            too_large = False
    if too_large:
        raise SecurityError(f"the result of {operator} is too large")


def _longest(items: Sequence[object]) -> int:
    return LARGEST_TEXT if isinstance(items, str | bytes) else MOST_WORK


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


# These take the context, needed or not: Jinja would compute a filter of constants when it compiles.
@pass_context
def _bounded_rounds(context: Context, rounds: Any) -> Any:
    if not isinstance(rounds, Sized):
        rounds = list(islice(rounds, MOST_WORK + 1))
    spend(context, len(rounds))
    return rounds


@pass_context
def _bounded_text(context: Context, value: Any) -> Any:
    return counted(context, value)


@pass_context
def _bounded_count(_: Context, value: Any) -> Any:
    check_count(value)
    return value
