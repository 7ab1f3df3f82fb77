"""`run --batch`: lines in, lines out, in order; bad ones named, and a run that was cut off gone on with."""

from __future__ import annotations

import io
import json
import random
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from qwen_onnx import UserError, export, load
from qwen_onnx.cli.batch import input as batch_lines
from qwen_onnx.cli.batch.input import parse_line, parse_object, read_lines
from qwen_onnx.cli.batch.run import BatchOptions, complete_file
from qwen_onnx.cli.completion import complete
from qwen_onnx.contract.cache_spec import StateSpec
from qwen_onnx.errors import OutOfMemoryError
from qwen_onnx.options import Given
from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.model.buffers import CacheMemory
from qwen_onnx.runners.sampling.params import GREEDY
from support.chats import endless, endless_checkpoint, poisoned, tiny
from support.command import Ran, child, command
from support.patience import PATIENCE
from support.refusals import refused

PARIS, SEVEN, HELLO = "What is the capital of France?", "What is 3 plus 4?", "Hello!"
FOUR_TOKENS = {"max_new_tokens": 4}


def write(path: Path, *lines: object) -> Path:
    """Objects as JSON, strings as they are."""
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def batch(model: Path, file: object, *arguments: object, stdin: str | bytes = b"") -> Ran:
    return command("run", model, "--batch", file, "--provider", "cpu", *arguments, stdin=stdin)


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


@pytest.fixture(scope="module")
def chat() -> Chat:
    return load(endless(), provider="cpu", threads=1)


def run_batch(chat: Chat, file: object, out: Path | None, asked: Given = FOUR_TOKENS, size: int = 3) -> int:
    return complete_file(chat, BatchOptions(str(file), size, out), asked, raw=False, system=None, stats=False)


def test_each_line_is_answered_as_run_json_would(tmp_path: Path) -> None:
    """In the order of the lines, each with its own options, its fields named as those of --json."""
    lines: list[dict[str, Any]] = [
        {"id": "a", "prompt": PARIS},
        {"messages": [{"role": "user", "content": PARIS}], "stop": [" France"]},
        {"id": 7, "prompt": SEVEN, "max_new_tokens": 2, "min_new_tokens": 1},
        {"prompt": HELLO, "temperature": 2, "seed": 3, "top_k": None, "top_p": 0.9},
        {"id": None, "prompt": "Spell the word stone.", "repetition_penalty": 1.2},
    ]
    file = write(tmp_path / "in", *lines)
    ran = batch(tiny(), file, "--batch-size", 3, "--logprobs", 1, "--stats")
    assert ran.code == 0
    assert ran.err.startswith("5 lines, 0 failed, ")
    found = records(ran.out)
    assert [record["line"] for record in found] == [1, 2, 3, 4, 5]
    assert [record.get("id", "none") for record in found] == ["a", "none", 7, "none", None]
    wanted = [
        {},
        {"stop": [" France"]},
        {"max_new_tokens": 2},
        {"temperature": 2, "seed": 3, "top_p": 0.9},
        {"repetition_penalty": 1.2},
    ]
    trained = load(tiny(), provider="cpu", threads=1)
    for line, record, asked in zip(lines, found, wanted, strict=True):
        messages = [{"role": "user", "content": line.get("prompt", PARIS)}]
        alone = complete(trained, messages, asked).as_json(trained)
        for name in ("text", "token_ids", "finish_reason"):
            assert record[name] == alone[name]
        assert record["prompt_tokens"] == alone["prompt_tokens"]
        assert [one["token_id"] for one in record["logprobs"]] == record["token_ids"]
        assert record.keys() - {"line", "key", "id"} - {"logprobs"} <= alone.keys()
        assert re.fullmatch("[0-9a-f]{16}", record["key"])
    one_by_one = records(batch(tiny(), file, "--batch-size", 1).out)
    assert [record["token_ids"] for record in one_by_one] == [record["token_ids"] for record in found]


def test_bad_lines_are_named_and_the_others_answered(tmp_path: Path) -> None:
    """Each line has a result: its answer, or one line that says what is wrong with it."""
    bad = {
        "not JSON": "not valid JSON",
        "[1]": "not a JSON object",
        '{"prompt": "x"': "not valid JSON",
        '{"prompt": "x", "top_p": NaN}': "NaN is no JSON number",
        '{"prompt": "x", "promt": 1}': "'promt' is not known; the keys are messages, prompt, id,",
        "{}": "one of `prompt` and `messages`",
        '{"prompt": "x", "messages": []}': "one of `prompt` and `messages`",
        '{"prompt": 5}': "prompt 5: a string",
        '{"prompt": [1, 2]}': "prompt [1, 2]: a string",
        '{"messages": []}': "messages []: a list",
        '{"messages": "x"}': "messages 'x': a list",
        '{"messages": ["x"]}': "message 1: an object",
        '{"messages": [{"role": 1, "content": "x"}]}': "message 1: role 1: a string",
        '{"messages": [{"role": "user", "content": "x"}, {"role": "user"}]}': "message 2: content None",
        '{"prompt": "x", "temperature": "hot"}': "temperature 'hot'",
        '{"prompt": "x", "max_new_tokens": -1}': "max_new_tokens -1",
        '{"prompt": "x", "stop": [""]}': "stop ['']: a string or a list of them, none empty, wanted",
        '{"prompt": "x", "id": [1]}': "id [1]: a string or a whole number",
        '{"prompt": "x", "id": true}': "id True: a string or a whole number",
        '{"prompt": "x", "prompt": "y"}': "a key is there twice",
        '{"prompt": "x", "id": "odd", "promt": 1}': "'promt' is not known",
        '{"prompt": "\\ud800"}': "",
        json.dumps({"prompt": "long " * 400, "id": "it"}): "the context holds 300",
    }
    file = write(tmp_path / "in", {"prompt": HELLO}, *bad, {"prompt": SEVEN})
    ran = batch(tiny(), file, "--max-context", 300)
    assert ran.code == 1
    first, *failed, last = records(ran.out)
    assert (first["text"], last["text"]) == ("Hello! How can I help you?", "3 plus 4 is 7.")
    *said, final = ran.err.splitlines()
    assert final == f"error: {len(bad)} of {len(bad) + 2} lines could not be answered; the others are done"
    for number, (record, words, mentions) in enumerate(zip(failed, said, bad.values(), strict=True), start=2):
        assert record.keys() - {"id"} == {"line", "key", "error"}
        assert record["line"] == number
        assert mentions in record["error"]
        assert words == f"line {number}: {record['error']}"
    assert failed[-1]["id"] == "it"
    assert [record.get("id") for record in failed if "promt" in record["error"]] == [None, "odd"]


def test_windows_files_and_blank_lines(tmp_path: Path) -> None:
    """A byte order mark and CRLF are no part of the JSON; lines are numbered as editors number them."""
    path = tmp_path / "in"
    path.write_bytes(b'\xef\xbb\xbf\r\n{"prompt": "Hello!"}\r\n\r\n  \n{"prompt": "What is 3 plus 4?"}')
    ran = batch(tiny(), "-", stdin=path.read_bytes())
    assert [(record["line"], record["text"][:5]) for record in records(ran.out)] == [
        (2, "Hello"),
        (5, "3 plu"),
    ]
    assert ran == batch(tiny(), path)
    assert batch(tiny(), "-", stdin=b"\xef\xbb\xbf\n\n") == Ran(0, "", "")


def test_raw_and_system(tmp_path: Path) -> None:
    file = write(tmp_path / "in", {"prompt": "The capital"}, {"messages": [{"role": "user", "content": "x"}]})
    raw, refused_line = records(batch(tiny(), file, "--raw", "--max-new-tokens", 3).out)
    assert "leave out --raw" in refused_line["error"]
    alone = records(
        command("run", tiny(), "-p", "The capital", "--raw", "--json", "--max-new-tokens", 3).out
    )[0]
    assert (raw["token_ids"], raw["prompt_tokens"]) == (alone["token_ids"], alone["prompt_tokens"])
    with_system = records(batch(tiny(), file, "--system", "Be brief.", "--max-new-tokens", 3).out)
    without = records(batch(tiny(), file, "--max-new-tokens", 3).out)
    assert with_system[0]["prompt_tokens"] != without[0]["prompt_tokens"]
    assert with_system[1]["prompt_tokens"] == without[1]["prompt_tokens"]


def test_a_line_that_draws_draws_beside_greedy_ones() -> None:
    """A temperature of the line wins over --greedy, whose penalties hold all the same."""
    base = {**GREEDY, "stop": ["x"]}
    _, drawn = parse_line({"prompt": "x", "temperature": 0.5, "stop": []}, base, raw=True, system=None)
    assert (drawn.get("do_sample"), drawn["repetition_penalty"], drawn["stop"]) == (None, 1.0, [])
    _, greedy = parse_line({"prompt": "x", "seed": 4}, base, raw=True, system=None)
    assert greedy["do_sample"] is False


def test_five_hundred_lines(chat: Chat, tmp_path: Path) -> None:
    """Each is answered once, in the order of the lines, whatever the lengths of the prompts."""
    rng = random.Random(0)
    lines = [
        {"prompt": "x" * rng.randrange(1, 60), "id": number, "max_new_tokens": rng.randrange(4)}
        for number in range(500)
    ]
    file, out = write(tmp_path / "in", *lines), tmp_path / "out"
    assert run_batch(chat, file, out, size=8) == 0
    found = records(out.read_text())
    assert [record["id"] for record in found] == list(range(500))
    for line, record in zip(lines, found, strict=True):
        assert len(record["token_ids"]) == line["max_new_tokens"] or record["finish_reason"] == "eos"
    for number in (0, 123, 499):
        prompt = [{"role": "user", "content": lines[number]["prompt"]}]
        tokens = chat.generate(prompt, max_new_tokens=lines[number]["max_new_tokens"], reuse_cache=False)
        assert found[number]["token_ids"] == [token.token_id for token in tokens]


class Counting(io.BytesIO):
    """Counts the lines that were read."""

    taken = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        self.taken += 1
        return super().readline(size)


@pytest.mark.parametrize(("size", "ahead"), [(1, 1), (4, 16)])
def test_lines_are_read_as_they_are_needed(
    size: int, ahead: int, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first result comes after one window of lines, not after the last line of the file."""
    stream = Counting(b'{"prompt": "x", "max_new_tokens": 1}\n' * 99)
    counts: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(stream))
        patch.setattr("builtins.print", lambda *_, **__: counts.append(stream.taken))
        assert run_batch(chat, "-", None, size=size) == 0
    assert (len(counts), counts[0]) == (99, ahead)


def test_a_line_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its beginning is kept. The next line begins after its end."""
    monkeypatch.setattr(batch_lines, "MOST_BYTES", 50)
    content = b'{"prompt": "%s"}\n{"prompt": "b"}\n' % (b"a" * 500)
    long, short = read_lines(io.BytesIO(content), "x")
    assert (long.number, len(long.content), short.number, short.end) == (1, 51, 2, len(content))
    refused(parse_object, long.content, mentions=("longer than",))
    assert parse_object(short.content) == {"prompt": "b"}


# A run that goes on where another ended.


@pytest.fixture(scope="module")
def whole(chat: Chat, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """An input, and the results of it."""
    folder = tmp_path_factory.mktemp("batch")
    texts = ("a", "é and more", "b" * 30, "c", "d e f", "g")
    file = write(folder / "in", *({"prompt": text, "id": text} for text in texts), "{}", {"prompt": "last"})
    with pytest.raises(UserError, match="1 of 8 lines"):
        run_batch(chat, file, folder / "out")
    return file, (folder / "out").read_bytes()


def test_a_file_cut_off_anywhere_is_gone_on_with(
    chat: Chat, whole: tuple[Path, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is then what one whole run writes, and errors of lines that were done are not said again."""
    file, content = whole
    ends = [0, *(place + 1 for place, byte in enumerate(content) if byte == 10)]
    cuts = {*ends, *(end + more for end in ends for more in (-2, -1, 1, 30)), *range(0, len(content), 97)}
    out = tmp_path / "out"
    for cut in sorted(cut for cut in cuts if 0 <= cut <= len(content)):
        out.write_bytes(content[:cut])
        capsys.readouterr()
        with pytest.raises(UserError, match="1 of 8 lines could not be answered"):
            run_batch(chat, file, out)
        assert out.read_bytes() == content
        assert ("line 7: " in capsys.readouterr().err) == (
            cut < ends[7]
        )  # said when it is done, and not again


def test_finished_lines_are_not_computed_again(
    chat: Chat, whole: tuple[Path, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, content = whole
    out = tmp_path / "out"
    out.write_bytes(content)
    monkeypatch.setattr(Chat, "generate_each", lambda *_: pytest.fail("computed"))
    with pytest.raises(UserError, match="1 of 8"):
        run_batch(chat, file, out)
    assert out.read_bytes() == content


def test_results_of_something_else_are_left_alone(
    chat: Chat, whole: tuple[Path, bytes], tmp_path: Path
) -> None:
    """A file that holds anything but results of these lines is refused, and no byte of it is changed."""
    file, content = whole
    out = tmp_path / "out"
    lines = file.read_text(encoding="utf-8").splitlines()
    changed = write(tmp_path / "changed", *lines[:2], '{"prompt": "z"}', *lines[3:])
    shorter = write(tmp_path / "shorter", *lines[:5])
    part = content[: len(content) - 40]
    broken = content.replace(b"token_ids", b"token\nids", 1)
    other = load(tiny(), provider="cpu", threads=1)
    cases: list[tuple[Chat, Path, bytes, dict[str, Any], str]] = [
        (chat, changed, part, FOUR_TOKENS, "its line 3 is not the result of line 3 there"),
        (chat, shorter, part, FOUR_TOKENS, "it goes on after the 5 lines"),
        (chat, file, part, {"max_new_tokens": 5}, "its line 1 is not the result of line 1"),
        (chat, file, part, {"max_new_tokens": 4, "stop": ["x"]}, "its line 1"),
        (other, file, part, FOUR_TOKENS, "its line 1"),
        (chat, file, b"my notes", FOUR_TOKENS, "no result"),
        (chat, file, b'{"line": 2, "key', FOUR_TOKENS, "no result"),
        (chat, file, b"\n" + content, FOUR_TOKENS, "its line 1"),
        (chat, file, broken, FOUR_TOKENS, "its line 1"),
    ]
    for model, lines_file, held, asked, mentions in cases:
        out.write_bytes(held)
        refused(run_batch, model, lines_file, out, asked, mentions=(str(out), mentions, "name another file"))
        assert out.read_bytes() == held
    refused(run_batch, chat, file, file, mentions=("its line 1",))


def test_results_of_a_model_that_differs_in_its_weights_only_are_left_alone(
    chat: Chat, whole: tuple[Path, bytes], tmp_path: Path
) -> None:
    checkpoint = shutil.copytree(endless_checkpoint(), tmp_path / "checkpoint")
    tensors = safetensors.numpy.load_file(checkpoint / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * np.float32(1.5)
    safetensors.numpy.save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    other = load(export(checkpoint, tmp_path / "other").folder, provider="cpu", threads=1)
    assert other.runner.describe() == chat.runner.describe()
    file, content = whole
    out = tmp_path / "out"
    out.write_bytes(content[: len(content) - 40])
    refused(run_batch, other, file, out, mentions=("its line 1 is not the result of line 1",))


def test_results_of_an_earlier_version_are_left_alone(tmp_path: Path) -> None:
    """As version 0.4.0 wrote them, of the same model, input and options."""
    file = write(tmp_path / "questions", '{"id":"a","prompt":"What is 3 plus 4?"}')
    old = (
        '{"line": 1, "key": "9cd3130a99d47cf9", "id": "a", "text": "3 plus 4 is 7.", '
        '"token_ids": [21, 498, 223, 22, 292, 223, 25, 16], "finish_reason": "length", "prompt_tokens": 27}\n'
    )
    out = tmp_path / "out"
    out.write_text(old, encoding="utf-8")
    chat = load(tiny(), provider="cpu", threads=1)
    mentions = (out, "another version", "name another file, or remove it")
    refused(run_batch, chat, file, out, {"max_new_tokens": 8}, mentions=mentions)
    assert out.read_text(encoding="utf-8") == old


@pytest.mark.skipif(sys.platform == "win32", reason="signals are another thing there")
def test_ctrl_c_keeps_what_is_done(tmp_path: Path) -> None:
    """Whole lines only, exit code 130, and a word on how to go on."""
    lines = [{"prompt": "x"}, {"prompt": "y", "max_new_tokens": 100_000}, {"prompt": "z"}]
    file, out = write(tmp_path / "in", *lines), tmp_path / "out"
    arguments = ("run", endless(), "--batch", file, "--out", out, "--batch-size", 1, "--ignore-eos")
    program = """
import sys
from qwen_onnx.cli.batch.output import Results
real = Results.write
def announcing(*arguments):
    real(*arguments)
    print("written", file=sys.stderr, flush=True)
Results.write = announcing
"""
    with child(*arguments, "--max-new-tokens", 3, "--provider", "cpu", program=program) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == b"written\n"
        process.send_signal(signal.SIGINT)
        said, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, said) == (130, b"")
    assert err.decode() == f"interrupted: 1 done, in {out}; the same command goes on from there\n"
    (record,) = records(out.read_text())
    assert (record["line"], len(record["token_ids"])) == (1, 3)


# What fails as a whole.


def test_a_row_that_fails_fails_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other rows of its batch are answered."""
    model = poisoned(tmp_path)
    given = load(model, provider="cpu", threads=1)
    bad = given.tokenizer.decode([77])
    assert 77 in given.prompt_ids([{"role": "user", "content": f"2{bad}2"}])
    file = write(tmp_path / "in", {"prompt": "1"}, {"prompt": f"2{bad}2"}, {"prompt": "3"})
    with pytest.raises(UserError, match="1 of 3 lines"):
        run_batch(given, file, None, {"max_new_tokens": 3, "logit_bias": {77: -100}})
    first, failed, last = records(capsys.readouterr().out)
    assert "not finite" in failed["error"]
    assert first["token_ids"]
    assert last["token_ids"]


def test_a_lack_of_memory_is_no_lines_fault(
    chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the run, and is written down for no line: the same command answers the rest later."""
    file, out = write(tmp_path / "in", *[{"prompt": str(number)} for number in range(7)]), tmp_path / "out"
    real, rows = CacheMemory._allocate, []

    def allocate(self: CacheMemory, state: StateSpec, batch_size: int, slots: int) -> Any:
        rows.append(batch_size)
        if len(set(rows)) > 1:
            raise OutOfMemoryError("a KV cache does not fit")
        return real(self, state, batch_size, slots)

    with monkeypatch.context() as patch:
        patch.setattr(CacheMemory, "_allocate", allocate)
        with pytest.raises(OutOfMemoryError):
            run_batch(chat, file, out)
    done = records(out.read_text())
    assert 0 < len(done) < 7
    assert all("error" not in record for record in done)
    assert run_batch(chat, file, out) == 0
    assert [record["line"] for record in records(out.read_text())] == list(range(1, 8))


@pytest.mark.skipif(sys.platform == "win32", reason="no such locks there")
def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    import fcntl

    file, out = write(tmp_path / "in", {"prompt": HELLO}), tmp_path / "out"
    with out.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "another run is writing it" in batch(tiny(), file, "--out", out).error
    assert batch(tiny(), file, "--out", out).code == 0


def test_results_behind_links(tmp_path: Path) -> None:
    """A link to nothing makes the file it names; one to itself is refused in one line."""
    file, link = write(tmp_path / "in", {"prompt": HELLO}), tmp_path / "link"
    link.symlink_to("there")
    assert batch(tiny(), file, "--out", link).code == 0
    assert records((tmp_path / "there").read_text())[0]["text"] == "Hello! How can I help you?"
    (tmp_path / "circle").symlink_to("circle")
    assert "circle" in batch(tiny(), file, "--out", tmp_path / "circle").error


def test_nothing_begins_that_cannot_be_done(tmp_path: Path) -> None:
    file = write(tmp_path / "in", {"prompt": "x"})
    for arguments, mentions in (
        ((file, "-p", "x"), "leave out -p and --prompt-ids"),
        ((file, "--prompt-ids", "1"), "leave out -p and --prompt-ids"),
        ((tmp_path / "none",), "No such file"),
        ((tmp_path,), "directory"),
        ((file, "--out", tmp_path), "a folder"),
        ((file, "--out", tmp_path / "none" / "out"), "lies in no folder"),
        ((file, "--speculate"), "--speculate is for one prompt"),
        ((file, "--greedy-on-device"), "--greedy-on-device is for one prompt"),
    ):
        assert mentions in batch(endless(), *arguments).error
    for arguments in (("--out", tmp_path / "out"), ("--batch-size", 2)):
        assert "--batch FILE.jsonl" in command("run", endless(), "-p", "x", *arguments).error
    assert (
        "--batch-size 0: a whole number from 1 to 4096 wanted"
        in batch(endless(), file, "--batch-size", 0).error
    )
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device")
def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    file = write(tmp_path / "in", {"prompt": "x"})
    assert "/dev/full: No space left" in batch(endless(), file, "--out", "/dev/full").error


def test_half_of_a_line_is_taken_back(
    chat: Chat, whole: tuple[Path, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the disk fills up in the middle of a result, the file ends with the result before it."""
    file, content = whole
    out, room = tmp_path / "out", [300]
    real = io.FileIO

    class Small(real):
        def write(self, given: Any, /) -> int:
            part = bytes(given)[: room[0]]
            if not part:
                raise OSError(28, "No space left on device")
            room[0] -= len(part)
            return super().write(part)

    monkeypatch.setattr("qwen_onnx.cli.batch.output.FileIO", Small)
    refused(run_batch, chat, file, out, mentions=("No space left",))
    held = out.read_bytes()
    assert content.startswith(held)
    assert held.endswith(b"\n")
    room[0] = 10**6
    with pytest.raises(UserError, match="1 of 8"):
        run_batch(chat, file, out)
    assert out.read_bytes() == content


def test_other_exports(tmp_path: Path) -> None:
    file = write(tmp_path / "in", *({"prompt": text} for text in (PARIS, SEVEN, HELLO)))
    wanted = ["The capital of France is Paris.", "3 plus 4 is 7.", "Hello! How can I help you?"]
    portable = export("tiny", tmp_path / "portable", target="portable").folder
    for model in (portable, tiny("int8"), tiny("bf16")):
        assert [record["text"] for record in records(batch(model, file).out)] == wanted


def test_a_line_s_logit_bias_is_openai_s(tmp_path: Path) -> None:
    """Its ids are strings, as keys of JSON objects are; it is in place of the command's."""
    biased = {"prompt": HELLO, "max_new_tokens": 4, "logit_bias": {"77": 100}}
    wrong = [
        {**biased, "logit_bias": bias} for bias in ({"x": 1}, {"5": 101}, {"399": 1}, {"5": None}, [5], "5=1")
    ]
    file = write(tmp_path / "in", biased, {**biased, "logit_bias": None}, *wrong)
    ran = batch(endless(), file, "--logit-bias", "78=100", "--ignore-eos")
    found = records(ran.out)
    assert [record["token_ids"] for record in found[:2]] == [[77] * 4, [78] * 4]
    said = [
        "logit_bias of 'x': a token id",
        "logit_bias 101 of 5",
        "logit_bias of 399: the id names no token",
    ]
    said += [
        "logit_bias None of 5",
        "logit_bias [5]: numbers by token id",
        "logit_bias '5=1': numbers by token id",
    ]
    for record, line in zip(found[2:], said, strict=True):
        assert record["error"].startswith(line), record["error"]
