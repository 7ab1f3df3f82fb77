"""`qwen-onnx run` for one prompt: stdout is the answer and nothing else, and every option does what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from qwen_onnx import export, load
from support.chats import ENDLESS_CONTEXT, endless, tiny
from support.checkpoints import QWEN2, write_checkpoint
from support.command import command

KEYS = {
    "prompt_ids", "prompt_tokens", "token_ids", "text", "finish_reason", "ttft_ms", "tokens_per_s", "provider",
    "dtype",
}  # fmt: skip
HI = [{"role": "user", "content": "Hi"}]


def run_json(*arguments: object, **settings: object) -> dict:
    ran = command("run", *arguments, "--json", "--show-prompt-ids", "--provider", "cpu", **settings)  # type: ignore[arg-type]
    assert (ran.code, ran.err) == (0, "")
    assert len(ran.out.splitlines()) == 1
    return json.loads(ran.out, parse_constant=pytest.fail)  # NaN and Infinity are no JSON


def test_the_bundled_model_answers() -> None:
    ran = command("run", tiny(), "-p", "What is 3 plus 4?")
    assert ran == (0, "3 plus 4 is 7.\n", "provider: cpu\n")


def test_a_piped_prompt_is_the_prompt_of_p() -> None:
    """All lines of it, without the line end of `echo`."""
    one = run_json(endless(), "-p", "one\ntwo é", "--max-new-tokens", 8)
    for piped in ("one\ntwo é\n", "one\ntwo é"):
        again = run_json(endless(), "--max-new-tokens", 8, stdin=piped)
        assert (again["prompt_ids"], again["token_ids"]) == (one["prompt_ids"], one["token_ids"])


def test_a_chat_whose_answers_go_to_a_file() -> None:
    """Prompt marks and the replies to commands go to stderr."""
    ran = command("run", tiny(), terminal=True, stdin="What is 3 plus 4?\n/help\n")
    assert (ran.code, ran.out) == (0, "3 plus 4 is 7.\n")
    assert ran.err.count("> ") == 3


def test_json_has_the_documented_keys() -> None:
    found = run_json(endless(), "-p", "Hi", "--max-new-tokens", 4)
    assert found.keys() == KEYS
    chat = load(endless(), provider="cpu")
    assert found["prompt_ids"] == chat.prompt_ids(HI)
    tokens = list(chat.generate(HI, max_new_tokens=4))
    assert found["token_ids"] == [token.token_id for token in tokens]
    assert found["text"] == "".join(token.text for token in tokens)
    assert (found["finish_reason"], found["provider"], found["dtype"]) == ("length", "cpu", "f32")
    assert found["ttft_ms"] > 0
    assert found["tokens_per_s"] > 0


def test_text_and_json_say_the_same() -> None:
    arguments = (endless(), "-p", "Hi", "--max-new-tokens", 40)
    assert command("run", *arguments).out == run_json(*arguments)["text"] + "\n"


def test_an_end_token_is_counted_and_never_printed() -> None:
    """Its id is the last of `token_ids`; the text has nothing of it."""
    found = run_json(tiny(), "-p", "What is the capital of France?")
    assert found["text"] == "The capital of France is Paris."
    assert found["finish_reason"] == "eos"
    assert found["token_ids"][-1] in load(tiny()).eos_token_ids


def test_ignore_eos_goes_on() -> None:
    stopped = run_json(tiny(), "-p", "What is 3 plus 4?")
    went_on = run_json(tiny(), "-p", "What is 3 plus 4?", "--ignore-eos", "--max-new-tokens", 40)
    assert went_on["token_ids"][: len(stopped["token_ids"])] == stopped["token_ids"]
    assert (len(went_on["token_ids"]), went_on["finish_reason"]) == (40, "length")


@pytest.mark.parametrize("count", [0, 1, 5])
def test_max_new_tokens_is_exact_and_counts_new_ones_only(count: int) -> None:
    found = run_json(endless(), "-p", "Hi", "--ignore-eos", "--max-new-tokens", count)
    assert (len(found["token_ids"]), found["finish_reason"]) == (count, "length")
    assert (found["ttft_ms"] is None) == (count == 0)
    assert (found["tokens_per_s"] is None) == (count < 2)


def test_nothing_asked_for_prints_an_empty_line() -> None:
    assert command("run", endless(), "-p", "Hi", "--max-new-tokens", 0, "--provider", "cpu") == (0, "\n", "")


def test_top_logits_come_only_when_asked_for_and_are_sorted() -> None:
    """Every id among them names a token, and every logit is a finite number."""
    found = run_json(endless(), "-p", "Hi", "--max-new-tokens", 3, "--top-logits", 100_000)
    assert found.keys() == KEYS | {"top_logits"}
    size = load(endless()).tokenizer.size
    for token_id, best in zip(found["token_ids"], found["top_logits"], strict=True):
        assert best[0]["token_id"] == token_id
        assert sorted(best, key=lambda one: -one["logit"]) == best
        assert len({one["token_id"] for one in best}) == len(best) <= size
    ran = command("run", endless(), "-p", "Hi", "--max-new-tokens", 3, "--top-logits", 2)
    assert len(ran.err.splitlines()) == 1 + 3
    assert ran.out == found["text"] + "\n"


def test_raw_text_is_not_put_into_a_template() -> None:
    found = run_json(endless(), "-p", "Hi there", "--raw", "--max-new-tokens", 2)
    assert found["prompt_ids"] == load(endless()).prompt_ids("Hi there")
    assert len(found["prompt_ids"]) < 10


def test_system_message_comes_first() -> None:
    found = run_json(endless(), "-p", "Hi", "--system", "Be brief.", "--max-new-tokens", 1)
    text = load(endless()).tokenizer.decode(found["prompt_ids"], skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n")
    assert text.endswith("<|im_start|>assistant\n")


def test_prompt_ids_are_taken_as_they_are() -> None:
    arguments = ("--max-new-tokens", 6)
    by_text = run_json(endless(), "-p", "Hi", *arguments)
    ids = ", ".join(map(str, by_text["prompt_ids"]))
    by_ids = run_json(endless(), "--prompt-ids", ids, *arguments)
    assert (by_ids["prompt_ids"], by_ids["token_ids"]) == (by_text["prompt_ids"], by_text["token_ids"])


@pytest.mark.parametrize("prompt", ["", " ", "\n", "<|im_end|>", "é🔥好"])
def test_any_content_can_be_asked(prompt: str) -> None:
    """An empty message too: the chat template's own tokens are there to go on from."""
    by_option = run_json(endless(), "-p", prompt, "--max-new-tokens", 2)
    assert by_option["token_ids"]
    by_pipe = run_json(endless(), "--max-new-tokens", 2, stdin=prompt + "\n")
    assert by_pipe["token_ids"] == by_option["token_ids"]
    if prompt:
        assert run_json(endless(), "--raw", "-p", prompt, "--max-new-tokens", 2)["token_ids"]


def test_a_full_context_ends_the_answer_and_says_so() -> None:
    found = run_json(endless(), "-p", "Hi", "--max-context", 64, "--ignore-eos")
    assert found["finish_reason"] == "context"
    # Every position was used; the last token is chosen from the last of them and needs none itself.
    assert len(found["prompt_ids"]) + len(found["token_ids"]) == 64 + 1


def test_stats_are_one_line_on_stderr() -> None:
    ran = command("run", endless(), "-p", "Hi", "--max-new-tokens", 5, "--stats", "--provider", "cpu")
    number = r"[\d.]+"
    assert re.fullmatch(
        rf"\d+ prompt tokens, 5 new, length, TTFT {number} ms, {number} tokens/s, cache {number} MB, "
        rf"peak memory \d+ MB, context \d+ of {ENDLESS_CONTEXT}, cpu, float32\n",
        ran.err,
    )


def test_threads_change_no_token() -> None:
    one, two = (run_json(endless(), "-p", "Hi", "--max-new-tokens", 8, "--threads", n) for n in (1, 2))
    assert one["token_ids"] == two["token_ids"]


def test_auto_says_what_it_got_and_a_named_provider_says_nothing() -> None:
    arguments = ("run", endless(), "-p", "Hi", "--max-new-tokens", 1)
    assert re.fullmatch(r"provider: (cpu|cuda)\n", command(*arguments).err)
    assert command(*arguments, "--provider", "cpu").err == ""


def test_an_export_without_a_tokenizer_runs_on_ids(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "bare", QWEN2)
    out = export(tmp_path / "bare", tmp_path / "out").folder
    found = run_json(out, "--prompt-ids", "1,2,3", "--max-new-tokens", 4)
    assert found["text"] == ""
    ran = command("run", out, "--prompt-ids", "1,2,3", "--max-new-tokens", 4)
    assert ran.out.split() == [str(token_id) for token_id in found["token_ids"]]
    assert "--prompt-ids" in command("run", out, "-p", "Hi").error
