"""Inputs, outputs and table sizes of a graph, asked of its bytes: a manifest may say anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from qwen_onnx.contract.manifest import GraphSpec, Manifest, TensorSpec
from qwen_onnx.errors import UserError
from qwen_onnx.runners.runtime.protobuf import MalformedError, fields, varint

# Fields of onnx.proto: ModelProto.graph; of GraphProto; of ValueInfoProto and what is below it; of TensorProto.
_GRAPH = 7
_INITIALIZER, _INPUT, _OUTPUT = 5, 11, 12
_NAME, _TYPE = 1, 2
_TENSOR_TYPE = 1
_ELEMENT, _SHAPE = 1, 2
_DIM = 1
_DIM_VALUE, _DIM_PARAM = 1, 2
_DIMS, _TENSOR_NAME = 1, 8
_DTYPES = {1: "float32", 6: "int32", 7: "int64", 10: "float16", 16: "bfloat16"}
_TABLE = b"rotary.cos"
_AGAIN = "copy or export it again"

Span = tuple[int, int]


def verify_interface(path: Path, content: bytes, graph: GraphSpec, manifest: Manifest) -> None:
    """A graph takes in and puts out what the manifest says, and has as many positions.

    Before it is opened, and before anything is allocated of the sizes that a manifest names.

    Raises:
        UserError: naming the first that is another.
    """
    try:
        graphs = [
            (first, last) for number, first, last in fields(content, 0, len(content)) if number == _GRAPH
        ]
        for kind, field, said in (("input", _INPUT, graph.inputs), ("output", _OUTPUT, graph.outputs)):
            spans = (span for whole in graphs for span in _spans(content, whole, field))
            _compare(path, kind, [_value(content, span) for span in spans], said)
        for whole in graphs:
            for rows in _table_rows(content, whole):
                if rows != manifest.context_length:
                    raise UserError(
                        f"{path}: has tables of {rows} positions, export.json says {manifest.context_length}; "
                        f"{_AGAIN}"
                    )
    except (MalformedError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a graph of an export ({error}); {_AGAIN}") from None


def _compare(path: Path, kind: str, found: list[TensorSpec], said: tuple[TensorSpec, ...]) -> None:
    for held, wanted in zip(found, said, strict=False):
        if held != wanted:
            raise UserError(
                f"{path}: has the {kind} {_words(held)}, export.json says {_words(wanted)}; {_AGAIN}"
            )
    if len(found) != len(said):
        raise UserError(f"{path}: has {len(found)} {kind}s, export.json says {len(said)}; {_AGAIN}")


def _words(spec: TensorSpec) -> str:
    return f"{spec.name[:100]} {spec.dtype} [{', '.join(map(str, spec.shape[:9]))}]"


def _value(content: bytes, span: Span) -> TensorSpec:
    """Of a ValueInfoProto."""
    name = _text(content, _one(content, span, _NAME))
    tensor = _one(content, _one(content, span, _TYPE), _TENSOR_TYPE)
    element = varint(content, *_one(content, tensor, _ELEMENT))[0]
    shape = _spans(content, _one(content, tensor, _SHAPE), _DIM)
    return TensorSpec(name, _DTYPES.get(element, str(element)), tuple(_size(content, dim) for dim in shape))


def _size(content: bytes, dim: Span) -> int | str:
    """Of a dimension: its size, or the name of what may differ."""
    found: int | str = "?"
    for number, first, last in fields(content, *dim):
        if number == _DIM_VALUE:
            found = varint(content, first, last)[0]
        elif number == _DIM_PARAM:
            found = _text(content, (first, last))
    return found


def _table_rows(content: bytes, whole: Span) -> Iterator[int]:
    """First sizes of the rotary tables."""
    for first, last in _spans(content, whole, _INITIALIZER):
        if (
            content.find(_TABLE, first, last) < 0
            or _text(content, _one(content, (first, last), _TENSOR_NAME)) != _TABLE.decode()
        ):
            continue
        for dims in _spans(
            content, (first, last), _DIMS
        ):  # one number each, or all in one field: the first is first
            yield varint(content, *dims)[0]
            break


def _spans(content: bytes, span: Span, field: int) -> Iterator[Span]:
    """Where each field of this number lies in a message."""
    return ((first, last) for number, first, last in fields(content, *span) if number == field)


def _one(content: bytes, span: Span, field: int) -> Span:
    """Where the field lies that stands once: of two, runtimes would merge what is in them."""
    found = [*_spans(content, span, field)]
    if len(found) != 1:
        raise MalformedError(f"field {field} stands {len(found)} times")
    return found[0]


def _text(content: bytes, span: Span) -> str:
    return content[span[0] : span[1]].decode()
