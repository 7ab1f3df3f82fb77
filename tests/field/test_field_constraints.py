"""Schemas as people send them, answers that are cut off, prompts that are piped in, what a batch line may ask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qwen_onnx import export, load
from qwen_onnx.runners.sampling.constraint import as_constraint
from qwen_onnx.runners.sampling.schema import closed
from support.chats import endless, tiny, write_chat_checkpoint
from support.command import command
from support.refusals import refused
from support.text_fixtures import QWEN3_LIKE

CITY = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}


def text_of(schema: Any, **options: bool) -> dict[str, Any]:
    """The schema that answers are held to."""
    constraint = as_constraint(json_schema=schema, **options)
    assert constraint is not None
    found: dict[str, Any] = json.loads(constraint.text)
    return found


@pytest.mark.parametrize(
    "wrapped",
    [
        {"name": "city", "strict": True, "schema": CITY},
        {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}},
        {"schema": CITY},
        {"type": "json_schema", "name": "city", "strict": True, "schema": CITY},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}},
        json.dumps({"name": "city", "schema": CITY}),
    ],
)
def test_k9_a_schema_comes_out_of_its_wrapper(wrapped: Any) -> None:
    assert text_of(wrapped) == text_of(CITY)


@pytest.mark.parametrize(
    ("schema", "mentions"),
    [
        ({"type": "object", "propertys": {"a": {}}}, ("'propertys'", "'properties' is meant")),
        ({"properties": {"a": {"anyOf": [{"tipe": "string"}]}}}, ("'tipe'", "'type'")),
        ({"$defs": {"a": {"minimun": 3}}, "$ref": "#/$defs/a"}, ("'minimun'", "'minimum'")),
        (
            {"properties": {"a": {"divisibleBy": 2}}},
            ("'divisibleBy' is a keyword of draft 3", "'multipleOf'"),
        ),
        ({"extends": {"type": "object"}}, ("'extends' is a keyword of draft 3", "'allOf'")),
        ({"items": {"disallow": "string"}}, ("'disallow' is a keyword of draft 3", "'not'")),
        ({"type": "string", "nullable": "yes"}, ("nullable 'yes': true or false wanted",)),
        ({"city": "Paris", "country": "France"}, ("'city'", "a JSON Schema wanted")),
    ],
)
def test_k9_a_keyword_that_no_draft_knows_is_refused(schema: Any, mentions: tuple[str, ...]) -> None:
    refused(as_constraint, json_schema=schema, mentions=("json_schema", *mentions))


@pytest.mark.parametrize("wrapped", [{"type": "json_object"}, {"response_format": {"type": "json_object"}}])
def test_k9_openai_s_json_object_is_any(wrapped: Any, tmp_path: Path) -> None:
    assert text_of(wrapped) == text_of(wrapped, additional_properties=True) == {"type": "object"}
    (tmp_path / "s.json").write_text(json.dumps(wrapped))
    end = load(endless(), provider="cpu", threads=1).prompt_ids("}")[0]
    asked = ("run", endless(), "--provider", "cpu", "-p", "x", "--json-schema", tmp_path / "s.json")
    assert command(*asked, "--logit-bias", f"{end}=100").out == "{}\n"


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        ({"type": "string", "nullable": True}, {"type": ["string", "null"]}),
        ({"type": "string", "nullable": False}, {"type": "string"}),
        ({"type": ["string", "null"], "nullable": True}, {"type": ["string", "null"]}),
        (
            {"enum": ["a"], "type": "string", "nullable": True},
            {"enum": ["a", None], "type": ["string", "null"]},
        ),
        ({"const": 5, "nullable": True}, {"enum": [5, None]}),
        ({"nullable": True}, {}),
        (
            {"$ref": "#/$defs/a", "nullable": True, "$defs": {"a": {"type": "integer", "nullable": True}}},
            {
                "$defs": {"a": {"type": ["integer", "null"]}},
                "anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}],
            },
        ),
        (
            {"type": "object", "properties": {"nullable": {"items": {"type": "number", "nullable": True}}}},
            {"type": "object", "properties": {"nullable": {"items": {"type": ["number", "null"]}}}},
        ),
    ],
)
def test_k9_nullable_is_openapi_s(schema: Any, wanted: Any) -> None:
    """It was passed over without a word, so that null was never said."""
    assert text_of(schema, additional_properties=True) == wanted


@pytest.mark.parametrize(
    "kind", [{"type": "string"}, {"$ref": "#/$defs/a"}, {"const": "x"}, {"enum": ["x", "y"]}]
)
def test_k9_null_is_said_where_it_may_be(kind: dict[str, Any]) -> None:
    chat = load(endless(), provider="cpu", threads=1)
    assert chat.tokenizer is not None
    schema = {
        "type": "object", "properties": {"a": {**kind, "nullable": True}}, "required": ["a"],
        "$defs": {"a": {"type": "string"}},
    }  # fmt: skip
    n = chat.tokenizer.encode("n", add_special_tokens=False)[0]
    assert json.loads(chat("x", json_schema=schema, logit_bias={n: 100.0})) == {"a": None}


def test_k9_names_and_values_are_no_keywords() -> None:
    """Of properties and definitions, and within const, enum, default and examples."""
    schema = {
        "type": "object",
        "properties": {"propertys": {"const": {"tipe": 1}}, "b": {"enum": [{"c": 2}], "default": {"d": 3}}},
        "$defs": {"minimun": {"type": "string", "examples": [{"e": 4}]}},
        "x-note": {"anything": True},
    }
    assert text_of(schema, additional_properties=True) == schema


def test_k11_objects_have_the_properties_that_are_named(tmp_path: Path) -> None:
    """And no others follow until the length ends; the schema, or an option, opens them."""
    (tmp_path / "s.json").write_text(
        '{"type":"object","properties":{"a":{"type":"integer","minimum":0,"maximum":9}},"required":["a"]}'
    )
    for seed in range(4):
        ran = command(
            *("run", endless(), "--provider", "cpu", "-p", "x", "--temperature", "1", "--seed", str(seed)),
            *("--json-schema", tmp_path / "s.json"),
        )
        assert ran.code == 0, ran.err
        assert json.loads(ran.out).keys() == {"a"}
    nested = {"type": "array", "items": {"type": "object", "properties": {"b": CITY}}}
    found = text_of(nested)
    assert found["items"]["additionalProperties"] is False
    assert found["items"]["properties"]["b"]["additionalProperties"] is False
    for own in (True, False, {"type": "integer"}):
        assert text_of({**CITY, "additionalProperties": own})["additionalProperties"] == own
    assert "additionalProperties" not in text_of(CITY, additional_properties=True)
    assert "additionalProperties" not in text_of({"type": "object"})


def test_k11_parts_that_are_combined_stay_open() -> None:
    """Closed, each would forbid what the other names."""
    both = {"allOf": [CITY, {"properties": {"b": {"type": "null"}}, "required": ["b"]}]}
    assert closed(both) == both
    beside = {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]}
    assert closed(beside) == beside
    refers = {"$defs": {"c": CITY}, "allOf": [{"$ref": "#/$defs/c"}, {"properties": {"b": {}}}]}
    assert text_of(refers) == refers
    alone = {
        "$defs": {"P": CITY},
        "properties": {"p": {"allOf": [{"$ref": "#/$defs/P"}]}},
        "required": ["p", "q"],
    }
    found = text_of(alone)
    assert found["additionalProperties"] is found["$defs"]["P"]["additionalProperties"] is False
    assert found["properties"].keys() == {"p", "q"}, "what is required is named"
    either = closed({"anyOf": [CITY, {"type": "null"}]})
    assert either["anyOf"][0]["additionalProperties"] is False


def test_k11_closing_leaves_no_contradiction() -> None:
    """Members of combined parts, parts beside what is required, definitions that some part refers to."""
    other = {"type": "object", "properties": {"b": {"type": "null"}}}
    members = {"allOf": [{"properties": {"x": CITY}}, {"properties": {"x": other}}]}
    required = {"type": "object", "required": ["b"], "anyOf": [CITY]}
    both = {"allOf": [CITY, {}], "anyOf": [other, {"type": "null"}]}
    for schema in (members, required, both):
        assert closed(schema) == schema
    refers = {
        "$defs": {"C": CITY},
        "type": "object",
        "properties": {"x": {"allOf": [{"$ref": "#/$defs/C"}, other]}, "y": CITY},
    }
    found = closed(refers)
    assert found["$defs"] == refers["$defs"]
    assert found["properties"]["x"] == refers["properties"]["x"]  # type: ignore[index]
    assert found["additionalProperties"] is found["properties"]["y"]["additionalProperties"] is False


def test_k11_one_of_several_stays_one() -> None:
    """Closed where no answer to one is an answer to another as it was given: else as they are."""

    def kind(name: str, **more: Any) -> dict[str, Any]:
        return {"type": "object", "properties": {"kind": {"const": name}, **more}, "required": ["kind"]}

    other = {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]}
    for parts in ([kind("x"), kind("y", z={})], [CITY, other], [CITY, {"type": "null"}]):
        found = closed({"oneOf": parts})["oneOf"]
        assert [each.get("additionalProperties") for each in found if each["type"] == "object"] == [
            False for each in parts if each["type"] == "object"
        ]
    union = {
        "$defs": {"X": kind("x"), "Y": kind("y")},
        "oneOf": [{"$ref": "#/$defs/X"}, {"$ref": "#/$defs/Y"}],
    }
    assert all(each["additionalProperties"] is False for each in closed(union)["$defs"].values())
    for parts in ([CITY, {**CITY, "required": []}], [CITY, {"type": "object", "properties": {}}]):
        assert closed({"oneOf": parts}) == {"oneOf": parts}


def test_k11_an_answer_that_is_cut_off_is_exit_1(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text('{"type":"array","minItems":9,"items":{"type":"integer"}}')
    asked = (
        "run",
        endless(),
        "--provider",
        "cpu",
        "--json-schema",
        tmp_path / "s.json",
        "--max-new-tokens",
        6,
    )
    ran = command(*asked, "-p", "x")
    assert ran.code == 1
    assert ran.out.startswith("[")
    assert "only the beginning of what --json-schema asks for; more --max-new-tokens wanted" in ran.err
    ran = command(*asked, "-p", "x", "--json")
    assert (ran.code, json.loads(ran.out)["finish_reason"]) == (1, "length")
    (tmp_path / "lines").write_text('{"prompt": "x"}\n')
    ran = command(*asked, "--batch", tmp_path / "lines")
    assert ran.code == 1
    assert "only the beginning" in json.loads(ran.out)["error"]
    assert json.loads(ran.out)["text"].startswith("[")


def test_k12_a_question_and_what_is_piped_in_go_together() -> None:
    """The question first, as elsewhere; nothing where nothing is piped in."""
    run = ("run", tiny(), "--provider", "cpu", "--json", "--show-prompt-ids", "--max-new-tokens", "1")
    both = json.loads(command(*run, "-p", "Summarise", stdin="a text\n").out)["prompt_ids"]
    alone = json.loads(command(*run, "-p", "Summarise\n\na text").out)["prompt_ids"]
    assert both == alone
    empty = json.loads(command(*run, "-p", "Summarise", stdin="  \n").out)["prompt_ids"]
    assert empty == json.loads(command(*run, "-p", "Summarise").out)["prompt_ids"] != both


def test_l10_a_line_has_its_own_constraint_tools_and_thinking(tmp_path: Path) -> None:
    lines = [
        {"prompt": "What is the capital of France?", "json_schema": CITY},
        {"prompt": "x", "regex": "(yes|no)"},
        {"prompt": "x", "enable_thinking": False},
        {"prompt": "x", "json_schema": {"tipe": 1}},
    ]
    (tmp_path / "lines").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ran = command("run", tiny(), "--provider", "cpu", "--batch", tmp_path / "lines", "--max-new-tokens", 20)
    found = [json.loads(line) for line in ran.out.splitlines()]
    assert json.loads(found[0]["text"]) == {"city": "Paris"}
    assert found[1]["text"] in ("yes", "no")
    assert "no switch for thinking" in found[2]["error"]
    assert "'tipe'" in found[3]["error"]
    ran = command("run", tiny(), "--provider", "cpu", "--batch", tmp_path / "lines", "--regex", "[0-9]")
    again = [json.loads(line) for line in ran.out.splitlines()]
    assert [each["text"] for each in again[:2]] == [each["text"] for each in found[:2]], "the line's own"


def test_l10_a_line_has_tools_of_its_own(tmp_path: Path) -> None:
    """Its prompt is that of `generate` with these tools."""
    checkpoint = write_chat_checkpoint(tmp_path / "m", template=QWEN3_LIKE, max_position_embeddings=1024)
    out = export(checkpoint, tmp_path / "out").folder
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    lines: list[dict[str, Any]] = [
        {"prompt": "x", "tools": tools},
        {"prompt": "x"},
        {"prompt": "x", "tools": 3},
    ]
    (tmp_path / "lines").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ran = command("run", out, "--provider", "cpu", "--batch", tmp_path / "lines", "--max-new-tokens", "2")
    found = [json.loads(line) for line in ran.out.splitlines()]
    chat, asked = load(out, provider="cpu"), [{"role": "user", "content": "x"}]
    wanted = [len(chat.prompt_ids(asked, tools=tools)), len(chat.prompt_ids(asked))]
    assert [each["prompt_tokens"] for each in found[:2]] == wanted
    assert wanted[0] > wanted[1]
    assert found[0]["tool_calls"] == []
    assert "tools 3" in found[2]["error"]


def test_json_is_text_as_it_is(tmp_path: Path) -> None:
    """Beyond ASCII too; what commands a terminal, and halves of pairs, are escaped."""
    (tmp_path / "lines").write_text(
        json.dumps({"prompt": "x", "id": "é 漢 \x9b \u202e \ud800"}) + "\n", encoding="utf-8"
    )
    run = ("run", tiny(), "--provider", "cpu", "--batch", tmp_path / "lines", "--out", tmp_path / "out")
    ran = command(*run, "--max-new-tokens", "1")
    text = (tmp_path / "out").read_text(encoding="utf-8")
    assert "é 漢 \\u009b \\u202e \\ud800" in text
    assert json.loads(text)["id"] == "é 漢 \x9b \u202e \ud800"
    assert ran.err.endswith(f"{tmp_path / 'out'}: 1 line, 0 of them failed\n")
    ran = command(*run, "--max-new-tokens", "1")
    assert ran.err.endswith("1 line, 0 of them failed; 1 was there already\n")


@pytest.mark.parametrize(("most", "code"), [(6, 1), (7, 0), (8, 0)])
def test_an_answer_that_matches_in_full_is_no_beginning(most: int, code: int) -> None:
    """Though its length ended it, and more could have come."""
    asked = ("run", tiny(), "--provider", "cpu", "-p", "What is 3 plus 4?", "--max-new-tokens", most)
    ran = command(*asked, "--regex", "3 plus 4 is [0-9]+")
    assert ran.code == code
    assert ("only the beginning" in ran.err) == bool(code)
    assert ran.out.startswith("3 plus 4 is 7") != bool(code)


@pytest.mark.parametrize(("most", "is_cut"), [(2, True), (3, False)])
def test_json_that_is_whole_is_no_beginning(most: int, is_cut: bool, tmp_path: Path) -> None:
    """In a batch too: its line has no error then."""
    line = {"prompt": "x", "json_schema": {"const": [1]}, "max_new_tokens": most}
    (tmp_path / "lines").write_text(json.dumps(line) + "\n")
    ran = command("run", tiny(), "--provider", "cpu", "--batch", tmp_path / "lines")
    found = json.loads(ran.out)
    assert ("error" in found) == is_cut == bool(ran.code)
    assert found["finish_reason"] == "length"
    assert (found["text"] == "[1]") != is_cut


def test_what_a_constraint_passes_over_is_told() -> None:
    """Only where the answer would have gone on without it."""
    asked = ("run", tiny(), "--provider", "cpu", "-p", "What is 3 plus 4?", "--regex")
    both = ("--min-new-tokens", 20, "--ignore-eos")
    note = "note: --regex lets nothing more come: the answer ends in spite of --min-new-tokens and --ignore-eos\n"
    assert command(*asked, "3 plus 4 is 7\\.", *both).err == note
    assert command(*asked, "3 plus 4 is 7\\.", "--min-new-tokens", 2).err == ""
    assert command(*asked, "(a|b){40}", *both, "--max-new-tokens", 5).err.count("note: ") == 0
