"""Names that graphs are built to and runners read: inputs, outputs, dimensions, files of an exported folder."""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal, NamedTuple

WEIGHTS_FILE = "weights.safetensors"
EXTRA_FILE = "extra.safetensors"
"""Made tensors, when the checkpoint's own files are linked instead of rewritten."""
TARGETS = ("onnxruntime", "portable")
"""What runs the graphs: ONNX Runtime, each provider its own; or anything, all of it one graph of old operators."""
LAYOUTS = ("plain", "onnxruntime-genai", "transformers.js", "optimum", "triton")
"""Who finds the files of an export where they are."""
WEIGHTS_ORDERS = ("checkpoint", "panels")
"""How a matrix lies in the weights file: [out, in]; or, in f32 for one kind of processor, in panels of some rows."""
DTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
"""A float export's dtype, and how safetensors headers spell it."""
QUANTIZED = {"int8": 8, "int4": 4}
"""A quantized export's dtype, and the bits of its layers' matrices."""
EXPORT_DTYPES = (*DTYPES, *QUANTIZED)
DTYPE_SPELLINGS = MappingProxyType({
    "float": "f32", "float32": "f32", "fp32": "f32", "half": "f16", "float16": "f16", "fp16": "f16",
    "bfloat16": "bf16",
})  # fmt: skip
"""What others call them, in small letters."""
QWEIGHT, SCALES, ZERO_POINTS = "qweight", "scales", "zero_points"
"""The tensors in the place of a quantized `weight`; not every format has the last."""
INPUT_IDS = "input_ids"
ATTENTION_MASK = "attention_mask"
POSITION_IDS = "position_ids"
WRITE_INDICES = "write_indices"
SEQLENS_K = "seqlens_k"
TOTAL_SEQUENCE_LENGTH = "total_sequence_length"
LOGIT_BIAS = "logit_bias"
NUM_LOGITS_TO_KEEP = "num_logits_to_keep"
LOGITS = "logits"
NEXT = "next_"
"""What an output is called that becomes an input of the next step: `next_input_ids` and so on."""
OF_ENTRY = {"greedy": {LOGIT_BIAS}, "score": {NUM_LOGITS_TO_KEEP}}
"""What some entries take in beside."""
BATCH = "batch_size"
SEQUENCE = "sequence_length"
KEPT = "num_logits"
TOKENS = "batch_size * sequence_length"
KEPT_TOKENS = "batch_size * num_logits"
LIVE = "total_sequence_length"
CAPACITY = "cache_capacity"
PAST = "past_sequence_length"
PAST_AND_NEW = "past_sequence_length + sequence_length"
GROW_FROM = "cache"
GROW_INTO = "larger"
GROW_RESULT = "grown"
LARGER_CAPACITY = "larger_capacity"
SHRINK_LENGTH = "length"
SHRINK_RESULT = "shrunk"
PROBE_X, PROBE_WEIGHT, PROBE_Y = "x", "weight", "y"
PROBE_SIZE = 16
"""Inputs and outputs of the probe's product: the most rows that a panel has."""


class LoweringSpec(NamedTuple):
    """How a runner drives the graphs of a lowering."""

    inputs: frozenset[str]
    """Beside ids and cache; OF_ENTRY says what else."""
    cache: Literal["live", "whole", "grown"]
    """What of the cache a step is given: the slots with tokens in them; all, so that no shape changes from one token
    to the next; or those before it, to give back more."""


_SLOTS = frozenset({ATTENTION_MASK, POSITION_IDS, WRITE_INDICES})
LOWERINGS = MappingProxyType({
    "static": LoweringSpec(_SLOTS, "live"),
    "static-capture": LoweringSpec(_SLOTS, "whole"),
    "static-grouped": LoweringSpec(_SLOTS, "whole"),
    "contrib": LoweringSpec(frozenset({SEQLENS_K, TOTAL_SEQUENCE_LENGTH}), "whole"),
    "portable": LoweringSpec(frozenset({ATTENTION_MASK, POSITION_IDS}), "grown"),
})  # fmt: skip
"""By the name that the manifest has."""
