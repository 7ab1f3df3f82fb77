"""Writes a checkpoint of bench/checkpoint.py as GGUF, with the same weights. Needs gguf and safetensors.

python bench/peers_gguf.py CHECKPOINT OUT.gguf f32|q8_0|q4_0

Vectors stay f32; q4_0 has the embedding, which is also the head, in Q8_0, as llama.cpp's own quantizer leaves it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import ml_dtypes  # noqa: F401 - so that NumPy knows bf16
import numpy as np
import safetensors

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def gguf_name(name: str) -> str:
    """What llama.cpp calls a tensor of a Qwen2 checkpoint."""
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, rest = name.split(".", 3)
    module, _, leaf = rest.rpartition(".")
    return f"blk.{layer}.{NAMES[module]}.{leaf}"


def write_gguf(checkpoint: Path, out: Path, kind: str) -> None:
    """With no vocabulary: it is fed token ids."""
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(str(out), "qwen2")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    types = gguf.GGMLQuantizationType
    with safetensors.safe_open(checkpoint / "model.safetensors", "np") as file:
        for name in file.keys():  # noqa: SIM118 - no dict
            values, own = file.get_tensor(name).astype(np.float32), gguf_name(name)
            if values.ndim < 2 or kind == "f32":
                writer.add_tensor(own, values)
                continue
            quantized = types.Q8_0 if kind == "q8_0" or own == "token_embd.weight" else types.Q4_0
            writer.add_tensor(own, gguf.quants.quantize(values, quantized), raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write_gguf(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
