"""The chat in a terminal: lines in, streamed answers out, the conversation kept between them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

from qwen_onnx.answer import Answer, answer
from qwen_onnx.errors import UserError
from qwen_onnx.runners.chat import Chat, Message, Token
from qwen_onnx.runners.generation_options import GenerationRequest

_HELP = """\
/help            this list
/clear           forget the conversation
/system TEXT     set the system message and forget the conversation; without TEXT, none
/params          how tokens are chosen and what ends an answer
/stats           context used and left, speed of the last answer
/exit            leave (so do Ctrl-D, and Ctrl-C twice)
Ctrl-C stops an answer and keeps the session."""


class Repl:
    """A conversation with a model, driven by `input`-like reading; only answers go to stdout."""

    def __init__(
        self,
        chat: Chat,
        request: GenerationRequest,
        *,
        system: str | None,
        raw: bool = False,
        show: Callable[[Token], None],
        report: Callable[[Answer], None] = lambda answer: None,
    ) -> None:
        """`show` gets each token as it comes, `report` each answer at its end; `raw` completes text, no chat."""
        self._chat, self._request, self._raw = chat, request, raw
        self._show, self._report = show, report
        self._last: Answer | None = None
        self._messages: list[Message] = []
        self._system(system)

    def run(self, read: Callable[[str], str] = input) -> int:
        """Answer until the user leaves; the exit code (0, or 130 after a second Ctrl-C at the prompt)."""
        _say(f"{self._chat.runner.manifest.model_id}, /help for commands")
        interrupted = False
        while True:
            try:
                line = read("> ").strip()
            except EOFError:
                _say("")
                return 0
            except KeyboardInterrupt:
                if interrupted:
                    return 130
                interrupted = True
                _say("\n(Ctrl-C again, or Ctrl-D, leaves)")
                continue
            interrupted = False
            if line in ("/exit", "/quit"):
                return 0
            try:
                self._handle(line)
            except UserError as error:
                full = "the context holds" in str(error) and len(self._messages) > self._kept
                _say(f"error: {error}" + ("; /clear forgets the conversation" if full else ""))

    def _handle(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        if not line:
            return
        if command == "/help":
            _say(_HELP)
        elif command == "/clear":
            del self._messages[self._kept :]
        elif command == "/system":
            self._system(rest.strip() or None)
        elif command == "/params":
            self._params()
        elif command == "/stats":
            self._stats()
        elif command.startswith("/") and not self._raw and "/" not in command[1:]:
            _say(f"no command {command}; /help lists them")
        else:
            self._answer(line)

    def _answer(self, line: str) -> None:
        user: Message = {"role": "user", "content": line}
        prompt = line if self._raw else [*self._messages, user]
        result = answer(self._chat, prompt, self._request, on_token=self._show)
        print(flush=True)
        self._last = result
        if result.token_ids:  # an interrupted answer stays as far as it came: the user saw it
            self._messages += [user, {"role": "assistant", "content": result.text}]
        if result.finish_reason not in ("eos", "stop"):
            _say(f"({result.finish_reason})")
        self._report(result)

    def _system(self, text: str | None) -> None:
        self._messages = [{"role": "system", "content": text}] if text else []
        self._kept = len(self._messages)

    def _params(self) -> None:
        _say(self._chat.options(self._request).describe())
        if ignored := self._chat.defaults.ignored:
            _say(f"not supported, of generation_config.json: {', '.join(ignored)}")

    def _stats(self) -> None:
        used, length = self._chat.context_used, self._chat.runner.context_length
        _say(f"context: {used} tokens used, {length - used} left")
        if self._last is not None:
            speed = self._last.tokens_per_s
            ttft = self._last.ttft_ms
            _say(f"last answer: {_number(ttft)} ms to the first token, {_number(speed)} tokens/s")


def enable_line_editing() -> None:
    """Arrow keys and history in `input`, where the platform has them."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - importing it is what enables it


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
