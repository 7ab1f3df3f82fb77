"""Token ids to text one by one: each push returns the text that no later token can change."""

import codecs
import json
import operator
import re
from collections.abc import Mapping
from typing import Any, Protocol

from qwen_onnx.runners.text.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x.+>")


class StreamDetokenizer:
    """The text of one sequence of ids, as it grows.

    For every sequence, the pushed texts and the flushed text joined are `tokenizer.decode` of all ids. The cost of
    a push does not grow with the sequence. After a flush the object is as new. Raises UserError as `decode` does.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._pieces = _pieces_for(tokenizer, skip_special_tokens=skip_special_tokens)

    def push(self, token_id: int) -> str:
        """Take the next id; return the text that is now certain (often empty within a character)."""
        token_id = operator.index(token_id)
        token = self._tokenizer.visible_token(token_id, skip_special_tokens=self._skip_special_tokens)
        return "" if token is None else self._pieces.push(token_id, token)

    def flush(self) -> str:
        """Return the text still held back, and start anew. Bytes of an unfinished character become U+FFFD."""
        return self._pieces.flush()


class _Pieces(Protocol):
    def push(self, token_id: int, token: str) -> str: ...
    def flush(self) -> str: ...


class _Bytes:
    """For byte-level BPE: every token is a run of bytes, and text is certain where a character ends."""

    def __init__(self) -> None:
        self._byte_of = _byte_level_alphabet()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int, token: str) -> str:
        return self._utf8.decode(_content(token, self._byte_of))

    def flush(self) -> str:
        held = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return held


class _Window:
    """For decoders in which a token's text hangs on the token before it and on the byte tokens beside it.

    Decodes the ids held back together with those last given out, and cuts off the text of the latter.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._given: list[int] = []
        self._held: list[int] = []

    def push(self, token_id: int, token: str) -> str:
        self._held.append(token_id)
        # A run of byte tokens is text only if all of it is valid: nothing of it is certain before its end.
        return "" if _BYTE_TOKEN.fullmatch(token) else self._give()

    def flush(self) -> str:
        text = self._give()
        self._given = []
        return text

    def _give(self) -> str:
        before = self._tokenizer.decode(self._given, skip_special_tokens=False)
        after = self._tokenizer.decode(self._given + self._held, skip_special_tokens=False)
        text = after[len(before) :]
        if text:
            self._given = self._held
        elif not before:
            # No text on either side: to the decoder these may still be the first tokens, or a space it strips.
            self._given += self._held
        self._held = []
        return text


class _Whole:
    """For decoders that may go back on any text: none of it is certain before the end."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._held: list[int] = []

    def push(self, token_id: int, token: str) -> str:
        self._held.append(token_id)
        return ""

    def flush(self) -> str:
        text = self._tokenizer.decode(self._held, skip_special_tokens=self._skip_special_tokens)
        self._held = []
        return text


def token_bytes(tokenizer: Tokenizer, size: int) -> list[bytes] | None:
    """What each id below `size` adds to a text; nothing where it is special or names no token.

    None where that is not decided by the id alone: the tokenizer is not byte-level.
    """
    if [stage["type"] for stage in _decoder_stages(tokenizer)] != ["ByteLevel"]:
        return None
    byte_of, found = _byte_level_alphabet(), [b""] * size
    for token, token_id in tokenizer.backend.get_vocab(with_added_tokens=True).items():
        if token_id < size:
            found[token_id] = _content(token, byte_of)
    for token_id in tokenizer.backend.get_added_tokens_decoder():
        if token_id < size and tokenizer.visible_token(token_id) is None:
            found[token_id] = b""
    return found


def _content(token: str, byte_of: Mapping[str, int]) -> bytes:
    """The bytes of a token of a byte-level vocabulary."""
    try:
        return bytes([byte_of[char] for char in token])
    except KeyError:
        # One character outside the alphabet, and the decoder takes the whole token as plain text.
        return token.encode()


def _pieces_for(tokenizer: Tokenizer, *, skip_special_tokens: bool) -> _Pieces:
    match _decoder_stages(tokenizer):
        case [{"type": "ByteLevel"}]:
            return _Bytes()
        case (
            []
            | [{"type": "Metaspace" | "WordPiece"}]
            | [{"type": "Replace"}, {"type": "ByteFallback"}, {"type": "Fuse"}]
            | [
                {"type": "Replace"},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "start": 0 | 1, "stop": 0},
            ]
        ):
            return _Window(tokenizer)
        case _:
            return _Whole(tokenizer, skip_special_tokens=skip_special_tokens)


def _decoder_stages(tokenizer: Tokenizer) -> list[dict[str, object]]:
    decoder = tokenizer.backend.decoder
    if decoder is None:
        return []
    # A decoder shows its settings only in its pickled state, which is its part of tokenizer.json.
    settings: dict[str, Any] = json.loads(decoder.__getstate__())
    return settings["decoders"] if settings["type"] == "Sequence" else [settings]


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    A byte that prints in Latin-1 stands as itself; the others are numbered upwards from U+0100 in byte order.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
