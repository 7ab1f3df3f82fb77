"""optimum-onnx: transformers' generate over ORTModelForCausalLM."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loop import left_padded, read_cases, write_result
from optimum.onnxruntime import ORTModelForCausalLM
from transformers import GenerationConfig


def main() -> None:
    cases = read_cases()
    folder, file = Path(cases["folder"]), Path(cases["model"])
    model = ORTModelForCausalLM.from_pretrained(folder, subfolder=str(file.parent), file_name=file.name)
    # The folder's own would stop at the end of an answer.
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=cases["pad"])

    def generate(ids: np.ndarray, mask: np.ndarray, steps: int, past: Any = None) -> Any:
        return model.generate(
            torch.from_numpy(ids),
            attention_mask=torch.from_numpy(mask),
            past_key_values=past,
            max_new_tokens=steps,
            output_logits=True,
            return_dict_in_generate=True,
        )

    def prompt() -> dict[str, Any]:
        ids = np.array([cases["prompt"]])
        first = generate(ids, np.ones_like(ids), cases["steps"])
        # All ids again, of which those that the cache holds are not computed.
        said = np.concatenate([first.sequences.numpy(), [cases["turn"]]], axis=1)
        second = generate(said, np.ones_like(said), cases["turn_steps"], first.past_key_values)
        return {
            "prompt": first.sequences[0, ids.shape[1] :].tolist(),
            "turn": second.sequences[0, said.shape[1] :].tolist(),
            "logits": torch.cat(first.logits).numpy(),
        }

    def batch() -> dict[str, Any]:
        ids, mask = left_padded(cases)
        found = generate(ids, mask, cases["batch_steps"])
        return {"batch": found.sequences[:, ids.shape[1] :].tolist()}

    write_result(
        "optimum-onnx", f"{version('optimum-onnx')}, transformers {version('transformers')}", [prompt, batch]
    )


if __name__ == "__main__":
    main()
