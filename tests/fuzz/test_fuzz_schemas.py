"""JSON schemas made of combinators: whatever is drawn under one is valid under it, by another library."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from qwen_onnx import UserError, load
from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.sampling.constraint import as_constraint
from qwen_onnx.runners.sampling.grammar import Grammar, Grammars
from qwen_onnx.runners.text.vocabulary import Vocabulary
from support.chats import tiny

NAMES = "abcd"
LONGEST = 120
"""Tokens of an answer; one that is longer is let be."""


@functools.cache
def parts() -> tuple[Chat, Grammars, int]:
    """Of the bundled model: whose vocabulary is byte-level BPE, as that of all Qwen models."""
    chat = load(tiny(), provider="cpu", threads=1)
    assert chat.tokenizer is not None
    size = chat.runner.manifest.vocab_size
    return chat, Grammars(chat.tokenizer, Vocabulary.of(size, chat.eos_token_ids, chat.tokenizer)), size


def compiled(schema: Any, **options: bool) -> Grammar | str:
    """The grammar, or why there is none."""
    try:
        constraint = as_constraint(json_schema=schema, **options)
        assert constraint is not None
        return parts()[1].compile(constraint)
    except UserError as error:
        return str(error)


def drawn(rng: random.Random, grammar: Grammar) -> str | None:
    """A text that the grammar lets through, its ids drawn without a model; None where it does not end."""
    chat, _, size = parts()
    matcher, ids = grammar.matcher(), list[int]()
    for _ in range(LONGEST):
        allowed = np.flatnonzero(np.isfinite(matcher.masked(np.zeros(size, np.float32)))).tolist()
        ends = [each for each in allowed if each in chat.eos_token_ids]
        if ends and (len(ends) == len(allowed) or rng.random() < 0.5):
            assert chat.tokenizer is not None
            return chat.tokenizer.decode(ids, skip_special_tokens=False)
        ids.append(rng.choice([each for each in allowed if each not in ends]))
        matcher.take(ids[-1])
    return None


def leaf(rng: random.Random) -> dict[str, Any]:
    low = rng.randrange(-30, 30)
    return rng.choice(
        [
            {"type": "integer", "minimum": low, "maximum": low + rng.randrange(40)},
            {"type": "integer", "minimum": 0, "maximum": 99, "multipleOf": rng.randrange(1, 9)},
            {"type": "string", "maxLength": rng.randrange(4)},
            {"type": "string", "pattern": rng.choice(["^[ab]{1,3}$", "^x?y$", "^[0-9]{2}$"])},
            {"type": ["boolean", "null"]},
            {"enum": rng.sample([1, "a", None, True, [1], {"a": 1}, "é\n"], 2)},
            {"const": rng.choice([0, "b", [], {"b": None}])},
        ]
    )


def an_object(rng: random.Random, depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "object"}
    found["properties"] = {
        name: schema(rng, depth - 1) for name in rng.sample(NAMES, rng.randrange(len(NAMES)))
    }
    if rng.random() < 0.6:
        found["required"] = rng.sample(NAMES, rng.randrange(3))
    if rng.random() < 0.2:
        found["additionalProperties"] = rng.choice([False, leaf(rng)])
    return found


def schema(rng: random.Random, depth: int) -> dict[str, Any]:
    """Any; references are to definitions that `rooted` adds."""
    if depth <= 0:
        return leaf(rng)
    kind = rng.randrange(9)
    if kind < 2:
        return an_object(rng, depth)
    if kind == 2:
        return {"type": "array", "items": schema(rng, depth - 1), "maxItems": rng.randrange(1, 3)}
    if kind == 3:
        items = [schema(rng, depth - 1) for _ in range(2)]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": rng.randrange(3)}
    if kind == 4:
        return {"$ref": f"#/$defs/{rng.choice('PQ')}"}
    if kind == 5:
        return {rng.choice(["anyOf", "oneOf"]): [schema(rng, depth - 1) for _ in range(2)]}
    if kind == 6:
        return {"allOf": [schema(rng, depth - 1) for _ in range(rng.randrange(1, 3))]}
    if kind == 7:
        combiner = rng.choice(["anyOf", "allOf"])
        return {**an_object(rng, depth), combiner: [an_object(rng, depth - 1) for _ in range(2)]}
    return leaf(rng)


def rooted(rng: random.Random) -> dict[str, Any]:
    definitions = {"P": an_object(rng, 1), "Q": schema(rng, 0)}
    return {**schema(rng, 3), "$defs": definitions}


def closing_contradicts(found: dict[str, Any], error: str) -> bool:
    """Objects that are closed have no value any more, which they had."""
    return "nsatisfiable" in error and isinstance(compiled(found, additional_properties=True), Grammar)


@pytest.mark.parametrize(
    "count",
    [150, pytest.param(2_000, marks=pytest.mark.thorough), pytest.param(10_000, marks=pytest.mark.fuzz)],
)
def test_what_is_drawn_under_a_schema_is_valid(count: int) -> None:
    """Under the schema as it was given, and as it is closed; closing one never leaves it without a value."""
    done = 0
    for seed in range(count):
        rng = random.Random(seed)
        found = rooted(rng)
        grammar = compiled(found)
        if isinstance(grammar, str):
            assert grammar.isprintable(), seed
            assert not closing_contradicts(found, grammar), (seed, found, grammar)
            continue
        text = drawn(rng, grammar)
        if text is not None:
            value = json.loads(text)
            jsonschema.Draft202012Validator(json.loads(grammar.constraint.text)).validate(value)
            jsonschema.Draft202012Validator(found).validate(value)
            done += 1
    assert done > count // 3
