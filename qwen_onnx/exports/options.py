"""What may be asked of an export."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from qwen_onnx.contract import DTYPE_SPELLINGS, EXPORT_DTYPES, LAYOUTS, QUANTIZED, TARGETS, WEIGHTS_ORDERS
from qwen_onnx.contract.quant import BITS, BLOCK_SIZES, QuantConfig, QuantPlan
from qwen_onnx.errors import UserError, option
from qwen_onnx.option_kinds import Count, Name, Number, OneOf, Switch, Text
from qwen_onnx.options import Options, declare

if TYPE_CHECKING:
    from qwen_onnx.checkpoints.config import QwenConfig

# By measurement (bench/README.md).
DEFAULT_BLOCK_SIZES = {"int8": (64, 32), "int4": (128, 64)}
"""Of layers and head."""
_UNCALIBRATED_INT4 = (32, 16)
_EXPORT, _QUANT, _OTHERS = "Export", "int8 and int4", "Other runtimes"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions(Options):
    """How a checkpoint is exported.

    Raises:
        UserError: values that are wrong, or do not go together.
    """

    dtype: str = declare(
        "f32",
        Name(EXPORT_DTYPES, spellings=DTYPE_SPELLINGS),
        "Of weights: f32 (default), f16, bf16, int8, int4.",
        _EXPORT,
    )
    revision: str | None = declare(None, Text(), "Branch, tag or commit of a Hub id.", _EXPORT)
    max_context: int | None = declare(None, Count(1), "Context length; default the model's own.", _EXPORT)
    weights_order: str = declare(
        "checkpoint", Text(WEIGHTS_ORDERS), "checkpoint (default), or panels: as this CPU reads f32.", _EXPORT,
        about="checkpoint, or panels: f32 matrices in the order that this processor's kernels read.",
    )  # fmt: skip
    link: bool = declare(
        False, Switch(), "Hard-link weights whose bytes stay as they are.", _EXPORT, flag="--link"
    )
    force: bool = declare(False, Switch(), "Replace an earlier export at OUT.", _EXPORT, flag="--force")
    check: bool = declare(
        True, Switch(), "Answer with a token before OUT appears; default on.", _EXPORT,
        about="Look for tensors of one number before, and run a token at the end: what would not run is refused.",
    )  # fmt: skip
    block_size: int | None = declare(
        None, OneOf(BLOCK_SIZES), "Weights that share a scale; int8 64, int4 128 (or 32).", _QUANT
    )
    head_bits: int | None = declare(
        None, OneOf(BITS), "Bits of embedding and head; default as the layers.", _QUANT
    )
    head_block_size: int | None = declare(
        None, OneOf(BLOCK_SIZES), "Their block size; default int8 32, int4 64 (or 16).", _QUANT
    )
    bits: float | None = declare(
        None, Number(4, 9), "Mean bits a weight, spent where they count.", _QUANT,
        about="Mean bits a weight, scales included: parts that lose most get smaller blocks or 8 bits.",
    )  # fmt: skip
    calibrate: str | None = declare(
        None, Text(), "auto (int4's default), none, or a text FILE.", _QUANT,
        about="What the model reads to round its weights: auto for the package's own text, none, or a text file.",
    )  # fmt: skip
    target: str | None = declare(
        None, Text(TARGETS), "onnxruntime (default); or portable: one graph, any runtime.", _OTHERS
    )
    layout: str = declare(
        "plain",
        Text(LAYOUTS, hidden=("cpu",)),
        f"Files as this reader wants them: {', '.join(LAYOUTS).replace('plain', 'plain (default)')}.",
        _OTHERS,
    )
    split: bool = declare(
        False, Switch(), "With --target portable: prefill.onnx and decode.onnx, too.", _OTHERS, flag="--split"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layout == "cpu":  # until 0.5: what `weights_order` panels was called
            object.__setattr__(self, "layout", "plain")
            object.__setattr__(self, "weights_order", "panels")
        if self.dtype not in QUANTIZED:
            for name in ("block_size", "head_bits", "head_block_size", "bits", "calibrate"):
                if getattr(self, name) is not None:
                    raise UserError(f"{option(name)} is for int8 and int4, not {self.dtype}")
        if self.bits is not None and self.dtype != "int4":
            raise UserError(f"{option('bits')} is for int4, from which some parts get more")
        if self.bits is not None and self.calibration is None:
            none = option("calibrate", "none")
            raise UserError(f"{option('bits')} needs a text, to see where bits count; drop {none}")
        panels = option("weights_order", "panels")
        if self.in_panels and self.dtype != "f32":
            how = "repacks their weights" if self.dtype in QUANTIZED else "makes f32 of their weights"
            raise UserError(f"{panels} is for f32, not {self.dtype}: ONNX Runtime {how} as it loads them")
        if self.in_panels and self.link:
            raise UserError(f"{option('link')}: {panels} writes weights anew; drop one of the two")

    @property
    def in_panels(self) -> bool:
        """Matrices are stored in panels."""
        return self.weights_order == "panels"

    @property
    def quant(self) -> QuantPlan | None:
        """How matrices are quantized; None where they are not."""
        if self.dtype not in QUANTIZED:
            return None
        bits = QUANTIZED[self.dtype]
        size, head_size = DEFAULT_BLOCK_SIZES[self.dtype]
        if self.dtype == "int4" and self.calibration is None:
            size, head_size = _UNCALIBRATED_INT4
        size, head_size = self.block_size or size, self.head_block_size or self.block_size or head_size
        head_bits = self.head_bits or bits
        return QuantPlan(
            QuantConfig(bits, size, zero_points=bits == 4, scales="F16"),
            QuantConfig(head_bits, head_size, zero_points=head_bits == 4, scales="F16"),
        )

    @property
    def calibration(self) -> str | None:
        """`auto` or a file; None where weights are rounded without a text."""
        given = self.calibrate or ("auto" if self.dtype == "int4" else "none")
        return None if given == "none" else given


def export_positions(config: QwenConfig, max_context: int | None) -> int:
    """Of an export of this model.

    Raises:
        UserError: more are asked for than the model has.
    """
    if max_context is None:
        return config.context_length
    if max_context > config.context_length:
        raise UserError(
            f"{option('max_context', max_context)}: 1 to {config.context_length} wanted, the model's positions"
        )
    return max_context
