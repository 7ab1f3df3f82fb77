"""Conversations saved and loaded: the same tokens after it, and no file that harms one."""

# ruff: noqa: F811 - a test's parameter has the name of the fixture that is imported

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy

import qwen_onnx
from qwen_onnx import UserError, export, load
from qwen_onnx.contract.manifest import is_weights
from qwen_onnx.runners import session_file
from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.model.buffers import HOST_TYPES, CacheMemory
from qwen_onnx.runners.model.kv_cache import GrowingCache, KVCache
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.options import SessionOptions
from support.caches import attention_spec
from support.chats import endless, tiny
from support.cuda.fixtures import stand_ins  # noqa: F401
from support.cuda.graphs_on_cpu import serve_cuda_graphs_on_cpu
from support.cuda.runs import Told, told  # noqa: F401

MESSAGES = [
    {"role": "user", "content": "naïve\n“?”"},
    {"role": "assistant", "content": "", "calls": [1, None]},
]
IDS = np.random.default_rng(8).integers(0, 300, 400).tolist()


def opened(folder: Path, **options: int) -> Chat:
    return load(folder, provider="cpu", threads=1, **options)


def said(chat: Chat, ids: list[int], count: int = 12) -> list[object]:
    """Ids and the best logits after a prompt, and how much of it was in the cache."""
    tokens = list(chat.generate(ids, max_new_tokens=count, ignore_eos=True, top_logits=3))
    return [(token.token_id, token.top_logits, token.cached_tokens) for token in tokens]


@pytest.fixture(scope="module")
def chat() -> Chat:
    return opened(endless())


@pytest.fixture
def saved(chat: Chat, tmp_path: Path) -> Path:
    """A session of 24 tokens in a folder with nothing else."""
    said(chat, IDS[:20], 5)
    chat.save(tmp_path / "old", messages=MESSAGES)
    return tmp_path / "old"


def portable(tmp_path: Path, dtype: str) -> Path:
    return export("tiny", tmp_path / "portable", target="portable", dtype=dtype).folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# What comes back.


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "int8", "portable-f32", "portable-f16"])
def test_a_loaded_conversation_goes_on_as_if_uninterrupted(kind: str, tmp_path: Path) -> None:
    """Its logits are the same to the last bit."""
    folder = portable(tmp_path, kind.split("-")[1]) if "-" in kind else tiny(kind)
    first, second = opened(folder), opened(folder)
    begun = [token_id for token_id, *_ in said(first, IDS[:30])]
    list(
        first.generate([*IDS[:30], *begun[:3], 5], max_new_tokens=1)
    )  # slots beyond the live ones hold something
    first.save(tmp_path / "session", messages=MESSAGES)
    assert second.load(tmp_path / "session") == MESSAGES
    assert second.context_used == first.context_used == 34
    longer = [*IDS[:30], *begun[:3], 5, 6, 7]
    after = said(first, longer)
    assert said(second, longer) == after
    assert after[0][-1] == 34
    assert said(second, [*longer, 9]) == said(first, [*longer, 9])


def test_of_many_tokens_and_of_none(chat: Chat, tmp_path: Path) -> None:
    """A cache that outgrew its first buffers loads into a Chat whose own has not, and the other way."""
    said(chat, IDS[:300])
    chat.save(tmp_path / "many")
    second = opened(endless())
    second.save(tmp_path / "none")
    assert second.load(tmp_path / "many") == []
    assert said(second, [*IDS[:300], 4]) == said(chat, [*IDS[:300], 4])
    second.load(tmp_path / "none")
    assert second.context_used == 0
    assert said(second, IDS[:9])[0][-1] == 0


@pytest.mark.parametrize("dtype", HOST_TYPES)
@pytest.mark.parametrize("kind", [KVCache, GrowingCache])
@pytest.mark.parametrize("length", [0, 5, 300])
def test_bits_of_every_dtype_come_back(dtype: str, kind: type[KVCache], length: int) -> None:
    """bfloat16 too, which numpy has not; of tensors longer than what is live, the live part."""
    spec = attention_spec(3, dtype=dtype)
    memory = CacheMemory(spec, "cpu", {}, tight=True, starts_empty=kind is GrowingCache)
    caches = [kind(memory, batch_size=1, limit=512) for _ in range(2)]
    rng = np.random.default_rng(1)
    slots = [rng.normal(size=(2, length, 4)).astype(HOST_TYPES[dtype]) for _ in range(6)]
    ids = rng.integers(0, 99, length)
    caches[0].fill(ids, slots)
    caches[1].fill(caches[0].token_ids, caches[0].read())
    for cache in caches:
        assert [found.tobytes() for found in cache.read()] == [wanted.tobytes() for wanted in slots]
        assert cache.shared_prefix([*ids, 3]) == cache.length == length
    caches[0].truncate(length // 2)
    assert [found.shape for found in caches[0].read()] == [(2, length // 2, 4)] * 6


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_buffers_on_a_device_come_back(dtype: str, told: Told, tmp_path: Path) -> None:
    """And a step that was captured before goes on over the buffers that are there."""
    program = """
from qwen_onnx.runners.session_file import load_session, save_session
runner, path = opened(sys.argv[1]), Path(sys.argv[2])
cache, rng = runner.new_cache(), np.random.default_rng(1)
runner.prefill(cache, ids[:1, :300] % 300)
runner.decode(cache, ids[:1, :1] % 300)
given = [rng.integers(0, 99, (2, 301, 16)).astype(slots.dtype) for slots in cache.read()]
cache.fill(cache.token_ids, given)
save_session(path, cache, runner.manifest, [])
loaded, _ = load_session(path, runner)
same = all((a == b).all() for a, b in zip(given, loaded.read(), strict=True))
runner.decode(loaded, ids[:1, :1] % 300)
tell(same=same, length=loaded.length, device=loaded.buffers[0].device_name(), dtype=loaded.spec.dtype)
"""
    names = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
    found = told(program, endless(dtype), tmp_path / "session")
    assert vars(found) == {"same": True, "length": 302, "device": "cuda", "dtype": names[dtype]}


def test_what_the_file_is(saved: Path, chat: Chat) -> None:
    """Any safetensors reader opens it; names and shapes are the contract's."""
    manifest = chat.runner.manifest
    with safetensors.safe_open(saved, "np") as file:
        assert file.get_tensor("token_ids").tolist()[:20] == IDS[:20]
        assert len(file.keys()) == 1 + 2 * manifest.num_hidden_layers
        wanted = (manifest.num_key_value_heads, 24, manifest.head_dim)
        assert file.get_tensor("past_key_values.0.key").shape == wanted
        assert json.loads(file.metadata()["session"])["messages"] == MESSAGES
    assert saved.stat().st_size == 8 + int.from_bytes(saved.read_bytes()[:8], "little") + 24 * 8 + chat_bytes(
        chat
    )


def chat_bytes(chat: Chat) -> int:
    """Of the cache's live slots."""
    manifest = chat.runner.manifest
    return 2 * manifest.num_hidden_layers * manifest.num_key_value_heads * 24 * manifest.head_dim * 4


def format_1(
    chat: Chat, ids: list[int], states: list[np.ndarray], messages: list[dict[str, object]]
) -> bytes:
    """A file as earlier versions wrote it: of a cache in f32, [heads, tokens, head size] each state."""
    manifest, length = chat.runner.manifest, len(ids)
    files = {name: spec.sha256 for name, spec in manifest.files.items()}
    model = ["f32", [files["weights.safetensors"]], [files["config.json"], files["tokenizer.json"]]]
    told = {
        "model": hashlib.sha256(json.dumps(model).encode()).hexdigest(), "model_id": manifest.model_id,
        "dtype": "f32", "cache_dtype": "float32", "tokens": length, "messages": messages,
    }  # fmt: skip
    metadata = {
        "format": "qwen-onnx session",
        "version": "1",
        "sha256": "0" * 64,
        "session": json.dumps(told),
    }
    header: dict[str, object] = {
        "__metadata__": metadata,
        "token_ids": {"dtype": "I64", "shape": [length], "data_offsets": [0, 8 * length]},
    }
    names = [
        f"past_key_values.{layer}.{name}" for layer in range(len(states) // 2) for name in ("key", "value")
    ]
    end = 8 * length
    for name, state in zip(names, states, strict=True):
        begin, end = end, end + state.nbytes
        header[name] = {"dtype": "F32", "shape": [*state.shape], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    content = len(text).to_bytes(8, "little") + text
    content += b"".join(array.tobytes() for array in (np.array(ids, np.int64), *states))
    return content.replace(b"0" * 64, hashlib.sha256(content).hexdigest().encode(), 1)


def test_files_of_format_1_load(chat: Chat, tmp_path: Path) -> None:
    """Those of earlier versions have it; what is saved now is the same, byte for byte."""
    said(chat, IDS[:20], 1)
    path = tmp_path / "session"
    path.write_bytes(format_1(chat, IDS[:20], list(chat._cache.read()), MESSAGES))
    chat.save(tmp_path / "new", messages=MESSAGES)
    assert (tmp_path / "new").read_bytes() == path.read_bytes()
    second = opened(endless())
    assert second.load(path) == MESSAGES
    assert second.context_used == 20
    found = said(second, [*IDS[:20], 3])
    assert found[0][-1] == 20
    assert found == said(chat, [*IDS[:20], 3])


def test_another_export_of_the_same_weights_loads_it(tmp_path: Path) -> None:
    """And no other model, nor another dtype of this one."""
    first = opened(tiny())
    said(first, IDS[:20])
    first.save(tmp_path / "session")
    again = opened(export("tiny", tmp_path / "again").folder)
    again.load(tmp_path / "session")
    assert said(again, [*IDS[:20], 3]) == said(first, [*IDS[:20], 3])
    for other in (tiny("f16"), tiny("int8"), endless()):
        other_chat = opened(other)
        with pytest.raises(UserError, match=r"saved with 'tiny' in 'f32'; this export, .* has other weights"):
            other_chat.load(tmp_path / "session")


@pytest.mark.parametrize("file", ["tokenizer.json", "config.json", "model.safetensors"])
def test_a_model_that_differs_in_one_file_does_not(file: str, tmp_path: Path) -> None:
    """Ids of another tokenizer are other words, over the same weights."""
    first = opened(tiny())
    said(first, IDS[:20])
    first.save(tmp_path / "session")
    checkpoint = shutil.copytree(Path(qwen_onnx.__file__).parent / "tiny", tmp_path / "checkpoint")
    if file == "model.safetensors":
        tensors = safetensors.numpy.load_file(checkpoint / file)
        tensors["model.norm.weight"] = tensors["model.norm.weight"] * np.float32(1.5)
        safetensors.numpy.save_file(tensors, checkpoint / file, {"format": "pt"})
    else:
        content = json.loads((checkpoint / file).read_text(encoding="utf-8"))
        if file == "config.json":
            content["rope_theta"] *= 2
        else:
            content["normalizer"] = {"type": "Lowercase"}
        (checkpoint / file).write_text(json.dumps(content), encoding="utf-8")
    (checkpoint / "golden.json").unlink()
    other = opened(export(checkpoint, tmp_path / "other").folder)
    assert "has other weights" in refused(other, tmp_path / "session")


def test_a_cache_of_another_dtype_is_computed_anew(tmp_path: Path) -> None:
    """f16 computes in f32 on the CPU, in f16 on a GPU and in the portable graph, over the same weights."""
    first = opened(tiny("f16"))
    second = opened(serve_cuda_graphs_on_cpu(tiny("f16"), tmp_path / "cuda"))
    graphs = [graph for graph in second.runner.manifest.graphs if "cuda" in graph.providers]
    assert second.runner.graph in graphs
    assert (first.runner.compute_dtype, second.runner.compute_dtype) == ("float32", "float16")
    wanted = said(second, [*IDS[:20], 3])
    said(first, IDS[:20])
    first.save(tmp_path / "session", messages=MESSAGES)
    assert second.load(tmp_path / "session") == MESSAGES
    assert second.context_used == 0
    assert said(second, [*IDS[:20], 3]) == wanted
    third = opened(portable(tmp_path, "f16"))  # which has no cache of the other type
    assert {spec.dtype for spec in third.runner.manifest.caches.values()} != {"float32"}
    said(third, IDS[:20])
    assert third.load(tmp_path / "session") == MESSAGES
    assert third.context_used == 0
    said(third, IDS[:20])
    third.save(tmp_path / "session")
    assert first.load(tmp_path / "session") == []
    assert first.context_used == 0


def test_an_answer_in_the_making_ends(saved: Path, chat: Chat) -> None:
    """It does not go on over the loaded conversation."""
    tokens = chat.generate(IDS[:9], max_new_tokens=5, ignore_eos=True)
    next(tokens)
    chat.load(saved)
    with pytest.raises(UserError, match="another answer was begun"):
        next(tokens)
    assert chat.context_used == 24


# What is refused, and leaves the conversation as it was.


def refused(chat: Chat, path: Path) -> str:
    said(chat, IDS[30:40], 3)
    used = chat.context_used
    with pytest.raises(UserError) as caught:
        chat.load(path)
    assert chat.context_used == used
    assert said(chat, [*IDS[30:40], 1], 1)[0][-1] == 10
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_damaged_file_is_refused(saved: Path, chat: Chat) -> None:
    """Wherever a bit flipped, or the file was cut."""
    content = saved.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    bad = saved.with_name("bad")
    places = [
        *range(0, header, 37),
        *range(8, 120, 5),
        header,
        header + 191,
        *range(header, len(content), 4001),
    ]
    for place in [*places, len(content) - 1]:
        flipped = bytearray(content)
        flipped[place] ^= 1 << (place % 8)
        bad.write_bytes(flipped)
        refused(chat, bad)
    for size in (0, 7, 8, 100, header - 1, header, header + 192, len(content) - 1):
        bad.write_bytes(content[:size])
        refused(chat, bad)
    bad.write_bytes(content + b"\0")
    assert "damaged" in refused(chat, bad)
    bad.write_bytes(content)
    assert chat.load(bad) == MESSAGES


def test_a_foreign_file_is_refused(tmp_path: Path, chat: Chat) -> None:
    (tmp_path / "text").write_text("to whom it may concern, " * 9)
    (tmp_path / "deep").write_bytes((90000).to_bytes(8, "little") + b"[" * 90000)
    (tmp_path / "list").write_bytes((2).to_bytes(8, "little") + b"[]")
    for path in (tmp_path / "text", tmp_path / "deep", tmp_path / "list", endless() / "weights.safetensors"):
        assert "not a saved session" in refused(chat, path)
    assert "wanted a saved session" in refused(chat, tmp_path)
    assert "wanted a saved session" in refused(chat, Path(os.devnull))
    assert "No such file" in refused(chat, tmp_path / "none")


def test_a_conversation_beyond_the_context_or_of_a_later_format(
    saved: Path, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = opened(endless(), max_context=23)
    assert "24 tokens were saved, the context holds 23; raise max_context" in refused(short, saved)
    exact = opened(endless(), max_context=24)
    exact.load(saved)
    assert exact.context_used == 24
    monkeypatch.setattr(session_file, "VERSION", "2")
    assert "session of format '1', this version reads '2'" in refused(chat, saved)


def test_ids_beyond_the_vocabulary(tmp_path: Path, chat: Chat) -> None:
    cache = Runner(endless(), SessionOptions(provider="cpu", threads=1)).new_cache()
    cache.fill(np.array([5, 400]), [np.zeros((2, 2, chat.runner.manifest.head_dim), np.float32)] * 6)
    session_file.save_session(tmp_path / "forged", cache, chat.runner.manifest, [])
    assert "damaged" in refused(chat, tmp_path / "forged")


# Writing.


def test_only_a_session_is_written_over(saved: Path, chat: Chat) -> None:
    """No report, folder or device is lost to `/save`."""
    for content in (b"my report", b"", saved.read_bytes()[:300]):
        other = saved.with_name("report.txt")
        other.write_bytes(content)
        with pytest.raises(UserError, match="exists and is no saved session; choose another name"):
            chat.save(other)
        assert other.read_bytes() == content
    for path, line in (
        (saved.parent, "exists and is no"),
        (Path(os.devnull), "exists and is no"),
        (saved / "x", "cannot be saved"),
        (saved.parent / "none" / "x", "cannot be saved"),
        (saved.parent / "a\0b", "cannot be saved"),
    ):
        with pytest.raises(UserError, match=line):
            chat.save(path)
    link = saved.with_name("link")
    link.symlink_to(saved.name)
    chat.save(link, messages=[{"role": "user", "content": "Hi"}])
    assert link.is_symlink()
    assert chat.load(saved) == [{"role": "user", "content": "Hi"}]
    for messages in ([{"foo": 1}], [{"role": "user", "content": 5}], "text"):
        with pytest.raises(UserError, match="wanted"):
            chat.save(link, messages=messages)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="hold what JSON does not"):
        chat.save(saved, messages=[{"role": "user", "content": "x", "more": object()}])


def test_messages_that_no_template_takes_are_damage(
    saved: Path, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    for messages in ([{"foo": 1}], [{"role": 5}], [{"role": "user", "content": 5}]):
        with monkeypatch.context() as patch:
            patch.setattr(session_file, "verified_messages", lambda value: value)
            chat.save(saved, messages=messages)
        with pytest.raises(UserError, match="damaged"):
            chat.load(saved)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("nameless", [True, False])
def test_a_failed_save_leaves_what_was_there(
    error: BaseException, nameless: bool, saved: Path, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no litter beside it, with and without files that have no name."""
    content = saved.read_bytes()

    def fail(*_: object) -> None:
        raise error

    if not nameless:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    said(chat, IDS[50:60])
    for name in ("os.fsync", "pathlib.Path.replace", "qwen_onnx.runners.model.kv_cache.KVCache.read"):
        with monkeypatch.context() as broken:
            broken.setattr(name, fail)
            for path in (saved, saved.with_name("new")):
                wanted = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else UserError
                with pytest.raises(wanted, match=r"No space left|^$"):
                    chat.save(path)
                assert names(saved.parent) == ["old"]
    assert saved.read_bytes() == content
    chat.save(saved)
    assert saved.read_bytes() != content
    assert names(saved.parent) == ["old"]


def test_a_killed_save_leaves_what_was_there(saved: Path, chat: Chat) -> None:
    try:
        os.close(os.open(saved.parent, os.O_TMPFILE | os.O_RDWR))
    except (AttributeError, OSError):
        pytest.skip("no files without a name on this system or disk")
    content = saved.read_bytes()
    program = """
import os, signal, sys
import qwen_onnx
chat = qwen_onnx.load(sys.argv[1], provider="cpu", threads=1)
os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)
chat.save(sys.argv[2])
"""
    done = subprocess.run([sys.executable, "-c", program, str(endless()), str(saved)])
    assert done.returncode == -signal.SIGKILL
    assert names(saved.parent) == ["old"]
    assert saved.read_bytes() == content
    assert chat.load(saved) == MESSAGES


@pytest.mark.parametrize("rows", [(16, None), (None, 16), (8, 16)])
def test_a_session_of_weights_in_another_order_says_so(
    rows: tuple[int | None, int | None], chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same model, whose name and dtype are no help; what older versions saved has no such word."""
    there, here = rows
    own = dataclasses.replace(chat.runner.manifest, panel_rows=here)
    other = {
        name: dataclasses.replace(spec, sha256="0" * 64)
        for name, spec in own.files.items()
        if is_weights(name)
    }
    theirs = dataclasses.replace(own, panel_rows=there, files={**own.files, **other})
    session_file.save_session(tmp_path / "s", chat._cache, theirs, [])
    monkeypatch.setattr(chat.runner, "manifest", own)
    words = [f"panels of {each} rows" if each else "the checkpoint's order" for each in rows]
    said = refused(chat, tmp_path / "s")
    assert said.endswith(f"weights lie in {words[0]} there, in {words[1]} here (weights_order)")
    session_file.save_session(tmp_path / "t", chat._cache, dataclasses.replace(theirs, panel_rows=here), [])
    assert refused(chat, tmp_path / "t").endswith("has other weights, config or tokenizer")
