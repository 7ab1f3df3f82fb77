"""What an export's generation_config.json says of generation, and what of it is not supported here."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from qwen_onnx.contract.json_file import read_json
from qwen_onnx.errors import UserError, printable
from qwen_onnx.options import Given, declared, made
from qwen_onnx.runners.sampling.request import Request

GENERATION_CONFIG_FILE = "generation_config.json"

# Read elsewhere, or of no effect on what one sequence says.
_ELSEWHERE = frozenset({
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version",
    "_from_model_config", "use_cache", "cache_implementation", "cache_config", "return_legacy_cache",
    "output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate",
    "remove_invalid_values", "renormalize_logits", "num_return_sequences", "is_assistant",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "assistant_lookbehind", "target_lookbehind", "prompt_lookup_num_tokens", "disable_compile", "compile_config",
})  # fmt: skip
# Values with which transformers does nothing.
_NEUTRAL = {
    "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0, "length_penalty": 1.0,
    "early_stopping": False, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "min_length": 0,
    "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0,
    "guidance_scale": 1.0, "token_healing": False, "low_memory": False,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """What holds where a caller says nothing else."""

    given: Given = dataclasses.field(default_factory=dict)
    """Values of Request by field name."""
    ignored: tuple[str, ...] = ()
    """`name value` of what the file says beyond that, which would change an answer in transformers."""


def read_generation_config(folder: Path) -> GenerationConfig:
    """Read an export's generation_config.json; a missing file, a missing key and null say nothing.

    Raises:
        UserError: a value of the wrong kind or out of range; file and key are named.
    """
    path = folder / GENERATION_CONFIG_FILE
    found = read_json(path) if path.exists() else {}
    values = {key: value for key, value in found.items() if value is not None}
    keys = {option.config_key: name for name, option in declared(Request).items() if option.config_key}
    given = {keys[key]: value for key, value in values.items() if key in keys}
    try:
        made(Request, given)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    others = {key: value for key, value in values.items() if key not in keys.keys() | _ELSEWHERE}
    ignored = [f"{key} {value}" for key, value in others.items() if _NEUTRAL.get(key) != value]
    return GenerationConfig(given, tuple(map(printable, ignored)))
