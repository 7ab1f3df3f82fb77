"""Which token ids end a model's answer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qwen_onnx.contract.json_file import read_json
from qwen_onnx.errors import UserError
from qwen_onnx.runners.text.loading.added_tokens import TOKENIZER_CONFIG_FILE
from qwen_onnx.runners.text.template.chat_template import ChatTemplate
from qwen_onnx.runners.text.tokenizer import TAGS, Tokenizer, special_token_text

END_OF_TURN = "<|im_end|>"
_ANSWER = "Answered"


def eos_ids(folder: Path, tokenizer: Tokenizer | None, template: ChatTemplate | None) -> frozenset[int]:
    """Return the ids after which generation stops: all that any of these names.

    1. `eos_token_id` of generation_config.json (an integer or a list);
    2. `eos_token_id` of config.json (the same);
    3. `eos_token` of tokenizer_config.json, if it is a token of the tokenizer;
    4. the added token that the chat template writes after an assistant's turn;
    5. `<|im_end|>`, where the chat template mentions it and the tokenizer has it as a token.

    A fine-tune often changes one of these and leaves the others. Missing files, missing keys and nulls name none.

    Raises UserError, naming the file and the key, for a value of another type or a negative id.
    """
    ids = _eos_token_ids(folder / "generation_config.json") | _eos_token_ids(folder / "config.json")
    if tokenizer is None:  # ids can be named without one, tokens cannot
        return ids
    ids |= _eos_token(folder / TOKENIZER_CONFIG_FILE, tokenizer)
    if template is not None:
        ids |= _end_of_turn(template, tokenizer)
        if any(END_OF_TURN in source for source in (template.source, *template.named.values())):
            ids |= _id_set(tokenizer.token_id(END_OF_TURN))
    return ids


def _end_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> frozenset[int]:
    """The added token right after what an assistant said, white space aside."""
    turns = [{"role": "user", "content": "Asked"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = template.render(turns, add_generation_prompt=False)
        after = text.rpartition(_ANSWER)[2].strip() if _ANSWER in text else ""
        first = tokenizer.encode(after, add_special_tokens=False)[:1]
    except UserError:  # it wants other turns than these
        return frozenset()
    added = tokenizer.backend.get_added_tokens_decoder()
    return frozenset(i for i in first if i in added and added[i].content not in TAGS)


def _eos_token_ids(path: Path) -> frozenset[int]:
    value = _read_if_present(path).get("eos_token_id")
    if value is None:
        return frozenset()
    ids: list[Any] = value if isinstance(value, list) else [value]
    # `True` is an int to Python, and would stop at token 1.
    if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
        raise UserError(f"{path}: eos_token_id must be a token id, a list of them or null; found {value!r}")
    return frozenset(ids)


def _eos_token(path: Path, tokenizer: Tokenizer) -> frozenset[int]:
    text = special_token_text(_read_if_present(path), "eos_token", path=path)
    return frozenset() if text is None else _id_set(tokenizer.token_id(text))


def _id_set(token_id: int | None) -> frozenset[int]:
    return frozenset() if token_id is None else frozenset({token_id})


def _read_if_present(path: Path) -> Mapping[str, object]:
    return read_json(path) if path.exists() else {}
