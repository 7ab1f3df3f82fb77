"""Facts that pages of docs/ state, held to what is there."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import pytest

from qwen_onnx import UserError, load
from qwen_onnx.runners.output import Token
from support.chats import tiny

DOCS = Path(__file__).parents[2] / "docs"


def test_the_shape_of_num_logits_to_keep_is_the_graph_s() -> None:
    graph = onnx.load(tiny() / "score.onnx", load_external_data=False).graph
    (found,) = (one for one in graph.input if one.name == "num_logits_to_keep")
    assert found.type.tensor_type.elem_type == onnx.TensorProto.INT64
    assert not found.type.tensor_type.shape.dim
    assert "`num_logits_to_keep` too, an int64 scalar (shape `[]`)" in (DOCS / "graphs.md").read_text()


def test_what_a_token_is_said_to_have_it_has() -> None:
    said = re.search(
        r"yields a `Token` for each step: (.*?), which is None", (DOCS / "python.md").read_text()
    )
    assert said
    names = re.findall(r"`(\w+)`", said[1])
    assert names[0] == "token_id"
    assert set(names) <= set(Token.__dataclass_fields__)


_REFUSED = {
    "not": {"not": {}}, "if": {"if": {}, "then": {}}, "then": {"then": {}}, "else": {"else": {}},
    "contains": {"contains": {}}, "minContains": {"minContains": 1}, "maxContains": {"maxContains": 1},
    "uniqueItems": {"uniqueItems": True}, "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"dependentSchemas": {"a": {}}}, "dependencies": {"dependencies": {"a": ["b"]}},
    "propertyNames": {"propertyNames": {}}, "unevaluatedProperties": {"unevaluatedProperties": False},
    "unevaluatedItems": {"unevaluatedItems": False}, "$dynamicRef": {"$dynamicRef": "#a"},
    "$dynamicAnchor": {"$dynamicAnchor": "a"}, "$recursiveRef": {"$recursiveRef": "#"},
    "$ref": {"$ref": "https://example.com/a"}, "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "anyOf": None,
}  # fmt: skip


def test_keywords_that_are_said_to_be_refused_are() -> None:
    """And no other: each in one line, which names no option of a library's."""
    page = (DOCS / "structured_output.md").read_text()
    line = next(line for line in page.splitlines() if line.startswith("- What llguidance does not know"))
    assert set(re.findall(r"`([^`]+)`", line)) == _REFUSED.keys()
    chat = load(tiny(), provider="cpu", threads=1)
    for name, schema in _REFUSED.items():
        if schema is None:
            continue
        with pytest.raises(UserError) as caught:
            chat.processor.grammar(chat.request({"json_schema": schema}))
        assert name == "$ref" or name in str(caught.value)
        assert "coerce" not in str(caught.value)
