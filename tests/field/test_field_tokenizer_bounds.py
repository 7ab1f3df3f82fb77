"""A tokenizer.json of strangers: refused, or bounded in time and memory. In processes that can be ended."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qwen_onnx.errors import UserError
from qwen_onnx.runners.text.loading import pipeline
from qwen_onnx.runners.text.loading.pipeline import KNOWN_SPLITS, verify_pipeline
from qwen_onnx.runners.text.tokenizer import Tokenizer
from support.chats import tiny
from support.patience import PATIENCE
from support.text_fixtures import tokenizer_json

DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
FORTY = {"type": "Sequence", "normalizers": [DOUBLING] * 40}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def changed(**members: Any) -> str:
    return json.dumps({**json.loads(tokenizer_json()), **members})


def nested(value: object, depth: int) -> object:
    for _ in range(depth):
        value = {"type": "Sequence", "normalizers": [value]}
    return value


HOSTILE: dict[str, str] = {
    "forty doublings": changed(normalizer=FORTY),
    "nested": changed(normalizer=nested(FORTY, 20)),
    "one that is long": changed(normalizer={**DOUBLING, "content": "a" * 5000}),
    "nothing replaced": changed(normalizer={**DOUBLING, "pattern": {"String": ""}}),
    "by a regex": changed(normalizer={**DOUBLING, "pattern": {"Regex": "."}, "content": "a" * 100}),
    "a decoder": changed(decoder={"type": "Sequence", "decoders": [DOUBLING] * 40}),
    "many stages": changed(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}] * 33}),
    "repeated repeats": changed(pre_tokenizer=split("(a+)+[bc]")),
    "repeated choices": changed(pre_tokenizer=split("(?:a|a){2,}[bc]")),
    "a call of itself": changed(pre_tokenizer=split(r"(?<x>a\g<x>?)*")),
    "a normalizer's regex": changed(normalizer={**DOUBLING, "pattern": {"Regex": "a*a*[bc]"}, "content": ""}),
    "behind the model": tokenizer_json().rstrip()[:-1] + ',"normalizer":' + json.dumps(FORTY) + "}",
    "with a letter escaped": tokenizer_json().rstrip()[:-1]
    + ',"\\u006eormalizer":'
    + json.dumps(FORTY).replace("pattern", "p\\u0061ttern").replace("content", "c\\u006fntent")
    + "}",
    "a key twice": tokenizer_json().replace(
        '"normalizer":', '"normalizer":{"type":"NFC","type":"NFD"},"x":', 1
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_o5_a_hostile_tokenizer_is_refused_before_it_is_loaded(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(HOSTILE[name])
    with pytest.raises(UserError, match=r"tokenizer\.json: (its .* is refused|not a tokenizer)") as refused:
        Tokenizer.from_folder(tmp_path)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("first", [64, 10**9])
def test_o5_the_members_are_all_seen(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the beginning of the file is enough, and where it is not."""
    monkeypatch.setattr(pipeline, "_FIRST", first)
    assert verify_pipeline(tokenizer_json().encode(), "x")
    model_first = json.loads(tokenizer_json())
    model_first = {"model": model_first.pop("model"), **model_first, "normalizer": FORTY}
    with pytest.raises(UserError, match="normalizer is refused"):
        verify_pipeline(json.dumps(model_first).encode(), "x")


def test_o5_tokenizers_that_people_have_pass() -> None:
    assert verify_pipeline((tiny() / "tokenizer.json").read_bytes(), "x")
    for pattern in KNOWN_SPLITS:
        assert verify_pipeline(changed(pre_tokenizer=split(pattern)).encode(), "x")
    llama = [{"type": "Prepend", "prepend": "▁"}, {**DOUBLING, "pattern": {"String": " "}, "content": "▁"}]
    assert verify_pipeline(changed(normalizer={"type": "Sequence", "normalizers": llama}).encode(), "x")
    for pattern in (r"\p{N}{1,3}(?=(?:\d{3})*\b)", r"[^\s\p{L}]*", "(?:ab)+", "[(a+)+]"):
        assert not verify_pipeline(changed(pre_tokenizer=split(pattern)).encode(), "x")  # watched


SLOW = """
import resource, signal, sys
from pathlib import Path
from qwen_onnx.errors import UserError
from qwen_onnx.runners.text.tokenizer import Tokenizer

tokenizer = Tokenizer.from_folder(Path(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert tokenizer.encode("abc")
if sys.argv[2] == "interrupt":
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
try:
    tokenizer.encode("a" * 4000 + "d" + "b")
except UserError as error:
    print(error)
except KeyboardInterrupt:
    print("interrupted", resource.getrusage(resource.RUSAGE_SELF).ru_utime < 1.5)
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
"""


@pytest.mark.skipif(sys.platform != "linux", reason="resource")
@pytest.mark.parametrize(("how", "said"), [("wait", "for 2 s"), ("interrupt", "interrupted True")])
def test_o5_a_split_of_unknown_time_is_left_behind(how: str, said: str, tmp_path: Path) -> None:
    """At the end of its time and at Ctrl-C; the process ends although the split goes on."""
    (tmp_path / "tokenizer.json").write_text(changed(pre_tokenizer=split("a*a*[bc]")))
    ran = subprocess.run(
        [sys.executable, "-c", SLOW, str(tmp_path), how],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (ran.returncode, said in ran.stdout) == (0, True), ran.stdout + ran.stderr
