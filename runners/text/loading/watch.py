"""Encoding within a time, by a tokenizer of which it is not known how long it takes."""

from __future__ import annotations

import threading

import tokenizers

from qwen_onnx.errors import UserError

SECONDS, CHARACTERS_A_SECOND = 2.0, 50_000


def watched_ids(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """The ids of a text, in a thread that Ctrl-C and the end of the time leave behind.

    Raises:
        UserError: it takes more than two seconds, and one more for each 50,000 characters.
    """
    done: list[list[int] | BaseException] = []

    def encode() -> None:
        try:
            # Of several texts: for one alone, the library holds the interpreter.
            (found,) = backend.encode_batch([text], add_special_tokens=add_special_tokens)
            done.append(found.ids)
        except BaseException as error:
            done.append(error)

    # A daemon: nobody can end it, and the process does not wait for it.
    thread = threading.Thread(target=encode, daemon=True)
    thread.start()
    seconds = SECONDS + len(text) / CHARACTERS_A_SECOND
    thread.join(seconds)
    if not done:
        raise UserError(
            f"the tokenizer is at a text of {len(text)} characters for {seconds:.0f} s: its regular expressions are "
            "none of Qwen's; take the tokenizer of the original model"
        )
    if isinstance(done[0], BaseException):
        raise done[0]
    return done[0]
