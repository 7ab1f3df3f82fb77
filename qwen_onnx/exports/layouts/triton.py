"""A model of NVIDIA Triton's Python backend around an export: its configuration, and the code that runs it."""

from __future__ import annotations

import importlib.resources
import re
from pathlib import Path

from qwen_onnx.errors import UserError

CONFIG_FILE = "config.pbtxt"
MODEL_FILE = Path("1", "model.py")
EXPORT_FOLDER = Path("1", "export")
"""Where model.py looks for the export; all three within the model's folder, which has the model's name."""

SEQUENCES = 4
"""Answers made at a time by one instance, unless told otherwise."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def write_triton(
    folder: Path,
    *,
    name: str,
    provider: str = "auto",
    threads: int | None = None,
    max_context: int | None = None,
    sequences: int = SEQUENCES,
) -> None:
    """Write config.pbtxt and 1/model.py into a model's folder, beside an export at 1/export.

    Args:
        folder: the model's, with the model's name once the repository is in place; made where it is missing.
        name, provider, threads, max_context, sequences: as in `config_pbtxt`.

    Raises:
        UserError: a name that Triton could not serve.
        OSError: what the disk said.
    """
    config = config_pbtxt(
        name=name, provider=provider, threads=threads, max_context=max_context, sequences=sequences
    )
    (folder / MODEL_FILE).parent.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(config, encoding="utf-8", newline="\n")
    (folder / MODEL_FILE).write_text(model_source(), encoding="utf-8", newline="\n")


def model_source() -> str:
    """The text of model.py."""
    return (importlib.resources.files("qwen_onnx.exports.layouts") / "triton_model.py").read_text(
        encoding="utf-8"
    )


def verify_name(name: str) -> None:
    """Refuse, before anything is made, what `config_pbtxt` would refuse.

    Raises:
        UserError: a name that Triton could not serve.
    """
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{name!r} is no name for a model on Triton: letters, digits, '.', '_' and '-' wanted, at most 200; "
            "rename its folder"
        )


def config_pbtxt(
    *,
    name: str,
    provider: str = "auto",
    threads: int | None = None,
    max_context: int | None = None,
    sequences: int = SEQUENCES,
) -> str:
    """The text of config.pbtxt.

    Args:
        name: the model's: letters, digits, `.`, `_` and `-`, as it stands in URLs.
        provider: `auto`, `cpu`, `cuda` or `tensorrt`.
        threads: cores of an instance; None for all physical ones that it may use.
        max_context: positions of an answer with its prompt; None for as many as the export holds.
        sequences: answers made at a time by an instance, each with a cache of its own.

    Raises:
        UserError: a name that Triton could not serve.
    """
    verify_name(name)
    return _CONFIG.format(
        name=name,
        provider=provider,
        threads=_or_auto(threads),
        max_context=_or_auto(max_context),
        sequences=sequences,
    )


def _or_auto(number: int | None) -> str:
    return "auto" if number is None else str(number)


_CONFIG = """\
# Needs Triton 24.12 or newer (Python 3.12), and qwen-onnx installed in the Python of the Python backend.
name: "{name}"
backend: "python"

# One request is one answer. Answers are made side by side by 1/model.py, not in batches by Triton.
max_batch_size: 0

# One response for each token: gRPC streaming, or POST v2/models/{name}/generate_stream.
model_transaction_policy {{ decoupled: true }}

# `prompt` or `messages`, not both.
input [
  # What the user says; the chat template is put around it.
  {{ name: "prompt" data_type: TYPE_STRING dims: [ 1 ] optional: true }},
  # A conversation as JSON: [{{"role": "user", "content": "Hello!"}}, ...]
  {{ name: "messages" data_type: TYPE_STRING dims: [ 1 ] optional: true }},
  # True: `prompt` is the text to continue, without a chat template.
  {{ name: "raw" data_type: TYPE_BOOL dims: [ 1 ] optional: true }},
  # Without it an answer goes on until the model ends it or the context is full.
  {{ name: "max_new_tokens" data_type: TYPE_INT32 dims: [ 1 ] optional: true }}
]

output [
  # What became certain with this token: whole characters, so it may be empty.
  {{ name: "text" data_type: TYPE_STRING dims: [ 1 ] }},
  {{ name: "token_id" data_type: TYPE_INT64 dims: [ 1 ] }},
  # Empty while the answer goes on; then "eos", "length" or "context".
  {{ name: "finish_reason" data_type: TYPE_STRING dims: [ 1 ] }}
]

# An instance is a process of its own. On a GPU: KIND_GPU, with `gpus: [ 0 ]` for that one alone.
instance_group [
  {{ kind: KIND_CPU count: 1 }}
]

# auto: CUDA where it starts, else the CPU. Or cpu, cuda, tensorrt, which refuse to load where they do not start.
parameters {{ key: "provider" value {{ string_value: "{provider}" }} }}
# Cores of an instance; auto: all physical ones. With several instances, divide them.
parameters {{ key: "threads" value {{ string_value: "{threads}" }} }}
# Positions of an answer with its prompt, in tokens; auto: all that the export holds.
parameters {{ key: "max_context" value {{ string_value: "{max_context}" }} }}
# Answers that an instance makes at a time, each with a cache of its own. More requests wait.
parameters {{ key: "sequences" value {{ string_value: "{sequences}" }} }}
"""
