"""The chat in a terminal: lines in, streamed answers out, the conversation kept between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from qwen_onnx.cli.chat import commands, shown
from qwen_onnx.cli.chat.conversation import Conversation
from qwen_onnx.cli.chat.settings import changed
from qwen_onnx.cli.completion import Completion, bounded, complete, verify_for_template
from qwen_onnx.cli.terminal.output import answer, tell
from qwen_onnx.errors import UserError, counted
from qwen_onnx.options import Given
from qwen_onnx.runners.chat import Chat, Message, Token
from qwen_onnx.runners.generate import verify_request
from qwen_onnx.runners.text.reasoning import Said


class Repl:
    """A conversation with a model, driven by `input`-like reading; only answers go to stdout."""

    def __init__(
        self,
        chat: Chat,
        asked: Given,
        *,
        system: str | None = None,
        raw: bool = False,
        shift: bool = True,
        print_token: Callable[[Token | None, Said], None],
        end: Callable[[], None] = lambda: answer(""),
        break_off: Callable[[], None] = lambda: None,
        report: Callable[[Completion], None] = lambda completion: None,
    ) -> None:
        """Nothing is read yet.

        Args:
            raw: complete text, no chat.
            shift: where the context is full, the oldest turns are dropped; else the turn is refused.
            asked: values of Request by field name.
            print_token: gets each token as it comes; `end` is called after the last, and `report` gets all of it.
            break_off: is called where an error ends an answer.
        """
        self._chat, self._asked, self._raw, self._shift = chat, dict(asked), raw, shift
        self._print_token, self._end, self._break_off, self._report = print_token, end, break_off, report
        self._last: Completion | None = None
        self._conversation = Conversation(system)

    def status(self) -> str:
        """The context in use, in a few characters."""
        return f"{self._chat.context_used}/{self._chat.runner.context_length}"

    def run(self, read: Callable[[str], str] = input) -> int:
        """Answer until the user leaves; the exit code (0, or 130 after a second Ctrl-C at the prompt)."""
        tell(f"{self._chat.runner.manifest.model_id}, /help for commands")
        interrupted = False
        while True:
            try:
                line = read("> ")
            except EOFError:
                tell("")
                return 0
            except UnicodeError as error:
                tell(f"error: what was typed is no text ({error})")
                continue
            except KeyboardInterrupt:
                if interrupted:
                    return 130
                interrupted = True
                tell("", "(Ctrl-C again, or Ctrl-D, leaves)")
                continue
            interrupted = False
            if commands.parse_command(line)[0] == "/quit":
                return 0
            try:
                self._handle(line)
            except UserError as error:
                tell(f"error: {error}")
            except KeyboardInterrupt:  # between two steps of a command
                tell("", "(interrupted)")

    def _handle(self, line: str) -> None:
        text = commands.block(line)
        command, rest = commands.parse_command(line) if text is None else ("", "")
        if not line.strip() or text == "":
            return
        if self._raw and command in commands.OF_CHATS:
            raise UserError(f"{command} is for chats; --raw completes each text by itself")
        commands.verify_alone(command, rest)
        match command:
            case "/help":
                tell(*commands.HELP.splitlines())
            case "/reset":
                self._reset()
            case "/show":
                shown.show_messages(self._conversation.messages)
            case "/read":
                self._read(commands.file_argument(command, rest))
            case "/tokens" if rest:
                shown.show_tokens(self._chat, rest)
            case "/tokens":
                shown.show_count(self._chat, self._count(self._conversation.messages))
            case "/system":
                self._system(rest)
            case "/undo":
                self._undo()
            case "/retry":
                self._retry()
            case "/tool":
                self._give(rest)
            case "/params":
                shown.show_params(self._chat, self._asked)
            case "/set":
                self._set(rest)
            case "/save":
                self._save(commands.file_argument(command, rest))
            case "/load":
                self._load(commands.file_argument(command, rest))
            case "/stats":
                shown.show_stats(self._chat, self._last)
            case _ if self._raw:
                self._complete(line if text is None else text)
            case _ if text is not None:
                self._ask({"role": "user", "content": text})
            case _ if command:
                tell(f"no command {command}; /help lists them, and /{command} sends it to the model")
            case _:
                said = line.strip()
                self._ask({"role": "user", "content": said[1:] if said.startswith("//") else said})

    def _forget(self) -> None:
        """Of the cache too: what it holds beyond the messages could be saved."""
        try:
            self._chat.rewind(self._conversation.messages)
        except UserError:  # a template that wants more than a system message
            self._chat.rewind([])

    def _system(self, text: str) -> None:
        shown.verify_length(self._chat, text)
        read = self._conversation.forget_read()
        self._conversation = Conversation(text or None)
        self._forget()
        how = (
            "under this system message"
            if text
            else "with no system message but the chat template's, if it has one"
        )
        tell(f"(the conversation begins anew, {how}{read})")

    def _reset(self) -> None:
        turns = len(self._conversation.turns)
        kept = "; the system message stays" if self._conversation.system else ""
        self._conversation.reset()
        read = self._conversation.forget_read()
        self._forget()
        tell(f"(forgot {counted(turns, 'turn')}{kept}{read})")

    def _undo(self) -> None:
        question, read = self._conversation.undo(), self._conversation.forget_read()
        self._forget()
        if question is None:
            tell(f"nothing to undo{read}")
        else:
            left = f"turns left: {len(self._conversation.turns)}"
            tell(f"(forgot {shown.shortened(question)} and its answer; {left}{read})")

    def _read(self, path: Path) -> None:
        text = shown.read_text(self._chat, path)
        self._conversation.read += f"{text}\n\n"
        tell(f"(read {path}: {counted(len(text), 'character')}, before your next question)")

    def _give(self, content: str) -> None:
        if self._conversation.messages[-1:] == self._conversation.system:
            raise UserError("/tool: nothing was asked yet, so that no function was called")
        self._ask({"role": "tool", "content": content})

    def _ask(self, message: Message) -> None:
        is_question = message["role"] == "user"
        if is_question:
            message = {**message, "content": f"{self._conversation.read}{message['content']}"}
        shown.verify_length(self._chat, str(message["content"]))
        self._reply([*self._conversation.messages, message], takes_read=is_question)

    def _retry(self) -> None:
        if (question := self._conversation.question()) is None:
            tell("nothing to answer anew")
        else:
            self._reply(question)

    def _reply(self, messages: list[Message], *, takes_read: bool = False) -> None:
        """Answer these messages; they become the conversation once a token of it was seen."""
        self._conversation.begin(messages, takes_read=takes_read)
        length = self._chat.runner.context_length
        room = min(int(bounded(self._chat, self._asked)["max_new_tokens"]), length // 4)
        messages, dropped = self._conversation.make_room(room, length, self._count, shift=self._shift)
        if dropped:
            what = "the oldest turn was" if dropped == 1 else f"the {dropped} oldest turns were"
            tell(f"(the context of {length} tokens has no room for {room} more: {what} dropped)")
        result = self._complete(messages)
        if result.token_ids:  # an interrupted answer stays as far as it came: the user saw it
            self._conversation.end(result.content)
        for call in result.tool_calls or []:
            tell(f"(calls {call.name}; give its result with /tool)")

    def _complete(self, prompt: str | list[Message]) -> Completion:
        asked = bounded(self._chat, self._asked)
        try:
            result = complete(self._chat, prompt, asked, on_token=self._print_token)
        except (UserError, KeyboardInterrupt):  # Ctrl-C once more, while the first one ends it
            self._break_off()
            raise
        self._end()
        self._last = result
        if result.finish_reason not in ("eos", "stop"):
            tell(f"({result.finish_reason})")
        self._report(result)
        return result

    def _count(self, messages: Sequence[Message]) -> int:
        request = self._chat.request(self._asked)
        return len(self._chat.prompt_ids(messages, **request.of_prompt)) if messages else 0

    def _set(self, rest: str) -> None:
        name, _, text = rest.partition(" ")
        if name:
            asked = changed(self._asked, name, text.strip())
            verify_for_template(self._chat.processor, asked)
            verify_request(self._chat.runner, self._chat.request(asked))
            self._asked = asked
        shown.show_params(self._chat, self._asked)

    def _save(self, path: Path) -> None:
        self._chat.save(path, messages=self._conversation.messages)
        without = "; not what /read put before the next question" if self._conversation.read else ""
        tell(f"saved {path}: {self._held()}{without}")

    def _load(self, path: Path) -> None:
        messages = self._chat.load(path)
        read = self._conversation.forget_read()
        self._conversation = Conversation()
        self._conversation.messages = messages
        tell(f"loaded {path}: {self._held()}{read}")
        if turns := self._conversation.turns:
            shown.show_messages(messages[turns[-1] :])

    def _held(self) -> str:
        return (
            f"{counted(len(self._conversation.turns), 'turn')}, {counted(self._chat.context_used, 'token')}"
        )
