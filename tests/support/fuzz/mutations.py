"""Damage at random, made again by its seed: bytes flipped, cut, doubled, exchanged; JSON values of other kinds."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

# Written into the JSON text as they are: what json.dumps cannot say.
RAW = (
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e308", "-0", "-0.0", "1e-400", "9" * 5000, "1" + "0" * 400,
    "9223372036854775807", "9223372036854775808", "-9223372036854775809", "18446744073709551616", "4294967296", "2.0",
    "[" * 900 + "]" * 900, "[" * 60_000, '{"a":' * 900 + "1" + "}" * 900, '{"a":1,"a":2}', '"\\ud800"', '"\\u0000"',
    '"\\udc00\\ud800"', "01", "+1", "'x'", "nul", "/* */1", "", "]", "}", ",", '"', "tru\u0435", "\ufeff1",
)  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 64, 2**31 - 1, 2**31, 2**32, 2**63, -(2**63), 0.5, -0.5, 1.0, 1e300, 5e-324,
    "", " ", "x", "1", "\n", "a\nb", "\x1b[2J\x07", "\0", "é", "\u202egnp.exe", "e\u0301\u0301\u0301", "\ufeff",
    "👩‍👩‍👧", "a" * 20_000, "../x", "/etc/passwd", "..", ".", "C:\\x", "%s%n", "{0.__class__}", "{{ 7 }}",
    [], {}, [[]], [None], {"": None}, {"a": {}}, [1, "x", None], [0] * 3000, [-1], {"content": 1}, {"content": "x"},
)  # fmt: skip


def damaged_bytes(rng: random.Random, content: bytes, others: tuple[bytes, ...] = ()) -> bytes:
    """One to four changes; `others` are contents to take chunks from."""
    made = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _change(rng, made, others)
    return bytes(made)


def _change(rng: random.Random, made: bytearray, others: tuple[bytes, ...]) -> None:
    size = len(made)
    begin = rng.randrange(size + 1)
    length = min(size - begin, rng.choice((1, 2, 4, 8, 64, 1024, 8192)))
    chunk = made[begin : begin + length]
    match rng.randrange(9):
        case 0 if begin < size:
            made[begin] ^= 1 << rng.randrange(8)
        case 1:
            del made[begin:]
        case 2:
            made[begin:begin] = rng.randbytes(rng.choice((1, 2, 7, 300)))
        case 3:
            made[begin:begin] = chunk * rng.choice((1, 2, 50))
        case 4:  # two chunks swapped
            other = rng.randrange(size + 1)
            moved = made[other : other + length]
            made[other : other + length] = chunk
            made[begin : begin + length] = moved
        case 5:
            del made[begin : begin + length]
        case 6:
            made[begin : begin + length] = bytes([rng.choice((0, 0x7F, 0x80, 0xFF))]) * length
        case 7 if others:
            other_content = rng.choice(others)
            at = rng.randrange(len(other_content) + 1)
            made[begin : begin + length] = other_content[at : at + length]
        case _:
            made[begin : begin + length] = rng.randbytes(length)


def damaged_json(rng: random.Random, value: Any, extra: tuple[Any, ...] = ()) -> bytes:
    """A JSON text like that of `value`; `extra` are values likely to matter to its reader."""
    holder = [copy.deepcopy(value)]
    raw: list[str] = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _change_value(rng, holder, raw, extra)
    text = json.dumps(holder[0], ensure_ascii=rng.random() < 0.5)
    for index, replaced in enumerate(raw):
        text = text.replace(f'"@raw {index}@"', replaced)
    if rng.random() < 0.05 and text.startswith("{"):  # every key twice
        text = text[:-1] + ("," if len(text) > 2 else "") + text[1:]
    content = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.03:
        content = rng.choice(
            (b"\xef\xbb\xbf" + content, text.encode("utf-16", "surrogatepass"), b"\xff" + content)
        )
    return content


def _change_value(rng: random.Random, holder: list[Any], raw: list[str], extra: tuple[Any, ...]) -> None:
    places = _places(holder)
    container, key = rng.choice(places)
    old = container[key]
    new: Callable[[], Any] = lambda: copy.deepcopy(rng.choice(extra + ODD if rng.random() < 0.5 else ODD))  # noqa: E731
    match rng.randrange(10):
        case 0 if container is not holder:
            del container[key]
        case 1:
            raw.append(rng.choice(RAW))
            container[key] = f"@raw {len(raw) - 1}@"
        case 2:
            other, at = rng.choice(places)
            if at in other if isinstance(other, dict) else at < len(other):
                # Copies: one may lie in the other.
                container[key], other[at] = copy.deepcopy(other[at]), copy.deepcopy(old)
        case 3:
            container[key] = rng.choice(([old], {"a": old}, str(old), [old, old], {"content": old}))
        case 4 if isinstance(container, dict):
            container[str(new())[:50]] = container.pop(key)
        case 5 if isinstance(container, dict):
            container[rng.choice(list(container))] = new()
            container[f"{key}{rng.choice(('', ' ', '.', '0'))}"] = old
        case 6 if isinstance(old, int | float) and not isinstance(old, bool):
            container[key] = rng.choice((-old, old + 1, old - 1, old * 2, old * 10**6, float(old), old / 3))
        case 7 if isinstance(old, str):
            container[key] = (
                old[: rng.randrange(len(old) + 1)] + str(new())[:30] + old[rng.randrange(len(old) + 1) :]
            )
        case 8 if isinstance(container, list):
            container.insert(rng.randrange(len(container) + 1), copy.deepcopy(old))
        case _:
            container[key] = new()


def _places(holder: list[Any]) -> list[tuple[Any, Any]]:
    """Every value's container and key, the whole among them."""
    found: list[tuple[Any, Any]] = []
    queue: list[Any] = [holder]
    while queue:
        container = queue.pop()
        for key in list(container) if isinstance(container, dict) else range(len(container)):
            found.append((container, key))
            if isinstance(container[key], dict | list):
                queue.append(container[key])
    return found
