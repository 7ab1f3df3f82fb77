"""Measures a checkpoint on the held-out prompts: right answers in f32, and whether f16 and bf16 give the same.

python tests/tiny/measure.py qwen_onnx/tiny
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HELD_OUT = Path(__file__).with_name("held_out.json")


class Answer(NamedTuple):
    """A greedy answer, and the least distance between the best and the second logit on its path."""

    text: str
    margin: float


def answer(model: Any, tokenizer: Any, messages: list[dict[str, str]]) -> Answer:
    """The greedy answer to a chat, up to the token that ends it."""
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=64, return_dict_in_generate=True, output_logits=True)
    best = torch.cat(output.logits).float().topk(2).values
    text = tokenizer.decode(output.sequences[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return Answer(text, (best[:, 0] - best[:, 1]).min().item())


@torch.no_grad()
def answers(folder: Path, items: list[dict[str, Any]], dtype: torch.dtype) -> list[Answer]:
    """The answers to these items of the checkpoint in the folder, with its bf16 weights taken to `dtype`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    return [answer(model, tokenizer, item["messages"]) for item in items]


def report_right(folder: Path, items: list[dict[str, Any]]) -> None:
    """Prints how many answers are right in f32, the least margin, and what is wrong."""
    given = answers(folder, items, torch.float32)
    wrong = [(item, got.text) for item, got in zip(items, given, strict=True) if item["answer"] != got.text]
    margins = sorted(got.margin for got in given)
    print(f"right {len(items) - len(wrong)} of {len(items)}, least margins {margins[:3]}", flush=True)
    for item, got in wrong:
        said = [message["content"] for message in item["messages"] if message["role"] == "user"]
        print(f"  {said} -> {got!r}, not {item['answer']!r}", flush=True)


def report_types(folder: Path, items: list[dict[str, Any]]) -> None:
    """Prints how many answers differ from those in f32 when computed in f16 and in bf16."""
    wanted = answers(folder, items, torch.float32)
    for dtype in (torch.float16, torch.bfloat16):
        given = answers(folder, items, dtype)
        differ = sum(got.text != want.text for got, want in zip(given, wanted, strict=True))
        print(
            f"{dtype}: {differ} differ from f32, least margin {min(got.margin for got in given)}", flush=True
        )


def main() -> None:
    torch.set_num_threads(2)
    folder, items = Path(sys.argv[1]), json.loads(HELD_OUT.read_text(encoding="utf-8"))
    report_right(folder, items)
    report_types(folder, items)


if __name__ == "__main__":
    main()
