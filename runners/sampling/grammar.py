"""Answers that are held to a constraint: which ids can come next, by llguidance, on the host."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.errors import UserError, option
from qwen_onnx.runners.sampling.constraint import Constraint
from qwen_onnx.runners.sampling.schema_bounds import STACK
from qwen_onnx.runners.text.detokenizer import token_bytes
from qwen_onnx.runners.text.tokenizer import Tokenizer
from qwen_onnx.runners.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

Scores = NDArray[np.float32]
Returned = TypeVar("Returned")

_STACK_SIZE = threading.Lock()
"""Held while the size of new threads' stacks, which is the whole process's, is another."""
_LONGEST_TOKEN = 255
"""Bytes; llguidance has an end to the depth of its trie. Published vocabularies end at 128."""


class Matcher:
    """One answer, as it comes: the ids that its text can go on with, or end at."""

    def __init__(self, matcher: LLMatcher, vocabulary: _Tokens, name: str, *, hold_end: bool) -> None:
        """`Grammar.matcher` makes one."""
        self._matcher, self._vocabulary, self._name = matcher, vocabulary, name
        self._hold_end = hold_end

    def masked(self, scores: Scores, *, hold_end: bool = False) -> Scores:
        """Scores, f32 [size], with -inf for every id that cannot come next.

        Args:
            hold_end: no end token either, while anything else can come.

        Raises:
            UserError: no text fits, or the constraint takes more than llguidance's limits.
        """
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        _verify(self._matcher, self._vocabulary, f"{option(self._name)} cannot be followed")
        allowed = np.unpackbits(mask, count=scores.size, bitorder="little").view(np.bool_)
        ends = self._vocabulary.ends
        may_end = bool(allowed[ends[0]])
        allowed[ends] = False
        if may_end and not ((hold_end or self._hold_end) and allowed.any()):
            allowed[ends] = True
        return np.where(allowed, scores, np.float32(-np.inf))

    def take(self, token_id: int) -> None:
        """Go on after an id that was not masked.

        Raises:
            UserError: as `masked`.
        """
        if token_id not in self._vocabulary.ends:
            self._matcher.consume_token(token_id)
            _verify(self._matcher, self._vocabulary, f"{option(self._name)} cannot be followed")


class Grammar:
    """A constraint, compiled for a vocabulary."""

    def __init__(self, start: LLMatcher, vocabulary: _Tokens, constraint: Constraint) -> None:
        """`Grammars.compile` makes one."""
        self._start, self._vocabulary, self.constraint = start, vocabulary, constraint

    def matcher(self, *, hold_end: bool = False) -> Matcher:
        """For one answer; `hold_end` as in `Matcher.masked`, at every token."""
        return Matcher(self._start.deep_copy(), self._vocabulary, self.constraint.kind, hold_end=hold_end)

    def accepts(self, text: str) -> bool:
        """Whether a whole text is what the constraint asks for."""
        matcher, ids = self._start.deep_copy(), self._vocabulary(text)
        return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


class Grammars:
    """Compiles constraints for one model, and keeps the last one."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
        """Takes about a second for 150,000 tokens.

        Raises:
            UserError: the tokenizer is not byte-level BPE, or no end token is left that could end an answer.
        """
        import llguidance  # here, because few answers need it

        both = f"{option('json_schema')} and {option('regex')}"
        tokens = token_bytes(tokenizer, vocabulary.size)
        if tokens is None:
            raise UserError(f"{both} need a byte-level BPE tokenizer, which this one is not")
        eos = np.array(sorted(vocabulary.eos_token_ids), np.int64)
        ends: list[int] = eos[~vocabulary.nameless(eos)].tolist()
        if not ends:
            raise UserError(f"{both} need an end token (eos_token_id), and this export has none")
        for end in ends:
            tokens[end] = b""
        self._vocabulary = _Tokens(tokenizer, tokens, ends)
        self._tokenizer = llguidance.LLTokenizer(self._vocabulary)  # type: ignore[arg-type]
        self._last: tuple[Constraint, Grammar] | None = None

    def compile(self, constraint: Constraint) -> Grammar:
        """The grammar of a constraint.

        Raises:
            UserError: it is none, asks for what llguidance does not know, or no text fits it.
        """
        if self._last is None or self._last[0] != constraint:
            self._last = constraint, self._compiled(constraint)
        return self._last[1]

    def _compiled(self, constraint: Constraint) -> Grammar:
        from llguidance import LLMatcher

        try:
            if constraint.kind == "regex":
                text = LLMatcher.grammar_from_regex(constraint.text)
            else:
                # White space without end would fit a schema too: one space after a comma or a colon, nowhere else.
                text = LLMatcher.grammar_from_json_schema(
                    constraint.text,
                    defaults={"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"},
                )
        except ValueError as error:
            raise UserError(f"{option(constraint.kind)} cannot be used: {error}") from None
        start = _on_deep_stack(lambda: LLMatcher(self._tokenizer, text, log_level=0))
        start.compute_bitmask()  # which finds out when no text fits
        _verify(start, self._vocabulary, f"{option(constraint.kind)} cannot be used")
        return Grammar(start, self._vocabulary, constraint)


class _Tokens:
    """What llguidance asks of a tokenizer: the tokens' bytes, and the ids of a text that is forced."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], ends: list[int]) -> None:
        self.tokens = [token if len(token) <= _LONGEST_TOKEN else b"" for token in tokens]
        self.ends, self.eos_token_id = ends, ends[0]
        self.interrupted = False
        self._tokenizer = tokenizer
        self._ids = {token: token_id for token_id, token in enumerate(tokens) if len(token) == 1}

    def __call__(self, text: str) -> list[int]:
        """Ids whose bytes are those of the text; it must not raise."""
        content = text.encode()
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            if b"".join([self.tokens[token_id] for token_id in ids]) == content:
                return ids
        except (UserError, IndexError):
            pass
        except KeyboardInterrupt:
            self.interrupted = True
        # The tokenizer normalizes this text, or takes some of it for a special token: byte by byte.
        return [self._ids[bytes([byte])] for byte in content if bytes([byte]) in self._ids]


def verify_regex(constraint: Constraint | None) -> None:
    """Raises UserError for a regular expression that is none, before there is a tokenizer to compile it for."""
    if constraint is None or constraint.kind != "regex":
        return
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_regex(constraint.text)
    if fault := _on_deep_stack(lambda: LLMatcher.validate_grammar(grammar)):
        raise UserError(f"{option('regex')} cannot be used: {_reason(fault)}")


def _on_deep_stack(compile: Callable[[], Returned]) -> Returned:
    """What the compiler makes, which calls itself, deeper than some threads' stacks.

    Ctrl-C ends the wait at once; the compiler then runs to its end, which schema_bounds.py sees to.
    """
    made = Future[Returned]()

    def run() -> None:
        try:
            made.set_result(compile())
        except BaseException as error:  # the waiting thread's
            made.set_exception(error)

    with _STACK_SIZE:
        usual = threading.stack_size(STACK)
        try:
            threading.Thread(target=run).start()
        finally:
            threading.stack_size(usual)
    return made.result()


def _verify(matcher: LLMatcher, vocabulary: _Tokens, failed: str) -> None:
    """Raises UserError where the matcher has failed, and KeyboardInterrupt where the user was the reason."""
    if vocabulary.interrupted:
        vocabulary.interrupted = False
        raise KeyboardInterrupt
    if matcher.is_error():
        raise UserError(f"{failed}: {_reason(matcher.get_error())}")


def _reason(error: str) -> str:
    """What llguidance says, without the grammar and the state around it."""
    first, *more = error.splitlines() or [""]
    if first.startswith("oneOf constraints"):  # it names an option of its own
        return "a value may fit two alternatives of oneOf, which is not supported; anyOf takes the place of oneOf"
    if first.startswith("NoExtension"):
        return "no text fits it"
    if "left-recursive" in error:  # its advice is for who writes grammars
        return "too many alternatives at once, as optional properties in the hundreds are"
    marked = [line.removeprefix("error: ") for line in more if line.startswith("error: ")]
    return (marked or [first.rpartition("(in regex): ")[2]])[0]
