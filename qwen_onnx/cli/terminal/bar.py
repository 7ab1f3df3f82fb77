"""A progress bar on stderr, where that is a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn

Show = Callable[[int, int | None, str], None]
"""How much is done, of how much, in words."""


@contextlib.contextmanager
def progress_bar(label: str, *columns: ProgressColumn, hidden: bool = False) -> Iterator[Show]:
    """A bar until the block ends; words are ours, never those of a file."""
    console = Console(stderr=True)
    parts = (TextColumn(label), BarColumn(), TextColumn("{task.description}"), *columns)
    disable = hidden or not console.is_terminal
    with Progress(*parts, console=console, transient=True, redirect_stdout=False, disable=disable) as bar:
        task = bar.add_task("", total=None)

        def show(done: int, total: int | None, words: str = "") -> None:
            bar.update(task, completed=done, total=total, description=words)

        yield show
