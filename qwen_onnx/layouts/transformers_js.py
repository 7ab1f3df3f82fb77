"""What transformers.js reads of config.json beside what Hugging Face's libraries do."""

from __future__ import annotations

from pathlib import PurePosixPath

from qwen_onnx.contract import read_json
from qwen_onnx.layouts.layout import Exported, Written, pad_left, write_json

BROWSER_LIMIT = 2_000_000_000
"""Bytes of a file that every browser reads into one buffer; theirs end at 2 to 4 GiB."""


def write_transformers_js_config(exported: Exported) -> Written:
    """`transformers.js_config`: how many files hold the weights of which graph, and the type of the cache.

    A browser cannot look into a folder, so that it has to be told.
    """
    path = exported.folder / "config.json"
    model = PurePosixPath(exported.model_file).name
    own: dict[str, object] = {"use_external_data_format": {model: len(exported.weights_files)}}
    if exported.dtype == "f16":
        own["kv_cache_dtype"] = {"fp16": "float16"}
    write_json(path, read_json(path) | {"transformers.js_config": own})
    large = [
        name for name in exported.weights_files if (exported.folder / name).stat().st_size > BROWSER_LIMIT
    ]
    notes = [f"{name}: one tensor makes it larger than 2 GB, which few browsers read" for name in large]
    return ["config.json", *pad_left(exported.folder)], notes
