"""Greedy decoding of a portable export with onnxruntime, tokenizers and NumPy, and nothing else.

python loop.py FOLDER PROMPT MAX_NEW_TOKENS
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import tokenizers

CACHE_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


def generate(folder: Path, prompt: str, max_new_tokens: int) -> list[int]:
    """Return the ids that follow the prompt, the end token too if one came."""
    manifest = json.loads((folder / "export.json").read_text(encoding="utf-8"))
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])

    # Nothing is held at first: every key and value tensor is there, and 0 tokens long.
    past = {
        tensor.name: np.zeros((1, tensor.shape[1], 0, tensor.shape[3]), CACHE_TYPES[tensor.type])
        for tensor in session.get_inputs()
        if tensor.name.startswith("past_key_values.")
    }
    presents = [name.replace("past_key_values", "present") for name in past]

    # The embedding may have more rows than there are tokens: ids from here on name none.
    named = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())

    held, made = 0, []
    step = tokenizer.encode(prompt, add_special_tokens=False).ids
    if not 0 < len(step) <= manifest["context_length"]:
        sys.exit(f"1 to {manifest['context_length']} tokens of prompt wanted, found {len(step)}")
    while len(made) < max_new_tokens and held + len(step) <= manifest["context_length"]:
        length = held + len(step)
        inputs = {
            "input_ids": np.array([step], np.int64),
            "attention_mask": np.ones((1, length), np.int64),  # over the held tokens and the new ones
            "position_ids": np.arange(held, length, dtype=np.int64)[None],
        }
        logits, *longer = session.run(["logits", *presents], inputs | past)
        past, held = dict(zip(past, longer, strict=True)), length
        step = [int(logits[0, -1, :named].argmax())]
        made += step
        if step[0] in manifest["eos_token_ids"]:
            break
    return made


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    print(json.dumps(generate(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
