"""Makes the bundled model from a seed: trains its tokenizer and its weights on two CPU cores, then measures it.

    python tests/tiny/train.py --out qwen_onnx/tiny

Needs torch and transformers. The text is what `dialogues` says and the Python standard library's own source.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from checkpoint import CONFIG, train_tokenizer, write_json, write_tokenizer, write_weights
from dialogues import Speaker, held_out_items
from measure import HELD_OUT, report_right, report_types
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import Qwen2Config, Qwen2ForCausalLM

BATCHES = (
    (16, 250),
    (16, 250),
    (16, 250),
    (10, 400),
)  # rows and their length, in turn: longer ones cost more
CODE_SHARE = 0.1
# The share of the tokens that the loss is taken at: what users say cannot be foretold, so less is learnt from it.
ANSWER_KEPT, CODE_KEPT, PROMPT_KEPT = 1.0, 0.5, 0.2
PEAK_RATE, WARMUP, DECAY = 3e-3, 50, 600  # the learning rate, and the steps that it rises and falls for
KEPT_EVERY = 500
Segment = tuple[str, bool]  # a text, and whether it is an answer
Batch = tuple[torch.Tensor, torch.Tensor]  # ids, and where the loss is taken: both of shape (rows, length)
Optimizers = list[torch.optim.Optimizer]


def standard_library() -> str:
    """The source of the first modules of the standard library, in order of name."""
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:120]
    return "".join(module.read_text(encoding="utf-8", errors="ignore") for module in modules)


def segments(speaker: Speaker) -> Iterator[Segment]:
    """One dialogue, in the format of the chat template, cut where answers begin and end."""
    system = speaker.system()
    if system is not None:
        yield f"<|im_start|>system\n{system}<|im_end|>\n", False
    for turn in speaker.turns():
        yield f"<|im_start|>user\n{turn.user}<|im_end|>\n<|im_start|>assistant\n", False
        yield f"{turn.assistant}<|im_end|>", True
        yield "\n", False
    yield "<|endoftext|>", False


def tokenizer_texts(speaker: Speaker, code: str) -> Iterator[str]:
    """What the tokenizer is trained on: dialogues, then code in pieces."""
    for _ in range(5000):
        yield "".join(text for text, _ in segments(speaker))
    for start in range(0, len(code), 2000):
        yield code[start : start + 2000]


class Batches:
    """Rows of whole dialogues, the last one cut, and now and then a row of code."""

    def __init__(self, tokenizer: Tokenizer, code: str, seed: int) -> None:
        self.tokenizer = tokenizer
        self.speaker = Speaker(seed)
        self.code_ids = tokenizer.encode(code).ids

    def row(self, length: int) -> list[tuple[int, bool]]:
        """Ids, each with whether the loss is taken at it."""
        draw = self.speaker.rng.random
        if draw() < CODE_SHARE:
            start = self.speaker.rng.randrange(len(self.code_ids) - length)
            return [(token, draw() < CODE_KEPT) for token in self.code_ids[start : start + length]]
        row: list[tuple[int, bool]] = []
        while len(row) < length:
            for text, is_answer in segments(self.speaker):
                share = ANSWER_KEPT if is_answer else PROMPT_KEPT
                row += [(token, draw() < share) for token in self.tokenizer.encode(text).ids]
        return row[:length]

    def batch(self, step: int) -> Batch:
        """The batch of one step."""
        rows, length = BATCHES[step % len(BATCHES)]
        both = torch.tensor([self.row(length) for _ in range(rows)])
        return both[..., 0], both[..., 1].bool()


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal, for matrices: learns these chats in fewer steps than AdamW alone.

    As torch.optim.Muon with "match_rms_adamw", but in f32: bf16 is slow on a CPU that lacks it.
    """

    def __init__(self, matrices: list[torch.nn.Parameter], lr: float, decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "decay": decay, "momentum": 0.95})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update of every matrix."""
        for group in self.param_groups:
            for matrix in group["params"]:
                average = self.state[matrix].setdefault("average", torch.zeros_like(matrix))
                average.lerp_(matrix.grad, 1 - group["momentum"])
                update = orthogonal(matrix.grad.lerp(average, group["momentum"]))
                matrix.mul_(1 - group["lr"] * group["decay"])
                matrix.add_(update, alpha=-0.2 * group["lr"] * math.sqrt(max(matrix.shape)))


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Nearly the orthogonal matrix closest to this one, by five Newton-Schulz steps."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonal(matrix.T).T
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (2.0315 * square @ square - 4.7750 * square) @ x
    return x


def make_optimizers(model: Qwen2ForCausalLM) -> Optimizers:
    """Muon for the matrices of the layers, AdamW for the embedding, the biases and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    adam = torch.optim.AdamW(others, lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    return [Muon(matrices, lr=PEAK_RATE, decay=0.05), adam]


def learning_rate(step: int, steps: int) -> float:
    """A short rise, a plain, and at the end a straight line down to nothing, so that the weights settle.

    Before the descent it does not depend on `steps`: a longer run can go on from a state that a shorter one kept.
    """
    return PEAK_RATE * min(1.0, (step + 1) / WARMUP, (steps - step) / DECAY)


def train_step(model: Qwen2ForCausalLM, optimizers: Optimizers, batch: Batch, rate: float) -> float:
    """One update; returns the loss."""
    ids, kept = batch
    hidden = model.model(ids[:, :-1]).last_hidden_state[kept[:, 1:]]
    loss = functional.cross_entropy(model.lm_head(hidden), ids[:, 1:][kept[:, 1:]])
    model.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return loss.item()


def keep(path: Path, step: int, model: Qwen2ForCausalLM, optimizers: Optimizers, batches: Batches) -> None:
    """Writes all that the next steps depend on."""
    state = {"step": step, "model": model.state_dict(), "rng": batches.speaker.rng.getstate()}
    torch.save(state | {"optimizers": [optimizer.state_dict() for optimizer in optimizers]}, path)


def resume(path: Path, model: Qwen2ForCausalLM, optimizers: Optimizers, batches: Batches) -> int:
    """Puts back what `keep` wrote; returns the next step."""
    state = torch.load(path, weights_only=False)
    model.load_state_dict(state["model"])
    batches.speaker.rng.setstate(state["rng"])
    for optimizer, kept in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(kept)
    return int(state["step"])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Makes the bundled model.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--keep", type=Path, help=f"folder for the state of the training, each {KEPT_EVERY} steps"
    )
    parser.add_argument("--resume", type=Path, help="a state so kept, to go on from")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(2)
    started = time.monotonic()
    code, items = standard_library(), held_out_items()
    write_json(HELD_OUT, items)
    tokenizer = train_tokenizer(tokenizer_texts(Speaker(arguments.seed + 1), code))
    write_tokenizer(arguments.out, tokenizer)
    batches = Batches(tokenizer, code, arguments.seed + 2)
    model = Qwen2ForCausalLM(Qwen2Config.from_dict(CONFIG)).float()
    optimizers = make_optimizers(model)
    first = resume(arguments.resume, model, optimizers, batches) if arguments.resume else 0
    print(f"{model.num_parameters()} parameters, {tokenizer.get_vocab_size()} tokens", flush=True)
    for step in range(first, arguments.steps):
        loss = train_step(model, optimizers, batches.batch(step), learning_rate(step, arguments.steps))
        if step % 50 == 0:
            print(f"step {step}, loss {loss:.3f}, {time.monotonic() - started:.0f} s", flush=True)
        if (step + 1) % KEPT_EVERY == 0:
            write_weights(arguments.out, model)
            report_right(arguments.out, items)
            if arguments.keep:
                keep(arguments.keep / f"{step + 1}.pt", step + 1, model, optimizers, batches)
    write_weights(arguments.out, model)
    report_right(arguments.out, items)
    report_types(arguments.out, items)
    print(f"done in {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
