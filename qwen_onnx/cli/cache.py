"""`qwen-onnx cache`: the exports in the cache, listed and removed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qwen_onnx.cli.terminal.json_line import as_json_line
from qwen_onnx.cli.terminal.output import answer, show, tell
from qwen_onnx.errors import UserError, counted

CacheDir = Annotated[Path | None, typer.Option(help="Default in the user's cache folder.")]

cache_app = typer.Typer(help="List or remove the exports in the cache.", no_args_is_help=True)


@cache_app.command("ls")
def cache_list(
    cache_dir: CacheDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="As a JSON list.")] = False,
) -> None:
    """List the exports in the cache, which `run` and other commands made."""
    from qwen_onnx.exports.cached.folder import cache_folder, list_exports

    exports = list_exports(cache_folder(cache_dir))
    if as_json:
        listed = [{"name": e.name, "model": e.model_id, "dtype": e.dtype, "bytes": e.size} for e in exports]
        answer(as_json_line(listed))
        return
    if not exports:
        tell(f"no exports in {cache_folder(cache_dir)}")
    for export in exports:
        show(f"{export.size:>15,}  {export.name}")


@cache_app.command("rm")
def cache_remove(
    names: Annotated[list[str] | None, typer.Argument(help="Names as `cache ls` shows them.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all of them.")] = False,
    cache_dir: CacheDir = None,
) -> None:
    """Remove exports from the cache."""
    from qwen_onnx.exports.cached.folder import cache_folder, remove_exports

    if not names and not everything:
        raise UserError("nothing to remove: give names from `qwen-onnx cache ls`, or --all")
    removed = remove_exports(cache_folder(cache_dir), names or [], everything=everything)
    tell(f"removed {counted(len(removed), 'export')}, {sum(export.size for export in removed):,} bytes")
