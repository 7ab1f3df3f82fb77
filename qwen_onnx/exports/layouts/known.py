"""The layouts that there are, and the targets that each goes with."""

from __future__ import annotations

from pathlib import Path

from qwen_onnx.contract import LAYOUTS, TARGETS
from qwen_onnx.errors import UserError, option
from qwen_onnx.exports.layouts.genai import write_genai_config
from qwen_onnx.exports.layouts.layout import Exported, Layout, Written, pad_left
from qwen_onnx.exports.layouts.transformers_js import BROWSER_LIMIT, write_transformers_js_config
from qwen_onnx.exports.layouts.triton import EXPORT_FOLDER, verify_name, write_triton
from qwen_onnx.exports.options import ExportOptions

PORTABLE_DTYPES = ("f32", "f16")


def choose_layout(name: str, target: str | None, dtype: str) -> tuple[Layout, str]:
    """The layout of this name, and the target: the layout's own where none is asked for.

    Raises:
        UserError: one of them is not known, or they do not go together.
    """
    layout = next((layout for layout in _layouts() if layout.name == name), None)
    if layout is None:
        raise UserError(f"layout {name!r} is not known; choose one of {', '.join(LAYOUTS)}")
    if target is not None and target not in TARGETS:
        raise UserError(f"target {target!r} is not known; choose one of {', '.join(TARGETS)}")
    chosen = target or layout.targets[0]
    if chosen not in layout.targets:
        made_of = option("target", layout.targets[0])
        raise UserError(f"{option('layout', name)} is made of {made_of}, not {chosen}")
    if chosen == "portable" and dtype not in PORTABLE_DTYPES:
        why = "few runtimes multiply bf16" if dtype == "bf16" else "its operators are ONNX Runtime's own"
        portable = option("target", chosen)
        raise UserError(f"{portable} is for f32 and f16, not {dtype}: {why}; choose one of them")
    return layout, chosen


def chosen_layout(options: ExportOptions) -> tuple[Layout, str]:
    """Of an export; it costs nothing to ask before a model is looked for.

    Raises:
        UserError: options that do not go together.
    """
    layout, target = choose_layout(options.layout, options.target, options.dtype)
    portable = option("target", "portable")
    if options.split and target != "portable":
        raise UserError(f"{option('split')} is for {portable}: others have a decode graph already")
    if options.in_panels and target == "portable":
        panels = option("weights_order", "panels")
        raise UserError(f"{panels} is for one kind of processor, not for {portable}")
    return layout, target


def output_folder(out: Path | None, model: str, options: ExportOptions) -> Path:
    """Where an export of a model of this name goes; where nobody says it, NAME-DTYPE, and what else was asked for.

    Raises:
        UserError: options that do not go together, or a name that the layout cannot have.
    """
    layout, target = chosen_layout(options)
    kind = layout.name if layout.name != "plain" else "portable" if target == "portable" else ""
    kind = kind or ("panels" if options.in_panels else "")
    out = out or Path(f"{model}-{options.dtype}" + (f"-{kind}" if kind else ""))
    if layout.is_repository:  # of several models, of which this is one
        layout.verify_name(model)
        return out / model
    return out


def _nothing(exported: Exported) -> Written:
    return [], []


def _padded_left(exported: Exported) -> Written:
    return pad_left(exported.folder), []


def _around_triton_model(folder: Path, name: str) -> None:
    write_triton(folder, name=name)


def _layouts() -> tuple[Layout, ...]:
    return (
        Layout("plain", ("onnxruntime", "portable"), _nothing),
        Layout("onnxruntime-genai", ("portable",), write_genai_config),
        Layout(
            "transformers.js",
            ("portable",),
            write_transformers_js_config,
            "onnx/",
            largest_file=BROWSER_LIMIT,
        ),
        Layout("optimum", ("portable",), _padded_left),
        Layout(
            "triton",
            ("onnxruntime", "portable"),
            _nothing,
            is_repository=True,
            inside=EXPORT_FOLDER.as_posix(),
            verify_name=verify_name,
            write_around=_around_triton_model,
        ),
    )
