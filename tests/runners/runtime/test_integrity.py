"""What is seen at load of files that are not those that were written; and graphs that read other people's files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import psutil
import pytest

from qwen_onnx import export, load
from qwen_onnx.contract.manifest import read_manifest
from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.external_data import refuse_foreign_data
from qwen_onnx.runners.runtime.integrity import SAMPLED_PAGES, sample
from support.chats import copy_export, endless, write_chat_checkpoint
from support.damage import WEIGHTS, change_manifest, edit_graph, forge
from support.exports import ON_CPU
from support.refusals import refused


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy_export(endless(), tmp_path / "export")


def opened(folder: Path) -> Chat:
    return Chat(Runner(folder, ON_CPU))


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["prefill.onnx", "decode.grouped.onnx", "grow.onnx"])
@pytest.mark.parametrize("change", ["a bit", "another graph", "cut", "removed", "unlisted"])
def test_a_changed_graph_is_refused(name: str, change: str, folder: Path) -> None:
    """It is refused before the runtime's parser sees it."""
    path = folder / name
    match change:
        case "a bit":
            flip(path, path.stat().st_size // 2)
        case "another graph":
            shutil.copy(folder / "decode.onnx", path)
        case "cut":
            os.truncate(path, path.stat().st_size - 1)
        case "removed":
            path.unlink()
        case _:
            files = read_manifest(folder).files
            change_manifest(folder, files={key: spec for key, spec in files.items() if key != name})
    refused(opened, folder, mentions=(path,))


def test_weights_of_another_model_of_the_same_shape_are_refused(folder: Path, tmp_path: Path) -> None:
    """Though sizes are equal, as of a fine-tune's weights beside the graphs of its base."""
    other = export(
        write_chat_checkpoint(tmp_path / "other", seed=1, max_position_embeddings=4096), tmp_path / "x"
    )
    assert (other.folder / WEIGHTS).stat().st_size == (folder / WEIGHTS).stat().st_size
    shutil.copy(other.folder / WEIGHTS, folder / WEIGHTS)
    refused(opened, folder, mentions=(folder / WEIGHTS, "not the weights"))


def test_weights_that_were_cut_between_two_runs_are_refused(folder: Path) -> None:
    """To read beyond the end of a mapped file would kill the process."""
    opened(folder)
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - 4096)
    refused(opened, folder, mentions=(folder / WEIGHTS, "bytes found"))


@pytest.mark.parametrize("place", [0, -1, "a page"])
def test_changed_pages_of_weights_are_seen(place: int | str, folder: Path) -> None:
    """Header and end of the file are among them."""
    size = (folder / WEIGHTS).stat().st_size
    middle = (size - 4096) * 7 // (SAMPLED_PAGES - 1) + 2048
    flip(folder / WEIGHTS, middle if isinstance(place, str) else place)
    refused(opened, folder, mentions=(folder / WEIGHTS, "not the weights"))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_changed_texts_are_refused(name: str, folder: Path) -> None:
    """Of the same size or not."""
    flip(folder / name, 50)
    refused(opened, folder, mentions=(folder / name, "sha256"))


def test_an_older_export_without_samples_loads(folder: Path) -> None:
    change_manifest(folder, samples={})
    opened(folder)


def test_other_graphs_may_be_missing(folder: Path) -> None:
    """A CPU needs no graph for a GPU."""
    for name in ("score.onnx", "greedy.onnx", "prefill.cuda.onnx", "prefill.tensorrt.onnx"):
        (folder / name).unlink()
    opened(folder)


@pytest.mark.parametrize("content", [b"", b"x", b"y" * 4096, b"z" * 4097, b"a" * 70_000 + b"b"])
def test_files_of_any_size_have_a_sample(content: bytes, tmp_path: Path) -> None:
    """Also of less than a page; the last byte is in one."""
    path = tmp_path / "file"
    path.write_bytes(content)
    first = sample(path)
    assert sample(path) == first
    path.write_bytes(content[:-1] + b"!")
    assert sample(path) != first


# Other people's files.


def set_location(path: Path, location: str, which: int = 0) -> None:
    def edit(graph: onnx.GraphProto) -> None:
        stored = [tensor for tensor in graph.initializer if tensor.external_data]
        for entry in stored[which].external_data:
            if entry.key == "location":
                entry.value = location

    edit_graph(path, edit)


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime gets no graph with weights to see."""
    real = onnxruntime.InferenceSession

    def watched(path: Any, *arguments: Any, **options: Any) -> Any:
        assert Path(path).name == "grow.onnx", f"ONNX Runtime was given {path}"
        return real(path, *arguments, **options)

    monkeypatch.setattr(onnxruntime, "InferenceSession", watched)


@pytest.mark.parametrize("which", [0, -1])
@pytest.mark.parametrize(
    "location",
    ["/etc/passwd", "../secret", "a/../../secret", "secret", "", ".", "..", "tokenizer.json",
     "weights.safetensors\0x", "weights.safetensors/../x", "C:\\secret", "\\\\host\\x", "WEIGHTS.safetensors"],
)  # fmt: skip
@pytest.mark.usefixtures("unseen")
def test_external_data_elsewhere_never_reaches_the_runtime(location: str, which: int, folder: Path) -> None:
    """Though a downloaded export's hashes are forged."""
    (folder.parent / "secret").write_bytes((folder / WEIGHTS).read_bytes())
    set_location(folder / "prefill.onnx", location, which)
    forge(folder)
    refused(opened, folder, mentions=(folder / "prefill.onnx", "no weights file of this export"))


@pytest.mark.usefixtures("unseen")
def test_weights_that_are_a_link_out_of_the_folder_are_refused(folder: Path) -> None:
    """Under the name that the manifest has, too."""
    (folder / WEIGHTS).rename(folder.parent / "secret")
    (folder / WEIGHTS).symlink_to(folder.parent / "secret")
    refused(opened, folder, mentions=(folder / WEIGHTS, "link out of the folder"))


def hide_in_a_node(graph: onnx.GraphProto) -> None:
    tensor = onnx.TensorProto(data_type=1, dims=[1], data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="/etc/passwd")
    graph.node[0].attribute.add(name="hidden", type=onnx.AttributeProto.TENSOR).t.CopyFrom(tensor)


def hide_in_a_graph(graph: onnx.GraphProto) -> None:
    inner = onnx.GraphProto(name="inner")
    hide_in_a_node(graph)
    inner.node.append(graph.node[0])
    del graph.node[0].attribute[:]
    graph.node[0].attribute.add(name="body", type=onnx.AttributeProto.GRAPH).g.CopyFrom(inner)


def hide_in_sparse(graph: onnx.GraphProto) -> None:
    graph.sparse_initializer.add().values.external_data.add(key="location", value="/etc/passwd")


@pytest.mark.parametrize("hide", [hide_in_a_node, hide_in_a_graph, hide_in_sparse])
@pytest.mark.usefixtures("unseen")
def test_external_data_where_no_export_has_it_is_refused(
    hide: Callable[[onnx.GraphProto], None], folder: Path
) -> None:
    """Nodes hold tensors too, not initializers only."""
    edit_graph(folder / "prefill.onnx", hide)
    forge(folder)
    refused(opened, folder, mentions=(folder / "prefill.onnx", "external data in field"))


def message(number: int, content: bytes) -> bytes:
    """A field with a length, as protobuf has it; lengths below 16,384."""
    length = (
        bytes([len(content)]) if len(content) < 128 else bytes([len(content) & 127 | 128, len(content) >> 7])
    )
    return bytes([number << 3 | 2]) + length + content


GOOD = message(2, WEIGHTS.encode())
KEY = message(1, b"location")


@pytest.mark.parametrize(
    "entry",
    [
        KEY + GOOD + message(2, b"/etc/passwd"),  # of a field that stands twice, the last counts
        message(2, b"/etc/passwd") + KEY,
        message(3, b"\x6a\x1d") + KEY + GOOD + message(2, b"/etc/passwd"),
        message(1, b"x") + GOOD + KEY + message(2, b"/etc/passwd"),
        b"\x0a\x88\x00location" + b"\x12\x8b\x80\x00/etc/passwd",  # numbers longer than need be
        KEY + b"\x92\x00\x0b/etc/passwd",
    ],
)
def test_entries_that_other_readers_read_otherwise_are_refused(entry: bytes, folder: Path) -> None:
    """These bytes look like one thing to a scan and like another to the runtime."""
    content = message(7, message(5, message(13, entry)))
    model = onnx.load_model_from_string(content)
    assert model.graph.initializer[0].external_data[0].value == "/etc/passwd"
    arguments = (folder / "x.onnx", content, "x.onnx", read_manifest(folder))
    refused(refuse_foreign_data, *arguments, mentions=("x.onnx", "/etc/passwd"))


@pytest.mark.parametrize(
    "content",
    [
        message(7, message(5, message(13, KEY + GOOD)))[:-1],
        message(7, message(5, message(13, KEY + b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"))),
        message(7, message(5, b"\x6b" + KEY)),
        b"\xff" * 20 + b"location",
        message(7, b"\x80\x80" + message(13, KEY)),
    ],
)
def test_bytes_that_are_no_protobuf_are_refused(content: bytes, folder: Path) -> None:
    arguments = (folder / "x.onnx", content, "x.onnx", read_manifest(folder))
    refused(refuse_foreign_data, *arguments, mentions=("x.onnx", "not a graph of an export"))


def test_every_location_is_found(folder: Path) -> None:
    """Of every initializer of every graph."""
    manifest = read_manifest(folder)
    bare = change_manifest(folder, files={WEIGHTS: manifest.files[WEIGHTS]})
    for graph in manifest.graphs:
        path = folder / graph.file
        model = onnx.load(path, load_external_data=False)
        refuse_foreign_data(path, model.SerializeToString(), graph.file, bare)
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = "x"
                    content = model.SerializeToString()
                    refused(refuse_foreign_data, path, content, graph.file, bare, mentions=("'x'",))
                    entry.value = WEIGHTS


@pytest.mark.parametrize("layout", ["transformers.js", "optimum"])
def test_layouts_load(layout: str, tmp_path: Path) -> None:
    """Locations count from the graph's folder, names in the manifest from the export's."""
    folder = export("tiny", tmp_path / "out", layout=layout).folder
    assert next(load(folder, provider="cpu").generate("Hi", max_new_tokens=1)).token_id >= 0


@pytest.mark.skipif(
    not hasattr(psutil.Process, "io_counters"), reason="the system does not count what is read"
)
def test_of_large_files_some_pages_are_read(tmp_path: Path) -> None:
    """To hash gigabytes at each start would take too long."""
    large = tmp_path / "weights.safetensors"
    with large.open("wb") as file:
        file.truncate(8 << 30)  # holes: no such disk is needed
    before = psutil.Process().io_counters().read_chars
    sample(large)
    assert psutil.Process().io_counters().read_chars - before < 1 << 20


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_missing_texts_are_refused(name: str, folder: Path) -> None:
    """They are not taken for files that say nothing."""
    (folder / name).unlink()
    refused(opened, folder, mentions=(folder / name, "missing"))
