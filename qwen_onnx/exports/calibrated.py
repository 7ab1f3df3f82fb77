"""The matrices of an export that is calibrated, ready to be written; what is done survives a kill, nothing else."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from qwen_onnx.checkpoints.checkpoint import Checkpoint
from qwen_onnx.checkpoints.safetensors_file import StoredTensor
from qwen_onnx.contract.quant import Calibration, QuantPlan
from qwen_onnx.errors import UserError, option
from qwen_onnx.exports.options import ExportOptions
from qwen_onnx.exports.quantization.budget import matrix_weights, measured_choices, plan_of
from qwen_onnx.exports.quantization.calibrate import calibrate, estimated_seconds
from qwen_onnx.exports.quantization.text import calibration_text
from qwen_onnx.runners.text.template.chat_template import ChatTemplate
from qwen_onnx.runners.text.tokenizer import Tokenizer

_LOOKING = 0.3  # share of the time in which it is found out where bits count
Calibrating = Callable[[float, float], None]
"""Told the share of the calibration that is done, 0 to 1, and the seconds that all of it is estimated to take."""


class TextSide(NamedTuple):
    """What a checkpoint knows of text."""

    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    eos_token_ids: tuple[int, ...]
    notes: tuple[str, ...]


class Calibrated(NamedTuple):
    """Matrices in blocks, by the names of the export's tensors; none where weights are rounded one by one."""

    plan: QuantPlan | None
    """How each of them is quantized."""
    tensors: dict[str, StoredTensor]
    calibration: Calibration | None
    notes: tuple[str, ...]


@contextlib.contextmanager
def calibrated(
    checkpoint: Checkpoint, options: ExportOptions, text: TextSide, *, folder: Path, progress: Calibrating
) -> Iterator[Calibrated]:
    """Calibrate, if the options want it; the files are there until the block ends.

    Args:
        folder: of finished layers. After a kill or Ctrl-C it is still there, and the next export goes on with it.

    Raises:
        UserError: a file without enough text, a checkpoint without a tokenizer when one is asked for, or weights
            that are no numbers.
    """
    quant, given = options.quant, options.calibration
    if quant is None or given is None:
        yield Calibrated(quant, {}, None, ())
        return
    if text.tokenizer is None:
        if options.calibrate is not None or options.bits is not None:
            raise UserError(
                f"{option('calibrate', given)}: {checkpoint.folder} has no tokenizer.json to read a text with; "
                f"use {option('calibrate', 'none')}"
            )
        yield Calibrated(
            quant, {}, None, ("not calibrated, for want of a tokenizer: the weights are rounded one by one",)
        )
        return
    config = checkpoint.config
    said = calibration_text(
        given, text.tokenizer, text.template,
        context_length=config.context_length, columns=max(config.hidden_size, config.intermediate_size),
    )  # fmt: skip
    seconds = estimated_seconds(checkpoint, quant, said)
    looking = 0.0 if options.bits is None else _LOOKING
    try:
        if options.bits is not None:
            choices = measured_choices(
                checkpoint, quant, said, lambda done: progress(done * looking, seconds)
            )
            quant = plan_of(options.bits, quant, choices, matrix_weights(checkpoint))
        found = calibrate(
            checkpoint,
            quant,
            said,
            folder,
            lambda done, what: progress(looking + done * (1 - looking), seconds),
        )
        yield Calibrated(quant, found, Calibration(said.name, said.sha256, said.windows.size), ())
    except KeyboardInterrupt:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
