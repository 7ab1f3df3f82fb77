"""Bounds put into the tree of a chat template: what it writes out, makes and compares, and how often it repeats."""

from collections.abc import Sequence, Sized
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.runtime import Context
from jinja2.visitor import NodeTransformer

from qwen_onnx.runners.text.template.methods import formatted_size
from qwen_onnx.runners.text.template.sizes import (
    LARGEST_TEXT,
    MOST_BITS,
    MOST_WORK,
    Meter,
    bounded_join,
    check_size,
    meter_of,
)

# Names with a space: a template can neither read nor set them.
_MADE, _USED, _PRINTED, _JOINED = "made value", "used value", "printed value", "joined text"
_ROUNDS, _REPEATED = "bounded rounds", "repeated part"

# So many nodes of the tree count as one loop round, each time they run.
_NODES_A_ROUND = 50
# To search a text for another takes, at worst, so many times as long as to go over it.
_SEARCH = 6
_SHORT = 16


def put_bounds(tree: nodes.Template) -> None:
    """Put the filters of `bounding_filters` into the tree. Raises TemplateSyntaxError for what no chat needs."""
    for node in tree.find_all((nodes.EvalContextModifier, nodes.ScopedEvalContextModifier)):
        raise TemplateSyntaxError("a chat template may not switch escaping", node.lineno)
    _Bounds().visit(tree)


def bounding_filters() -> dict[str, Any]:
    """Return, by their names in a bounded template, the filters that hold it within bounds."""
    return {
        _MADE: _made,
        _USED: _used,
        _PRINTED: _printed,
        _JOINED: _joined,
        _ROUNDS: _bounded_rounds,
        _REPEATED: _repeated,
    }


def check_operation(meter: Meter, operator: str, left: object, right: object) -> None:
    """Raise SecurityError when the result of an operator would be out of proportion, or slow to get."""
    match operator, left, right:
        case "+", str(), str():
            check_size(len(left) + len(right))
            too_large = False
        case "%", str(), _:
            check_size(formatted_size(meter, left, right if isinstance(right, tuple) else (right,), "%"))
            too_large = False
        case "**", int(), int():
            too_large = left.bit_length() * right > MOST_BITS
        case "*", int(), int():
            too_large = left.bit_length() + right.bit_length() > MOST_BITS
        case _, int(), int():
            too_large = max(left.bit_length(), right.bit_length()) > MOST_BITS
        case ("*", int(count), Sequence() as items) | ("*", Sequence() as items, int(count)):
            too_large = len(items) * count > _longest(items)
        case "+", Sequence(), Sequence():
            too_large = len(left) + len(right) > _longest(left)
        case "-", _, _:
            too_large = isinstance(left, Sized)  # sets, of which a template has no others
        case _:
            too_large = False
    if too_large:
        raise SecurityError(f"the result of {operator} is too large")


def _longest(items: Sequence[object]) -> int:
    return LARGEST_TEXT if isinstance(items, str) else MOST_WORK


class _Bounds(NodeTransformer):
    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        """Return what to put in the place of a node, after what is within it."""
        repeated = isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block)
        work = sum(1 for _ in node.find_all(nodes.Node)) // _NODES_A_ROUND if repeated else 0
        tick = _filtered(nodes.Const(work, lineno=node.lineno), _REPEATED)
        self.generic_visit(node)
        match node:
            case nodes.For():
                node.iter = _filtered(node.iter, _ROUNDS)
                if node.test is not None:
                    node.test = nodes.And(tick, node.test, lineno=node.lineno)
                elif work:
                    node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
            case nodes.Macro() | nodes.CallBlock() | nodes.Block() if work:
                node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
            case nodes.AssignBlock():
                node.filter = _filtered(node.filter, _MADE, lineno=node.lineno)
            case nodes.Output():
                node.nodes = [_printing(each) for each in node.nodes]
            case nodes.Concat():
                # The pieces are joined here: Jinja would join them first, and be counted afterwards.
                return _filtered(nodes.Tuple(node.nodes, "load", lineno=node.lineno), _JOINED)
            case nodes.Tuple(ctx="load") | nodes.List() if not _plain(node):
                return _filtered(node, _MADE)
            case nodes.Dict():
                return _filtered(node, _USED)  # its keys are hashed
            case nodes.Getitem(arg=nodes.Slice()):
                return _filtered(node, _MADE)
            case nodes.Compare():
                _bound_comparison(node)
        return node


def _printing(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.TemplateData | nodes.Const) else _filtered(node, _PRINTED)


def _bound_comparison(node: nodes.Compare) -> None:
    sides = [node.expr, *(operand.expr for operand in node.ops)]
    within = [operand.op in ("in", "notin") for operand in node.ops]
    # With a constant of the template's, a comparison takes as long as that.
    if len(sides) == 2 and (_plain(sides[1]) or (_plain(sides[0]) and not within[0])):
        return
    node.expr = _filtered(node.expr, _USED)
    for operand, needle, inside in zip(node.ops, sides, within, strict=False):
        short = isinstance(needle, nodes.Const) and len(str(needle.value)) <= _SHORT
        operand.expr = _filtered(operand.expr, _USED, nodes.Const(_SEARCH if inside and not short else 1))


def _filtered(
    node: nodes.Node | None, name: str, *args: nodes.Expr, lineno: int | None = None
) -> nodes.Filter:
    lineno = node.lineno if node is not None else lineno
    return nodes.Filter(node, name, list(args), [], None, None, lineno=lineno)


def _plain(node: nodes.Node) -> bool:
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(isinstance(item, nodes.Const) for item in node.items)
    return isinstance(node, nodes.Const)


# These take the context, needed or not: Jinja would compute a filter of constants when it compiles.
@pass_context
def _made(context: Context, value: Any) -> Any:
    return meter_of(context).made(value)


@pass_context
def _used(context: Context, value: Any, times: int = 1) -> Any:
    meter_of(context).use(value, times)
    return value


@pass_context
def _printed(context: Context, value: Any) -> Any:
    meter = meter_of(context)
    meter.spend(1)
    if not isinstance(value, str):
        meter.use(value)
        value = str(value)
    return meter.made(value)


@pass_context
def _joined(context: Context, values: tuple[Any, ...]) -> Any:
    meter = meter_of(context)
    for value in values:
        meter.use(value)
    return meter.made(bounded_join(map(str, values)))


@pass_context
def _bounded_rounds(context: Context, rounds: Any) -> Any:
    meter = meter_of(context)
    if not isinstance(rounds, Sized):
        rounds = meter.listed(iter(rounds))
    meter.spend(len(rounds))
    return rounds


@pass_context
def _repeated(context: Context, work: int) -> bool:
    meter_of(context).spend(work)
    return True
