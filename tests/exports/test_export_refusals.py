"""Exports that must not happen: one line that names what is at fault, and everything left as it was."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from qwen_onnx import UserError, contract
from qwen_onnx.checkpoints.checkpoint import INDEX_FILE
from support.checkpoints import QWEN2, write_checkpoint
from support.exporting import export_model
from support.refusals import refused
from support.text_fixtures import byte_level_tokenizer, tokenizer_json

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
Tensors = dict[str, np.ndarray]


class Case(NamedTuple):
    """What is done to a checkpoint's tensors, and what the error then has to name."""

    damage: Callable[[Tensors], Any]
    mentions: tuple[str, ...]


CASES = {
    "missing": Case(lambda tensors: tensors.pop(NORM), (NORM, "model")),
    "all but one missing": Case(lambda tensors: [tensors.pop(n) for n in list(tensors) if n != NORM], ("37",)),
    "misshapen": Case(
        lambda tensors: tensors.update({NORM: tensors[NORM][:-1].copy()}),
        ("model.safetensors", NORM, "[63]", "[64]"),
    ),
    "transposed": Case(
        lambda tensors: tensors.update({EMBEDDING: tensors[EMBEDDING].T.copy()}),
        ("model.safetensors", EMBEDDING, "[64, 320]", "[320, 64]"),
    ),
} | {
    name: Case(
        lambda tensors, dtype=dtype: tensors.update({NORM: tensors[NORM].astype(dtype)}),
        ("model.safetensors", NORM, name, "BF16"),
    )
    for name, dtype in {
        "I64": np.int64, "F64": np.float64, "U8": np.uint8, "BOOL": np.bool_,
        "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    }.items()
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "model", QWEN2, shards=2)
    return tmp_path / "model"


@pytest.fixture
def assert_untouched(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Export, which must be refused; verify that nothing was made, changed or left."""
    monkeypatch.chdir(tmp_path)

    def export(
        *, out: Path = tmp_path / "new" / "out", mentions: tuple[object, ...] = (), **options: Any
    ) -> str:
        before = snapshot(tmp_path)
        line = refused(export_model, str(model), out, mentions=mentions, **options)
        assert snapshot(tmp_path) == before
        return line

    return export


def snapshot(folder: Path) -> dict[Path, tuple[bytes, int]]:
    return {
        path: (path.read_bytes() if path.is_file() else b"", path.lstat().st_nlink if path.is_file() else 0)
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_tensors_that_do_not_fit_the_config(
    case: Case, model: Path, assert_untouched: Callable[..., str]
) -> None:
    """They are refused before anything is written, and file and tensor are named."""
    tensors = write_checkpoint(model, QWEN2)
    for file in (FIRST, SECOND, INDEX_FILE):
        (model / file).unlink()
    case.damage(tensors)
    safetensors.numpy.save_file(tensors, model / "model.safetensors")
    assert_untouched(mentions=case.mentions)


@pytest.mark.parametrize(
    ("options", "mentions"),
    [
        ({"max_context": 0}, ("max_context 0", "1 or more wanted")),
        ({"max_context": -1}, ("max_context -1", "1 or more wanted")),
        ({"max_context": 129}, ("max_context=129", 128)),
        ({"dtype": "int2"}, ("int2", "f32", "f16", "bf16", "int4")),
        ({"dtype": "F31"}, ("F31", "f32")),
        ({"revision": "main"}, ("revision='main'",)),
        ({"link": True, "dtype": "f16"}, ("link", FIRST, "f32", "f16")),
    ],
)
def test_options_that_do_not_fit_the_model(
    options: dict[str, Any], mentions: tuple[Any, ...], assert_untouched: Callable[..., str]
) -> None:
    """No option is passed over, or found wrong after the weights were written."""
    assert_untouched(mentions=mentions, **options)


def test_link_across_file_systems(
    monkeypatch: pytest.MonkeyPatch, assert_untouched: Callable[..., str]
) -> None:
    """Nothing is copied instead, and the first link does not stay behind when the second fails."""
    link, made = os.link, []

    def link_once(source: Any, target: Any) -> None:
        if made:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source), None, str(target))
        made.append(target)
        link(source, target)

    monkeypatch.setattr(os, "link", link_once)
    assert_untouched(link=True, mentions=("link", SECOND, os.strerror(errno.EXDEV)))
    assert made


def test_link_of_a_file_that_an_export_would_overwrite(
    model: Path, assert_untouched: Callable[..., str]
) -> None:
    """A hard link is the checkpoint's own file, which must not be emptied."""
    (model / SECOND).rename(model / contract.EXTRA_FILE)
    index = (model / INDEX_FILE).read_text()
    (model / INDEX_FILE).write_text(index.replace(SECOND, contract.EXTRA_FILE))
    assert_untouched(link=True, mentions=("link", contract.EXTRA_FILE))


def test_tokenizer_larger_than_the_embedding(model: Path, assert_untouched: Callable[..., str]) -> None:
    """Its ids would have no row (D5 in docs/faults.md)."""
    ids = byte_level_tokenizer().get_vocab_size()
    write_checkpoint(model, {**QWEN2, "vocab_size": ids - 1}, shards=2)
    (model / "tokenizer.json").write_text(tokenizer_json())
    assert_untouched(mentions=("tokenizer.json", ids - 1))


@pytest.mark.parametrize("content", ["[]", "{}", '{"prompt_ids": 1, "token_ids": [], "margins": []}'])
def test_golden_ids_that_are_none(model: Path, assert_untouched: Callable[..., str], content: str) -> None:
    """Any file may have that name in a model's folder."""
    (model / "golden.json").write_text(content)
    assert_untouched(mentions=("golden.json",))


def test_value_too_large_for_f16(model: Path, assert_untouched: Callable[..., str]) -> None:
    """The tensor, its file and the number are named."""
    tensors = safetensors.numpy.load_file(model / SECOND)
    tensors[NORM][3] = 7e4
    safetensors.numpy.save_file(tensors, model / SECOND)
    assert_untouched(dtype="f16", mentions=(SECOND, NORM, "7e+04", "f16"))


def test_out_that_is_in_use(model: Path, tmp_path: Path, assert_untouched: Callable[..., str]) -> None:
    """With --force an export is replaced, and nothing else."""
    export_model(str(model), tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    assert_untouched(out=tmp_path / "out", mentions=("out", "force=True"))
    for force in (False, True):
        assert_untouched(out=tmp_path / "mine", force=force, mentions=("mine", "not empty"))
        assert_untouched(out=tmp_path / "mine" / "thesis.txt", force=force, mentions=("thesis.txt",))
        assert_untouched(out=model, force=force)


@pytest.mark.parametrize("link", [False, True])
def test_disk_that_is_too_small(
    monkeypatch: pytest.MonkeyPatch, assert_untouched: Callable[..., str], link: bool
) -> None:
    """The free space is looked at before anything is written."""
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=8_000))
    assert_untouched(link=link, mentions=("8,000 bytes are free",))


@pytest.mark.parametrize("force", [False, True])
def test_disk_that_fills_up_meanwhile(
    model: Path, tmp_path: Path, assert_untouched: Callable[..., str], force: bool
) -> None:
    """Nothing of the new export is left, and the earlier one is as it was."""
    if force:
        export_model(str(model), tmp_path / "out", dtype="bf16")

    def fail_half_way(done: int, total: int) -> None:
        if 2 * done > total:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "out"
    assert_untouched(out=out, force=force, progress=fail_half_way, mentions=(out, os.strerror(errno.ENOSPC)))


def test_ctrl_c_leaves_nothing(model: Path, tmp_path: Path) -> None:
    """No hidden folder stays behind."""

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    before = snapshot(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        export_model(str(model), tmp_path / "new" / "out", progress=interrupt)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "change", [lambda path: os.truncate(path, 20_001), os.unlink], ids=["cut", "removed"]
)
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_source_that_changes_meanwhile(
    model: Path, tmp_path: Path, change: Callable[[Path], None], dtype: str
) -> None:
    """A download or a training run may write to it."""
    kept = (model / SECOND).read_bytes()

    def spoil(done: int, total: int) -> None:
        if (model / SECOND).exists() and (model / SECOND).stat().st_size == len(kept):
            change(model / SECOND)

    refused(
        export_model, str(model), tmp_path / "out", dtype=dtype, progress=spoil, mentions=(model / SECOND,)
    )
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_folder_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, assert_untouched: Callable[..., str]
) -> None:
    """It may be somebody else's."""

    def deny(path: Path) -> bool:
        if path.name == "adapter_config.json":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return exists(path)

    exists = Path.exists
    monkeypatch.setattr(Path, "exists", deny)
    assert_untouched(mentions=("adapter_config.json", os.strerror(errno.EACCES)))


def test_layers_that_cannot_be_there_are_refused_before_graphs_are_built(tmp_path: Path) -> None:
    """config.json says a million layers, there are tensors of three."""
    write_checkpoint(tmp_path / "model", QWEN2)
    raw = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 1_000_000}))
    with pytest.raises(UserError, match="says 1000000 layers"):
        export_model(str(tmp_path / "model"), tmp_path / "out")
