"""What a model says: calls of functions, tags of reasoning, tokens that were added to its tokenizer."""

from __future__ import annotations

import json
import random
import re
import shutil
import unicodedata
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers import AddedToken

from qwen_onnx.runners.text.detokenizer import StreamDetokenizer
from qwen_onnx.runners.text.reasoning import ReasoningSplitter, closed, split
from qwen_onnx.runners.text.stream import TextStream
from qwen_onnx.runners.text.tokenizer import TAGS, Tokenizer
from qwen_onnx.runners.text.tool_calls import ToolCall, parse_tool_calls
from support.text_fixtures import NASTY, byte_level_tokenizer, tokenizer_json


class Scratch(Protocol):
    """A folder to write in."""

    scratch: Path


def _cut(rng: random.Random, text: str) -> list[str]:
    """The text in pieces, as a stream brings it."""
    ends = sorted(rng.randrange(len(text) + 1) for _ in range(rng.choice((0, 1, 3, len(text)))))
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


# Calls

_WORD = re.compile(r"W\d+")
"""What is said, so that it can be found again: no escape of JSON begins with W."""


_ID = re.compile(r'"id":\s*"[^"]*"')


class _Words:
    def __init__(self, rng: random.Random) -> None:
        self._rng, self.count = rng, 0

    def one(self) -> str:
        self.count += 1
        return f"W{self.count}"

    def value(self, depth: int = 2) -> Any:
        kind = self._rng.randrange(9 if depth else 6)
        match kind:
            case 0 | 1:
                return self._rng.choice(("", " ", "é漢", "<", "\n", "</tool_call>", '"', "\\")) + self.one()
            case 2:
                return self._rng.choice((None, True, False, 0, -1, 1.5, 10**20, "", " "))
            case 3 | 4 | 5:
                return self.one()
            case 6:
                return [self.value(depth - 1) for _ in range(self._rng.randrange(3))]
            case _:
                return self.arguments(depth - 1)

    def arguments(self, depth: int = 2) -> dict[str, Any]:
        return {self.one(): self.value(depth) for _ in range(self._rng.randrange(4))}


def tool_calls(rng: random.Random, base: object) -> None:
    """Whole calls are found, in any writing; of what is damaged, no word is lost and no call made up."""
    words = _Words(rng)
    parts, calls, prose = list[str](), list[ToolCall](), list[str]()
    for left in reversed(range(rng.randrange(1, 4))):
        said = rng.choice(("", "\n", f" {words.one()} ", f"<b>{words.one()}\n", f"{words.one()}</tool_call>"))
        found = [ToolCall(words.one(), words.arguments()) for _ in range(rng.choice((1, 1, 1, 2)))]
        calls += found
        prose.append(said)
        parts += said, _written(rng, found, last=not left)
    text = "".join(parts)
    rest, parsed = parse_tool_calls(text)
    assert (rest, parsed) == ("".join(prose).strip(), calls)
    for _ in range(rng.choice((1, 1, 2, 5))):
        text = _damaged(rng, text)
    _nothing_is_lost(text)
    begun = rng.random() < 0.5
    _nothing_is_lost(split(text if begun else f"<think>{words.one()}</think>{text}", begun=begun).answer)


def _written(rng: random.Random, calls: list[ToolCall], *, last: bool) -> str:
    """As models write them: one or more between two tags; the last without its end."""
    as_objects = [_object(rng, call) for call in calls]
    indent = rng.choice((None, None, 1))
    texts = [json.dumps(one, ensure_ascii=rng.random() < 0.5, indent=indent) for one in as_objects]
    if rng.random() < 0.2:  # line ends in strings as they are
        texts = [text if "\\\\" in text else text.replace("\\n", "\n") for text in texts]
    space = rng.choice(("", "\n", " ", "\r\n"))
    if len(texts) > 1 and rng.random() < 0.5:
        texts = [f"[{','.join(texts)}]"]
    brackets = len(texts[0]) - len(texts[0].rstrip("}"))
    if len(texts) == 1 and 0 < brackets <= 4 and "</tool_call>" not in texts[0] and rng.random() < 0.2:
        texts[0] = texts[0][: len(texts[0]) - rng.randrange(brackets + 1)]
    elif last and rng.random() < 0.1:
        return f"<tool_call>{space}{space.join(texts)}{space}"
    return f"<tool_call>{space}{space.join(texts)}{space}</tool_call>"


def _object(rng: random.Random, call: ToolCall) -> dict[str, Any]:
    arguments: Any = call.arguments
    kind = rng.random()
    if kind < 0.2:
        arguments = json.dumps(arguments)
    elif kind < 0.4 and not arguments:
        arguments = rng.choice((None, "", " "))
    fields = [("name", call.name), (rng.choice(("arguments", "parameters", "args")), arguments)]
    if not call.arguments and rng.random() < 0.2:
        fields.pop()
    rng.shuffle(fields)
    if rng.random() < 0.1:
        return {"type": "function", "id": "call_1", "function": dict(fields)}
    return dict(fields + ([("id", "call_1")] if rng.random() < 0.1 else []))


def _damaged(rng: random.Random, text: str) -> str:
    at, size = rng.randrange(len(text) + 1), rng.choice((1, 1, 1, 2, 8, 40))
    match rng.randrange(6):
        case 0:
            return text[:at] + text[at + size :]
        case 1:
            return text[:at]
        case 2:
            return text[:at] + text[at : at + size] * 2 + text[at + size :]
        case 3:
            other = rng.randrange(len(text) + 1)
            return text[:at] + text[other : other + size] + text[at:]
        case _:
            odd = ('"', "{", "}", "[", "]", ",", ":", "\\", "<tool_call>", "</tool_call>", "\n", "null", "NaN",
                   "1e999", "'", "\x00", "\u2028", '"name"', "<", "W7", '"args": {}', "//", "\\u")  # fmt: skip
            return text[:at] + rng.choice(odd) + text[at:]


def _nothing_is_lost(text: str) -> None:
    rest, calls = parse_tool_calls(text)
    assert calls or rest == text
    kept = rest + json.dumps(
        [[call.name, call.arguments] for call in calls], ensure_ascii=False, allow_nan=False
    )
    kept += " ".join(_ID.findall(text))  # which nobody needs
    lost = {*_WORD.findall(text)} - {*_WORD.findall(kept)}
    assert not lost, f"{lost} of {text!r}"
    assert all(call.name for call in calls)


# Reasoning

_PIECES = (
    "<think>", "</think>", "<think>", "</think>", "<thi", "nk>", "</", "<", "think", "\n", "\n\n", " ", "\t", "a",
    "END", "EN", "ND", "é", "🔥", "<tool_call>", "\u00a0", "<|im_end|>", "</think", "<think", "<THINK>", "so it is",
)  # fmt: skip


def reasoning(rng: random.Random, base: object) -> None:
    """Tags in any position, in tokens of their own or in pieces: one reading, whatever the pieces are."""
    backend = byte_level_tokenizer()
    for tag in rng.sample(TAGS, rng.randrange(5)):
        backend.add_tokens([AddedToken(tag, special=rng.random() < 0.5, normalized=rng.random() < 0.5)])
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode("".join(rng.choices(_PIECES, k=rng.randrange(12))))
    if rng.random() < 0.3:  # in the middle of a character, or of a tag
        ids = [token_id for token_id in ids if rng.random() < 0.9]
    text, begun = tokenizer.decode(ids), rng.random() < 0.4
    whole = split(text, begun=begun)
    before, answer, thought = _parts(text, begun)
    assert (whole.reasoning, whole.answer) == (thought, answer)
    splitter = ReasoningSplitter(begun=begun)
    said = [*map(splitter.push, _cut(rng, text)), splitter.flush()]
    assert "".join(part.reasoning for part in said) == thought
    assert "".join(part.answer for part in said) == answer
    assert split(closed(text, begun=begun), begun=begun) == whole
    stop = rng.choice(("END", "\n", "<", "think", " ", "</think>", "é"))
    stream = TextStream(tokenizer, [stop], begun=begun)
    streamed = ""
    for count, token_id in enumerate(ids, start=1):
        streamed += stream.push(token_id, last=count == len(ids))
        if stream.stopped:
            break
    wanted = before + answer.split(stop)[0]
    assert streamed == wanted, (text, stop)
    assert stream.stopped == (stop in answer)


def _parts(text: str, begun: bool) -> tuple[str, str, str]:
    """What comes before the answer, with its tags; the answer; the reasoning. By the words of the docs."""
    start = text if begun else text.lstrip()
    if not begun and not start.startswith("<think>"):
        return "", text, ""
    inner = start if begun else start.removeprefix("<think>")
    thought, tag, after = inner.partition("</think>")
    answer = after.lstrip("\n")
    return text[: len(text) - len(answer)] if tag else text, answer, thought.strip("\n")


# Tokenizers

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_CONTENTS = (
    "<think>", "</think>", "<tool_call>", "<a>", "Ünd", "U\u0308nd", "an", "<é>", "|x", " y ", "<|im_end|>", "  ",
    "\n", "漢", "🔥", "é", "e\u0301", "café", "ab", "abc", "bc", "<|", "|>", "\t", "a", "İ", "ﬁ", "\u200d", "1",
)  # fmt: skip
_SPELLED = (*_CONTENTS, "U", "nd", "\u0301", " ", "x", "_", ".", "<", ">", "The dog", "\n\n")


def added_tokens(rng: random.Random, base: Scratch) -> None:
    """Of every flag, in tokenizer.json or beside it: ids and texts are those of `tokenizers`, streamed or not."""
    # Of two that the normalizer makes one, `tokenizers` takes now the one, now the other.
    contents = {unicodedata.normalize("NFC", one): one for one in rng.sample(_CONTENTS, rng.randrange(1, 7))}
    tokens = [
        AddedToken(content, **{flag: rng.random() < 0.4 for flag in FLAGS}) for content in contents.values()
    ]
    oracle = byte_level_tokenizer()
    before = oracle.get_vocab_size()
    for token in tokens:
        (oracle.add_special_tokens if token.special else oracle.add_tokens)([token])
    inside = rng.randrange(3)  # in tokenizer.json, beside it, or both
    if inside != 1:
        oracle = tokenizers.Tokenizer.from_str(oracle.to_str())
    folder = base.scratch / "added"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "tokenizer.json").write_text(
        tokenizer_json() if inside == 1 else oracle.to_str(), encoding="utf-8"
    )
    if inside:
        decoder = {
            str(oracle.token_to_id(token.content)): {
                "content": token.content, **{flag: getattr(token, flag) for flag in FLAGS},
            }
            for token in tokens
        }  # fmt: skip
        config = {"added_tokens_decoder": decoder}
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = Tokenizer.from_folder(folder)
    for text in ("".join(rng.choices(_SPELLED, k=rng.randrange(9))), rng.choice(NASTY)):
        ids = tokenizer.encode(text)
        assert ids == oracle.encode(text).ids, (text, decoder if inside else None)
        _decoded_as(oracle, tokenizer, ids)
    top = oracle.get_vocab_size() + 2
    ids = [rng.choice((rng.randrange(top), rng.randrange(before, top))) for _ in range(rng.randrange(12))]
    _decoded_as(oracle, tokenizer, ids)


def _decoded_as(oracle: tokenizers.Tokenizer, tokenizer: Tokenizer, ids: list[int]) -> None:
    decoder = oracle.get_added_tokens_decoder()
    special_tags = {n for n, token in decoder.items() if token.special and token.content in TAGS}
    for skip in (False, True):
        text = tokenizer.decode(ids, skip_special_tokens=skip)
        if not (skip and special_tags & {*ids}):  # which stay here
            assert text == oracle.decode(ids, skip_special_tokens=skip)
        elif special_tags.issuperset(ids):
            assert text == oracle.decode(ids, skip_special_tokens=False)
        stream = StreamDetokenizer(tokenizer, skip_special_tokens=skip)
        for _ in range(2):  # after a flush it is as new
            assert "".join(map(stream.push, ids)) + stream.flush() == text
    assert tokenizer.size == max(oracle.get_vocab(with_added_tokens=True).values()) + 1
