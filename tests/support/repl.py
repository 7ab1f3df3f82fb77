"""A chat driven by a script in place of a person."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from qwen_onnx import UserError
from qwen_onnx.cli.chat.repl import Repl
from qwen_onnx.options import Given, made
from qwen_onnx.runners.output import FinishReason, Token
from qwen_onnx.runners.sampling.generation_config import GenerationConfig
from qwen_onnx.runners.sampling.params import merged
from qwen_onnx.runners.sampling.request import Request
from qwen_onnx.runners.text.prompts import PromptIds

CTRL_C, CTRL_D = KeyboardInterrupt(), EOFError()


class ScriptedChat:
    """Answers each prompt with the next of its answers, a word a token; a UserError in their place is raised."""

    def __init__(self, *answers: str | UserError) -> None:
        self.asked: list[Any] = []
        self.context_used, self.tokenizer = 0, None
        self.generation_config = GenerationConfig()
        self.runner = SimpleNamespace(context_length=100, manifest=SimpleNamespace(model_id="a/model"))
        self._answers = list(answers)

    def prompt_ids(self, prompt: Any, **_: Any) -> PromptIds:
        self._prompt = prompt
        ids = PromptIds([1, 2, 3])
        ids.begun = None if isinstance(prompt, str) else False
        return ids

    def rewind(self, prompt: Any) -> None:
        self.context_used = len(prompt)

    def request(self, options: Given) -> Request:
        return made(Request, merged(self.generation_config.given, options))

    def generate(self, prompt_ids: list[int], **asked: Any) -> Iterator[Token]:
        self.asked.append(self._prompt)
        said = self._answers.pop(0)
        if isinstance(said, UserError):
            raise said
        words = said.split(" ")
        for count, word in enumerate(words, start=1):
            self.context_used = len(prompt_ids) + count - 1
            reason = FinishReason.EOS if count == len(words) else None
            if count == asked["max_new_tokens"] and reason is None:
                reason = FinishReason.LENGTH
            text = word if count == 1 else f" {word}"
            yield Token(count, text, reason, len(prompt_ids), 0, 12.34, None if count == 1 else 56.78)
            if reason is not None:
                return


def talk(
    chat: Any, *lines: str | BaseException, on_token: Callable[[Token], None] | None = None, **settings: Any
) -> int:
    """Run a session on these lines (or what reading one raises); the exit code. All of them must be read."""
    script = iter(lines)

    def read(prompt: str) -> str:
        assert prompt == "> "
        line = next(script)
        if isinstance(line, BaseException):
            raise line
        return line

    own = {
        name: settings.pop(name)
        for name in ("system", "raw", "report", "shift", "break_off")
        if name in settings
    }
    asked = {"max_new_tokens": 50, **settings}
    say = on_token or (lambda token: print(token.text, end=""))
    repl = Repl(chat, asked, print_token=lambda token, _: None if token is None else say(token), **own)
    code = repl.run(read)
    assert next(script, None) is None, "left before the end of the script"
    return code


def users(messages: Sequence[Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]
