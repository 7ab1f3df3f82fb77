"""Which stored tensors are the model's, under which name; what is no part of it is passed over by name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from qwen_onnx.checkpoints.config import QwenConfig
from qwen_onnx.checkpoints.known_keys import shortened
from qwen_onnx.checkpoints.safetensors_file import FLOAT_DTYPES, StoredTensor, same_tensor
from qwen_onnx.errors import UserError

Tensors = dict[str, StoredTensor]

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_OWN = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")
# Of old transformers versions (a mask, frequencies), and scales of a cache in 8 bits.
_BUFFER = re.compile(
    r"(self_attn\.)?rotary_emb\.inv_freq|(self_)?attn\.(masked_)?bias|(self_)?attn\.(\w+_proj\.)?(\w_|output_|prob_)scale"
)
_QUANTIZED = re.compile(
    r"\.(qweight|qzeros|g_idx|absmax|SCB|weight_(scale|packed|shape)\w*|codes|codebooks)(\.|$)"
)
_ADAPTER = re.compile(r"(^|\.)(lora_\w+|base_layer|modules_to_save|original_module)(\.|$)")


def named_as_causal_lm(tensors: Tensors) -> Tensors:
    """The tensors under the names of a `...ForCausalLM`: a bare decoder's, as of Qwen3Model, lack `model.`."""
    if EMBEDDING in tensors or EMBEDDING.removeprefix("model.") not in tensors:
        return tensors
    own = ("layers.", "embed_tokens.", "norm.")
    names = {name: f"model.{name}" if name.startswith(own) else name for name in tensors}
    if twice := next((name for name in tensors if names[name] != name and names[name] in tensors), None):
        raise UserError(f"{tensors[twice].file}: has both {twice} and {names[twice]}; keep one of them")
    return {names[name]: dataclasses.replace(tensor, name=names[name]) for name, tensor in tensors.items()}


def only_own(tensors: Tensors, config: QwenConfig) -> tuple[Tensors, list[str]]:
    """The tensors that could be the model's, and a note that names the others.

    Passed over is what transformers passes over and what changes no logits: other heads, extra layers, buffers. What
    stands inside a layer stays, so that whoever builds the graph refuses it: a bias there may be meant.

    Raises:
        UserError: an adapter's tensors, which change the model.
    """
    if adapter := next((name for name in tensors if _ADAPTER.search(name)), None):
        raise UserError(
            f"{tensors[adapter].file}: {adapter} is of an adapter; merge it into its base model first"
        )
    extra = [name for name in tensors if _is_extra(name, config)]
    kept = {name: tensor for name, tensor in tensors.items() if name not in set(extra)}
    return kept, [f"tensors that the model does not use: {shortened(extra)}"] if extra else []


def _is_extra(name: str, config: QwenConfig) -> bool:
    if not name.startswith(_OWN):
        return True
    if (layer := _LAYER.fullmatch(name)) is None:
        return False
    return int(layer[1]) >= config.num_hidden_layers or _BUFFER.fullmatch(layer[2]) is not None


def decide_head(
    config: QwenConfig, tensors: Tensors, raw: Mapping[str, Any]
) -> tuple[QwenConfig, Tensors, list[str]]:
    """Tied or own head: what the tensors are decides, not what the flag says.

    Raises:
        UserError: there is neither a head nor a flag that the embedding is one.
    """
    head, embedding = tensors.get(HEAD), tensors.get(EMBEDDING)
    if head is None:
        if not config.tie_word_embeddings:
            bare = any(name.endswith("Model") for name in map(str, raw.get("architectures") or []))
            raise UserError(
                f"{HEAD} is missing and config.json does not say tie_word_embeddings; "
                + ("a decoder without a head makes no text" if bare else "incomplete download?")
            )
        return config, tensors, []
    if embedding is None and config.tie_word_embeddings:  # one matrix under the other of its names
        renamed = {(EMBEDDING if name == HEAD else name): tensor for name, tensor in tensors.items()}
        return config, renamed | {EMBEDDING: dataclasses.replace(head, name=EMBEDDING)}, []
    if embedding is not None and same_tensor(head, embedding):
        kept = {name: tensor for name, tensor in tensors.items() if name != HEAD}
        return dataclasses.replace(config, tie_word_embeddings=True), kept, []
    notes = []
    if config.tie_word_embeddings:
        notes.append(f"config.json says tie_word_embeddings, but {HEAD} differs: it is used")
    return dataclasses.replace(config, tie_word_embeddings=False), tensors, notes


def quantization_note(raw: Mapping[str, Any], names: Iterable[str], dtypes: Iterable[str]) -> str | None:
    """A note on a quantization_config that was left behind where all weights are floats.

    Args:
        raw: config.json.
        names: of the tensors; enough where their dtypes are not known yet.
        dtypes: as safetensors spells them.

    Raises:
        UserError: the weights are quantized.
    """
    keys = [key for key in ("quantization_config", "compression_config") if raw.get(key)]
    if not keys:
        return None
    found = raw[keys[0]]
    method = str(found.get("quant_method", "?") if isinstance(found, Mapping) else found)
    if any(map(_QUANTIZED.search, names)) or any(dtype not in FLOAT_DTYPES for dtype in dtypes):
        raise UserError(
            f"config.json: {keys[0]} ({method}) found; quantized weights are not supported, "
            "give the checkpoint they were made from"
        )
    return f"config.json: {shortened([f'{keys[0]} ({method})'])} is passed over: all weights are floats"
