"""The chat page in headless Chromium, as `qwen-onnx web` serves it, with the bundled model and with a fake one."""

from __future__ import annotations

import functools
import http.server
import json
import lzma
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from environments import RUNTIMES, prepare

from qwen_onnx import export, load
from qwen_onnx.cli.chat.conversation import with_room
from qwen_onnx.runners.text.reasoning import closed, split
from qwen_onnx.runners.text.tokenizer import Tokenizer
from qwen_onnx.web.server import PageServer
from qwen_onnx.web.site import LIBRARIES, PAGE, Site
from support.chats import tiny

pytestmark = pytest.mark.runtimes

TURNS = ["Repeat after me: cloud river", "What is 3 plus 4?"]
HOSTILE = """<script>window.ran=1</script> <img src=x onerror="window.ran=2"> ![pic](http://example.com/a.png)
[a](javascript:window.ran=3) [b](https://example.com/x) [c](data:text/html,hi) <iframe src=http://example.com>

<svg onload=window.ran=4><a href="x" onclick="window.ran=5">x</a> <form action=//example.com><math><mi>

```html
<script>window.ran=6</script>
```
"""
CODE = "def square(x):\n    return x * x"
ANSWERS = [
    [
        "<think>\nA short one will do.\n</think>\n\n",
        f"Here it is:\n\n```python\n{CODE}\n```\n\n",
        "**Done.**",
    ],
    ["| n | n² |\n|---|---|\n| 1 | 1 |\n| 2 | 4 |\n\n- each is the one before plus an odd number"],
]


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export("tiny", tmp_path_factory.mktemp("page") / "tiny", target="portable").folder


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts for Node, beside the packages that they import."""
    installed = prepare(next(runtime for runtime in RUNTIMES if runtime.name == "chromium")).folder
    folder = tmp_path_factory.mktemp("scripts")
    for script in (*installed.glob("*.*js"), *installed.glob("*.js"), installed / "package.json"):
        shutil.copy(script, folder / script.name)
    shutil.copytree(PAGE, folder / "page")
    (folder / "node_modules").symlink_to(installed / "node_modules")
    return folder


def drive(scripts: Path, url: str, *runs: dict[str, Any]) -> list[dict[str, Any]]:
    cases, result = scripts / "cases.json", scripts / "result.json"
    pictures = os.environ.get("QWEN_ONNX_SCREENSHOTS")
    cases.write_text(json.dumps({"url": url, "runs": runs, "pictures": pictures}), encoding="utf-8")
    run = subprocess.run(
        ["node", str(scripts / "drive_page.mjs"), str(cases), str(result)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    results: list[dict[str, Any]] = json.loads(result.read_text(encoding="utf-8"))
    assert [each["console"] for each in results] == [[] for _ in runs]
    return results


class Page:
    """The served page, and what is done on it."""

    def __init__(self, scripts: Path, server: PageServer) -> None:
        self._scripts, self._server = scripts, server

    def __call__(self, scenario: str, **values: Any) -> Any:
        (result,) = drive(self._scripts, self._server.address, {"scenario": scenario, **values})
        assert result["error"] is None
        return result["found"]

    def runs(self, *runs: dict[str, Any]) -> list[dict[str, Any]]:
        return drive(self._scripts, self._server.address, *runs)


@pytest.fixture(scope="module")
def page(scripts: Path, portable: Path) -> Any:
    with PageServer(Site.of(portable), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Page(scripts, server)
        server.shutdown()


def terminal_answers(turns: list[str], **options: Any) -> list[str]:
    """What the runner says to one turn after the other."""
    chat, messages = load(tiny(), provider="cpu"), []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        text = "".join(token.text for token in chat.generate(messages, **options))
        messages.append({"role": "assistant", "content": text})
    return [message["content"] for message in messages[1::2]]


def test_the_page_answers_as_the_runner_does(page: Page) -> None:
    (result,) = page.runs({"scenario": "chats", "turns": TURNS})
    assert re.fullmatch(r"f32 · (WebGPU.*|WebAssembly, \d threads?)", result["status"])
    assert result["isolated"], "so that WebAssembly has threads"
    assert result["found"]["said"] == terminal_answers(TURNS)
    cached = [re.search(r"(\d+) of (\d+) prompt", line) for line in result["found"]["numbers"]]
    (none, first), (kept, second), (again, _) = ([int(n) for n in each.groups()] for each in cached if each)
    assert none == 0
    assert first < kept < second
    assert again == first - 1, "a new chat with the same prompt: the cache is cut back to it"


def test_m1_a_question_of_several_lines_scrolls_and_only_the_reader_stops_it(page: Page) -> None:
    found = page("scrolls", fake=True)
    assert max(found["first"], found["second"], found["back"]) <= 1
    assert found["left"] > 300, "who scrolled up stays there"


def test_m1_a_full_context_drops_the_oldest_turns_as_the_terminal_does(page: Page) -> None:
    turns = [f"Repeat after me: {'cloud river ' * 150}"] * 7
    found = page("fills", turns=turns)
    assert found["notes"] == [
        "The context has no room left for an answer: the model no longer sees what is above."
    ]
    # One that fits in no context is given back, and the chat goes on.
    assert re.search(r"\d+ tokens long, and the context holds 2048", found["error"])
    assert found["back"].startswith("word word")
    assert found["said"][-1] == "3 plus 4 is 7."
    assert found["errors"] == 0


def test_m1_dropped_turns_stay_in_sight_and_are_not_sent_again(page: Page) -> None:
    found = page("drops", fake=True)
    pair = ["user", "assistant"]
    assert found["order"] == [*pair, "note", *pair, *pair, *pair]
    assert found["asked"] == ["a", "a,1,b", "a,1,b,2,c", "b,2,c,3,d"]


def test_m1_reading_and_reasoning_can_be_stopped(page: Page) -> None:
    found = page("stops", fake=True)
    assert found["summary"] == ["Thinking…"]
    assert [line.endswith("stopped") for line in found["numbers"]] == [True, True]
    assert found["asked"][1] == {"role": "assistant", "content": "<think>\nhm\n</think>\n\n"}
    assert (found["back"], found["questions"]) == ("a long one", ["think", "say"])


def test_m1_a_reload_keeps_the_conversation(page: Page) -> None:
    found = page("reloads", fake=True)
    assert found["shown"] == [["first\nquestion"], ["one"], 1]
    assert [message["content"] for message in found["messages"]] == [
        "first\nquestion",
        "<think>\nwell\n</think>\n\n**one**",
        "second",
    ]
    assert found["half"][0] == "half of"
    assert found["half"][1].endswith("interrupted")
    assert found["left"] == 0, "New chat, and what is damaged in the storage"


def test_try_again_asks_the_same_once_more(page: Page) -> None:
    assert page("retries", fake=True) == {"said": ["one", "three"], "same": True, "buttons": 1}


def test_settings_take_effect_and_stay(page: Page) -> None:
    found = page("settings")
    assert found["kept"] == {"system": "Be brief.", "temperature": 0, "maxTokens": 3, "device": ""}
    assert found["shown"] == "3"
    chat = load(tiny(), provider="cpu")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Count from 3 to 9."},
    ]
    assert f"of {len(chat.prompt_ids(messages))} prompt tokens" in found["numbers"][0]
    assert found["numbers"][0].startswith("3 tokens ·")


def test_model_output_runs_and_loads_nothing(page: Page) -> None:
    found = page("hostile", fake=True, text=HOSTILE)
    assert (found["ran"], found["outside"], found["handlers"]) == (None, [], [])
    assert not {"script", "img", "iframe", "svg", "form", "math"} & set(found["elements"])
    assert "<script>window.ran=1</script>" in found["shown"], "it is shown as it was written"
    safe = ["noopener noreferrer nofollow", "_blank"]
    assert found["links"] == [["http://example.com/a.png", *safe], ["https://example.com/x", *safe]]


def test_it_looks_right_on_a_phone_and_a_desk_and_its_code_is_copied(page: Page) -> None:
    runs = [
        {"scenario": "looks", "fake": True, "answers": ANSWERS, "viewport": viewport, "scheme": scheme}
        for viewport in ("desktop", "phone")
        for scheme in ("light", "dark")
    ]
    for result in page.runs(*runs):
        found = result["found"]
        assert (found["code"], found["languages"]) == (CODE, ["python"])
        assert found["whole"] == f"Here it is:\n\n```python\n{CODE}\n```\n\n**Done.**"
        assert found["wide"] <= 0, "nothing scrolls sideways"


def test_it_is_used_without_a_mouse(page: Page) -> None:
    found = page("keys", fake=True)
    assert found["question"] == ["one\ntwo"]
    assert found["focused"] == [
        "open-settings", "reset", "copy", "pre", "copy", "retry", "message", "send",
    ]  # fmt: skip


def test_any_file_server_will_do_and_what_is_missing_is_named(
    scripts: Path, portable: Path, tmp_path: Path
) -> None:
    """As docs/web.md sets it up; without the headers there is one thread."""
    folder = shutil.copytree(PAGE, tmp_path / "page")
    shutil.copytree(LIBRARIES, folder / "libraries")
    for packed in (folder / "libraries").glob("*.xz"):
        packed.with_suffix("").write_bytes(lzma.decompress(packed.read_bytes()))
    shutil.copytree(portable, folder / "model")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        (result,) = drive(scripts, url, {"scenario": "chats", "turns": TURNS[:1]})
        assert (result["status"], result["isolated"]) == ("f32 · WebAssembly, 1 thread", False)
        assert result["found"]["said"] == terminal_answers(TURNS[:1])
        (folder / "model" / "weights.safetensors").write_bytes(b"short")
        (result,) = drive(scripts, url, {})
        assert result["status"] == "Not loaded"
        assert "weights.safetensors: 5 of" in result["error"]
        server.shutdown()


def test_the_page_s_rules_are_the_terminal_s(scripts: Path) -> None:
    """Room in the context, reasoning, and the choice of a token, over the same inputs in both."""
    texts = [
        "", "<", "<thi", "plain", "<think>\nwhy\n</think>\n\nso", "<think>why", "why\n</th", "why</think>\nso",
        "\n<think>\n\n</think>\n\nx",
        "a <think> b",
    ]  # fmt: skip
    chats = [
        [{"role": "system", "content": "s" * 9}, *_turns(count, size)]
        for count in range(5)
        for size in (3, 30)
    ]
    code = """
import { readFileSync } from "node:fs";
import { closed, split, withRoom } from "./page/context.js";
import { choose } from "./page/sampling.js";
const { texts, chats } = JSON.parse(readFileSync(0, "utf8"));
const count = (messages) => messages.reduce((sum, { content }) => sum + content.length + 2, 0);
const logits = Float32Array.from([1, 3, 2, 2.5, -1, 9]);
const sampling = (over) =>
  ({ draws: true, temperature: 1, topK: 0, topP: 1, minP: 0, repetitionPenalty: 1, ...over });
const drawn = (over, seen = []) => {
  const ids = Array.from({ length: 1000 }, (_, at) => choose(logits, 5, seen, sampling(over), () => at / 1000));
  return [...new Set(ids)].sort();
};
console.log(JSON.stringify({
  split: texts.map((text) => [false, true].map((begun) => split(text, begun))),
  closed: texts.map((text) => [false, true].map((begun) => closed(text, begun))),
  room: chats.map((messages) => withRoom(messages, 20, 120, count)),
  drawn: [drawn({ draws: false }), drawn({}), drawn({ topK: 2 }), drawn({ topP: 0.6 }), drawn({ minP: 0.5 }),
    drawn({ draws: false, repetitionPenalty: 2 }, [1])],
}));
"""
    (scripts / "rules.mjs").write_text(code)
    done = subprocess.run(
        ["node", "rules.mjs"], cwd=scripts, input=json.dumps({"texts": texts, "chats": chats}),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    for text, halves, ends in zip(texts, found["split"], found["closed"], strict=True):
        for begun, half, end in zip((False, True), halves, ends, strict=True):
            said = split(text, begun=begun)
            if text not in (
                "<",
                "<thi",
                "why\n</th",
            ):  # what may yet become a tag is not shown while it comes
                assert (half["reasoning"], half["answer"]) == (said.reasoning, said.answer), (text, begun)
            assert end == closed(text, begun=begun)
    for messages, result in zip(chats, found["room"], strict=True):
        count = lambda given: sum(len(str(each["content"])) + 2 for each in given)  # noqa: E731
        kept, dropped = with_room(messages, 20, 120, count)
        assert (result["kept"], result["dropped"]) == (kept, dropped)
    assert found["drawn"] == [[1], [0, 1, 2, 3, 4], [1, 3], [1, 3], [1, 3], [3]]


def test_k4_k8_the_page_s_tokenizer_is_the_runner_s(scripts: Path, tmp_path: Path) -> None:
    """Tags that are flagged as special have text, and tokens that stand beside tokenizer.json are tokens."""
    shutil.copytree(tiny(), tmp_path / "model")
    size = Tokenizer.from_folder(tiny()).size
    beside = {
        str(size + index): {"content": text, "special": special}
        for index, (text, special) in enumerate([("<think>", True), ("</think>", True), ("<|odd|>", False)])
    }
    path = tmp_path / "model/tokenizer_config.json"
    config = {**json.loads(path.read_text()), "added_tokens_decoder": beside}
    path.write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(tmp_path / "model")
    texts = [
        "",
        "a",
        "<think>\nwhy\n</think>\n\nso",
        "x<|odd|> y",
        "naïve <|im_end|> <tool_call>{}</tool_call> 😀",
    ]
    code = """
import { readFileSync } from "node:fs";
import { tokenizerOf } from "./page/tokenizer.js";
const { texts, files } = JSON.parse(readFileSync(0, "utf8"));
const tokenizer = tokenizerOf(...files);
console.log(JSON.stringify(texts.map((text) => {
  const ids = tokenizer.encode(text);
  return [ids, tokenizer.decode(ids)];
})));
"""
    (scripts / "tokenizer_cases.mjs").write_text(code)
    shutil.copytree(PAGE.parent / "libraries", scripts / "page/libraries", dirs_exist_ok=True)
    files = [json.loads((tmp_path / "model" / name).read_text()) for name in ("tokenizer.json", path.name)]
    done = subprocess.run(
        ["node", "tokenizer_cases.mjs"], cwd=scripts, input=json.dumps({"texts": texts, "files": files}),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for text, (ids, said) in zip(texts, json.loads(done.stdout), strict=True):
        assert ids == tokenizer.encode(text), text
        assert said == tokenizer.decode(ids), text


def _turns(count: int, size: int) -> list[dict[str, str]]:
    pair = [{"role": "user", "content": "q" * size}, {"role": "assistant", "content": "a" * size}]
    return [*(pair * count), {"role": "user", "content": "q" * size}]
