"""What is fuzzed: each target makes one case of a seed and hands it to the product, as a user's command would.

A target returns when what came out is right, and raises UserError when the product refused; anything else is a fault.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import json
import math
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from qwen_onnx.checkpoints.checkpoint import open_checkpoint
from qwen_onnx.checkpoints.config import parse_config
from qwen_onnx.checkpoints.safetensors_file import FLOAT_DTYPES, read_header
from qwen_onnx.cli.batch.input import parse_line, parse_object, read_lines
from qwen_onnx.contract.json_file import read_json
from qwen_onnx.contract.manifest import FileSpec, read_manifest, write_manifest
from qwen_onnx.errors import UserError
from qwen_onnx.exports.exporter import export_model
from qwen_onnx.exports.options import ExportOptions
from qwen_onnx.options import made
from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.options import SessionOptions
from qwen_onnx.runners.sampling.generation_config import read_generation_config
from qwen_onnx.runners.sampling.params import merged
from qwen_onnx.runners.sampling.request import Request
from qwen_onnx.runners.text.eos_ids import eos_ids
from qwen_onnx.runners.text.template.chat_template import ChatTemplate
from qwen_onnx.runners.text.tokenizer import Tokenizer
from support.chats import copy_export
from support.fuzz.command_lines import damaged_command
from support.fuzz.config_keys import config_keys
from support.fuzz.mutations import ODD, damaged_bytes, damaged_json
from support.fuzz.said import added_tokens, reasoning, tool_calls
from support.fuzz.shown import terminal_text
from support.fuzz.templates import damaged_template
from support.text_fixtures import NASTY

ON_CPU = SessionOptions(provider="cpu", threads=1)
CONVERSATION = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What's 2 < 3? 好 é🔥"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."},
    {"role": "user", "content": "Sure?"},
)
EXTRA = (
    "qwen2", "qwen3", "llama", "yarn", "linear", "default", "F32", "BF16", "U8", "full_attention", "cpu", "cuda",
    "model.safetensors", "../model.safetensors", "/dev/zero", "weights.safetensors", "<|im_end|>", 1e-6, 10_000.0,
    {"type": "yarn", "factor": 4.0}, {"rope_type": "linear", "factor": 1e9}, [0, 8], [0, 2**63], [2**62, 4],
)  # fmt: skip

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": -3, "maximum": 300},
        "b": {"enum": ["x", "yé漢", None]},
        "c": {"type": "array", "items": {"type": "number", "multipleOf": 0.5}, "minItems": 1, "maxItems": 3},
        "d": {"type": "string", "maxLength": 5, "pattern": "^[a-z]+$"},
        "e": {"anyOf": [{"$ref": "#/$defs/f"}, {"const": True}, {"type": "string", "format": "date"}]},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"f": {"type": "object", "properties": {"g": {"$ref": "#"}}}},
}
KEYWORDS = (
    "string", "number", "null", "#", "#/$defs/f", "#/properties/e", "http://x/y", "uuid", "uri", "(a{1000}){1000}",
    "[", {"not": {}}, {"oneOf": [{}, {}]}, {"allOf": [{"$ref": "#"}]}, {"multipleOf": 9_999_991}, {"minItems": 2**40},
    {"x-guidance": {"whitespace_flexible": True}}, {"patternProperties": {"^a": {}}}, {"type": ["null", "array"]},
)  # fmt: skip
PIECES = (
    "a", "b", "[ab]", "é", "漢", r"\d", r"\w", r"\p{L}", ".", "|", "*", "+", "?", "{3}", "{1000}", "{0,99}", "(", ")",
    "(?i)", "(?=", "(?P<x>", "[^", "]", "^", "$", r"\b", r"\1", "\\", "/", "\n", "\0", "\ud800", '"', "&&", "~",
)  # fmt: skip


GENERATION = {
    "eos_token_id": [361, 362], "bos_token_id": None, "do_sample": True, "temperature": 0.7, "top_k": 20,
    "top_p": 0.8, "repetition_penalty": 1.1, "stop_strings": ["END"], "max_new_tokens": 99, "min_new_tokens": 1,
    "num_beams": 1,
}  # fmt: skip
TEXTS = {
    "special_tokens_map.json": {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]},
    "added_tokens.json": {"<|im_end|>": 361},
    "chat_template.json": {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"},
}
"""Files that the base's checkpoint has not."""


class Base:
    """What the cases are made of: a checkpoint in two shards and its export; and a folder to write in."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint, self.export, self.scratch = (
            folder / "checkpoint",
            folder / "export",
            folder / "scratch",
        )

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_folder(self.checkpoint)

    @functools.cached_property
    def chat(self) -> Chat:
        return Chat(Runner(self.export, ON_CPU))

    @functools.cached_property
    def damaged_checkpoint(self) -> Path:
        """One of one's own; what a case changes in it, it puts back."""
        return copy_export(self.checkpoint, self.scratch / "damaged checkpoint")

    @functools.cached_property
    def damaged_export(self) -> Path:
        """The same of the export."""
        return copy_export(self.export, self.scratch / "damaged export")

    @functools.cached_property
    def shards(self) -> tuple[bytes, ...]:
        return tuple(path.read_bytes() for path in sorted(self.checkpoint.glob("*.safetensors")))


Target = Callable[[random.Random, Base], None]


def header(rng: random.Random, base: Base) -> None:
    """A .safetensors file."""
    content = base.shards[0]
    length = 8 + struct.unpack("<Q", content[:8])[0]
    if rng.random() < 0.6:
        text = damaged_json(rng, json.loads(content[8:length]), EXTRA)
        content = struct.pack("<Q", len(text)) + text + content[length:]
    else:
        cut = length if rng.random() < 0.7 else len(content)
        content = damaged_bytes(rng, content[:cut], base.shards) + content[cut:]
    path = base.scratch / "model.safetensors"
    path.write_bytes(content)
    for tensor in read_header(path).values():
        assert tensor.offset + tensor.nbytes <= len(content)
        if tensor.dtype in FLOAT_DTYPES and tensor.nbytes:
            assert tensor.numpy().nbytes == tensor.nbytes


def index(rng: random.Random, base: Base) -> None:
    """model.safetensors.index.json."""
    _open_damaged(rng, base, "model.safetensors.index.json")


def config(rng: random.Random, base: Base) -> None:
    """config.json, as far as it can be read without weights."""
    path = base.scratch / "config.json"
    path.write_bytes(_damaged(rng, (base.checkpoint / "config.json").read_bytes()))
    found = parse_config(read_json(path))
    assert found.context_length > 0
    assert found.num_attention_heads % found.num_key_value_heads == 0
    assert math.isfinite(found.rope_theta)


def config_of_weights(rng: random.Random, base: Base) -> None:
    """config.json beside weights that it may not fit."""
    _open_damaged(rng, base, "config.json")


def generation_config(rng: random.Random, base: Base) -> None:
    """generation_config.json."""
    folder = _folder(base, "generation")
    value = GENERATION | {"eos_token_id": rng.choice(([361, 362], 361, None))}
    (folder / "generation_config.json").write_bytes(damaged_json(rng, value, EXTRA))
    found = eos_ids(folder, base.tokenizer, None)
    assert all(type(token_id) is int and token_id >= 0 for token_id in found)
    defaults = read_generation_config(folder)
    assert all(line.isprintable() for line in defaults.ignored)
    request = made(Request, merged(defaults.given, {}))
    assert all(line.isprintable() for line in request.describe().split("\n"))


def tokenizer_json(rng: random.Random, base: Base) -> None:
    """tokenizer.json."""
    folder = _folder(base, "tokenizer")
    (folder / "tokenizer.json").write_bytes(_damaged(rng, (base.checkpoint / "tokenizer.json").read_bytes()))
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode(rng.choice(NASTY))
    assert all(token_id < tokenizer.size for token_id in ids)
    assert isinstance(tokenizer.decode([*ids, 0, tokenizer.size, 10**9]), str)
    assert tokenizer.holes.size <= tokenizer.size


def tokenizer_config(rng: random.Random, base: Base) -> None:
    """tokenizer_config.json, and the template in it."""
    folder = _folder(base, "template")
    held = json.loads((base.checkpoint / "tokenizer_config.json").read_text())
    if rng.random() < 0.3:
        held["chat_template"] = [{"name": "default", "template": held["chat_template"]}]
    (folder / "tokenizer_config.json").write_bytes(damaged_json(rng, held, EXTRA))
    template = ChatTemplate.from_folder(folder)
    eos_ids(folder, base.tokenizer, template)
    if template is not None:
        assert isinstance(template.render(CONVERSATION), str)


def template(rng: random.Random, base: Base) -> None:
    """A chat template from a stranger."""
    messages = [dict(message) for message in CONVERSATION]
    try:
        text = ChatTemplate(damaged_template(rng)).render(messages)
        assert len(text) <= 2**24
        assert "PWNED" not in text
    finally:
        assert messages == list(CONVERSATION), "the conversation was edited"


def manifest(rng: random.Random, base: Base) -> None:
    """export.json: all of it, or what is beside the long lists of the graphs' inputs."""
    path = base.damaged_export / "export.json"
    whole = path.read_bytes()
    value = json.loads(whole)
    damaged = damaged_json(rng, value, EXTRA) if rng.random() < 0.7 else damaged_bytes(rng, whole)
    if rng.random() < 0.5:
        long = {key: value.pop(key) for key in ("graphs", "packages")}
        short = damaged_json(rng, value, EXTRA).rstrip()
        damaged = short[:-1] + b"," + json.dumps(long).encode()[1:]
    _run_with(base, "export.json", damaged)


def graph(rng: random.Random, base: Base) -> None:
    """An .onnx file that the manifest does not know."""
    name = rng.choice(("prefill.onnx", "decode.grouped.onnx", "grow.onnx"))
    whole = (base.export / name).read_bytes()
    while (damaged := damaged_bytes(rng, whole, (whole,))) == whole:
        pass
    _run_with(base, name, damaged)
    raise AssertionError("a graph that was changed has run")


def forged_graph(rng: random.Random, base: Base) -> None:
    """An .onnx file that the manifest does know: what the runtime's parser and checks say of it."""
    name = rng.choice(("prefill.onnx", "decode.grouped.onnx", "grow.onnx"))
    whole = (base.export / name).read_bytes()
    damaged = damaged_bytes(rng, whole, (whole,))
    held = read_manifest(base.export)
    digest = hashlib.sha256(damaged).hexdigest()
    forged = dataclasses.replace(held, files=held.files | {name: FileSpec(len(damaged), digest)})
    try:
        write_manifest(base.damaged_export, forged)
        _run_with(base, name, damaged)
    finally:
        write_manifest(base.damaged_export, held)


def weights(rng: random.Random, base: Base) -> None:
    """weights.safetensors: cut, longer, exchanged, or with bits flipped anywhere."""
    whole = (base.export / "weights.safetensors").read_bytes()
    damaged = damaged_bytes(rng, whole, base.shards)
    _run_with(base, "weights.safetensors", damaged)
    assert len(damaged) == len(whole), "weights of another size have run"


def prompt_ids(rng: random.Random, base: Base) -> None:
    """Token ids that are none, in a prompt; texts that are none."""
    strange = (*ODD, -(2**70), np.int64(3), np.float32(1), 399, 400, 401, b"x", object())
    share, length = rng.choice((0, 0.05, 0.5)), rng.randrange(90)
    prompt: Any = [rng.choice(strange) if rng.random() < share else rng.randrange(400) for _ in range(length)]
    if rng.random() < 0.1:
        prompt = rng.choice(("", "x" * 3000, "\ud800", "<|im_end|>" * 99, *NASTY))
    new = rng.choice((0, 1, 2, -1, True, 1.5, None))
    tokens = list(base.chat.generate(prompt, max_new_tokens=new))
    assert all(0 <= token.token_id < 400 for token in tokens)
    assert new is None or len(tokens) <= new


def batch_lines(rng: random.Random, base: Base) -> None:
    """A line of a `--batch` file, and the file that it stands in."""
    value: dict[str, Any] = {
        "id": "a",
        "max_new_tokens": 1,
        "stop": ["x", "y"],
        "temperature": 0.5,
        "seed": 1,
    }
    value |= {"prompt": "Hi 好"} if rng.random() < 0.5 else {"messages": [{"role": "user", "content": "é🔥"}]}
    whole = json.dumps(value).encode()
    damaged = damaged_bytes(rng, whole, (whole,)) if rng.random() < 0.3 else damaged_json(rng, value, EXTRA)
    content = b"\n".join((whole, damaged, whole)) + (b"\r\n" if rng.random() < 0.5 else b"")
    *before, last = read_lines(io.BytesIO(content), "batch")
    assert before[0].content == whole
    assert last.end == len(content)
    plain, refusal = {"max_new_tokens": 1}, None
    for line in (*before, last):
        try:
            found = parse_object(line.content)
            raw = "prompt" in found and rng.random() < 0.5
            prompt, asked = parse_line(found, plain, raw=raw, system=None)
            ids = base.chat.verified_ids(prompt, asked)
        except UserError as error:
            assert line.content != whole, "the damage of one line was another's"
            refusal = error
        else:
            assert ids
            json.dumps(found.get("id"), allow_nan=False)
    if refusal is not None:
        raise refusal


def constraint(rng: random.Random, base: Base) -> None:
    """A JSON schema, or a regular expression."""
    if rng.random() < 0.6:
        schema = damaged_json(rng, SCHEMA, KEYWORDS).decode("utf-8", "replace")
        tokens = list(base.chat.generate([1, 2, 3], max_new_tokens=50, json_schema=schema))
        if tokens[-1].finish_reason == "eos":
            json.loads("".join(token.text for token in tokens))
    else:
        regex = "".join(rng.choices(PIECES, k=rng.randrange(9)))
        list(base.chat.generate([1, 2, 3], max_new_tokens=20, regex=regex))


def options(rng: random.Random, base: Base) -> None:
    """The command line."""
    damaged_command(rng, base.export, base.checkpoint, base.scratch)


def exported(rng: random.Random, base: Base) -> None:
    """The texts of a checkpoint: what is exported of it, runs."""
    name = rng.choice(
        ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", *TEXTS)
    )
    path, held = base.damaged_checkpoint / name, base.checkpoint / name
    whole = held.read_bytes() if held.exists() else json.dumps(TEXTS.get(name, GENERATION)).encode()
    out = base.scratch / "exported"
    shutil.rmtree(out, ignore_errors=True)
    try:
        path.write_bytes(_damaged(rng, whole))
        found = parse_config(read_json(base.damaged_checkpoint / "config.json"))
        asked = ExportOptions(
            dtype=rng.choice(("f32", "f16", "int8")), max_context=min(64, found.context_length)
        )
        export_model(str(base.damaged_checkpoint), out, asked)
        try:
            chat = Chat(Runner(out, ON_CPU))
            first = next(chat.generate([1], max_new_tokens=1))
        except UserError as error:
            raise AssertionError(f"exported, and no command runs it: {error}") from None
        assert 0 <= first.token_id < found.vocab_size
        assert chat.complete([1, 2], max_new_tokens=1, ignore_eos=True) is not None
    finally:
        path.unlink()
        if held.exists():
            path.write_bytes(held.read_bytes())


def faulty(rng: random.Random, base: Base, number: int) -> None:
    """What must be seen as faults; no target of a run."""
    match number:
        case 0:
            os.kill(os.getpid(), 11)
        case 1:
            while True:
                pass
        case 2:
            (base.scratch.parent / "outside").write_text("x")
        case 3:
            raise ValueError("x")
        case 4:
            error = UserError("which would be one line")
            error.args = ("two\nlines",)
            raise error
        case _:
            bytearray(1 << 45)


TARGETS: dict[str, tuple[Target, int]] = {
    "header": (header, 5000),
    "index": (index, 1500),
    "config": (config, 4000),
    "config_of_weights": (config_of_weights, 500),
    "generation_config": (generation_config, 1500),
    "tokenizer_json": (tokenizer_json, 2000),
    "tokenizer_config": (tokenizer_config, 1500),
    "template": (template, 3000),
    "manifest": (manifest, 1200),
    "graph": (graph, 400),
    "forged_graph": (forged_graph, 600),
    "weights": (weights, 600),
    "prompt_ids": (prompt_ids, 1000),
    "batch_lines": (batch_lines, 1000),
    "constraint": (constraint, 1000),
    "options": (options, 600),
    "exported": (exported, 500),
    "config_keys": (config_keys, 6000),
    "tool_calls": (tool_calls, 5000),
    "reasoning": (reasoning, 4000),
    "added_tokens": (added_tokens, 3000),
    "terminal_text": (terminal_text, 4000),
}
"""Each with its part of a run."""
NEVER_REFUSED = ("tool_calls", "reasoning", "added_tokens", "terminal_text")
"""Whatever a model says is right."""


def case(target: str, number: int, base: Base) -> None:
    """Run one case: the same each time."""
    rng = random.Random(f"{target} {number}")
    if target == "faulty":
        faulty(rng, base, number)
    else:
        TARGETS[target][0](rng, base)


def _folder(base: Base, name: str) -> Path:
    folder = base.scratch / name
    folder.mkdir(exist_ok=True)
    return folder


def _damaged(rng: random.Random, content: bytes) -> bytes:
    return (
        damaged_json(rng, json.loads(content), EXTRA) if rng.random() < 0.75 else damaged_bytes(rng, content)
    )


def _open_damaged(rng: random.Random, base: Base, name: str) -> None:
    folder, whole = base.damaged_checkpoint, (base.checkpoint / name).read_bytes()
    try:
        (folder / name).write_bytes(_damaged(rng, whole))
        opened = open_checkpoint(folder)
        assert all(tensor.file.parent == folder for tensor in opened.tensors.values())
    finally:
        (folder / name).write_bytes(whole)


def _run_with(base: Base, name: str, content: bytes) -> None:
    """Open an export with one other file, and compute with it."""
    folder = base.damaged_export
    try:
        (folder / name).write_bytes(content)
        tokens = list(Chat(Runner(folder, ON_CPU)).generate([1, 2, 3], max_new_tokens=2))
        assert all(token.token_id >= 0 for token in tokens)
    finally:
        (folder / name).write_bytes((base.export / name).read_bytes())
