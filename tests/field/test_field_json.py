"""What `--json` says of an answer: texts beside ids, and no more of the prompt than is asked for."""

from __future__ import annotations

import json
from pathlib import Path

from qwen_onnx import load
from support.chats import tiny
from support.command import command

RUN = ("run", tiny(), "--provider", "cpu", "-p", "What is 3 plus 4?")


def test_m11_ids_in_logprobs_have_their_texts(tmp_path: Path) -> None:
    """In `run`, batches and `score`; the end token too, which is no text of the answer."""
    asked = ("--logprobs", "2", "--top-logits", "2")
    found = json.loads(command(*RUN, "--json", *asked).out)
    tokenizer = load(tiny(), provider="cpu").tokenizer
    assert tokenizer is not None
    texts = [tokenizer.decode([each], skip_special_tokens=False) for each in found["token_ids"]]
    assert "".join(texts) == "3 plus 4 is 7.<|im_end|>"
    assert [each["text"] for each in found["logprobs"]] == texts
    for each, best in zip(found["logprobs"], found["top_logits"], strict=True):
        assert each["top_logprobs"][0] == {name: each[name] for name in ("token_id", "text", "logprob")}
        assert [(one["token_id"], one["text"]) for one in best] == [
            (one["token_id"], one["text"]) for one in each["top_logprobs"]
        ]
        assert best[0]["logit"] >= best[1]["logit"]
    (tmp_path / "lines").write_text('{"prompt": "What is 3 plus 4?"}\n')
    lines = ("--batch", tmp_path / "lines", "--batch-size", "1")
    (line,) = command("run", tiny(), "--provider", "cpu", *lines, *asked).out.splitlines()
    assert json.loads(line)["logprobs"] == found["logprobs"]
    assert json.loads(line)["top_logits"] == found["top_logits"]
    scored = json.loads(command("score", tiny(), "-", "--json", "--provider", "cpu", stdin="3 plus 4").out)
    assert "".join(scored["texts"]) == "3 plus 4"


def test_m11_the_prompts_ids_come_when_they_are_asked_for() -> None:
    plain = json.loads(command(*RUN, "--json").out)
    found = json.loads(command(*RUN, "--json", "--show-prompt-ids").out)
    assert "prompt_ids" not in plain
    assert plain["prompt_tokens"] == found["prompt_tokens"] == len(found["prompt_ids"])
    assert "--show-prompt-ids is for --json" in command(*RUN, "--show-prompt-ids").error
