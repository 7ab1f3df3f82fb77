"""The figures of bench/gpu.py as markdown. What was not measured says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gpu_subject import DTYPES, MODES

MISSING = "not measured"
_NOTES = """\
Every time is of time.perf_counter around all that a user's step has: the id's upload, the launch, the copy of the
logits to the host and argmax there (or, with greedy on device, the reading of the id). The runner reads back what
a step computed, so a step is over when it returns. Settings take turns, round by round, after a warm-up; x control
is a row's tokens/s over those, in the same rounds, of f16 with capture (beside transformers: of its own dtype).
TTFT is of a whole prompt into an empty cache; load is with the files in the page cache and a CUDA context there.
The reading limit: all weights, the tied head included, and the live cache at half of the answer, over the device's
copy bandwidth (read and written bytes) in the same process; the share is that time over the median step. Peak
memory is cudaMemGetInfo's difference from a process that has a CUDA context and nothing else, in a process of its
own: what runs beside it on the device would count, and what ONNX Runtime's provider takes for itself is in it.
transformers chooses on the device, feeds its next step there, and the id is read to the host at each step."""


def markdown(found: dict[str, Any]) -> str:
    """All tables."""
    blocks = [
        _head(found),
        _proof(found),
        _main(found),
        _correctness(found),
        _breakdown(found),
        _peers(found),
    ]
    if found["not_run"]:
        blocks.append("Not run (time): " + "; ".join(found["not_run"]) + ".")
    if found["errors"]:
        blocks.append("Failed:\n" + "\n".join(f"- {name}: {line}" for name, line in found["errors"].items()))
    return "\n\n".join([*blocks, _NOTES]) + "\n"


def _number(value: float | None, form: str = ".1f") -> str:
    return MISSING if value is None else format(value, form)


def _at(value: Any, *path: str) -> Any:
    """Down a path of keys; None where it ends early."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _lines(title: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (title, ["---"] * len(title), *rows))


def _head(found: dict[str, Any]) -> str:
    machine, gpu, sizes = found["machine"], found["gpu"], found["sizes"]
    name = MISSING if gpu is None else f"{gpu['name']}, {gpu['memory'] / 2**30:.0f} GiB"
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if version)
    toy = " A toy: its figures mean nothing." if found["toy"] else ""
    return (
        f"`{found['command']}`, {found['date']}, {found['seconds']:.0f} s.{toy}\n\n"
        f"GPU: {name}; driver {_at(found, 'driver', 'version') or MISSING}. "
        f"Host: {machine['cores']} cores, {machine['memory_bytes'] / 1e9:.0f} GB, {machine['platform']}, "
        f"Python {machine['python']}, {versions}.\n\n"
        f"{found['shape']['num_hidden_layers']} layers, hidden {found['shape']['hidden_size']}, vocabulary "
        f"{found['shape']['vocab_size']:,}; a prompt of {sizes['prompt']} tokens, {sizes['new']} decode steps, "
        f"{sizes['rounds']} rounds."
    )


def _proof(found: dict[str, Any]) -> str:
    proof = found["parts"].get("proof", {})
    bandwidth = proof.get("copy_bandwidth_bytes_per_s")
    copies = MISSING if bandwidth is None else f"{bandwidth / 1e9:,.0f} GB/s, read and written"
    line = f"ONNX Runtime {proof.get('onnxruntime', MISSING)}. Copies on the device: {copies}."

    def rows() -> Iterator[Sequence[str]]:
        for dtype in DTYPES:
            entry = _at(proof, "dtypes", dtype)
            used, nodes = _at(entry, "device_memory_bytes"), _at(entry, "profile", "nodes_by_provider")
            yield (
                dtype, ", ".join(_at(entry, "providers") or [MISSING]), _number(used and used / 1e6, ",.0f"),
                ", ".join(f"{name} {count:.0f}" for name, count in (nodes or {}).items()) or MISSING,
                _number(_at(entry, "profile", "run_us"), ",.0f"),
            )  # fmt: skip

    title = (
        "proof",
        "providers",
        "device memory, MB",
        "nodes of an uncaptured step",
        "its run, profiled, us",
    )
    return f"{line}\n\n{_lines(title, rows())}"


def timed_rows(found: dict[str, Any]) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Rows of this package by dtype, setting and batch; the peers' part has its own."""
    parts = [part for name, part in found["parts"].items() if not name.startswith("peers")]
    rows = [row for part in parts for row in part.get("rows", []) if "setting" in row]
    return {(row["dtype"], row["setting"], row["batch"]): row for row in rows}


def _timed_cells(row: dict[str, Any] | None) -> list[str]:
    share, against = _at(row, "limit_share"), _at(row, "speed_over_control")
    return [
        _number(_at(row, "load_s"), ".2f"),
        _number(_at(row, "ttft_ms", "median"), ",.1f"),
        _number(_at(row, "tokens_per_s", "median"), ",.1f"),
        *(_number(_at(row, "step_ms", name), ",.3f") for name in ("median", "p10", "p90")),
        _number(share, ".0%"),
        _number(against, ".2f"),
    ]


_TIMED = (
    "load, s", "TTFT, ms", "decode, tokens/s", "step, ms: median", "p10", "p90", "of the reading limit", "x control",
)  # fmt: skip


def _main(found: dict[str, Any]) -> str:
    measured = timed_rows(found)
    memory = {
        (part["dtype"], part["setting"], part["batch"]): part
        for name, part in found["parts"].items()
        if name.startswith("memory") and "peak_bytes" in part
    }

    def rows() -> Iterator[Sequence[str]]:
        for batch in (1, 8):
            for key in ((dtype, mode, batch) for dtype in DTYPES for mode in MODES):
                held = memory.get(key)
                needed = held and held["weights_bytes"] + held["cache_bytes"]
                yield (
                    key[0], key[1], str(batch), *_timed_cells(measured.get(key)),
                    _number(held and held["peak_bytes"] / 1e6, ",.0f"), _number(needed and needed / 1e6, ",.0f"),
                    _number(held and held["ratio"], ".2f"),
                )  # fmt: skip

    memory_title = ("peak device memory, MB", "weights + cache, MB", "ratio")
    return _lines(("dtype", "setting", "batch", *_TIMED, *memory_title), rows())


def _correctness(found: dict[str, Any]) -> str:
    part = found["parts"].get("correctness", {})
    by_dtype, checked = {row["dtype"]: row for row in part.get("rows", [])}, found["sizes"]["checked"]

    def rows() -> Iterator[Sequence[str]]:
        for dtype in ("f32", "f16", "bf16"):
            row = by_dtype.get(dtype)
            if row is None:
                yield dtype, *[MISSING] * 6
                continue
            ids = f"equal ({row['distinct_ids']} distinct)"
            if not row["ids_equal"]:
                ids = f"part at step {row['parts_at_step']}, margin {row['margin_there']:.1e}"
            yield (
                dtype, row["against"], f"{row['max_logit_difference']:.1e}", f"{row['bound']:.1e}",
                f"{row['largest_logit']:.1f}", ids, f"{row['random_steps_of_equal_best_ids']} of {checked}",
            )  # fmt: skip

    title = ("logits of", "against", "max difference", "the package's bound", "largest logit")
    ids = (f"greedy ids of {checked} steps, to f32 on the CPU", "equal best ids along random ids, to it too")
    return _lines((*title, *ids), rows())


def _piece(entry: dict[str, Any] | None, name: str) -> str:
    spent = _at(entry, "pieces_us", name)
    return "none" if entry and spent is None else _number(spent)


def _breakdown(found: dict[str, Any]) -> str:
    settings = _at(found["parts"], "breakdown", "settings") or {}
    names = list(dict.fromkeys(name for entry in settings.values() for name in entry["pieces_us"]))

    def rows() -> Iterator[Sequence[str]]:
        for mode in MODES:
            entry = settings.get(mode)
            yield (
                mode, *(_piece(entry, name) for name in names),
                *(_number(_at(entry, "kernels", name), ",.1f") for name in ("kernels_us", "kernels")),
                _number(_at(entry, "run_without_kernels_us"), ",.1f"),
            )  # fmt: skip

    title = (
        "f16, batch 1: us of a",
        *names,
        "of the run: kernels busy",
        "kernels, number",
        "of the run: the rest",
    )
    return _lines(title, rows())


def _peers(found: dict[str, Any]) -> str:
    rows = {
        (row["dtype"], row["setting"], row["batch"]): row
        for name, part in found["parts"].items()
        if name.startswith("peers")
        for row in part.get("rows", [])
    }
    settings = ("capture", "transformers eager", "transformers compiled")
    keys = [(dtype, mode, batch) for batch in (1, 8) for dtype in ("f16", "bf16") for mode in settings]
    cells = ((key[0], key[1], str(key[2]), *_timed_cells(rows.get(key))) for key in keys)
    return _lines(("dtype", "in turns with transformers", "batch", *_TIMED), cells)
