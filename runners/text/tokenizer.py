"""Text to token ids and back, by the export's own tokenizer.json."""

import operator
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from qwen_onnx.errors import UserError
from qwen_onnx.runners.text.loading.added_tokens import added_tokens, named_tokens
from qwen_onnx.runners.text.loading.pipeline import verify_pipeline
from qwen_onnx.runners.text.loading.watch import watched_ids

TOKENIZER_FILE, VOCAB_FILE, MERGES_FILE = "tokenizer.json", "vocab.json", "merges.txt"
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Of reasoning and of calls: an answer is read by them, so they have text even where they are flagged as special."""

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Far above every real vocabulary: one stray id of four billion in a damaged file must not size our arrays.
_LARGEST_ID = 2**24
_CHARACTERS = 8
"""A token is hardly longer, on average: so much of a text is encoded to know that it is too long."""
_CUT = 64
"""Tokens more than a whole text may have, where it is cut in the middle of one."""


class Tokenizer:
    """A model's tokenizer: `encode`, `decode`, and what is known of its ids (`size`, `holes`, `token_id`).

    Raises UserError when `backend` names no token, or an id that no real vocabulary reaches.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, origin: str = TOKENIZER_FILE) -> None:
        # A file may have been saved with the truncation or padding of a training run: neither belongs to the text.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._watched = False
        """How long texts take is not known: its regular expressions are none that are."""
        named = backend.get_vocab(with_added_tokens=True).values()
        if not named:
            raise UserError(f"{origin}: names no token")
        largest = max(named)
        if largest >= _LARGEST_ID:
            raise UserError(f"{origin}: token id {largest} is out of range")
        self._named = np.fromiter(named, dtype=np.int64, count=len(named))
        self.size: int = largest + 1
        """Highest id + 1, added tokens included. Ids from here on decode to nothing."""

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Read the tokenizer of an exported folder or a checkpoint.

        That is `tokenizer.json`, or vocab.json and merges.txt where there is none, with the added tokens that stand
        beside it.

        Raises UserError, naming the file, when it is missing, unreadable or not a tokenizer.
        """
        path = folder / TOKENIZER_FILE
        if not path.exists() and has_tokenizer(folder):
            return cls(_built(folder), origin=str(folder / VOCAB_FILE))
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise UserError(f"{path}: no such file") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
        watched = not verify_pipeline(content, str(path))
        try:
            backend = tokenizers.Tokenizer.from_buffer(content)
        except BaseException as error:
            raise _translated(error, f"{path}: not a tokenizer") from None
        _add(backend, added_tokens(folder), folder)
        found = cls(backend, origin=str(path))
        found._watched = watched
        return found

    @cached_property
    def holes(self) -> NDArray[np.int64]:
        """The ids below `size` that name no token, ascending: never to be sampled."""
        nameless = np.ones(self.size, np.bool_)  # sorting would take seconds for a stray id of millions
        nameless[self._named] = False
        return np.flatnonzero(nameless).astype(np.int64)

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The tokenizers object itself."""
        return self._backend

    def verify_length(self, text: str, most: int) -> None:
        """Raises UserError where the beginning of a text is more than so many tokens: the rest is not looked at.

        A text of megabytes takes a minute and gigabytes to encode.
        """
        size = _CHARACTERS * most
        while size < len(text):
            if (count := len(self.encode(text[:size], add_special_tokens=False))) > most + _CUT:
                raise UserError(
                    f"the prompt has {len(text):,} characters, of which the first {size:,} are {count:,} tokens; "
                    f"the context holds {most:,} with the answer"
                )
            size *= 2

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`. Nothing is inserted but what the tokenizer's own post-processor inserts.

        Raises UserError for text that is not valid Unicode (it holds half of a surrogate pair).
        """
        try:
            # A tokenizers.Encoding holds far more than ids (offsets, masks): only the ids leave this function.
            if self._watched:
                return watched_ids(self._backend, text, add_special_tokens=add_special_tokens)
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except UserError:
            raise
        except BaseException as error:
            verify_unicode("text", text)
            raise _translated(error, "text cannot be tokenized") from None

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`. An id that names no token, however far out of range, adds nothing.

        Raises UserError when the tokenizer's decoder refuses the tokens.
        """
        known = [i for i in map(operator.index, ids) if 0 <= i < self.size]
        if skip_special_tokens:
            known = [i for i in known if i not in self._skipped]
        return self._decoded(known, skip_special_tokens=False)

    def _decoded(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        try:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise _translated(error, "token ids cannot be decoded") from None

    @cached_property
    def _skipped(self) -> frozenset[int]:
        """The special tokens, but for TAGS."""
        # Asked of the library's decode, for it goes by its own list of special contents, which outlives the flag
        # that an added token shows. Twice the id: some decoders drop the first space, and a token may be just that.
        pairs = {
            token_id: [token_id] * 2
            for token_id, token in self._backend.get_added_tokens_decoder().items()
            if token.content not in TAGS and 0 <= token_id < self.size
        }
        return frozenset(
            token_id
            for token_id, pair in pairs.items()
            if self._decoded(pair, skip_special_tokens=True)
            == ""
            != self._decoded(pair, skip_special_tokens=False)
        )

    def token_id(self, text: str) -> int | None:
        """Return the id of the token whose whole content is `text`, or None."""
        try:
            return self._backend.token_to_id(text)
        except (TypeError, UnicodeError):
            return None  # half of a surrogate pair: no token holds one

    def visible_token(self, token_id: int, *, skip_special_tokens: bool = True) -> str | None:
        """Return the vocabulary's spelling of an id, or None for an id that `decode` passes over."""
        token = self._backend.id_to_token(token_id) if 0 <= token_id < self.size else None
        return None if skip_special_tokens and token_id in self._skipped else token


def special_token_text(config: Mapping[str, object], key: str, *, path: Path) -> str | None:
    """Return the text of a special token of tokenizer_config.json: a string, `{"content": string}` or null.

    Raises UserError, naming the file and the key, for anything else.
    """
    value = config.get(key)
    if isinstance(value, Mapping):
        value = value.get("content")
    if value is None or isinstance(value, str):
        return value
    raise UserError(
        f"{path}: {key} must be a string, an object with a string content, or null; found {value!r}"
    )


def has_tokenizer(folder: Path) -> bool:
    """A tokenizer can be read from this folder."""
    older = (folder / VOCAB_FILE).exists() and (folder / MERGES_FILE).exists()
    return older or (folder / TOKENIZER_FILE).exists()


def _built(folder: Path) -> tokenizers.Tokenizer:
    """Of vocab.json and merges.txt, as transformers' Qwen2Tokenizer."""
    files = [str(folder / name) for name in (VOCAB_FILE, MERGES_FILE)]
    try:
        vocab, merges = models.BPE.read_file(*files)
        backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    except BaseException as error:
        raise _translated(error, f"{' and '.join(files)}: not a vocabulary with its merges") from None
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_QWEN2_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    _add(backend, added_tokens(folder), folder)
    there = {token.content for token in backend.get_added_tokens_decoder().values()}
    _add(backend, [token for token in named_tokens(folder) if token.content not in there], folder)
    return backend


def _add(backend: tokenizers.Tokenizer, tokens: list[AddedToken], folder: Path) -> None:
    """Add tokens as transformers does: the ids that the file beside tokenizer.json says are no more than an order."""
    there = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    try:
        backend.add_tokens([token for token in tokens if repr(token) not in there])
    except BaseException as error:
        raise _translated(error, f"{folder}: its added tokens cannot be added") from None


def _translated(error: BaseException, context: str) -> BaseException:
    """Return a UserError for what the tokenizers library raised.

    The library raises bare Exception, and BaseException where its Rust side panics; a Ctrl-C passes unchanged.
    """
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        return error
    return UserError(f"{context} ({' '.join(str(error).split())})")


def verify_unicode(name: str, text: str) -> None:
    """Raises UserError for text that holds half of a surrogate pair, as JSON's escapes may."""
    if text.isascii():
        return
    lone = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
    if lone is not None:
        found = f"lone surrogate U+{ord(text[lone]):04X} at character {lone}"
        raise UserError(f"{name} is not valid Unicode: {found}") from None
