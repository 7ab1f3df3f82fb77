"""Small changes of a source file, one at a time: what a slip of the hand could leave behind."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//", ast.Pow: "*",
    ast.LShift: ">>", ast.RShift: "<<",
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


class Mutation(NamedTuple):
    """`old` at these places of the file becomes `new`."""

    path: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def apply(self, text: str) -> str:
        """The file with this change."""
        assert text[self.start : self.end] == self.old
        return text[: self.start] + self.new + text[self.end :]

    def key(self, text: str) -> str:
        """Names it as long as its line stays what it is, wherever that line moves to."""
        begin = text.rfind("\n", 0, self.start) + 1
        line = text[begin:].partition("\n")[0].strip()
        before = text[begin : self.start].count(self.old)
        which = f" (no. {before + 1})" if before else ""
        return f"{self.path}, {_around(text, self.line)}: {line} | {self.old} -> {self.new}{which}"


def mutations(root: Path, path: str) -> list[Mutation]:
    """All of one file."""
    text = (root / path).read_text(encoding="utf-8")
    return list(_Finder(path, text).of(ast.parse(text)))


def _around(text: str, line: int) -> str:
    """The name of the innermost function or class that this line is in."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    inside = [node for node in found if node.lineno <= line <= (node.end_lineno or line)]
    return max(inside, key=lambda node: node.lineno).name if inside else "module"


class _Finder:
    """Mutations of nodes, with their places in the text."""

    def __init__(self, path: str, text: str) -> None:
        self._path, self._text = path, text
        lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))
        self._lines = lines

    def of(self, node: ast.AST) -> Iterator[Mutation]:
        """Of a node and all below it; of no annotation, and of no string."""
        yield from self._here(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self.of(child)

    def _here(self, node: ast.AST) -> Iterator[Mutation]:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            new = COMPARISONS[type(node.ops[0])]
            yield from self._between(node.left, node.comparators[0], new)
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            if not any(isinstance(side, ast.Constant | ast.JoinedStr) and _is_text(side)
                       for side in (node.left, node.right)):  # fmt: skip
                yield from self._between(node.left, node.right, OPERATORS[type(node.op)])
        elif isinstance(node, ast.BoolOp):
            new = "or" if isinstance(node.op, ast.And) else "and"
            yield from self._between(node.values[0], node.values[1], new)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield self._whole(node, self._source(node.operand))
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield self._whole(node, str(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            yield self._whole(node, str(node.value + 1))
        elif isinstance(node, ast.Constant) and isinstance(node.value, float):
            yield self._whole(node, f"({self._source(node)} * 2)")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            yield self._whole(node.func, CALLS[node.func.id])
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield self._whole(node, "pass")
        elif isinstance(node, ast.Break | ast.Continue):
            yield self._whole(node, "continue" if isinstance(node, ast.Break) else "break")

    def _offset(self, line: int, column: int) -> int:
        """In characters; ast counts columns in bytes."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def _span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._offset(node.lineno, node.col_offset),
            self._offset(node.end_lineno, node.end_col_offset),
        )

    def _source(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self._text[start:end]

    def _whole(self, node: ast.expr | ast.stmt, new: str) -> Mutation:
        start, end = self._span(node)
        return Mutation(self._path, node.lineno, start, end, self._text[start:end], new)

    def _between(self, left: ast.expr, right: ast.expr, new: str) -> Iterator[Mutation]:
        """The operator between two operands; parentheses around them stay."""
        start, end = self._span(left)[1], self._span(right)[0]
        gap = self._text[start:end]
        old = gap.strip(" ()\n")
        if old and "#" not in gap and "\n" not in old:
            at = start + gap.index(old)
            line = self._text.count("\n", 0, at) + 1
            yield Mutation(self._path, line, at, at + len(old), old, new)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
