"""The keys of a checkpoint's JSON files that transformers 4 and 5 know, and what each means here.

A key that stands here is read, harmless, noted or refused; one that does not is named in a note at export.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from qwen_onnx.contract.json_file import read_json
from qwen_onnx.errors import UserError, printable

_NAMED = 5
"""Most names in a note."""


@dataclasses.dataclass(frozen=True)
class Key:
    """What a key means here."""

    use: Literal["read", "harmless", "noted", "refused"]
    """`harmless` changes no logits and no ids; `noted` is passed over with a note, `refused` ends the export."""
    reason: str = ""
    """Of `noted` and `refused`."""
    neutral: tuple[Any, ...] = ()
    """Values with which a `noted` or `refused` key changes nothing."""


def keys(use: Literal["read", "harmless"], names: str) -> dict[str, Key]:
    """Each of the names, read or harmless."""
    return dict.fromkeys(names.split(), Key(use))


def refused(reason: str, names: str, *neutral: Any) -> dict[str, Key]:
    """Each of the names; refused with values other than `neutral`."""
    return dict.fromkeys(names.split(), Key("refused", reason, neutral))


def noted(reason: str, names: str, *neutral: Any) -> dict[str, Key]:
    """Each of the names; named in a note with values other than `neutral`."""
    return dict.fromkeys(names.split(), Key("noted", reason, neutral))


def unsupported(**neutral: Any) -> dict[str, Key]:
    """Options of generation that are not followed here, with the values that change nothing."""
    return {name: Key("noted", "not supported", (None, value)) for name, value in neutral.items()}


OFF = (None, False, 0)
"""Values of what is switched off."""
_OWN_CODE = "the checkpoint's own code is not run"

GENERATION: Mapping[str, Key] = {
    **keys(
        "read",
        "do_sample temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty "
        "max_new_tokens min_new_tokens stop_strings eos_token_id",
    ),
    # Of other kinds of decoding, of memory and speed, of what transformers returns beside the ids.
    **keys(
        "harmless",
        "bos_token_id pad_token_id decoder_start_token_id transformers_version _from_model_config _commit_hash "
        "_original_object_hash use_cache cache_implementation cache_config max_cache_len return_legacy_cache "
        "output_attentions output_hidden_states output_logits output_scores return_dict_in_generate "
        "remove_invalid_values renormalize_logits num_return_sequences is_assistant num_assistant_tokens "
        "num_assistant_tokens_schedule assistant_confidence_threshold assistant_early_exit "
        "assistant_ensemble_weight assistant_lookbehind target_lookbehind prompt_lookup_num_tokens "
        "max_matching_ngram_size speculation_type use_mtp disable_compile compile_config "
        "continuous_batching_config prefill_chunk_size",
    ),
    **unsupported(
        num_beams=1, num_beam_groups=1, diversity_penalty=0.0, length_penalty=1.0, early_stopping=False,
        typical_p=1.0, epsilon_cutoff=0.0, eta_cutoff=0.0, min_length=0, no_repeat_ngram_size=0,
        encoder_no_repeat_ngram_size=0, encoder_repetition_penalty=1.0, guidance_scale=1.0, token_healing=False,
        low_memory=False, max_length=None, max_time=None, top_h=None, bad_words_ids=[], sequence_bias={},
        suppress_tokens=[], begin_suppress_tokens=[], forced_bos_token_id=None, forced_eos_token_id=None,
        exponential_decay_length_penalty=None, watermarking_config=None, penalty_alpha=None, dola_layers=None,
        constraints=None, force_words_ids=None, force_bos_token_to_be_generated=False,
    ),
}  # fmt: skip
"""generation_config.json; where there is none, transformers takes these keys from config.json."""

CONFIG: Mapping[str, Key] = {
    **GENERATION,
    # How a model was trained, loaded or saved; heads of other tasks; the tensors say what type they are.
    **keys(
        "harmless",
        "dtype torch_dtype _name_or_path name_or_path use_return_dict return_dict torchscript use_bfloat16 "
        "tf_legacy_loss attention_dropout initializer_range gradient_checkpointing chunk_size_feed_forward "
        "is_decoder tie_encoder_decoder cross_attention_hidden_size finetuning_task id2label label2id "
        "num_labels task_specific_params problem_type classifier_dropout summary_type tokenizer_class prefix "
        "sep_token_id attn_implementation _attn_implementation _attn_implementation_internal "
        "_attn_implementation_autoset experts_implementation _experts_implementation "
        "_experts_implementation_internal _output_attentions pretraining_tp base_model_tp_plan base_model_pp_plan "
        "base_model_ep_plan base_model_fsdp_plan num_nextn_predict_layers mtp_layer_types unsloth_version "
        "unsloth_fixed transformers.js_config",
    ),
    **noted(_OWN_CODE, "auto_map custom_pipelines", None, {}),
}
"""Keys of config.json that shape no model; those that do are in config.py, where they are read."""

TOKENIZER: Mapping[str, Key] = {
    **keys("read", "chat_template added_tokens_decoder bos_token eos_token unk_token pad_token"),
    # Of batches, of lengths, of Python; of the special tokens' names; files that are found by their own names.
    **keys(
        "harmless",
        "sep_token cls_token mask_token additional_special_tokens extra_special_tokens "
        "model_specific_special_tokens tokenizer_class processor_class name_or_path _name_or_path verbose "
        "model_max_length max_len max_length stride truncation_strategy truncation padding padding_side "
        "truncation_side pad_to_multiple_of pad_token_type_id pad_token_id model_input_names "
        "clean_up_tokenization_spaces clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output "
        "response_template response_schema chat_control_tokens backend files_loaded is_local local_files_only "
        "init_inputs tokenizer_file vocab_file merges_file tokenizer_object vocab merges special_tokens_map_file "
        "errors use_fast legacy from_slow gguf_file trust_remote_code add_bos_token add_eos_token "
        "transformers_version _commit_hash fix_mistral_regex",
    ),
    # Parts of tokenizer.json, as transformers hands them on to itself.
    **keys(
        "harmless",
        "tokenizer tokenizer_padding tokenizer_truncation _json_padding _json_truncation post_processor unk_id "
        "_spm_precompiled_charsmap slow_tokenizer fast_tokenizer",
    ),
    **noted(_OWN_CODE, "auto_map", None, {}),
    **noted("tokenizer.json decides", "add_prefix_space", *OFF),
    **refused("special tokens are always one token here", "split_special_tokens", *OFF),
}
"""tokenizer_config.json."""


def refuse_keys(file: str, raw: Mapping[str, Any], known: Mapping[str, Key]) -> None:
    """Refuse what would be computed otherwise than the file says.

    Raises:
        UserError: naming the key, its value and the reason.
    """
    for name, key in known.items():
        if key.use == "refused" and name in raw and raw[name] not in key.neutral:
            raise UserError(f"{file}: {name} {reprlib.repr(raw[name])} found; {key.reason}")


def key_notes(file: str, raw: Mapping[str, Any], known: Mapping[str, Key]) -> Iterator[str]:
    """What of the file is passed over and could matter: one line for all keys that nobody knows."""
    for name, key in known.items():
        unused = key.use == "noted" and name not in GENERATION
        if unused and name in raw and raw[name] not in key.neutral:
            yield printable(f"{file}: {name} is passed over: {key.reason}")
    if unknown := [name for name in raw if name not in known]:
        yield f"{file}: not read, as nobody here knows what it means: {shortened(unknown)}"


def tokenizer_notes(folder: Path) -> Iterator[str]:
    """The notes on tokenizer_config.json, where there is one; who reads generation_config.json says what it omits.

    Raises:
        UserError: a key that is refused, or no JSON object.
    """
    if (path := folder / "tokenizer_config.json").is_file():
        refuse_keys(path.name, raw := read_json(path), TOKENIZER)
        yield from key_notes(path.name, raw, TOKENIZER)


def shortened(names: list[str]) -> str:
    """The first names of a list, as one line for a terminal, and how many there are."""
    named = ", ".join(name if len(name) < 80 else f"{name[:70]}..." for name in names[:_NAMED])
    return printable(named + (f", ... ({len(names)} in all)" if len(names) > _NAMED else ""))
