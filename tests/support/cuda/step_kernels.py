"""Prints what one decode step asks of a GPU, by kernel, in Markdown.

PYTHONPATH=tests python -m support.cuda.step_kernels

Without capture, at a capacity of 1,024 slots, batch 1, in layers of Qwen2.5-0.5B's size.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from pathlib import Path

from qwen_onnx import export
from support.checkpoints import write_checkpoint
from support.cuda import stand_ins as cuda_stand_ins
from support.cuda.runs import ENVIRONMENT, PRELUDE, SHAPED

DTYPES = ("f16", "bf16", "f32")
FEWER, MORE = 2, 4
"""Layers of the two models whose difference tells a layer's part from the rest."""

PROGRAM = """
runner = opened(sys.argv[1], cuda_graph=False)
talk = Conversation(runner)
talk.prefill(700)
talk.steps(2)
trace = Path(os.environ["QWEN_STAND_IN_TRACE"])
start = trace.stat().st_size
talk.steps(1)
tell(start=start, stop=trace.stat().st_size)
"""


def asked(stand_ins: Path, folder: Path, trace: Path) -> Counter[str]:
    """How often one step asks for each thing."""
    done = cuda_stand_ins.run(stand_ins, PRELUDE + PROGRAM, folder, trace=trace, env=ENVIRONMENT)
    if done.returncode:
        raise RuntimeError(done.stderr)
    told = json.loads(done.stdout.splitlines()[-1])
    lines = trace.read_bytes()[told["start"] : told["stop"]].decode().splitlines()
    names = [line.rpartition(" ")[0] for line in lines if "Synchronize" not in line]
    plain = cuda_stand_ins.demangled({name for name in names if name.startswith("_Z")})
    return Counter(shortened(plain[name]) if name in plain else name for name in names)


def shortened(kernel: str) -> str:
    """Its own name, without namespaces, template arguments and parameters."""
    kernel = kernel.replace("(anonymous namespace)", "")
    while (inner := re.sub(r"<[^<>]*>|\([^()]*\)", "", kernel)) != kernel:
        kernel = inner
    return kernel.split("::")[-1].split()[-1]


def table(counts: dict[str, dict[int, Counter[str]]]) -> str:
    """`per layer + rest` of each name; f16's most frequent first."""
    names = sorted({name for of in counts.values() for each in of.values() for name in each})
    rows: list[tuple[list[int], str]] = []
    totals = dict.fromkeys(counts, (0, 0))
    for name in names:
        cells, order = [], []
        for dtype, of in counts.items():
            layer = (of[MORE][name] - of[FEWER][name]) // (MORE - FEWER)
            rest = of[MORE][name] - MORE * layer
            cells.append(f"{layer} + {rest}" if layer or rest else "")
            order += [-layer, -rest]
            totals[dtype] = (totals[dtype][0] + layer, totals[dtype][1] + rest)
        rows.append((order, f"| `{name}` | {' | '.join(cells)} |"))
    head = [f"| kernel, call or copy | {' | '.join(counts)} |", "|---|" + "---:|" * len(counts)]
    end = f"| **all** | {' | '.join(f'**{layer} + {rest}**' for layer, rest in totals.values())} |"
    return "\n".join([*head, *(row for _, row in sorted(rows)), end])


def main() -> None:
    if reason := cuda_stand_ins.unavailable():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "stand-ins").mkdir()
        cuda_stand_ins.compile_into(root / "stand-ins")
        counts: dict[str, dict[int, Counter[str]]] = {dtype: {} for dtype in DTYPES}
        for layers in (FEWER, MORE):
            checkpoint = root / f"{layers}"
            write_checkpoint(checkpoint, {**SHAPED, "num_hidden_layers": layers}, dtype="F16")
            for dtype in DTYPES:
                folder = export(checkpoint, root / f"{layers}-{dtype}", dtype=dtype).folder
                counts[dtype][layers] = asked(root / "stand-ins", folder, root / "trace")
    print(table(counts))


if __name__ == "__main__":
    main()
