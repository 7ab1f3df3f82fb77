"""The text of one answer as its tokens come, up to a stop string in it; none in its reasoning counts."""

from __future__ import annotations

from collections.abc import Sequence

from qwen_onnx.runners.text.detokenizer import StreamDetokenizer
from qwen_onnx.runners.text.reasoning import AnswerStart
from qwen_onnx.runners.text.stop_strings import StopStrings
from qwen_onnx.runners.text.tokenizer import Tokenizer


class TextStream:
    """Takes ids one after the other; what it gives joins to the answer's text."""

    def __init__(
        self, tokenizer: Tokenizer | None, stop: Sequence[str] = (), *, begun: bool | None = None
    ) -> None:
        """Without a tokenizer texts are empty; `begun` as of `Sequence`."""
        self._detokenizer = None if tokenizer is None else StreamDetokenizer(tokenizer)
        self._stops = StopStrings(stop)
        self._start = None if begun is None or not stop else AnswerStart(begun=begun)

    @property
    def stopped(self) -> bool:
        """A stop string came up: no more text comes."""
        return self._stops.found

    def push(self, token_id: int | None, *, may_stop: bool = True, last: bool = False) -> str:
        """The text that became certain with the next id.

        Args:
            token_id: None where it has no text, being an end token. (By that, not by being special: some tokenizers
                do not flag theirs.)
            may_stop: a stop string that it completes counts.
            last: what was held back comes too.
        """
        text = ""
        if self._detokenizer is not None:
            text = "" if token_id is None else self._detokenizer.push(token_id)
            text += self._detokenizer.flush() if last else ""
        passed, answer = ("", text) if self._start is None else self._start.push(text, last=last)
        text = passed + self._stops.push(answer, may_end=may_stop)
        return text + self._stops.flush() if last and not self.stopped else text
