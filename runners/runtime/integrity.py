"""Whether the files of an export are those that were written, as far as milliseconds at load can tell.

What is small is hashed; of weights the size and some pages are compared, so that another model's are found too.
`qwen-onnx check` hashes everything.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from qwen_onnx.contract.manifest import GraphSpec, Manifest, is_weights
from qwen_onnx.errors import UserError
from qwen_onnx.runners.runtime.external_data import refuse_foreign_data
from qwen_onnx.runners.runtime.graph_interface import verify_interface

PAGE = 4096
SAMPLED_PAGES = 16
_AGAIN = "copy or export it again"


def sample(path: Path) -> str:
    """sha256, lower-case hex, of pages spread over a file, the first and the last among them.

    Raises:
        OSError: from the file system.
    """
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        last = max(0, path.stat().st_size - PAGE)
        for index in range(SAMPLED_PAGES):
            file.seek(last * index // (SAMPLED_PAGES - 1))
            digest.update(file.read(PAGE))
    return digest.hexdigest()


def verify_graph(folder: Path, manifest: Manifest, graph: GraphSpec) -> None:
    """The graph is the one that was written and that the manifest tells of, and reads weights files that are there.

    Raises:
        UserError: naming the file, and what is wrong with it.
    """
    for name in manifest.files:
        if is_weights(name):
            _verify_weights(folder, name, manifest, graph)
    path = folder / graph.file
    wanted = manifest.files.get(graph.file)
    if wanted is None:
        raise UserError(f"{path}: export.json does not list its size and sha256; {_AGAIN}")
    _verify_size(path, wanted.size)
    content = _read(path)
    if hashlib.sha256(content).hexdigest() != wanted.sha256:
        raise UserError(f"{path}: changed since it was written, its sha256 differs; {_AGAIN}")
    refuse_foreign_data(path, content, graph.file, manifest)
    verify_interface(path, content, graph, manifest)


def verify_texts(folder: Path, manifest: Manifest) -> None:
    """Tokenizer, templates and the like are those that were copied, and all of them.

    Raises:
        UserError: naming the file.
    """
    graphs = {graph.file for graph in manifest.graphs}
    for name, wanted in manifest.files.items():
        path = folder / name
        if is_weights(name) or name in graphs:
            continue
        _verify_size(path, wanted.size)
        if hashlib.sha256(_read(path)).hexdigest() != wanted.sha256:
            raise UserError(f"{path}: changed since it was written, its sha256 differs; {_AGAIN}")


def _verify_weights(folder: Path, name: str, manifest: Manifest, graph: GraphSpec) -> None:
    path = folder / name
    if path.is_symlink() and not (folder / graph.file).is_symlink():
        raise UserError(
            f"{path}: a link out of the folder, which ONNX Runtime follows not; copy or hard-link it"
        )
    _verify_size(path, manifest.files[name].size)
    # Exports of before have no samples.
    if name in manifest.samples and _sampled(path) != manifest.samples[name]:
        raise UserError(f"{path}: not the weights that this export was made with; {_AGAIN}")


def _verify_size(path: Path, wanted: int) -> None:
    try:
        if not path.is_file():
            raise UserError(f"{path}: missing; an export's files belong together, {_AGAIN}")
        size = path.stat().st_size
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    if size != wanted:
        raise UserError(f"{path}: {size:,} bytes found, {wanted:,} wanted; {_AGAIN}")


def _sampled(path: Path) -> str:
    try:
        return sample(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
