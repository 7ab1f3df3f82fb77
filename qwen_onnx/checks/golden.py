"""Greedy ids that an export is to give everywhere: recorded on the CPU provider, compared with any other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from qwen_onnx.checks.tolerances import logit_bound
from qwen_onnx.contract.manifest import Golden, Manifest, write_manifest
from qwen_onnx.errors import UserError
from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.options import SessionOptions
from qwen_onnx.runners.sampling.request import PLAIN

GOLDEN_TOKENS = 32
_GOLDEN_TEXT = "Count from one to five, then spell the word stone."
_LEAST_EQUAL = 0.5  # of the golden ids, however near the others were

Greedy = Callable[[list[int], int], list[int]]
"""Ids so far and a count to as many greedy ids after them; fewer where the context ends."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was checked."""

    ok: bool
    text: str


def check_golden(chat: Chat, manifest: Manifest) -> Finding:
    """Greedy ids against the golden ones, as many as the context holds.

    Where there are none the CPU provider records them first; where the manifest's do not fit, for this once.
    """
    provider, context = chat.runner.provider, chat.runner.context_length
    golden, kept = golden_of(chat, manifest)
    if golden is None:
        return Finding(True, f"golden ids: none, a context of {context} has no room for a prompt and one")
    if kept and provider == "cpu":
        return Finding(True, f"golden ids: {len(golden.token_ids)} {kept}")
    kind = "int8" if manifest.quantized else chat.runner.compute_dtype
    bound = logit_bound(kind, layers=manifest.num_hidden_layers, largest=0.0)

    def greedy(ids: list[int], count: int) -> list[int]:
        return list(record_golden(chat, ids, count).token_ids)

    return compare_golden(greedy_along(greedy, golden), golden, bound, provider)


def golden_of(chat: Chat, manifest: Manifest) -> tuple[Golden | None, str]:
    """The golden ids, and how they were made where they were made just now; None where the context is too short."""
    folder, context = chat.runner.folder, chat.runner.context_length
    if (golden := manifest.golden and manifest.golden.within(context)) is not None:
        return golden, ""
    on_cpu = chat
    if chat.runner.provider != "cpu":
        on_cpu = Chat(Runner(folder, SessionOptions(provider="cpu", max_context=context)))
    prompt = golden_prompt(on_cpu, manifest)[: max(1, context // 2)]
    if len(prompt) >= context:
        return None, ""
    golden = record_golden(on_cpu, prompt)
    if manifest.golden is not None or context != manifest.context_length:
        return golden, "made for this context on the CPU provider; nothing was compared"
    try:
        write_manifest(folder, dataclasses.replace(manifest, golden=golden))
    except OSError as error:  # a folder that may only be read is no fault of the export
        return golden, f"made on the CPU provider, and not recorded ({error.strerror}); nothing was compared"
    return (
        golden,
        "recorded on the CPU provider, for later checks and other machines; nothing to compare with yet",
    )


def greedy_along(greedy: Greedy, golden: Golden) -> Golden:
    """The greedy id at each golden step, given the golden ids before it: a near tie hides nothing after it."""
    total = len(golden.token_ids)
    ids: list[int] = []
    while len(ids) < total:
        found = greedy([*golden.prompt_ids, *golden.token_ids[: len(ids)]], total - len(ids))
        pairs = zip(found, golden.token_ids[len(ids) :], strict=False)
        parting = next((step for step, (a, b) in enumerate(pairs) if a != b), len(found) - 1)
        if parting < 0:  # this context is too short for more
            break
        ids += found[: parting + 1]
    return Golden(golden.prompt_ids, tuple(ids), golden.margins)


def compare_golden(found: Golden, golden: Golden, bound: float, provider: str) -> Finding:
    """Equal ids are good; so are a few others where the best two logits were nearer than twice the bound."""
    total = len(golden.token_ids)
    pairs = zip(found.token_ids, golden.token_ids, golden.margins, strict=False)
    parted = [(step, margin) for step, (a, b, margin) in enumerate(pairs) if a != b]
    if len(found.token_ids) < total:
        return Finding(False, f"golden ids: only {len(found.token_ids)} of {total} were made on {provider}")
    equal = f"golden ids: {total - len(parted)} of {total} equal on {provider}"
    if not parted:
        return Finding(True, equal)
    step, margin = max(parted, key=lambda part: part[1])
    if margin < 2 * bound and total - len(parted) >= _LEAST_EQUAL * total:
        return Finding(True, f"{equal}, the others at margins up to {margin:.2g}, within rounding")
    return Finding(False, f"{equal}; at step {step} the margin was {margin:.2g}: a mismatch")


def record_golden(chat: Chat, prompt_ids: list[int], count: int = GOLDEN_TOKENS) -> Golden:
    """Greedy ids after a prompt, past end tokens, and the margin of each choice."""
    count = min(count, chat.runner.context_length - len(prompt_ids))
    tokens = list(chat.generate(prompt_ids, **PLAIN, max_new_tokens=count, top_logits=2))
    margins = [token.top_logits[0][1] - token.top_logits[-1][1] for token in tokens]
    return Golden(tuple(prompt_ids), tuple(token.token_id for token in tokens), tuple(margins))


def golden_prompt(chat: Chat, manifest: Manifest) -> list[int]:
    """Ids to begin with: those of the manifest, else a fixed text's, in the model's own template."""
    if manifest.golden is not None:
        return list(manifest.golden.prompt_ids)
    if chat.tokenizer is None:
        return [(7 * i + 1) % manifest.vocab_size for i in range(16)]
    try:
        prompt = [{"role": "user", "content": _GOLDEN_TEXT}] if chat.template else _GOLDEN_TEXT
        ids = chat.prompt_ids(prompt)
    except UserError:  # a template that wants more than one user message
        ids = chat.prompt_ids(_GOLDEN_TEXT)
    return ids[: max(1, manifest.context_length // 2)]
