"""What each dtype costs on a real language model: `python tests/real/quality.py FOLDER [--tokens N] [--dtypes ...]`.

Prints perplexity, KL divergence from f32 and top-1 agreement on held-out text, over weights that were moved off their
grid, and right answers to thirty questions, over those as they are. The text is Python's own documentation, of
`pydoc_data.topics`.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import re
import sys
from pathlib import Path
from typing import NamedTuple

from fetch import fetch_model
from questions import QUESTIONS

from qwen_onnx import export, load
from qwen_onnx.checks.comparison import Comparison, compare_models
from qwen_onnx.contract.manifest import is_weights
from qwen_onnx.runners.chat import Chat

HELD_OUT = ("execmodel", "naming", "import")
DTYPES = ("f32", "f16", "bf16", "int8", "int4")


class Row(NamedTuple):
    """One dtype."""

    dtype: str
    bits: float
    """Of the weights file, for each weight."""
    found: Comparison
    right: int
    """Of QUESTIONS."""


def text() -> str:
    """Some 5,700 tokens."""
    return "\n\n".join(pydoc_data.topics.topics[name] for name in HELD_OUT)


def exported(model: Path, dtype: str) -> Path:
    """Beside the checkpoint; not made again."""
    out = model.with_name(f"{model.name}-{dtype}")
    return out if out.exists() else export(model, out, dtype=dtype).folder


def bits_of(folder: Path, weights: int) -> float:
    """Of all weights files, for each number of the checkpoint."""
    nbytes = sum(path.stat().st_size for path in folder.iterdir() if is_weights(path.name))
    return 8 * nbytes / weights


def right_answers(chat: Chat) -> list[str]:
    """The questions whose answer has its word."""
    return [
        question
        for question, wanted in QUESTIONS.items()
        if re.search(wanted, chat(question, do_sample=False, max_new_tokens=40), re.IGNORECASE)
    ]


def measure(folder: Path, dtypes: tuple[str, ...], tokens: int) -> list[Row]:
    """A row for each dtype."""
    plain, moved = fetch_model(folder)
    reference = load(exported(moved, "f32"), provider="cpu")
    weights = (exported(moved, "f32") / "weights.safetensors").stat().st_size // 4
    ids = reference.prompt_ids(text())[:tokens]
    rows = []
    for dtype in dtypes:
        with load(exported(moved, dtype), provider="cpu") as chat:
            found = compare_models(chat, reference, ids)
        with load(exported(plain, dtype), provider="cpu") as chat:
            right = len(right_answers(chat))
        rows.append(Row(dtype, bits_of(exported(moved, dtype), weights), found, right))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--dtypes", nargs="+", default=DTYPES)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    rows = measure(options.folder, tuple(options.dtypes), options.tokens)
    count = rows[0].found.positions
    print(f"{count:,} positions, Python {sys.version.split()[0]}")
    print(f"| dtype | bits a weight | perplexity | KL, nats | top-1 | of {len(QUESTIONS)} questions |")
    print("|---|---|---|---|---|---|")
    for dtype, bits, found, right in rows:
        print(
            f"| {dtype} | {bits:.2f} | {found.perplexity:.2f} | {max(found.kl, 0):.2g} | "
            f"{100 * found.top1:.1f} % | {right} |"
        )


if __name__ == "__main__":
    main()
