"""Messages to the prompt of a chat model, by the chat template that came with it."""

import codecs
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from qwen_onnx.checkpoints import TEMPLATES_FOLDER
from qwen_onnx.contract.json_file import read_json
from qwen_onnx.errors import UserError
from qwen_onnx.runners.text.loading.added_tokens import SPECIAL_TOKENS, TOKENIZER_CONFIG_FILE
from qwen_onnx.runners.text.messages import with_decoded_arguments
from qwen_onnx.runners.text.template.sandbox import RefusalError, TemplateSandbox, render_bounded
from qwen_onnx.runners.text.tokenizer import special_token_text


class ChatTemplate:
    """A compiled chat template. `source` is its text, `named` are those that its model has under names.

    Raises UserError, naming `origin`, when the text is not a Jinja template.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        origin: str = "chat template",
        named: Mapping[str, str] | None = None,
    ) -> None:
        self.source, self.named = source, dict(named or {})
        self._special_tokens = dict(special_tokens or {})
        self._origin = origin
        try:
            self._template = TemplateSandbox().bounded_template(source)
        except Exception as error:
            raise UserError(f"{origin}: not a usable chat template ({_described(error)})") from None

    @classmethod
    def from_folder(cls, folder: Path) -> Self | None:
        """Read the template of an exported folder or a checkpoint; None when the model has none.

        The first of these that holds one is used: `chat_template.jinja`, `chat_template.json`, and
        `chat_template` in `tokenizer_config.json`. In JSON it is a string, or several under names, as an object or
        as a list of `{"name": …, "template": …}`: then the one named "default", or the only one. More of them with
        names stand in additional_chat_templates/NAME.jinja.

        Raises UserError, naming the file, when one of them is damaged, or leaves open which template is meant.
        """
        config_path = folder / TOKENIZER_CONFIG_FILE
        config = read_json(config_path) if config_path.exists() else {}
        found = _template_file(folder) or _template_in(config, config_path)
        if found is None:
            return None
        source, path, named = found
        if extra := dict(_additional(folder)):
            named = {"default": source, **named, **extra}
        return cls(source, special_tokens=special_tokens(folder), origin=str(path), named=named)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        enable_thinking: bool | None = None,
    ) -> str:
        """Return the prompt for `messages`, ending where the model is to answer if `add_generation_prompt`.

        `enable_thinking` is the template's own switch; None leaves the choice to the template.

        Raises UserError when the template refuses the messages, fails, reaches for what the sandbox forbids, writes
        more than 16 MiB, or does more work than the sandbox allows.
        """
        try:
            variables: dict[str, object] = {
                **self._special_tokens,
                "messages": _plain(with_decoded_arguments(messages)),
                "tools": _plain(tools),
                "documents": None,  # transformers passes it always, and templates may ask if it is defined
                "add_generation_prompt": add_generation_prompt,
            }
            if enable_thinking is not None:
                variables["enable_thinking"] = enable_thinking
            return render_bounded(self._template, variables)
        except RefusalError as error:
            raise UserError(
                f"the chat template refuses the messages: {' '.join(str(error).split())}"
            ) from None
        except Exception as error:
            # Whatever the template did, the fault is its own or the messages': the user gets a line, not our stack.
            raise UserError(f"{self._origin}: the chat template failed ({_described(error)})") from None


def special_tokens(folder: Path) -> dict[str, str]:
    """Texts of the special tokens that tokenizer_config.json names, as templates see them.

    Raises UserError, naming the file and the key, where one is no text.
    """
    path = folder / TOKENIZER_CONFIG_FILE
    config = read_json(path) if path.exists() else {}
    texts = {name: special_token_text(config, name, path=path) for name in SPECIAL_TOKENS}
    # A null is left out, so that a template finds the variable undefined, not the word "None".
    return {name: text for name, text in texts.items() if text is not None}


_Found = tuple[str, Path, dict[str, str]]


def _template_file(folder: Path) -> _Found | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        source = _read(path)
        if source.strip():
            return source, path, {}
    path = folder / "chat_template.json"
    return _template_in(read_json(path), path) if path.exists() else None


def _additional(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted((folder / TEMPLATES_FOLDER).glob("*.jinja")):
        yield path.stem, _read(path)


def _read(path: Path) -> str:
    try:
        return path.read_bytes().removeprefix(codecs.BOM_UTF8).decode()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 (byte {error.start})") from None


def _template_in(config: Mapping[str, object], path: Path) -> _Found | None:
    match config.get("chat_template"):
        case None:
            return None
        case str(source):
            # A blank template, as a blank file, would make every prompt empty: it says that there is none.
            return (source, path, {}) if source.strip() else None
        case dict(named):
            pass
        case list(entries) if all(
            isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in entries
        ):
            named = {entry["name"]: entry.get("template") for entry in entries}
        case _:
            raise UserError(f"{path}: chat_template must be a string, or templates with names")
    if not named:
        return None
    source = named["default"] if "default" in named else next(iter(named.values()))
    if len(named) > 1 and "default" not in named:
        raise UserError(f"{path}: chat_template has {', '.join(map(repr, named))}, and no 'default'")
    if not isinstance(source, str):
        raise UserError(f"{path}: chat_template 'default' must be a string, found {source!r}")
    return source, path, {name: text for name, text in named.items() if isinstance(text, str)}


def _plain(value: object) -> object:
    """Copy what a template gets to see into plain JSON types, without methods of our own to reach through."""
    match value:
        case None | bool() | int() | float():
            return value
        case str():
            return str.__str__(value)
        case Mapping():
            return {_plain(key): _plain(item) for key, item in value.items()}
        case Sequence():
            return [_plain(item) for item in value]
    raise TypeError(f"messages and tools hold JSON values, not {type(value).__name__}")


def _described(error: Exception) -> str:
    lineno = getattr(error, "lineno", None)
    where = "" if lineno is None else f", line {lineno}"
    return f"{type(error).__name__}: {_one_line(error)}{where}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error)[:500].split())
