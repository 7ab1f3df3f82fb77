"""Which projections some graphs read as one matrix: a view of tensors that lie side by side in the weights file."""

from __future__ import annotations

from types import MappingProxyType

PACKED = MappingProxyType(
    {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
)


def parts(name: str) -> tuple[str, ...]:
    """The checkpoint's tensors, in order, that a parameter is made of: itself, or those it packs."""
    pieces = name.split(".")
    for packed, modules in PACKED.items():
        if packed in pieces:
            return tuple(
                ".".join(module if piece == packed else piece for piece in pieces) for module in modules
            )
    return (name,)
