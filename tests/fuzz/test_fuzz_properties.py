"""As test_fuzz.py, by hypothesis: any JSON and any text where files and options hold it, shrunk when it fails."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qwen_onnx.checkpoints.config import QwenConfig, parse_config
from qwen_onnx.checkpoints.safetensors_file import read_header
from qwen_onnx.cli.main import main
from qwen_onnx.contract.manifest import Manifest, read_manifest
from qwen_onnx.errors import UserError
from qwen_onnx.runners.text.eos_ids import eos_ids
from qwen_onnx.runners.text.template.chat_template import ChatTemplate
from qwen_onnx.runners.text.tokenizer import Tokenizer, special_token_text
from support.chats import endless
from support.checkpoints import QWEN2, QWEN2_YARN_NEW
from support.text_fixtures import byte_level_tokenizer

NUMBERS = st.integers() | st.integers(-2, 300) | st.floats()
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=12)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
MORE_KEYS = ("rope_scaling", "rope_parameters", "layer_types", "head_dim", "sliding_window", "attention_bias")
CONFIG_KEYS = st.sampled_from([*QWEN2, *MORE_KEYS, "max_window_layers"])
MARKS = st.sampled_from(["{{", "}}", "{%", "%}", "messages", "(", ")", "[0]", ".", "|", "for ", "in "])
TEXTS = st.text() | st.text(st.characters(categories=["Cs", "Cc", "Cf", "Mn", "So", "Lo"]))
TOKENIZER = Tokenizer(byte_level_tokenizer())


def refusal_is_one_line(function: Callable[..., Any], *arguments: Any) -> Any:
    said = ""
    try:
        return function(*arguments)
    except UserError as error:
        said = str(error)
    assert said.isprintable()
    assert len(said) <= 1500
    return None


def a_config(values: dict[str, Any], base: dict[str, Any]) -> None:
    found = refusal_is_one_line(parse_config, {**base, **values})
    assert found is None or (isinstance(found, QwenConfig) and found.context_length > 0)


def a_manifest(values: dict[str, Any]) -> None:
    raw = json.loads((endless() / "export.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "export.json").write_text(json.dumps({**raw, **values}))
        refusal_is_one_line(read_manifest, Path(folder))


def a_generation_config(value: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        found = refusal_is_one_line(eos_ids, Path(folder), None, None)
    assert found is None or all(type(token_id) is int for token_id in found)


def a_special_token(value: Any) -> None:
    found = refusal_is_one_line(lambda: special_token_text({"eos_token": value}, "eos_token", path=Path("x")))
    assert found is None or isinstance(found, str)


def a_header(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(len(content).to_bytes(8, "little") + content + bytes(8))
        refusal_is_one_line(read_header, path)


def a_text(text: str) -> None:
    ids = refusal_is_one_line(TOKENIZER.encode, text)
    if ids is not None and not any(special in text for special in ("<|", "<think>", "caf", "an added")):
        # By the tokenizer's own NFC: its Unicode may be older than Python's.
        wanted = TOKENIZER.backend.normalizer.normalize_str(text)
        assert TOKENIZER.decode(ids, skip_special_tokens=False) == wanted


def a_template(source: str, content: str) -> None:
    template = refusal_is_one_line(ChatTemplate, source)
    if template is not None:
        refusal_is_one_line(template.render, [{"role": "user", "content": content}])


def a_command(arguments: list[str]) -> None:
    """None of these names a verb that would write."""
    with mock.patch("sys.argv", ["qwen-onnx", "info", *arguments]), pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, 1, 2)


CHANGES = st.dictionaries(CONFIG_KEYS, VALUES, max_size=3)
ENTRIES = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["F32", "BF16", "U8"]) | SCALARS, "shape": VALUES, "data_offsets": VALUES}
)
HEADERS = VALUES | st.dictionaries(st.text(max_size=5), ENTRIES, max_size=3)
ARGUMENTS = TEXTS.filter(lambda text: not text.startswith("--help"))
PROPERTIES: dict[str, tuple[Callable[..., None], dict[str, st.SearchStrategy[Any]]]] = {
    "config": (a_config, {"values": CHANGES, "base": st.sampled_from([QWEN2, QWEN2_YARN_NEW])}),
    "manifest": (
        a_manifest,
        {"values": st.dictionaries(st.sampled_from([*Manifest.__annotations__]), VALUES, max_size=2)},
    ),
    "generation config": (a_generation_config, {"value": VALUES}),
    "special token": (a_special_token, {"value": VALUES}),
    "header": (
        a_header,
        {"content": st.binary() | HEADERS.map(lambda value: json.dumps(value).encode())},
    ),
    "text": (a_text, {"text": TEXTS}),
    "template": (
        a_template,
        {"source": st.lists(MARKS | st.text(max_size=4)).map(" ".join), "content": TEXTS},
    ),
    "command": (a_command, {"arguments": st.lists(ARGUMENTS, max_size=3)}),
}


def verify(name: str, examples: int) -> None:
    check, strategies = PROPERTIES[name]
    lenient = settings(max_examples=examples, suppress_health_check=list(HealthCheck), derandomize=True)
    lenient(given(**strategies)(check))()


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_hundred_examples(name: str) -> None:
    """Whatever a file or an option holds is right, or refused in one line."""
    verify(name, 60 if name == "command" else 120)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", PROPERTIES)
def test_a_thousand_examples(name: str) -> None:
    """The same, ten times as much."""
    verify(name, 400 if name == "command" else 1500)
