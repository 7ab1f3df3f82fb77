"""The cache of one conversation: who computes with it now, how it is kept, and its end."""

from __future__ import annotations

import collections.abc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from qwen_onnx.errors import UserError, counted
from qwen_onnx.runners.model.kv_cache import KVCache
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.session_file import load_session, save_session
from qwen_onnx.runners.text.prompts import Message

T = TypeVar("T")
_BEGUN = "another answer was begun on this Chat, or a session loaded; make a Chat for each conversation"
_CLOSED = "this Chat was closed; load the export again"


class Conversation:
    """A runner and a cache. Any thread may ask: a step is made by one at a time, an answer by the last that began."""

    def __init__(self, runner: Runner) -> None:
        """An empty one; `runner` may serve others too."""
        self._runner: Runner | None = runner
        self._held: KVCache | None = runner.new_cache()
        self._turn = 0
        self._step = threading.RLock()
        """Held while the cache is read or written."""

    def __repr__(self) -> str:
        if self._runner is None:
            return "<Chat, closed>"
        manifest, most = self._runner.manifest, self._runner.context_length
        how = f"{manifest.model_id} as {manifest.dtype} on {self._runner.provider}"
        return f"<Chat {how}, {self.context_used} of {counted(most, 'token')}, {self._runner.folder}>"

    @property
    def runner(self) -> Runner:
        """What computes.

        Raises:
            UserError: the Chat was closed.
        """
        if self._runner is None:
            raise UserError(_CLOSED)
        return self._runner

    @property
    def _cache(self) -> KVCache:
        if self._held is None:
            raise UserError(_CLOSED)
        return self._held

    def close(self) -> None:
        """Give back the cache and, when no other Chat shares them, the weights; nothing else can be asked then."""
        with self._step:
            self._turn += 1
            self._runner = self._held = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def context_used(self) -> int:
        """Slots of the cache in use."""
        return self._cache.length

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache as it is now."""
        return self._cache.nbytes

    def save(self, path: str | Path, *, messages: collections.abc.Sequence[Message] = ()) -> None:
        """Write the conversation's cache to a file, and messages for whoever loads it; a file, or nothing new.

        Raises:
            UserError: it cannot be written, or what stands at `path` is no saved session.
        """
        with self._step:
            save_session(Path(path), self._cache, self.runner.manifest, messages)

    def load(self, path: str | Path) -> list[Message]:
        """Go on with a saved conversation in place of this one; the messages it was saved with.

        A prompt that begins like it computes only what is new. Where the cache is of another type here (f16 on a GPU,
        f32 on a CPU), the file's is left where it is and the next prompt is computed anew.

        Raises:
            UserError: no session that this model saved, a damaged one, or one longer than the context; the
                conversation is then what it was.
        """
        cache, messages = load_session(Path(path), self.runner)
        with self._step:
            self._turn, self._held = self._turn + 1, cache
        return list(messages)

    def _in_turn(self, begin: Callable[[KVCache], Iterator[T]], *, reuse_cache: bool) -> Iterator[T]:
        """What `begin` gives over the cache, one step at a time, until another answer begins.

        Raises:
            UserError: it began, or the Chat was closed; and what `begin` raises.
        """
        with self._step:
            self._turn = turn = self._turn + 1
            if not reuse_cache:
                self._cache.truncate(0)
            steps = begin(self._cache)
        while True:
            with self._step:  # not while the caller has the token
                if self._turn != turn:
                    raise UserError(_CLOSED if self._runner is None else _BEGUN)
                found = next(steps, None)
            if found is None:
                return
            yield found

    def _forget_other_than(self, token_ids: list[int]) -> None:
        """Of the cache, all that is no beginning of these ids."""
        with self._step:
            self._cache.truncate(self._cache.shared_prefix(token_ids))
