"""Tokens that answers are read by: tags of any flag, ends from four places, tokens beside tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from qwen_onnx import load
from qwen_onnx.contract.manifest import read_manifest
from qwen_onnx.errors import UserError
from qwen_onnx.runners.text.detokenizer import StreamDetokenizer
from qwen_onnx.runners.text.eos_ids import eos_ids
from qwen_onnx.runners.text.reasoning import Said, closed, split
from qwen_onnx.runners.text.template.chat_template import ChatTemplate
from qwen_onnx.runners.text.tokenizer import TAGS, Tokenizer
from support.chats import write_chat_checkpoint
from support.field_runs import exported_as
from support.text_fixtures import QWEN25_LIKE, byte_level_tokenizer, tokenizer_json, write_folder

END_OF_TEXT, END_OF_TURN = (
    byte_level_tokenizer().token_to_id(text) for text in ("<|endoftext|>", "<|im_end|>")
)
SIZE = byte_level_tokenizer().get_vocab_size()
TURNS_OF_EOS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + eos_token + '\n' }}{% endfor %}"
)


def added(text: str, token_id: int, **flags: bool) -> dict[str, object]:
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {"id": token_id, "content": text, **dict.fromkeys(names, False), **flags}


def beside(texts: dict[int, str], **flags: bool) -> dict[str, object]:
    """An added_tokens_decoder."""
    tokens = {str(token_id): added(text, 0, **flags) for token_id, text in texts.items()}
    for token in tokens.values():
        del token["id"]
    return tokens


def with_tokens(*tokens: dict[str, object]) -> str:
    """The test tokenizer with `<think>` taken out, and these added."""
    found = json.loads(tokenizer_json())
    found["added_tokens"] = [*(t for t in found["added_tokens"] if t["content"] != "<think>"), *tokens]
    return json.dumps(found)


@pytest.mark.parametrize("flag", ["special", "normalized", "lstrip", "rstrip", "single_word"])
def test_k4_tags_have_text_whatever_their_flag(flag: str, tmp_path: Path) -> None:
    """An answer's reasoning and calls are found in it, whole or token by token."""
    texts = (*TAGS, "<|other|>")
    tokens = [added(text, SIZE + index, **{"special": True, flag: True}) for index, text in enumerate(texts)]
    write_folder(tmp_path, {"tokenizer.json": with_tokens(*tokens)})
    tokenizer = Tokenizer.from_folder(tmp_path)
    think, unthink, call, uncall, other = (tokenizer.token_id(text) for text in texts)
    assert None not in (think, other)
    dog, fox = (tokenizer.encode(text) for text in ("dog", "fox"))
    ids: list[Any] = [think, *dog, unthink, *fox, other, END_OF_TURN, call, *dog, uncall]
    wanted = "<think>dog</think>fox<tool_call>dog</tool_call>"
    assert tokenizer.decode(ids) == wanted
    stream = StreamDetokenizer(tokenizer)
    assert "".join(map(stream.push, ids)) + stream.flush() == wanted
    assert split(wanted) == Said("dog", "fox<tool_call>dog</tool_call>")
    assert "<|other|>" in tokenizer.decode(ids, skip_special_tokens=False)


FOUR: dict[str, object] = {
    "generation_config.json": {"eos_token_id": [5, 6]},
    "config.json": {"eos_token_id": 7},
    "tokenizer_config.json": {"eos_token": "<|endoftext|>"},
    "chat_template.jinja": "{% for m in messages %}{{ m.content }}"
    "{{ ' <think2>' if m.role == 'assistant' }}\n{% endfor %}",
}


def test_k5_the_end_set_is_the_union_of_four_places(tmp_path: Path) -> None:
    """Each alone counts, and all of them together."""
    tokenizer = with_tokens(added("<think2>", SIZE))
    end = tokenizers.Tokenizer.from_str(tokenizer).token_to_id("<think2>")
    alone = [{5, 6}, {7}, {END_OF_TEXT}, {end}]
    for index, (name, ends) in enumerate(zip(FOUR, alone, strict=True)):
        folder = write_folder(tmp_path / str(index), {"tokenizer.json": tokenizer, name: FOUR[name]})
        found = Tokenizer.from_folder(folder)
        assert eos_ids(folder, found, ChatTemplate.from_folder(folder)) == ends
    folder = write_folder(tmp_path / "all", {"tokenizer.json": tokenizer, **FOUR})
    ends = eos_ids(folder, Tokenizer.from_folder(folder), ChatTemplate.from_folder(folder))
    assert ends == {5, 6, 7, END_OF_TEXT, end}


@pytest.mark.parametrize(
    "template",
    [
        TURNS_OF_EOS.replace(" + eos_token", ""),
        "{% for m in messages %}{{ m.content }} and so on{% endfor %}",
        "{{ raise_exception('no') }}",
        "{% for m in messages %}{{ m.content | upper }}<think>{% endfor %}",
        "{% for m in messages %}{{ m.content }}<think>{% endfor %}",
    ],
)
def test_k5_what_is_no_end_of_a_turn_is_none(template: str, tmp_path: Path) -> None:
    """Text, nothing at all, the start of the next turn, a tag, a template that refuses."""
    write_folder(tmp_path, {"chat_template.jinja": template})
    assert eos_ids(tmp_path, Tokenizer.from_folder(tmp_path), ChatTemplate.from_folder(tmp_path)) == set()


def test_k5_an_export_stops_where_its_template_ends_a_turn(tmp_path: Path) -> None:
    """generation_config.json names another id alone."""
    write_chat_checkpoint(tmp_path / "m", num_hidden_layers=1, template=TURNS_OF_EOS)
    write_folder(tmp_path / "m", {"generation_config.json": {"eos_token_id": 0}})
    out = exported_as(tmp_path / "m", tmp_path / "out")
    assert set(read_manifest(out).eos_token_ids) >= {0, END_OF_TURN}


def test_k8_tokens_beside_tokenizer_json_are_tokens(tmp_path: Path) -> None:
    write_folder(
        tmp_path, {"tokenizer_config.json": {"added_tokens_decoder": beside({SIZE + 1: "<b>", SIZE: "<a>"})}}
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("<b><a>") == [SIZE + 1, SIZE]
    assert tokenizer.size == SIZE + 2
    older = write_folder(tmp_path / "older", {"added_tokens.json": {"<b>": SIZE + 1, "<a>": SIZE}})
    assert Tokenizer.from_folder(older).encode("<b><a>") == [SIZE + 1, SIZE]
    both = {"added_tokens.json": {"<c>": SIZE}, "tokenizer_config.json": {"added_tokens_decoder": {}}}
    assert len(Tokenizer.from_folder(write_folder(tmp_path / "both", both)).encode("<c>")) > 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "a"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9": {"content": 5}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9": {"content": "a", "special": 1}}}),
        ("added_tokens.json", {"a": "5"}),
        ("added_tokens.json", {"a": True}),
    ],
)
def test_k8_what_is_no_token_is_named(name: str, content: object, tmp_path: Path) -> None:
    write_folder(tmp_path, {name: content})
    with pytest.raises(UserError, match=name) as refused:
        Tokenizer.from_folder(tmp_path)
    assert str(refused.value).isprintable()


FLAGS: list[dict[str, Any]] = [
    {},
    {"special": True},
    {"normalized": True},
    {"lstrip": True},
    {"rstrip": True},
    {"single_word": True},
]


@pytest.mark.transformers
@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("older", [False, True])
def test_k8_ids_are_those_of_transformers(flags: dict[str, Any], older: bool, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    texts = {SIZE: "<a>", SIZE + 1: "Ünd", SIZE + 2: "<|x|>", 0: "<|im_end|>"}
    files: dict[str, object] = {"tokenizer_config.json": {"added_tokens_decoder": beside(texts, **flags)}}
    if older:
        named = {"additional_special_tokens": ["<a>"], "eos_token": "<|im_end|>"} if flags else {}
        files = {
            "added_tokens.json": {text: token_id for token_id, text in texts.items() if token_id},
            "tokenizer_config.json": named,
        }
    write_folder(tmp_path, files)
    oracle, ours = PreTrainedTokenizerFast.from_pretrained(tmp_path), Tokenizer.from_folder(tmp_path)
    for text in ("a <a> b", "Ünd Ünd", "xÜndx  <|x|>  <a>y<|im_end|>\n", "U\u0308nd <A>"):
        assert ours.encode(text) == oracle.encode(text)


def split_files(folder: Path) -> dict[str, object]:
    """vocab.json and merges.txt in the place of tokenizer.json."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {"vocab.json": model["vocab"], "merges.txt": "#version: 0.2\n" + "\n".join(merges) + "\n"}


NAMED = {
    "eos_token": "<|im_end|>",
    "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    "chat_template": QWEN25_LIKE,
}


def test_l9_a_vocabulary_and_merges_are_a_tokenizer(tmp_path: Path) -> None:
    """The export has it as tokenizer.json; ids of text are those of the tokenizer that they came from."""
    checkpoint = write_chat_checkpoint(tmp_path / "m", num_hidden_layers=1)
    files = split_files(checkpoint)
    tokens = beside(
        {SIZE - 6: "<|endoftext|>", SIZE - 5: "<|im_start|>", SIZE - 4: "<|im_end|>"}, special=True
    )
    files["tokenizer_config.json"] = {**NAMED, "added_tokens_decoder": tokens}
    write_folder(checkpoint, files)
    (checkpoint / "tokenizer.json").unlink()
    out = exported_as(checkpoint, tmp_path / "out")
    assert "tokenizer.json" in read_manifest(out).files
    text = "<|im_start|>user\nThe dog's 12 été\r\n  x<|im_end|>"
    assert Tokenizer.from_folder(out).encode(text) == byte_level_tokenizer().encode(text).ids
    assert load(out, provider="cpu").prompt_ids([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize("damaged", ["vocab.json", "merges.txt"])
def test_l9_damaged_files_are_named(damaged: str, tmp_path: Path) -> None:
    files = split_files(write_folder(tmp_path, {}))
    write_folder(tmp_path, {**files, damaged: "[]"})
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=damaged):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.transformers
@pytest.mark.parametrize("config", [{}, NAMED, {"added_tokens_decoder": beside({400: "<a>"}, special=True)}])
def test_l9_ids_are_those_of_qwen2s_tokenizer(config: dict[str, object], tmp_path: Path) -> None:
    from transformers import Qwen2Tokenizer

    write_folder(tmp_path, {**split_files(write_folder(tmp_path, {})), "tokenizer_config.json": config})
    (tmp_path / "tokenizer.json").unlink()
    oracle, ours = Qwen2Tokenizer.from_pretrained(tmp_path), Tokenizer.from_folder(tmp_path)
    for text in ("The dog's 12345 ete\u0301\r\n  x", "<|im_start|><a><|endoftext|><|im_end|>"):
        assert ours.encode(text) == oracle.encode(text)


def test_k4_an_answer_cut_after_its_tag_is_reasoning() -> None:
    """The tag alone is no answer, and it is closed where the conversation goes on."""
    assert split("<think>") == Said()
    assert closed("\n<think>", begun=False).endswith("</think>\n\n")
    assert split("<thin") == Said(answer="<thin")
    assert split("\n</thi", begun=True) == Said(reasoning="</thi")
