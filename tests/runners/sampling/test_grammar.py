"""Answers held to a JSON schema or a regular expression: of random weights, which follow nothing by themselves."""

from __future__ import annotations

import functools
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from qwen_onnx import UserError, load
from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.output import FinishReason
from qwen_onnx.runners.sampling.constraint import Constraint, as_constraint
from qwen_onnx.runners.sampling.grammar import Grammars, Matcher
from qwen_onnx.runners.text.detokenizer import token_bytes
from qwen_onnx.runners.text.tokenizer import Tokenizer
from qwen_onnx.runners.text.vocabulary import Vocabulary
from support.answers import PARIS, ids, opened, say, text
from support.chats import endless, tiny
from support.command import command
from support.text_fixtures import byte_level_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "näme": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": -3, "maximum": 120},
        "mood": {"enum": ["glad", "müde", "悲しい", None]},
        "marks": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "at": {
            "type": "object",
            "properties": {"code": {"type": "string", "pattern": "^[a-c]{2,4}$"}},
            "required": ["code"],
            "additionalProperties": False,
        },
    },
    "required": ["näme", "age", "mood", "marks", "at"],
    "additionalProperties": False,
}
DRAWN: list[dict[str, Any]] = [
    {},
    *[{"temperature": temperature, "seed": seed} for temperature in (0.7, 50) for seed in (1, 2, 3)],
    {
        "temperature": 1, "top_k": 2, "top_p": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 1, "seed": 4,
    },
]  # fmt: skip
ENDS = [360, 362]


@pytest.fixture(scope="module")
def chat() -> Chat:
    return opened(endless())


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(Tokenizer(byte_level_tokenizer()), Vocabulary(366, eos_token_ids=ENDS))


def fits(schema: dict[str, Any], value: Any) -> bool:
    """What JSON Schema says of the keywords that these tests use."""
    if "enum" in schema:
        return any(type(value) is type(one) and value == one for one in schema["enum"])
    if "anyOf" in schema:
        return any(fits(one, value) for one in schema["anyOf"])
    match schema["type"]:
        case "null":
            return value is None
        case "boolean":
            return type(value) is bool
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            found = re.search(schema.get("pattern", ""), value) if isinstance(value, str) else None
            return found is not None and len(value) <= schema.get("maxLength", 99)
        case "array":
            sized = isinstance(value, list) and schema.get("minItems", 0) <= len(value) <= schema["maxItems"]
            return sized and all(fits(schema["items"], item) for item in value)
        case _:
            kinds, named = schema["properties"], isinstance(value, dict)
            return named and set(schema["required"]) <= set(value) <= set(kinds) and all(
                fits(kinds[key], item) for key, item in value.items()
            )  # fmt: skip


@pytest.mark.parametrize("sampling", DRAWN)
def test_random_weights_say_what_the_schema_wants(chat: Chat, sampling: dict[str, Any]) -> None:
    """At any temperature, in the order of its properties, and ended by the model."""
    assert not fits(SCHEMA, {"age": 3})
    tokens = say(chat, count=400, json_schema=SCHEMA, **sampling)
    said = text(tokens)
    assert tokens[-1].finish_reason is FinishReason.EOS
    assert tokens[-1].token_id in chat.eos_token_ids
    assert fits(SCHEMA, json.loads(said)), said
    assert list(json.loads(said)) == list(SCHEMA["properties"])  # in this order
    assert max(ids(tokens)) < chat.tokenizer.size


@pytest.mark.parametrize("sampling", DRAWN)
@pytest.mark.parametrize(
    "regex",
    [
        r"\d{3}-[a-f]+x", "(yes|no|maybe) then", "[^a-z]{1,9}", "^a$", "", "漢字{2,3}|☕️", r"(?i)straße\.?",
        "(the |dog ){2,5}",
        "Cafe\u0301 \u212b <think>", r"<\|im_end\|>!", "[\U0001f300-\U0001f5ff]{2}",
    ],
)  # fmt: skip
def test_random_weights_match_the_expression(chat: Chat, regex: str, sampling: dict[str, Any]) -> None:
    """Also where it forces text that the tokenizer would normalize, or take for a special token."""
    tokens = say(chat, count=60, regex=regex, **sampling)
    said = text(tokens)
    if tokens[-1].finish_reason is FinishReason.LENGTH:
        assert regex == r"\d{3}-[a-f]+x"  # the only one without an end to it
    else:
        assert tokens[-1].finish_reason is FinishReason.EOS
        assert re.fullmatch(regex, said), said


def test_a_model_that_can_chat_keeps_to_it_too() -> None:
    trained = opened(tiny())
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Berlin", "Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    assert json.loads(text(say(trained, PARIS, 60, json_schema=schema))) == {"city": "Paris"}
    free = say(trained, PARIS, 40)
    assert ids(say(trained, PARIS, 40, regex=r"The [a-z]+ of [A-Z][a-z]+ is Paris\.")) == ids(free)


# The mask against the language, by every id.


def allowed(matcher: Matcher, **options: bool) -> set[int]:
    scores = matcher.masked(np.arange(366, dtype=np.float32), **options)
    held = np.flatnonzero(scores > -np.inf)
    assert np.array_equal(scores[held], held)  # the scores of the others are as they were
    return set(held.tolist())


def test_the_mask_is_the_language(grammars: Grammars) -> None:
    """An id is allowed if and only if its bytes go on with a string of the language, an end only after one.

    Where the next byte is no choice, llguidance forces the tokenizer's own tokens: fewer, never others.
    """
    units = ["a", "b", "th", "é", "漢", "字", " d"]
    language = {"".join((a, b, c)).encode() for a in units for b in ("", *units) for c in ("", *units)}
    contents = token_bytes(Tokenizer(byte_level_tokenizer()), 366)
    grammar = grammars.compile(Constraint("regex", f"({'|'.join(units)}){{1,3}}"))
    rng, forced, checked = np.random.default_rng(0), 0, 0
    for _ in range(60):
        matcher, said = grammar.matcher(), b""
        while True:
            rest = {string[len(said) :] for string in language if string.startswith(said)}
            viable = {
                token_id
                for token_id, content in enumerate(contents)
                if content and any(string.startswith(content) for string in rest)
            }
            ends = set(ENDS) if said in language else set()
            found = allowed(matcher)
            if len({string[:1] for string in rest}) == 1 and not ends:
                assert found
                assert found <= viable
                forced += 1
            else:
                assert found == viable | ends, said
                checked += 1
            token_id = int(rng.choice(sorted(found)))
            if token_id in ENDS:
                break
            matcher.take(token_id)
            said += contents[token_id]
        assert said in language
    assert min(forced, checked) > 20


def test_the_bytes_of_tokens_are_those_of_the_text() -> None:
    """They are those that come out: é of an added token, parts of characters, none of special tokens."""
    tokenizer = Tokenizer(byte_level_tokenizer())
    contents = token_bytes(tokenizer, 400)
    assert contents[360:363] + contents[366:] == [b""] * 37
    rng = np.random.default_rng(0)
    for _ in range(300):
        some = rng.integers(0, 366, 12).tolist()
        assert b"".join(contents[one] for one in some).decode(errors="replace") == tokenizer.decode(some)


def test_an_answer_ends_where_the_expression_does(grammars: Grammars) -> None:
    """Not in the middle; any of the end tokens; and one that is held off where something else can come."""
    a, b = (Tokenizer(byte_level_tokenizer()).token_id(char) for char in "ab")
    matcher = grammars.compile(Constraint("regex", "[ab]b?")).matcher()
    assert allowed(matcher, hold_end=True) == allowed(matcher) == {a, b}
    matcher.take(a)
    assert allowed(matcher) == {b, *ENDS}
    assert allowed(matcher, hold_end=True) == {b}
    matcher.take(b)
    assert allowed(matcher) == allowed(matcher, hold_end=True) == set(ENDS)
    matcher.take(ENDS[1])
    held = grammars.compile(Constraint("regex", "[ab]b?")).matcher(hold_end=True)
    held.take(a)
    assert allowed(held) == {b}


def test_ids_without_a_name_are_never_allowed() -> None:
    """A hole between the tokens, one that the model ends with, rows beyond the tokens."""
    vocabulary = {"a": 1, "b": 4, "ab": 6, "Ġ": 7, "<end>": 8}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    backend.decoder = decoders.ByteLevel()
    holes = Tokenizer(backend).holes
    made = Grammars(Tokenizer(backend), Vocabulary(9, holes, eos_token_ids=[8, 3, 400]))
    matcher = made.compile(Constraint("regex", "(?s).*")).matcher()
    scores = matcher.masked(np.zeros(9, np.float32))
    assert np.flatnonzero(scores == 0).tolist() == [1, 4, 6, 7, 8]
    with pytest.raises(UserError, match="need an end token"):
        Grammars(Tokenizer(backend), Vocabulary(9, holes, eos_token_ids=[3, 400]))
    backend.decoder = decoders.Metaspace()
    with pytest.raises(UserError, match="need a byte-level BPE tokenizer"):
        Grammars(Tokenizer(backend), Vocabulary(9, eos_token_ids=[8]))


def test_tokens_of_any_length_are_taken() -> None:
    """Those too long for llguidance's trie are never allowed."""
    long = {"a" * count: count for count in (1, 2, 255, 256, 5000)}
    backend = tokenizers.Tokenizer(models.BPE({**long, "z": 0}, []))
    backend.decoder = decoders.ByteLevel()
    made = Grammars(Tokenizer(backend), Vocabulary(5001, eos_token_ids=[0]))
    scores = made.compile(Constraint("regex", "a+")).matcher().masked(np.zeros(5001, np.float32))
    assert np.flatnonzero(scores == 0).tolist() == [1, 2, 255]


# Beside the other options.


def test_an_end_is_held_off_while_anything_else_can_come(chat: Chat) -> None:
    """min_new_tokens and ignore_eos always leave a token to choose, and nothing comes behind a complete text."""
    ends = {"logit_bias": dict.fromkeys(chat.eos_token_ids, 100.0)}
    usual = say(chat, regex="x{2,9}", **ends)
    assert (text(usual), usual[-1].finish_reason) == ("xx", "eos")
    for more in ({"ignore_eos": True}, {"min_new_tokens": 40}):
        tokens = say(chat, regex="x{2,9}", **ends, **more)
        assert (text(tokens), tokens[-1].finish_reason) == ("x" * 9, "eos")
    three = say(chat, regex="(ab|cd){2,9}", **ends, min_new_tokens=6)
    assert len(three) == 7


def test_what_cuts_an_answer_says_so(
    chat: Chat,
) -> None:
    """`eos` is said of whole texts only."""
    tokens = say(chat, count=5, json_schema=SCHEMA)
    assert (len(tokens), tokens[-1].finish_reason) == (5, FinishReason.LENGTH)
    stopped = say(chat, count=400, json_schema=SCHEMA, stop="age")
    assert stopped[-1].finish_reason is FinishReason.STOP
    assert text(stopped).endswith('"')


def test_the_constraint_has_the_last_word(chat: Chat) -> None:
    """Bias brings back nothing that does not fit, nor white space without end, which would be JSON too."""
    spaces = [token_id for token_id in range(366) if not chat.tokenizer.decode([token_id]).strip(" \n\t\r")]
    assert len(spaces) > 5
    bias = {"logit_bias": dict.fromkeys(spaces, 100.0)}
    schema = {**SCHEMA, "properties": {**SCHEMA["properties"], "näme": {"enum": ["x"]}}}
    said = text(say(chat, count=300, json_schema=schema, **bias))
    assert said == json.dumps(json.loads(said), ensure_ascii=False)


def test_the_same_seed_is_the_same_answer(chat: Chat) -> None:
    """Whatever was said before it, and to which constraint."""
    options = {"json_schema": SCHEMA, "temperature": 2, "seed": 9, "count": 400}
    first = ids(say(chat, **options))
    say(chat, regex="[ab]{9}")
    assert ids(say(chat, **options)) == first
    assert ids(say(opened(endless()), **options)) == first


def test_log_probabilities_are_those_of_the_model(chat: Chat) -> None:
    """Not those of masked logits: 0 for whatever is forced."""
    free = say(chat, count=1, logprobs=3)[0]
    held = say(chat, count=1, logprobs=3, top_logits=3, regex="z")[0]
    assert held.top_logprobs == free.top_logprobs
    assert held.token_id not in dict(held.top_logprobs)
    assert held.logprob < held.top_logprobs[-1][1]


def test_a_constraint_is_compiled_once(chat: Chat) -> None:
    request, again = (chat.request({"json_schema": schema}) for schema in (SCHEMA, json.dumps(SCHEMA)))
    assert request.constraint is not None
    assert request.constraint == again.constraint
    assert chat.processor._grammars.compile(request.constraint) is chat.processor._grammars.compile(
        again.constraint
    )
    assert not request.plain
    assert "json_schema '{" in request.describe()


def test_guesses_are_of_free_answers() -> None:
    speculating = opened(endless(), speculate=True)
    with pytest.raises(UserError, match=r"^speculate is greedy: no .* json_schema or regex"):
        say(speculating, regex="a")


def test_ctrl_c_in_forced_text_is_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no error of the library's, out of whose callback it comes."""
    tokenizer = Tokenizer(byte_level_tokenizer())
    made = Grammars(tokenizer, Vocabulary(366, eos_token_ids=ENDS))
    matcher = made.compile(Constraint("regex", "a(bcd|efg)")).matcher()

    def interrupted(*_: object, **__: object) -> list[int]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "encode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            matcher.masked(np.zeros(366, np.float32))
    assert len(allowed(matcher)) == 1


# Schemas at random.

LEAVES = st.one_of(
    st.fixed_dictionaries({"type": st.sampled_from(["null", "boolean"])}),
    st.tuples(st.integers(-(10**9), 10**9), st.integers(0, 10**6)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": sum(pair)}
    ),
    st.integers(0, 9).map(lambda most: {"type": "string", "maxLength": most}),
    st.lists(
        st.none() | st.booleans() | st.integers(-9, 9**9) | st.text(max_size=5), min_size=1, max_size=4
    ).map(lambda values: {"enum": values}),
)


def _object(kinds: dict[str, Any], some: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": kinds,
        "required": list(kinds)[:some],
        "additionalProperties": False,
    }


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(inner, st.integers(0, 3)).map(
            lambda pair: {"type": "array", "items": pair[0], "maxItems": pair[1]}
        ),
        st.builds(_object, st.dictionaries(st.text(max_size=4), inner, max_size=3), st.integers(0, 3)),
        st.lists(inner, min_size=1, max_size=3).map(lambda kinds: {"anyOf": kinds}),
    ),
    max_leaves=6,
)


@given(schema=SCHEMAS, seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_any_schema_is_kept_to(schema: dict[str, Any], seed: int) -> None:
    """Each keyword means what JSON Schema says."""
    tokens = say(_shared(), [7, 8, 9], 900, json_schema=schema, temperature=5, seed=seed)
    assert tokens[-1].finish_reason is FinishReason.EOS
    assert fits(schema, json.loads(text(tokens))), text(tokens)


@functools.cache
def _shared() -> Chat:
    return opened(endless())


# What is refused.


@pytest.mark.parametrize(
    ("options", "mentions"),
    [
        ({"regex": "(a"}, "regex cannot be used: unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"regex": r"a\b"}, r"regex cannot be used: lookarounds not supported yet"),
        ({"regex": "[^\0-\U0010ffff]"}, "no text fits it"),
        ({"regex": "(a{1000}){1000}"}, "regex cannot be followed: .*too many expressions"),
        ({"regex": "a?" * 2049}, "regex of 4,098 characters: at most 4,096 are taken"),
        ({"regex": "\ud800"}, "half of a surrogate pair"),
        ({"regex": 5}, "regex 5: a string wanted"),
        ({"regex": "a", "json_schema": {}}, "two constraints: give one"),
        ({"json_schema": []}, r"json_schema \[\]: an object, or true, wanted"),
        ({"json_schema": False}, "json_schema False: an object, or true, wanted"),
        ({"json_schema": "{"}, "json_schema is not JSON"),
        ({"json_schema": {"enum": [float("nan")]}}, "json_schema is not JSON"),
        ({"json_schema": {"enum": [{1}]}}, "json_schema is not JSON"),
        ({"json_schema": {"enum": ["\ud800"]}}, "json_schema cannot be used: .*hex escape"),
        ({"json_schema": {"type": "strin"}}, "json_schema cannot be used: Invalid type: strin"),
        ({"json_schema": {"not": {}}}, 'Unimplemented keys: ."not"'),
        ({"json_schema": {"oneOf": [{}, {}]}}, "oneOf"),
        ({"json_schema": {"$ref": "https://example.com/x"}}, "example.com"),
        ({"json_schema": {"$ref": "#"}}, "json_schema cannot be used: no text fits it"),
        ({"json_schema": {"pattern": "(a"}}, "json_schema cannot be used: .*unclosed group"),
        ({"json_schema": {"const": "x" * 2**17}}, "json_schema of 131,085 characters"),
        # What each of these did without our own bounds: the process ended, or minutes and gigabytes went.
        ({"json_schema": {"const": -(2**63)}}, "numbers from -1e.18 on are taken"),
        ({"json_schema": {"type": "integer", "multipleOf": 9_999_991}}, "9,999,991 states of multipleOf"),
        ({"json_schema": {"allOf": [{"multipleOf": 9973}, {"multipleOf": 0.7}]}}, "states of multipleOf"),
        ({"json_schema": {"pattern": "a?" * 9000}}, "18,000 characters of a pattern"),
        ({"json_schema": {"patternProperties": {str(i): {} for i in range(101)}}}, "101 patternProperties"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_one_line(
    chat: Chat, capfd: pytest.CaptureFixture[str], options: dict[str, Any], mentions: str
) -> None:
    with pytest.raises(UserError, match=mentions) as refused:
        say(chat, count=12, **options)
    assert len(str(refused.value)) < 300 or "(a{1000}" in str(options)
    assert capfd.readouterr() == ("", "")  # no panic of the library's, no trace


def test_definitions_through_definitions_are_compiled_or_refused(grammars: Grammars) -> None:
    """The compiler calls itself for each: that ends no process, not in a thread of a small stack either."""

    def chain(count: int) -> dict[str, Any]:
        kinds = {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(count)}
        return {"$defs": {**kinds, str(count): {"type": "null"}}, "$ref": "#/$defs/0"}

    found: list[object] = []
    usual = threading.stack_size(1 << 18)
    try:
        compiling = threading.Thread(
            target=lambda: found.append(grammars.compile(as_constraint(json_schema=chain(1900))))
        )
        compiling.start()
        compiling.join()
    finally:
        threading.stack_size(usual)
    assert len(found) == 1
    with pytest.raises(UserError, match="levels of nesting, in all definitions: at most 10,000"):
        as_constraint(json_schema=chain(2600))


# On the command line.


def test_the_command_line_takes_both(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA), encoding="utf-8-sig")
    asked = ("run", endless(), "-p", "Hi", "--provider", "cpu", "--seed", 1, "--temperature", 2)
    ran = command(*asked, "--json-schema", path)
    assert (ran.code, ran.err) == (0, "")
    assert fits(SCHEMA, json.loads(ran.out))
    assert re.fullmatch("[ab]{3}\n", command(*asked, "--regex", "[ab]{3}").out)
    shown = command("run", endless(), "--regex", "[ab]{3}", terminal=True, stdin="/params\nHi\n")
    assert "regex '[ab]{3}'" in shown.err
    assert re.fullmatch("[ab]{3}\n", shown.out)


@pytest.mark.parametrize(
    ("content", "mentions"),
    [
        (None, "no such file"), (b"{", "is not JSON"), (b"[]", "an object, or true, wanted"), (b"\xff", "not UTF-8"),
        (b"[" * 10**5, "nested too deeply"), (b'{"type": 5}', "type must be"), (b"true", "two constraints"),
    ],
)  # fmt: skip
def test_wrong_files_are_one_line(tmp_path: Path, content: bytes | None, mentions: str) -> None:
    path = tmp_path / "schema.json"
    if content is not None:
        path.write_bytes(content)
    more = ("--regex", "a") if content == b"true" else ()
    line = command("run", endless(), "-p", "Hi", "--provider", "cpu", "--json-schema", path, *more).error
    assert mentions in line


def test_threads_that_compile_leave_other_threads_their_stacks() -> None:
    before = threading.stack_size()
    made = [load(tiny(), provider="cpu", threads=1) for _ in range(3)]

    def compile_some(chat: Chat) -> None:
        for count in range(20):
            chat.processor._grammars.compile(Constraint("regex", f"a{{{count + 1}}}"))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(compile_some, made))
    assert threading.stack_size() == before


def test_more_alternatives_than_fit_are_said_in_our_words() -> None:
    schema = {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(1500)}}
    with pytest.raises(UserError, match="too many alternatives at once"):
        list(load(tiny(), provider="cpu", threads=1).generate("x", json_schema=schema, max_new_tokens=3))
