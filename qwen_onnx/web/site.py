"""What the page's server has: the page, its libraries and the files of the manifest; nothing else."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import lzma
import shlex
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from qwen_onnx.contract.manifest import MANIFEST_FILE, Manifest, is_weights, read_manifest
from qwen_onnx.errors import UserError
from qwen_onnx.runners.runtime.integrity import verify_graph, verify_texts
from qwen_onnx.runners.text.tokenizer import TOKENIZER_FILE

PAGE = Path(__file__).parent / "page"
LIBRARIES = Path(__file__).parent / "libraries"
XZ = ".xz"
GRAPH_FILE = "model.onnx"
MOST_BYTES = 4 * 10**9
"""Of weights: WebAssembly's memory ends at 4 GiB, and holds more than them."""

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".jinja": "text/plain; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
    ".wasm": "application/wasm",
}


class Resource:
    """One file that is served, opened anew for each request."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        """`name`: the one that its address ends with, where it is another."""
        self._path = path
        self.content_type = _TYPES.get(Path(name or path.name).suffix, "application/octet-stream")

    def open(self) -> tuple[BinaryIO, int, str]:
        """The file, its size in bytes, and an ETag that changes with it.

        Raises:
            OSError: it is gone.
        """
        file = self._path.open("rb")
        status = self._path.stat()
        return file, status.st_size, f'"{status.st_mtime_ns:x}-{status.st_size:x}"'


class PackedResource(Resource):
    """A file kept as .xz: WebAssembly is a sixth of its size so. It is unpacked when it is first asked for."""

    def open(self) -> tuple[BinaryIO, int, str]:
        """See Resource.open."""
        return io.BytesIO(self._content), len(self._content), self._etag

    @cached_property
    def _content(self) -> bytes:
        return lzma.decompress(self._path.read_bytes())

    @cached_property
    def _etag(self) -> str:
        return f'"{hashlib.sha256(self._content).hexdigest()[:32]}"'


@dataclasses.dataclass(frozen=True)
class Site:
    """Every address that is answered, by path, and what lies there."""

    manifest: Manifest
    resources: dict[str, Resource]

    @classmethod
    def of(cls, export: Path) -> Site:
        """The page over this export.

        Raises:
            UserError: no export, one that the page cannot load, or one that is damaged.
        """
        manifest = read_manifest(export)
        verify_loadable(export, manifest)
        resources = {"/": Resource(PAGE / "index.html")}
        resources |= {f"/{path.name}": Resource(path) for path in sorted(PAGE.iterdir())}
        for package in json.loads((LIBRARIES / "libraries.json").read_text(encoding="utf-8")).values():
            for name in package["files"]:
                served = name.removesuffix(XZ)
                kind = PackedResource if name.endswith(XZ) else Resource
                resources[f"/libraries/{served}"] = kind(LIBRARIES / name, served)
        for name in (MANIFEST_FILE, *manifest.files):
            resources[f"/model/{name}"] = Resource(export / name)
        return cls(manifest, resources)


def verify_loadable(export: Path, manifest: Manifest) -> None:
    """The page can load it, and its files are those that were written.

    Raises:
        UserError: it cannot, and the command that makes one that it can.
    """
    if manifest.target != "portable" or manifest.layout != "plain" or GRAPH_FILE not in manifest.files:
        model = shlex.quote(manifest.model_id)
        held = "ONNX Runtime outside browsers" if manifest.target != "portable" else manifest.layout
        raise UserError(
            f"{export}: an export for {held}; the page needs a portable one: `qwen-onnx web {model}` makes it"
        )
    if TOKENIZER_FILE not in manifest.files:
        raise UserError(
            f"{export}: has no {TOKENIZER_FILE}, and so no text; export a checkpoint that has one"
        )
    refuse_size(str(export), sum(spec.size for name, spec in manifest.files.items() if is_weights(name)))
    for name in manifest.files:
        path = export / name
        if not path.is_file():
            raise UserError(f"{path}: missing; copy or export it again")
        if not path.resolve().is_relative_to(export.resolve()):
            raise UserError(f"{path}: a link out of the folder, which is not served; copy or hard-link it")
    verify_texts(export, manifest)
    verify_graph(export, manifest, next(graph for graph in manifest.graphs if graph.file == GRAPH_FILE))


def refuse_size(subject: str, size: int) -> None:
    """A browser has memory for so many bytes of weights.

    Raises:
        UserError: it has not.
    """
    if size > MOST_BYTES:
        raise UserError(
            f"{subject}: {size / 1e9:.1f} GB of weights, and a browser's WebAssembly has 4 GB for all; "
            "take a smaller model, or --dtype f16"
        )
