"""A graph as a file: its parameters point into the weights files, and it is verified before it is written."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import onnx
import onnx_ir as ir

PACKED = MappingProxyType(
    {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
)
"""Projections that some graphs read as one matrix: a view of tensors that lie side by side in the weights file."""


class StoredParameter(NamedTuple):
    """Where an initializer's bytes lie, as a graph file has to say it."""

    file: str
    offset: int
    nbytes: int


def parameters(model: ir.Model) -> dict[str, ir.Value]:
    """The initializers that a weights file has to fill, by their checkpoint name."""
    return {name: value for name, value in model.graph.initializers.items() if value.const_value is None}


def save_graph(model: ir.Model, path: Path, stored: dict[str, StoredParameter]) -> None:
    """Verify and write the graph; its parameters point into the weights files, which lie in the same folder."""
    for name, value in parameters(model).items():
        place = _place(name, stored)
        if value.dtype is None or value.shape is None:
            raise ValueError(f"parameter {name} has no type")
        value.const_value = ir.ExternalTensor(
            Path(place.file).name, place.offset, place.nbytes, value.dtype, shape=value.shape, name=name,
            base_dir=path.parent,
        )  # fmt: skip
    proto = ir.to_proto(model)
    verify(proto)
    path.write_bytes(proto.SerializeToString())


def verify(model: onnx.ModelProto) -> None:
    """The ONNX checker and strict shape inference, on a copy whose external weights are inputs: none is read.

    Raises:
        onnx.checker.ValidationError, onnx.shape_inference.InferenceError: the graph is not valid ONNX.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(model)
    inline = []
    for tensor in proto.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            proto.graph.input.append(value)
        else:
            inline.append(tensor)
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(inline)
    onnx.checker.check_model(proto)
    onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)


def _place(name: str, stored: dict[str, StoredParameter]) -> StoredParameter:
    """Where a parameter lies; one that packs several tensors spans them, which lie side by side."""
    first, *others = (stored[part] for part in parts(name))
    end = first.offset + first.nbytes
    for other in others:
        if (other.file, other.offset) != (first.file, end):
            raise ValueError(f"{name}: what it packs does not lie side by side")
        end += other.nbytes
    return StoredParameter(first.file, first.offset, end - first.offset)


def parts(name: str) -> tuple[str, ...]:
    """The checkpoint's tensors, in order, that a parameter is made of: itself, or those it packs."""
    pieces = name.split(".")
    for packed, modules in PACKED.items():
        if packed in pieces:
            return tuple(
                ".".join(module if piece == packed else piece for piece in pieces) for module in modules
            )
    return (name,)
