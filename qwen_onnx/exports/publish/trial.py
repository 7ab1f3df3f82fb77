"""An export runs before it appears: a token through its graph of prompts, one through that of single tokens."""

from __future__ import annotations

from pathlib import Path

from qwen_onnx.checkpoints.safetensors_file import read_header
from qwen_onnx.contract.manifest import Manifest, is_weights
from qwen_onnx.errors import OutOfMemoryError, UserError, option
from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.machine import free_memory
from qwen_onnx.runners.runtime.options import SessionOptions
from qwen_onnx.runners.runtime.session import import_onnxruntime
from qwen_onnx.runners.sampling.request import PLAIN

_MOST_TOKENS = 64  # of a prompt
_AROUND = 256 << 20  # bytes that the runtime and a small cache take
# Of the largest matrix, what is held beside the file: it in f32, and where the graph transposes it, that too.
_COPIES = {"f16": 2, "bf16": 2, "int8": 4, "int4": 8}
_PORTABLE_COPIES = {"f32": 1, "f16": 6}


def try_export(folder: Path, manifest: Manifest, *, out: Path) -> list[str]:
    """Run two tokens on the CPU provider, over weights as they lie in their files; notes for the user.

    Args:
        out: what messages call the folder.

    Raises:
        UserError: it does not run, with the reason.
    """
    needed = _needed_memory(folder, manifest)
    if (free := free_memory()) < needed:
        return [f"{out}: not run: about {needed:,} bytes of memory are wanted for a token, {free:,} are free"]
    try:
        import_onnxruntime(at_least=manifest.min_onnxruntime)
    except UserError as error:
        return [f"{out}: not run: {error}"]
    try:
        return [note.replace(str(folder), str(out)) for note in _run(folder, manifest)]
    except (OutOfMemoryError, MemoryError) as error:
        return [f"{out}: not run: {str(error) or 'out of memory'}".replace(str(folder), str(out))]
    except UserError as error:
        said = str(error).replace(str(folder), str(out))
    raise UserError(
        f"the export would not run, so it is not kept: {said}; {option('check', False)} exports it all the same"
    )


def _run(folder: Path, manifest: Manifest) -> list[str]:
    # Elsewhere ONNX Runtime's rewritings begin with copies of all weights, in f32 or transposed.
    level = "all" if (manifest.dtype, manifest.target) == ("f32", "onnxruntime") else "disabled"
    options = SessionOptions(provider="cpu", optimization_level=level)
    chat = Chat(Runner(folder, options, lean=True))
    ids, notes = _first_prompt(chat)
    first = next(chat.generate(ids, max_new_tokens=1))  # as generation_config.json says
    if len(ids) + 1 < chat.runner.context_length:
        # The cache holds the rest, so that this one goes through the graph of single tokens.
        list(chat.generate([*ids, first.token_id], **PLAIN, max_new_tokens=1))
    return notes


def _first_prompt(chat: Chat) -> tuple[list[int], list[str]]:
    """Ids of a question, in the model's own template, and notes; of anything where they say none."""
    ids: list[int] = []
    notes: list[str] = []
    if chat.tokenizer is not None:
        ids = chat.prompt_ids("Hi")
        try:
            ids = chat.prompt_ids([{"role": "user", "content": "Hi"}]) if chat.template else ids
        except UserError as error:
            notes = [f"the chat template refuses a question, use `run --raw`: {error}"]
    most = min(_MOST_TOKENS, max(1, chat.runner.context_length - 2))
    return ids[-most:] or [0], notes


def _needed_memory(folder: Path, manifest: Manifest) -> int:
    """Bytes of a run beside the mapped weights."""
    files = [read_header(folder / name) for name in manifest.files if is_weights(name)]
    largest = max(tensor.nbytes for file in files for tensor in file.values())
    copies = _PORTABLE_COPIES if manifest.target == "portable" else _COPIES
    return _AROUND + largest * copies.get(manifest.dtype, 0)
