import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models

from qwen_onnx.errors import UserError
from qwen_onnx.runners.text.tokenizer import Tokenizer
from support.text_fixtures import ADDED, NASTY, SPECIAL, byte_level_tokenizer, tokenizer_json, write_folder


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_tokenizer())


@pytest.mark.parametrize("text", NASTY)
def test_text_survives_as_its_nfc_form(tokenizer: Tokenizer, text: str) -> None:
    """Every byte, space and line end of it."""
    normal = byte_level_tokenizer().normalizer.normalize_str(text)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == normal


def test_tokens_are_those_of_qwen2(tokenizer: Tokenizer) -> None:
    """Tokens are split where Qwen2 splits, in every release of the tokenizers library."""
    spelled = [
        tokenizer.visible_token(i, skip_special_tokens=False) or ""
        for i in tokenizer.encode(" The dog's 12\r\n<|im_end|>")
    ]
    assert spelled[-1] == "<|im_end|>"
    assert "".join(spelled[:-1]) == "ĠTheĠdog'sĠ12čĊ"
    assert spelled[-4:-2] == ["1", "2"]  # digits stand alone


@pytest.mark.transformers
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_ids_are_those_of_transformers(
    tokenizer: Tokenizer, tmp_path: Path, add_special_tokens: bool
) -> None:
    """Trimmed, split and merged as by the tokenizer that the model was trained with."""
    transformers = pytest.importorskip("transformers")
    file = write_folder(tmp_path, {}) / "tokenizer.json"
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token="<|im_end|>")
    for text in (*NASTY, *ADDED, *(a + b for a in NASTY for b in NASTY)):
        ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        assert ids == theirs(text, add_special_tokens=add_special_tokens)["input_ids"]
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )


def test_nothing_is_inserted(tokenizer: Tokenizer) -> None:
    """Qwen has no start token: empty text is no ids."""
    assert tokenizer.encode("") == []
    assert tokenizer.encode("dog") == tokenizer.encode("dog", add_special_tokens=False)


def test_what_the_post_processor_inserts_can_be_left_out() -> None:
    """A rendered chat template has its start token already."""
    backend = byte_level_tokenizer()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", backend.token_to_id("<|endoftext|>"))]
    )
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("dog")[1:] == tokenizer.encode("dog", add_special_tokens=False)


def test_size_counts_added_tokens(tokenizer: Tokenizer) -> None:
    """<|im_end|> lies behind the base vocabulary."""
    assert tokenizer.size == 360 + len(SPECIAL) + len(ADDED)
    assert tokenizer.token_id("<|im_end|>") == 362
    assert tokenizer.token_id("<|im_end|") is None
    assert tokenizer.holes.tolist() == []
    assert tokenizer.holes.dtype == np.int64


def test_holes_are_the_unnamed_ids_below_size() -> None:
    """They decode to nothing."""
    tokenizer = Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 1, "b": 4, "c": 6}, unk_token="a")))
    assert tokenizer.size == 7
    assert tokenizer.holes.tolist() == [0, 2, 3, 5]
    assert tokenizer.decode([0, 2, 3, 5]) == ""


@pytest.mark.parametrize("unknown", [366, 151_935, -1, 2**31, 2**32, 2**64, -(2**70)])
def test_unknown_ids_decode_to_nothing(tokenizer: Tokenizer, unknown: int) -> None:
    """Rows that pad the embedding, and numbers that no row has."""
    dog = tokenizer.encode("dog")
    assert tokenizer.decode([unknown]) == ""
    assert tokenizer.decode([*dog, unknown, *dog]) == "dogdog"


def test_decode_takes_numpy_ids(tokenizer: Tokenizer) -> None:
    """As they come out of a session: an int64 array."""
    assert tokenizer.decode(np.asarray(tokenizer.encode("dog"), dtype=np.int64)) == "dog"


def test_special_tokens_are_skipped_only_if_asked(tokenizer: Tokenizer) -> None:
    """<think> is not special."""
    ids = tokenizer.encode("<think>a<|im_end|>")
    assert tokenizer.decode(ids) == "<think>a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<think>a<|im_end|>"


@pytest.mark.parametrize("text", ["\ud800", "ab\udfffcd"])
def test_half_a_surrogate_pair_is_a_line_not_a_traceback(tokenizer: Tokenizer, text: str) -> None:
    """Text from a terminal or from JSON escapes may hold lone surrogates."""
    with pytest.raises(UserError, match=r"U\+D[0-9A-F]{3}"):
        tokenizer.encode(text)
    assert tokenizer.token_id(text) is None


def test_truncation_and_padding_saved_in_the_file_do_not_apply(tmp_path: Path) -> None:
    """As one saved in training may have them."""
    backend = byte_level_tokenizer()
    backend.enable_truncation(4)
    backend.enable_padding(length=4, pad_token="<|endoftext|>", pad_id=360)
    folder = write_folder(tmp_path, {"tokenizer.json": backend.to_str()})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("") == []
    assert len(tokenizer.encode("1234567")) == 7


def _with(change: dict[str, object]) -> str:
    model = json.loads(tokenizer_json())["model"]
    return json.dumps({**json.loads(tokenizer_json()), "model": {**model, **change}})


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "{",
        "[]",
        "{}",
        "\ud7ff" * 3,
        '{"model": {"type": "BPE"}}',
        tokenizer_json()[:-200],
        _with({"type": "NoSuchModel"}),
        _with({"merges": [["a", "no such token"]]}),
        json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": []}}),
        _with({"vocab": {"a": 2**32 - 1}, "merges": []}),
        _with({"continuing_subword_prefix": "longer than a token"}),  # the library's Rust side panics
    ],
)
def test_a_damaged_file_is_one_line_that_names_it(tmp_path: Path, content: str | None) -> None:
    """Whatever the library makes of it: an exception, a panic or a huge allocation."""
    folder = write_folder(tmp_path, {"tokenizer.json": content, "x": None})
    with pytest.raises(UserError, match=r"tokenizer\.json") as caught:
        Tokenizer.from_folder(folder)
    assert "\n" not in str(caught.value)


def test_a_folder_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
