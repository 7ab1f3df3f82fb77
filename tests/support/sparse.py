"""Checkpoints of zeros in sparse files, and exports of them in processes that report their memory."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path

from qwen_onnx.checkpoints.checkpoint import INDEX_FILE
from qwen_onnx.checkpoints.safetensors_file import FLOAT_DTYPES
from support.checkpoints import QWEN3, random_tensors

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ONE_LAYER = {**QWEN3, "num_hidden_layers": 1, "hidden_size": 4096, "num_attention_heads": 2}
MB, GB = 10**6, 10**9
# VmHWM is the kernel's own high-water mark of resident memory since the process began. It counts what an export
# allocates and the pages of its libraries' files too: an upper bound of the first, which misses no short peak.
CHILD = """
import sys
from pathlib import Path
from qwen_onnx import export
export(sys.argv[1], Path(sys.argv[2]), dtype=sys.argv[3], check=False)
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(int(status["VmHWM"].split()[0]) * 1024)
"""


def write_sparse(folder: Path, dtype: str, nbytes: int, *, tied: bool) -> None:
    """A checkpoint of about `nbytes`: an embedding and, where it is not tied, a head of the same size."""
    matrix = nbytes if tied else nbytes // 2
    vocab = matrix // (ONE_LAYER["hidden_size"] * FLOAT_DTYPES[dtype].itemsize)
    config = {**ONE_LAYER, "vocab_size": vocab, "tie_word_embeddings": tied}
    shapes = {name: tensor.shape for name, tensor in random_tensors({**config, "vocab_size": 1}).items()}
    shapes |= dict.fromkeys({EMBEDDING, HEAD} & shapes.keys(), (vocab, ONE_LAYER["hidden_size"]))
    shards = {name: "head.safetensors" if name == HEAD else "rest.safetensors" for name in shapes}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": shards}))
    for file in set(shards.values()):
        write_zeros(folder / file, dtype, {name: shapes[name] for name in shapes if shards[name] == file})
    if not tied:
        with (folder / "head.safetensors").open(
            "r+b"
        ) as stream:  # a head equal to the embedding would be shared
            stream.seek(-1, os.SEEK_END)
            stream.write(b"\x3f")


def write_zeros(path: Path, dtype: str, shapes: dict[str, tuple[int, ...]]) -> None:
    """A .safetensors file of zeros that nobody ever wrote."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * FLOAT_DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, path.stat().st_size + end)
