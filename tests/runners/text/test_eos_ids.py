from collections.abc import Mapping
from pathlib import Path

import pytest

from qwen_onnx.errors import UserError
from qwen_onnx.runners.text.eos_ids import eos_ids
from qwen_onnx.runners.text.template.chat_template import ChatTemplate
from qwen_onnx.runners.text.tokenizer import Tokenizer
from support.text_fixtures import QWEN25_LIKE, byte_level_tokenizer, write_folder

END_OF_TEXT, START, END_OF_TURN = (
    byte_level_tokenizer().token_to_id(t) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
)


def found(folder: Path, files: Mapping[str, object]) -> set[int]:
    write_folder(folder, files)
    return set(eos_ids(folder, Tokenizer.from_folder(folder), ChatTemplate.from_folder(folder)))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [END_OF_TURN, END_OF_TEXT]}, {"eos_token_id": 7}, {7, END_OF_TURN, END_OF_TEXT}),
        ({"eos_token_id": END_OF_TEXT}, {"eos_token_id": END_OF_TEXT}, {END_OF_TEXT}),
        (None, {"eos_token_id": END_OF_TEXT}, {END_OF_TEXT}),
        ({"eos_token_id": [END_OF_TURN, END_OF_TEXT]}, {"eos_token_id": [3]}, {3, END_OF_TURN, END_OF_TEXT}),
    ],
    ids=["list", "int", "missing file", "config differs"],
)
def test_k5_the_ends_of_both_configs_count(
    tmp_path: Path, generation: object, config: object, expected: set[int]
) -> None:
    """Neither overrules the other."""
    assert found(tmp_path, {"generation_config.json": generation, "config.json": config}) == expected


@pytest.mark.parametrize("nothing", [{}, {"eos_token_id": None}, {"eos_token_id": []}, None])
def test_config_is_asked_where_generation_config_names_none(tmp_path: Path, nothing: object) -> None:
    """A null or an empty list says nothing."""
    files = {"generation_config.json": nothing, "config.json": {"eos_token_id": [5, 6]}}
    assert found(tmp_path, files) == {5, 6}


@pytest.mark.parametrize("eos", ["<|endoftext|>", {"content": "<|endoftext|>", "special": True}])
def test_k5_the_end_of_tokenizer_config_counts(tmp_path: Path, eos: object) -> None:
    """Some models name their end nowhere else."""
    files = {
        "config.json": {"eos_token_id": None},
        "tokenizer_config.json": {"bos_token": None, "eos_token": eos},
    }
    assert found(tmp_path, files) == {END_OF_TEXT}
    assert found(tmp_path, {"config.json": {"eos_token_id": 1}}) == {1, END_OF_TEXT}


@pytest.mark.parametrize("config", [{}, {"eos_token": None}, {"eos_token": "</s>"}, {"eos_token": {}}, None])
def test_a_model_may_name_no_end(tmp_path: Path, config: object) -> None:
    """By null, by a token that the tokenizer does not have, or by missing files."""
    assert found(tmp_path, {"tokenizer_config.json": config}) == set()


def test_the_end_of_turn_of_the_template_is_added(tmp_path: Path) -> None:
    """A base model made a chat model may keep <|endoftext|> in its configs and never write it."""
    files = {"generation_config.json": {"eos_token_id": END_OF_TEXT}, "chat_template.jinja": QWEN25_LIKE}
    assert found(tmp_path, files) == {END_OF_TEXT, END_OF_TURN}


def test_only_a_token_that_the_template_writes_is_added(tmp_path: Path) -> None:
    """Not <|im_end|> where turns end otherwise, or where it is several tokens."""
    files: dict[str, object] = {"config.json": {"eos_token_id": 5}}
    assert found(tmp_path, {**files, "chat_template.jinja": "{{ messages }}"}) == {5}
    without = byte_level_tokenizer().to_str().replace("<|im_end|>", "<|turn_end|>")
    assert found(tmp_path, {**files, "tokenizer.json": without, "chat_template.jinja": QWEN25_LIKE}) == {5}


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize(
    "value", ["5", "", True, False, -1, 5.0, {}, [5, "6"], [None], [True], [-1], [[5]], [5.0]]
)
def test_a_wrong_type_names_file_and_key(tmp_path: Path, name: str, value: object) -> None:
    """true is not token 1, and a string is not passed over."""
    with pytest.raises(UserError, match=rf"{name}: eos_token_id"):
        found(tmp_path, {name: {"eos_token_id": value}})


@pytest.mark.parametrize("value", [5, True, ["<|im_end|>"], {"content": 5}])
def test_a_wrong_eos_token_names_file_and_key(tmp_path: Path, value: object) -> None:
    """Where it is neither text nor an object."""
    write_folder(tmp_path, {"tokenizer_config.json": {"eos_token": value}})
    with pytest.raises(UserError, match=r"tokenizer_config\.json: eos_token"):
        eos_ids(tmp_path, Tokenizer.from_folder(tmp_path), None)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"generation_config\.json"):
        found(tmp_path, {"generation_config.json": "{"})
