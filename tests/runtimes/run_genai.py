"""onnxruntime-genai: its own loop, over a folder with genai_config.json."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as genai
from loop import left_padded, read_cases, write_result


def main() -> None:
    cases = read_cases()
    vocabulary = json.loads(Path(cases["folder"], "genai_config.json").read_text())["model"]["vocab_size"]
    config = genai.Config(cases["folder"])
    # An id that is hardly ever chosen: these cases go on after the end of an answer.
    config.overlay(json.dumps({"model": {"eos_token_id": vocabulary - 1}}))
    model = genai.Model(config)

    def start(ids: np.ndarray) -> genai.Generator:
        params = genai.GeneratorParams(model)
        params.set_search_options(do_sample=False, batch_size=len(ids), max_length=512)
        generator = genai.Generator(model, params)
        generator.append_tokens(ids.astype(np.int32))
        return generator

    def generate(generator: genai.Generator, steps: int) -> tuple[list[list[int]], np.ndarray]:
        chosen, seen = [], []
        for _ in range(steps):
            seen.append(generator.get_logits()[:, -1].astype(np.float32))
            generator.generate_next_token()
            chosen.append(generator.get_next_tokens().copy())
        return np.stack(chosen, axis=1).tolist(), np.stack(seen)

    def prompt() -> dict[str, Any]:
        generator = start(np.array([cases["prompt"]]))
        first, logits = generate(generator, cases["steps"])
        generator.get_logits()  # else the last id, chosen but not computed yet, is left out
        generator.append_tokens(np.array([cases["turn"]], np.int32))
        second, _ = generate(generator, cases["turn_steps"])
        return {"prompt": first[0], "turn": second[0], "logits": logits[:, 0]}

    def batch() -> dict[str, Any]:
        ids, _ = left_padded(cases)
        return {"batch": generate(start(ids), cases["batch_steps"])[0]}

    def chunked() -> dict[str, Any]:
        middle = len(cases["prompt"]) // 2
        generator = start(np.array([cases["prompt"][:middle]]))
        generator.append_tokens(np.array([cases["prompt"][middle:]], np.int32))
        return {"chunked": generate(generator, cases["steps"])[0][0]}

    write_result("onnxruntime-genai", genai.__version__, [prompt, batch, chunked])


if __name__ == "__main__":
    main()
