"""Tokens that stand beside tokenizer.json: transformers adds them to it, in the order of their ids."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken

from qwen_onnx.contract.json_file import read_json
from qwen_onnx.errors import UserError

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
ADDED_TOKENS_FILE = "added_tokens.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The keys of tokenizer_config.json that name one; templates know them by the same names."""
_LISTS = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_END_OF_TEXT = "<|endoftext|>"


def added_tokens(folder: Path) -> list[AddedToken]:
    """Those of tokenizer_config.json's `added_tokens_decoder`, or of added_tokens.json where that key is missing.

    Raises:
        UserError: naming the file, where one holds something else.
    """
    path = folder / TOKENIZER_CONFIG_FILE
    config = _read_if_present(path)
    if "added_tokens_decoder" in config:
        return _of_decoder(config["added_tokens_decoder"], f"{path}: added_tokens_decoder")
    path = folder / ADDED_TOKENS_FILE
    ids = _read_if_present(path)
    special = {token.content for token in named_tokens(folder)} if ids else set()
    found = []
    for text, token_id in ids.items():
        if not text or type(token_id) is not int:
            raise UserError(f"{path}: {text!r} {token_id!r}: texts and their ids wanted")
        flag = text in special
        found.append((token_id, AddedToken(text, normalized=not flag, special=flag)))
    return [token for _, token in sorted(found, key=lambda pair: pair[0])]


def named_tokens(folder: Path) -> list[AddedToken]:
    """Special tokens by their names in tokenizer_config.json, and in special_tokens_map.json, with Qwen2's defaults.

    Raises:
        UserError: naming the file and the key, where one is no token.
    """
    values: dict[str, object] = {
        "eos_token": _END_OF_TEXT,
        "unk_token": _END_OF_TEXT,
        "pad_token": _END_OF_TEXT,
    }
    path = folder / TOKENIZER_CONFIG_FILE
    config = _read_if_present(path)
    older = {} if "added_tokens_decoder" in config else _read_if_present(folder / "special_tokens_map.json")
    values |= {**config, **older}
    found = [_named(values.get(key), f"{path}: {key}") for key in SPECIAL_TOKENS]
    extra = next((values[key] for key in _LISTS if values.get(key)), [])
    extra = list(extra.values()) if isinstance(extra, Mapping) else extra
    if not isinstance(extra, list):
        raise UserError(f"{path}: additional_special_tokens {extra!r}: a list of tokens wanted")
    found += [_named(value, f"{path}: additional_special_tokens") for value in extra]
    return [token for token in found if token is not None]


def _of_decoder(decoder: object, origin: str) -> list[AddedToken]:
    if not isinstance(decoder, Mapping):
        raise UserError(f"{origin} {str(decoder)[:100]!r}: an object of ids and tokens wanted")
    found = []
    for token_id, value in decoder.items():
        if not token_id.isdecimal() or len(token_id) > 9 or not isinstance(value, Mapping):
            raise UserError(f"{origin}: {str(token_id)[:50]!r}: an id and a token wanted")
        found.append((int(token_id), _token(value, f"{origin}: {token_id}")))
    return [token for _, token in sorted(found, key=lambda pair: pair[0])]


def _named(value: object, origin: str) -> AddedToken | None:
    if isinstance(value, Mapping):
        token = _token({key: part for key, part in value.items() if key != "special"}, origin)
        token.special = True
        return token
    if value is None or isinstance(value, str):
        return AddedToken(value, special=True, normalized=False) if value else None
    raise UserError(f"{origin} must be a string, an object with a string content, or null; found {value!r}")


def _token(value: Mapping[str, object], origin: str) -> AddedToken:
    flags = {name: value[name] for name in _FLAGS if name in value}
    content = value.get("content")
    if not isinstance(content, str) or any(type(flag) is not bool for flag in flags.values()):
        raise UserError(f"{origin}: a token with a string content and true or false flags wanted")
    return AddedToken(content, **flags)


def _read_if_present(path: Path) -> Mapping[str, object]:
    return read_json(path) if path.exists() else {}
