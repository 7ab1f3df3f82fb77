"""A stranger's program: runs an exported folder with onnxruntime, tokenizers and numpy, and nothing else.

python static_loop.py FOLDER PROMPT MAX_NEW_TOKENS
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import tokenizers

CAPACITY = 256  # slots of the cache; no more than the manifest's context_length


def generate(folder: Path, prompt: str, max_new_tokens: int) -> list[int]:
    """Return the ids that follow the prompt, the end token too if one came."""
    manifest = json.loads((folder / "export.json").read_text(encoding="utf-8"))
    graphs = [graph for graph in manifest["graphs"] if "cpu" in graph["providers"]]
    graph = next(graph for graph in graphs if graph["entry"] == "prefill")  # any number of tokens, one too
    if graph["lowering"] != "static":
        sys.exit(
            f"{folder}: a graph of the lowering {graph['lowering']}, this loop is for static: export f32, f16 or bf16"
        )
    session = onnxruntime.InferenceSession(str(folder / graph["file"]), providers=["CPUExecutionProvider"])
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    cache = {
        spec["name"]: np.zeros((1, spec["shape"][1], CAPACITY, spec["shape"][3]), spec["dtype"])
        for spec in graph["inputs"]
        if spec["name"].startswith("past_key_values.")
    }
    present = [name.replace("past_key_values", "present") for name in cache]
    held, made = 0, []
    step = tokenizer.encode(prompt, add_special_tokens=False).ids
    while len(made) < max_new_tokens:
        length = held + len(step)
        inputs = {
            "input_ids": np.array([step], np.int64),
            "attention_mask": np.ones((1, length), np.int64),  # over the slots in use, the new ones too
            "position_ids": np.arange(held, length, dtype=np.int64)[None],
            "write_indices": np.array([held], np.int64),  # the slot of the first new token
        }
        logits, *buffers = session.run(["logits", *present], inputs | cache)
        cache, held = dict(zip(cache, buffers, strict=True)), length
        # The embedding may have more rows than there are tokens.
        step = [int(logits[0, -1, : tokenizer.get_vocab_size()].argmax())]
        made += step
        if step[0] in manifest["eos_token_ids"]:
            break
    return made


if __name__ == "__main__":
    print(json.dumps(generate(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
