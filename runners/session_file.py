"""A conversation on disk: token ids, what the cache holds of them, and messages, in one safetensors file.

What keys and values are is decided by weights, config and dtype; what ids mean, by the tokenizer. A file is loaded
with the same ones only, on any provider.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.contract.cache_spec import CacheSpec
from qwen_onnx.contract.manifest import Manifest, is_weights
from qwen_onnx.errors import UserError, option
from qwen_onnx.runners.model.buffers import HOST_TYPES
from qwen_onnx.runners.model.kv_cache import KVCache
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.panels import orders_in_words
from qwen_onnx.runners.text.prompts import verified_messages

FORMAT, VERSION = "qwen-onnx session", "1"

_TOKEN_IDS = "token_ids"
_STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""A state's dtype as safetensors spells it."""
_UNKNOWN = "0" * 64
"""In place of the sha256 of the file, which is of the file with this in it."""
_MOST_HEADER = 100_000_000  # bytes, as safetensors has it


def model_hash(manifest: Manifest) -> str:
    """sha256, lower-case hex, of the hashes of weights, config and tokenizer, and the dtype."""
    files = manifest.files
    weights = sorted(spec.sha256 for name, spec in files.items() if is_weights(name))
    others = [files[name].sha256 for name in ("config.json", "tokenizer.json") if name in files]
    return hashlib.sha256(json.dumps([manifest.dtype, weights, others]).encode()).hexdigest()


def save_session(
    path: Path, cache: KVCache, manifest: Manifest, messages: Sequence[Mapping[str, object]]
) -> None:
    """Write row 0 of a cache to `path`, over an earlier session only; killed at any moment, that is still there.

    Raises:
        UserError: it cannot be written, what stands there is no saved session, or messages that JSON does not hold.
    """
    try:
        told = {
            "model": model_hash(manifest),
            "model_id": manifest.model_id,
            "dtype": manifest.dtype,
            **({"panel_rows": manifest.panel_rows} if manifest.panel_rows else {}),
            "cache_dtype": cache.spec.dtype,
            "tokens": cache.length,
            "messages": [dict(message) for message in (verified_messages(messages) if messages else [])],
        }
        metadata = {"format": FORMAT, "version": VERSION, "sha256": _UNKNOWN, "session": json.dumps(told)}
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"messages to be saved hold what JSON does not ({error})") from None
    entries = _entries(cache.spec, cache.length)
    header = json.dumps({"__metadata__": metadata, **entries}).encode()
    header += b" " * (-len(header) % 8)
    try:
        path = Path(os.path.realpath(path))
        _refuse_foreign(path)
        with _replacing(path) as file:
            digest = hashlib.sha256()
            file.write(prefix := len(header).to_bytes(8, "little") + header)
            digest.update(prefix)
            for array in itertools.chain([cache.token_ids], cache.read()):  # one of them in memory
                file.write(content := array.tobytes())
                digest.update(content)
            file.seek(prefix.index(_UNKNOWN.encode()))
            file.write(digest.hexdigest().encode())
    except (OSError, ValueError) as error:  # a null byte in the name
        raise UserError(f"{path}: cannot be saved ({getattr(error, 'strerror', None) or error})") from None


def load_session(path: Path, runner: Runner) -> tuple[KVCache, list[dict[str, object]]]:
    """A new cache with what was saved, and the messages; an empty cache where the runner's is of another dtype.

    Raises:
        UserError: no such session, of another model, longer than the context, damaged; or it does not fit.
    """
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{path}: not a file; wanted a saved session")
        with path.open("rb") as file:
            return _load(path, file, runner)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _load(path: Path, file: BinaryIO, runner: Runner) -> tuple[KVCache, list[dict[str, object]]]:
    header, manifest = _read_header(file), runner.manifest
    if header is None:
        raise UserError(f"{path}: not a saved session, or a damaged one")
    told, damaged = header.told, UserError(f"{path}: damaged since it was saved; it cannot be loaded")
    if header.version != VERSION:
        raise UserError(f"{path}: session of format {header.version!r}, this version reads {VERSION!r}")
    if told.get("model") != model_hash(manifest):
        same = (told.get("model_id"), told.get("dtype")) == (manifest.model_id, manifest.dtype)
        order = orders_in_words(told.get("panel_rows"), manifest.panel_rows) if same else ""
        raise UserError(
            f"{path}: saved with {told.get('model_id')!r} in {told.get('dtype')!r}; this export, "
            f"{manifest.model_id!r} in {manifest.dtype!r}, has other weights, config or tokenizer{order}"
        )
    length, dtype, messages = told.get("tokens"), told.get("cache_dtype"), told.get("messages")
    spec = _saved_spec(runner, dtype)
    if type(length) is not int or length < 0 or spec is None or not isinstance(messages, list):
        raise damaged
    try:
        if messages:
            verified_messages(messages)
    except UserError:
        raise damaged from None
    entries = _entries(spec, length)
    nbytes = max(entry["data_offsets"][1] for entry in entries.values())
    if header.entries != entries or os.fstat(file.fileno()).st_size != len(header.content) + nbytes:
        raise damaged
    if length > runner.context_length:
        raise UserError(
            f"{path}: {length} tokens were saved, the context holds {runner.context_length}; "
            f"raise {option('max_context')}"
        )
    digest = hashlib.sha256(header.content)

    def tensors() -> Iterator[NDArray[Any]]:
        kinds: list[type[np.generic]] = [np.int64, *(HOST_TYPES[state.dtype] for state in spec.states)]
        for entry, kind in zip(entries.values(), kinds, strict=True):
            content = file.read(math.prod(entry["shape"]) * np.dtype(kind).itemsize)
            digest.update(content)
            yield np.frombuffer(content, kind).reshape(entry["shape"])
        if digest.hexdigest() != header.sha256:
            raise damaged

    saved = tensors()
    token_ids, cache = next(saved), runner.new_cache()
    if cache.spec.dtype == dtype:
        cache.fill(token_ids, saved)
    else:
        for _ in saved:
            pass  # read to its end, for the hash
    if token_ids.size and not 0 <= token_ids.min() <= token_ids.max() < manifest.vocab_size:
        raise damaged
    return cache, messages


class _Header(NamedTuple):
    version: object
    sha256: str
    told: dict[str, Any]
    entries: dict[str, Any]
    """Of the tensors, by name."""
    content: bytes
    """All bytes before the tensors', with _UNKNOWN for the sha256."""


def _read_header(file: BinaryIO) -> _Header | None:
    """None: no session, of whatever version."""
    prefix = file.read(8)
    if len(prefix) < 8 or (length := int.from_bytes(prefix, "little")) > _MOST_HEADER:
        return None
    content = file.read(length)
    try:
        entries = json.loads(content)
        metadata = entries.pop("__metadata__")
        if metadata["format"] != FORMAT:
            return None
        sha256, told = metadata["sha256"], json.loads(metadata["session"])
        unsigned = prefix + content.replace(sha256.encode(), _UNKNOWN.encode(), 1)
        return _Header(metadata["version"], sha256, dict(told), entries, unsigned)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _saved_spec(runner: Runner, dtype: object) -> CacheSpec | None:
    """Of the cache that a session was saved from, which may be another provider's; None: there is no such dtype."""
    found = next((spec for spec in runner.manifest.caches.values() if spec.dtype == dtype), None)
    if found is not None or not isinstance(dtype, str) or dtype not in _STORED:
        return found
    # Another export of these weights has graphs that compute in it.
    states = runner.cache_spec.states
    return CacheSpec(tuple(dataclasses.replace(state, dtype=dtype) for state in states))


def _entries(spec: CacheSpec, length: int) -> dict[str, dict[str, Any]]:
    """Of the tensors in a header, in the order of their bytes: the ids, and row 0 of each state."""
    end = 8 * length
    entries: dict[str, dict[str, Any]] = {
        _TOKEN_IDS: {"dtype": "I64", "shape": [length], "data_offsets": [0, end]}
    }
    for state in spec.states:
        begin, end = end, end + state.nbytes(batch_size=1, slots=length)
        shape = [*state.sizes(batch_size=1, slots=length)[1:]]
        entries[state.past] = {"dtype": _STORED[state.dtype], "shape": shape, "data_offsets": [begin, end]}
    return entries


def _refuse_foreign(path: Path) -> None:
    """Raises UserError where something stands at `path` that is no saved session."""
    if not path.exists():
        return
    if path.is_file():
        with path.open("rb") as file:
            if _read_header(file) is not None:
                return
    raise UserError(f"{path}: exists and is no saved session; choose another name")


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that is at `path` at the end of the block, in one step; nothing of it is left where that fails."""
    beside = path.with_name(f".qwen-onnx-{secrets.token_hex(4)}.new")
    try:
        # It has no name before it is whole, so that a process that is killed leaves none.
        nameless = os.open(path.parent, os.O_TMPFILE | os.O_RDWR, 0o600)  # what was said is nobody else's
    except (AttributeError, OSError):  # not on this system, or not on this disk
        nameless = None
    try:
        with _private(beside) if nameless is None else os.fdopen(nameless, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if nameless is not None:  # with a folder given, since only then links in /proc are followed
                os.link(f"/proc/self/fd/{nameless}", beside, src_dir_fd=nameless)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _private(path: Path) -> BinaryIO:
    """A new file that only its owner reads."""
    return os.fdopen(
        os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0), 0o600), "wb"
    )
