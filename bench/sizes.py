"""Sizes of exports of the published Qwen models, computed from their configs: `python bench/sizes.py`.

Disk is the weights file. Memory is these weights and a KV cache of 4,096 tokens, f16 in f16 and f32 in all else.
The runtime itself, some 100 MB on a CPU and more on a GPU, is not in it. f16 and bf16 are as on a GPU: on a CPU their
weights become f32 copies.
"""

from __future__ import annotations

import math

from qwen_onnx.checkpoints.config import QwenConfig, parse_config
from qwen_onnx.exports.cached.size import export_size, model_tensors

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


def row(model: str) -> str:
    """Its gigabytes on disk and in memory, for each dtype."""
    config = config_of(model)
    count = sum(math.prod(tensor.shape) for tensor in model_tensors(config))
    cells = [" / ".join(_gigabytes(size) for size in export_size(config, dtype, "cuda")) for dtype in COLUMNS]
    return f"| {model} | {count / 1e9:.2f} B | {' | '.join(cells)} |"


def table() -> str:
    """All models, in Markdown."""
    head = [f"| | parameters | {' | '.join(COLUMNS.values())} |", f"|---|{'---|' * (len(COLUMNS) + 1)}"]
    return "\n".join([*head, *map(row, MODELS)])


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f}" if size < 1e10 else f"{size / 1e9:.1f}" if size < 1e11 else f"{size / 1e9:.0f}"


if __name__ == "__main__":
    print(table())
