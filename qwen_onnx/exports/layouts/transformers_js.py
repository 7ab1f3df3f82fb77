"""What transformers.js reads of config.json beside what Hugging Face's libraries do."""

from __future__ import annotations

from pathlib import PurePosixPath

from qwen_onnx.contract.json_file import read_json
from qwen_onnx.exports.layouts.layout import Exported, Written, pad_left, write_json

BROWSER_LIMIT = 2_000_000_000
"""Bytes of a file that every browser reads into one buffer; theirs end at 2 to 4 GiB."""


def write_transformers_js_config(exported: Exported) -> Written:
    """`transformers.js_config`: how many files hold the weights of which graph, and the type of the cache.

    A browser cannot look into a folder, so that it has to be told. Exports in f32 and f16 are told of each other's
    files, so that the one's `onnx` folder can be copied into the other's.
    """
    path = exported.folder / "config.json"
    counts = {PurePosixPath(file).name: count for file, count in exported.file_counts.items()}
    own = {"use_external_data_format": counts, "kv_cache_dtype": {"fp16": "float16"}}
    write_json(path, read_json(path) | {"transformers.js_config": own})
    large = [
        name for name in exported.weights_files if (exported.folder / name).stat().st_size > BROWSER_LIMIT
    ]
    notes = [f"{name}: one tensor makes it larger than 2 GB, which few browsers read" for name in large]
    return ["config.json", *pad_left(exported.folder)], notes
