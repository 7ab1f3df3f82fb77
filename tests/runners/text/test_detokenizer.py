from collections.abc import Iterable, Sequence
from functools import cache

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from qwen_onnx.runners.text.detokenizer import StreamDetokenizer
from qwen_onnx.runners.text.tokenizer import Tokenizer
from support.text_fixtures import ADDED, NASTY, SPECIAL, byte_level_tokenizer

E4 = "é🔥好👩‍👩‍👧"
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
OTHER_DECODERS = {
    "none": None,
    "llama": decoders.Sequence([*LLAMA, decoders.Strip(" ", 1, 0)]),
    "gemma": decoders.Sequence(LLAMA),
    "strips more": decoders.Sequence([*LLAMA, decoders.Strip(" ", 2, 0)]),
    "metaspace": decoders.Metaspace(),
    "metaspace, none prepended": decoders.Metaspace(prepend_scheme="never"),
    "wordpiece": decoders.WordPiece(),
    "bpe suffix": decoders.BPEDecoder(),
    "ctc": decoders.CTC(),
    "byte-level in a sequence": decoders.Sequence([decoders.ByteLevel()]),
}
PIECES = [
    "", "▁", "▁▁", "▁a", "a", "b▁", "Ġ", "é", "好", "##a", "##", ".", " .", "'s", "</w>", "a</w>", "<pad>", "|",
    "<unk>", "<0x41>", "<0xE2>", "<0x82>", "<0xAC>", "<0xF0>", "<0x+f>", "<0x4>", "�",
]  # fmt: skip


@cache
def byte_level() -> Tokenizer:
    return Tokenizer(byte_level_tokenizer())


@cache
def other(name: str) -> Tokenizer:
    # Every other id is left unnamed: those must not disturb what is around them.
    backend = tokenizers.Tokenizer(
        models.WordLevel({piece: 2 * i for i, piece in enumerate(PIECES)}, unk_token="<unk>")
    )
    if (decoder := OTHER_DECODERS[name]) is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["<pad>", "<s>", "▁▁▁"])
    backend.add_tokens([AddedToken("an added▁token", special=False)])
    return Tokenizer(backend)


def streamed(tokenizer: Tokenizer, ids: Iterable[int], *, skip_special_tokens: bool = True) -> list[str]:
    detokenizer = StreamDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    named = st.integers(0, tokenizer.size - 1)
    return st.lists(st.one_of(named, named, named, st.integers(-3, tokenizer.size + 3), st.just(2**64)))


@settings(deadline=None, max_examples=200)
@given(ids=ids_of(byte_level()), skip=st.booleans())
def test_stream_equals_decode_for_any_ids(ids: list[int], skip: bool) -> None:
    """Invalid UTF-8, special, added, unknown and absurd ids."""
    expected = byte_level().decode(ids, skip_special_tokens=skip)
    assert "".join(streamed(byte_level(), ids, skip_special_tokens=skip)) == expected


@settings(deadline=None, max_examples=200)
@given(
    content=st.lists(st.sampled_from([*b"A\x80\xbf\xc2\xe0\xa0\xe2\x82\xac\xed\xf0\x9f\x94\xa5\xf4\x90\xff"]))
)
def test_stream_equals_decode_for_any_bytes(content: list[int]) -> None:
    """As many U+FFFD for malformed bytes: dense UTF-8 starts and stray ends."""
    alphabet = bytes_to_ids()
    ids = [alphabet[byte] for byte in content]
    assert "".join(streamed(byte_level(), ids)) == byte_level().decode(ids)
    assert byte_level().decode(ids) == bytes(content).decode(errors="replace")


@settings(deadline=None, max_examples=200)
@given(text=st.text())
def test_stream_equals_decode_for_any_text(text: str) -> None:
    """Its characters may be split over tokens."""
    ids = byte_level().encode(text)
    assert "".join(streamed(byte_level(), ids)) == byte_level().decode(ids)


@pytest.mark.parametrize("name", OTHER_DECODERS)
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_stream_equals_decode_for_other_decoders(name: str, data: st.DataObject) -> None:
    """They look back: a first space is dropped, a run of bytes is judged as a whole."""
    tokenizer = other(name)
    ids, skip = data.draw(ids_of(tokenizer)), data.draw(st.booleans())
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(streamed(tokenizer, ids, skip_special_tokens=skip)) == expected


@cache
def bytes_to_ids() -> dict[int, int]:
    """The id of each byte, found by decoding: one byte of ASCII alone, the others as parts of characters."""
    found: dict[int, int] = {}
    for char in (chr(i) for i in [*range(0x100), *range(0x100, 0x800, 0x40), *range(0x800, 0xD800, 0x800)]):
        found |= dict(zip(char.encode(), single_bytes(char), strict=True))
    for char in ("\ue000", "\U00010000", "\U00040000", "\U00080000", "\U000c0000", "\U00100000"):
        found |= dict(zip(char.encode(), single_bytes(char), strict=True))
    # Bytes that no text holds: the alphabet spells those from AE on as themselves.
    found |= {byte: known_id(byte_level(), chr(byte)) for byte in range(0xAE, 0x100) if byte not in found}
    return found


def single_bytes(char: str) -> list[int]:
    pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    [(spelled, _)] = pre_tokenizer.pre_tokenize_str(char)
    return [known_id(byte_level(), c) for c in spelled]


def known_id(tokenizer: Tokenizer, text: str) -> int:
    token_id = tokenizer.token_id(text)
    assert token_id is not None
    return token_id


@pytest.mark.parametrize("text", [E4, *NASTY])
def test_stream_equals_decode_at_every_cut_of_a_text(text: str) -> None:
    """Also inside a character, as max_new_tokens may cut."""
    ids = byte_level().encode(text)
    for end in range(len(ids) + 1):
        assert "".join(streamed(byte_level(), ids[:end])) == byte_level().decode(ids[:end])


def test_held_bytes_come_out_at_the_end() -> None:
    """Of an unfinished character, as U+FFFD."""
    ids = [i for char in "é🔥" for i in single_bytes(char)]
    assert streamed(byte_level(), ids) == ["", "é", "", "", "", "🔥", ""]
    assert streamed(byte_level(), ids[:-1]) == ["", "é", "", "", "", "�"]


def test_certain_text_is_not_held_back() -> None:
    ids = byte_level().encode("The quick brown fox, it's tired.")
    texts = streamed(byte_level(), ids)
    assert all(texts[:-1])
    assert texts[-1] == ""
    llama = other("llama")
    assert streamed(llama, [known_id(llama, text) for text in ("▁a", "▁a", "好")]) == [
        "a", " a", "好", ""
    ]  # fmt: skip


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_come_where_they_are_not_skipped(skip: bool) -> None:
    """Two bytes with a skipped one between them join, as in decode."""
    first, second = single_bytes("é")
    ids = [first, known_id(byte_level(), SPECIAL[2]), second]
    texts = streamed(byte_level(), ids, skip_special_tokens=skip)
    assert "".join(texts) == ("é" if skip else "�<|im_end|>�")


def test_added_tokens_are_those_of_decode() -> None:
    """One with a space or beyond Latin-1 comes out as decode has it."""
    ids = [known_id(byte_level(), text) for text in ADDED]
    assert streamed(byte_level(), ids) == ["<think>", "an added tóken", "caf", "�"]


def test_a_flushed_detokenizer_is_as_new() -> None:
    """Bytes of one text are not completed by the next."""
    first, second = single_bytes("é")
    detokenizer = StreamDetokenizer(byte_level())
    assert [detokenizer.push(first), detokenizer.flush()] == ["", "�"]
    assert [detokenizer.push(second), detokenizer.flush(), detokenizer.flush()] == ["�", "", ""]


@pytest.mark.parametrize("name", OTHER_DECODERS)
def test_a_flushed_detokenizer_of_any_decoder_is_as_new(name: str) -> None:
    """The next text begins as its own: with no space before it where the decoder strips the first one."""
    tokenizer = other(name)
    ids = tokenizer.encode("one two")
    detokenizer = StreamDetokenizer(tokenizer)
    for _ in range(3):
        assert "".join([*map(detokenizer.push, ids), detokenizer.flush()]) == tokenizer.decode(ids)


class CountingTokenizer(Tokenizer):
    """Records how many ids each decode is asked for."""

    longest = 0

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        ids = list(ids)
        self.longest = max(self.longest, len(ids))
        return super().decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("name", ["byte-level", "llama", "none"])
def test_the_cost_of_a_push_does_not_grow(name: str) -> None:
    """Few ids are decoded again with each, however long the text is."""
    backend = (byte_level() if name == "byte-level" else other(name)).backend
    tokenizer = CountingTokenizer(backend)
    pattern: Sequence[int] = [i for i in range(tokenizer.size) if tokenizer.visible_token(i) is not None]
    ids = list(pattern) * (5000 // len(pattern))
    assert "".join(streamed(tokenizer, ids)) == Tokenizer(backend).decode(ids)
    assert tokenizer.longest <= 20
