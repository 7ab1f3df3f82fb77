"""What a tokenizer.json does to text, looked at before it is loaded: nothing of it may grow or hang.

The library runs the normalizer already when it loads, on each added token, and holds the interpreter while it does.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from qwen_onnx.errors import UserError

KNOWN_SPLITS = frozenset(
    (
        # Qwen2 and Qwen3; GPT-4 and Llama 3; GPT-2. At each place one of their branches takes what is there.
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    )
)
_CHAINS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
_TELLING = ("pattern", "content")
"""Keys without which nothing grows or takes long."""
_MEMBER = re.compile(rb'"\s*:\s*[^\s\d-]')
_MOST_STAGES = 32
_MOST_GROWTH = 64
_LONGEST = 4096
_FIRST = 2**18
_SPACE = re.compile(r"[ \t\r\n]*")
_ATOM = re.compile(r"\\[pP]\{[^}]*\}|\\.|\[(?:\\.|\[:\^?\w+:\]|[^\]\\])*\]|.", re.DOTALL)
_UNBOUNDED = re.compile(r"[*+]|\{\d*,\}")
_QUANTIFIER = re.compile(r"[*+?]|\{\d*,?\d*\}")


def verify_pipeline(content: bytes, origin: str) -> bool:
    """Whether texts are encoded in a time that is known; where not, a limit must be put to it.

    Raises:
        UserError: what it makes of a text may be too large, or may take too long to find.
    """
    known = True
    for key, value in _members(content, origin):
        if key == "post_processor":
            _verify_size(str(value), origin, key)
        if key == "added_tokens" and isinstance(value, list):
            for token in value:
                _verify_size(str(token), origin, key)
        if key not in _CHAINS:
            continue
        stages = [*_stages(value, _CHAINS[key])]
        growth = math.prod(_growth(stage) for stage in stages)
        if len(stages) > _MOST_STAGES or growth > _MOST_GROWTH:
            found = f"{len(stages)} stages" if len(stages) > _MOST_STAGES else "makes text far longer"
            raise UserError(
                f"{origin}: its {key} is refused ({found}; at most {_MOST_STAGES} stages, and {_MOST_GROWTH} "
                "times the text, wanted); take the tokenizer of the original model"
            )
        for pattern in _patterns(stages):
            _verify_size(pattern, origin, key)
            if pattern in KNOWN_SPLITS:
                continue
            known = False
            if _repeats_repeats(pattern) or (key != "pre_tokenizer" and len(_UNBOUNDED.findall(pattern)) > 1):
                raise UserError(
                    f"{origin}: its {key} is refused: {pattern[:80]!r} may take for ever to match"
                )
    return known


def _verify_size(text: str, origin: str, key: str) -> None:
    if len(text) > _LONGEST:
        raise UserError(f"{origin}: its {key} is refused: a part of more than {_LONGEST} characters")


def _members(content: bytes, origin: str) -> list[tuple[str, object]]:
    """All of the file but its model, which is most of it and mostly comes last."""
    try:
        try:
            # The beginning alone, where it is enough: the rest is megabytes.
            return _read_members(content[:_FIRST].decode("utf-8", "ignore"), content)
        except ValueError:
            return _read_members(content.decode(), content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{origin}: not a tokenizer ({' '.join(str(error).split())[:200]})") from None


def _read_members(text: str, content: bytes) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    at = _after_space(text, 0) + 1
    while not text.startswith("}", at := _after_space(text, at)):
        key, at = _LOOSE.raw_decode(text, at)
        at = _after_space(text, _after_space(text, at) + 1)
        if key == "model" and not _comes_later(content, len(text[:at].encode())):
            break
        value, at = (_LOOSE if key == "model" else _STRICT).raw_decode(text, at)
        found.append((str(key), value))
        at = _after_space(text, at)
        if not text.startswith(",", at):
            break
        at += 1
    return found


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _comes_later(content: bytes, start: int) -> bool:
    """What replaces, splits or is added may stand after this place: the library takes the last of a name."""
    if content.find(b"\\u00", start) >= 0:  # a letter of its name may be written so
        return True
    for name in _TELLING:
        at = content.find(name.encode(), start)
        while at >= 0:  # in a vocabulary, a number comes after it
            if _MEMBER.match(content, at + len(name)):
                return True
            at = content.find(name.encode(), at + 1)
    return False


def _without_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _stages(value: object, inner: str) -> Iterator[Mapping[str, Any]]:
    if not isinstance(value, Mapping):
        return
    if value.get("type") == "Sequence" and isinstance(stages := value.get(inner), list):
        for stage in stages:
            yield from _stages(stage, inner)
    else:
        yield value


def _growth(stage: Mapping[str, Any]) -> float:
    """How many times as long a text may become; infinite where that is not known."""
    match stage:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return max(1, len(new.encode()) / len(old.encode())) if old else math.inf
        case {"type": "Replace", "pattern": {"Regex": str()}, "content": str(new)}:
            return max(1, len(new.encode()))
        case {"type": "Replace"}:
            return math.inf
        case {"type": "Prepend", "prepend": str(text)}:
            return 1 + len(text) / 16
        case {"type": "ByteLevel"}:
            return 2
        case {"type": "NFD" | "NFKC" | "NFKD" | "Precompiled"}:
            return 3
    return 1


def _patterns(stages: list[Mapping[str, Any]]) -> Iterator[str]:
    for stage in stages:
        if isinstance(pattern := stage.get("pattern"), Mapping) and isinstance(pattern.get("Regex"), str):
            yield pattern["Regex"]


def _repeats_repeats(pattern: str) -> bool:
    """A group that is repeated without end, and in which something is repeated or chosen: exponential at worst."""
    varying = [False]
    """Of each group that is open."""
    atoms = [found[0] for found in _ATOM.finditer(re.sub(r"\\[kg]<", "((.*)*)*", pattern))]
    for index, atom in enumerate(atoms):
        after = "".join(atoms[index + 1 : index + 8])
        if atom == "(":
            varying.append(False)
        elif atom == ")" and len(varying) > 1:
            inner = varying.pop()
            if inner and _UNBOUNDED.match(after):
                return True
            varying[-1] |= inner
        elif atom == "|" or (index and atom != "?" and _QUANTIFIER.match(atom)):
            varying[-1] = True
    return False


_LOOSE, _STRICT = json.JSONDecoder(), json.JSONDecoder(object_pairs_hook=_without_twins)
