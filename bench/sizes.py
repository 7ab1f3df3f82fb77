"""Sizes of exports of the published Qwen models, computed from their configs: `python bench/sizes.py`.

Disk is the weights file. Memory is these weights and a KV cache of CONTEXT tokens, f16 in f16 and f32 in all else.
The runtime itself, some 100 MB on a CPU and more on a GPU, is not in it. f16 and bf16 are as on a GPU: on a CPU their
weights become f32 copies.
"""

from __future__ import annotations

import math
from pathlib import Path

from qwen_onnx.checkpoints.config import QwenConfig, parse_config
from qwen_onnx.checkpoints.safetensors_file import StoredTensor
from qwen_onnx.contract import DTYPES
from qwen_onnx.exports.layouts.known import choose_layout
from qwen_onnx.exports.options import ExportOptions
from qwen_onnx.exports.plan import ExportKind, build_planned, checkpoint_plan, graph_plans
from qwen_onnx.exports.weights import quant_of, rotary_tensors, stored_as
from qwen_onnx.graphs.graph_file import parameters

CONTEXT = 4096
"""Tokens in the cache."""
COLUMNS = {"f32": "f32", "f16": "f16, bf16", "int8": "int8", "int4": "int4"}
_COMMON = {"model_type": "qwen2", "vocab_size": 151936, "max_position_embeddings": 32768}
_QWEN3 = {**_COMMON, "model_type": "qwen3", "head_dim": 128, "max_position_embeddings": 40960}
_FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "tie_word_embeddings",
)  # fmt: skip
# As their config.json files say; Qwen2.5-Coder and -Math are of the same sizes.
MODELS = {
    "Qwen2.5-0.5B": (_COMMON, (896, 4864, 24, 14, 2, True)),
    "Qwen2.5-1.5B": (_COMMON, (1536, 8960, 28, 12, 2, True)),
    "Qwen2.5-3B": (_COMMON, (2048, 11008, 36, 16, 2, True)),
    "Qwen2.5-7B": ({**_COMMON, "vocab_size": 152064}, (3584, 18944, 28, 28, 4, False)),
    "Qwen2.5-14B": ({**_COMMON, "vocab_size": 152064}, (5120, 13824, 48, 40, 8, False)),
    "Qwen2.5-32B": ({**_COMMON, "vocab_size": 152064}, (5120, 27648, 64, 40, 8, False)),
    "Qwen2.5-72B": ({**_COMMON, "vocab_size": 152064}, (8192, 29568, 80, 64, 8, False)),
    "Qwen3-0.6B": (_QWEN3, (1024, 3072, 28, 16, 8, True)),
    "Qwen3-1.7B": (_QWEN3, (2048, 6144, 28, 16, 8, True)),
    "Qwen3-4B": (_QWEN3, (2560, 9728, 36, 32, 8, True)),
    "Qwen3-8B": (_QWEN3, (4096, 12288, 36, 32, 8, False)),
    "Qwen3-14B": (_QWEN3, (5120, 17408, 40, 40, 8, False)),
    "Qwen3-32B": (_QWEN3, (5120, 25600, 64, 64, 8, False)),
}


def config_of(model: str) -> QwenConfig:
    common, sizes = MODELS[model]
    return parse_config({**common, **dict(zip(_FIELDS, sizes, strict=True))})


def tensors_of(config: QwenConfig) -> list[StoredTensor]:
    """What a checkpoint holds: names and shapes, in no file."""
    graph = build_planned(checkpoint_plan(), config, 1)
    found = []
    for name, value in parameters(graph).items():
        if value.shape is not None and not name.startswith("rotary."):
            shape = tuple(value.shape.numpy())
            found.append(StoredTensor(name, Path(), "BF16", shape, 0, 2 * math.prod(shape)))
    return found


def sizes_of(config: QwenConfig, dtype: str) -> tuple[int, int]:
    """Bytes on disk and in memory."""
    quant = ExportOptions(dtype=dtype).quant
    disk = sum(tensor.nbytes for tensor in rotary_tensors(config, config.context_length))
    for tensor in tensors_of(config):
        own = None if quant is None else quant_of(tensor, quant)
        disk += sum(
            each.nbytes for each in stored_as(tensor, DTYPES.get(dtype, "F32"), quant=own, panel_rows=None)
        )
    layout, _ = choose_layout("plain", None, dtype)
    first = graph_plans(config, ExportKind(dtype, layout, quant=quant))[0]
    cache = first.cache(config)
    assert cache is not None
    return disk, disk + cache.nbytes(batch_size=1, slots=CONTEXT)


def row(model: str) -> str:
    """Its gigabytes on disk and in memory, for each dtype."""
    config = config_of(model)
    count = sum(math.prod(tensor.shape) for tensor in tensors_of(config))
    cells = [" / ".join(_gigabytes(size) for size in sizes_of(config, dtype)) for dtype in COLUMNS]
    return f"| {model} | {count / 1e9:.2f} B | {' | '.join(cells)} |"


def table() -> str:
    """All models, in Markdown."""
    head = [f"| | parameters | {' | '.join(COLUMNS.values())} |", f"|---|{'---|' * (len(COLUMNS) + 1)}"]
    return "\n".join([*head, *map(row, MODELS)])


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f}" if size < 1e10 else f"{size / 1e9:.1f}" if size < 1e11 else f"{size / 1e9:.0f}"


if __name__ == "__main__":
    print(table())
