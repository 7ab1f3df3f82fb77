"""No export succeeds that no command can run afterwards: it runs a token before it appears."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from qwen_onnx import UserError, export, load
from qwen_onnx.exports.publish import trial
from qwen_onnx.runners.model import open_graph
from qwen_onnx.runners.model.executors.fixed_shape import FixedShape
from qwen_onnx.runners.model.logits_model import LogitsModel
from support.chats import write_chat_checkpoint
from support.checkpoints import QWEN3, write_checkpoint
from support.command import command
from support.refusals import refused
from support.text_fixtures import write_folder

pytestmark = pytest.mark.thorough

REFUSES = "{{ raise_exception('no users here') }}"
KINDS = [
    {"dtype": "f32"}, {"dtype": "f16"}, {"dtype": "bf16"}, {"dtype": "int8"}, {"dtype": "int4"},
    {"target": "portable"}, {"target": "portable", "dtype": "f16", "split": True}, {"layout": "optimum"},
    {"layout": "transformers.js", "dtype": "f16"}, {"layout": "onnxruntime-genai"},
    {"layout": "triton", "dtype": "int8"}, {"dtype": "f16", "max_context": 20},
]  # fmt: skip


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each step that a model computes."""
    found: list[int] = []
    append = LogitsModel._append

    def noted(self: LogitsModel, cache: Any, input_ids: np.ndarray, *others: Any) -> Any:
        found.append(input_ids.shape[1])
        return append(self, cache, input_ids, *others)

    monkeypatch.setattr(LogitsModel, "_append", noted)
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_chat_checkpoint(
        tmp_path / "model", **{**QWEN3, "tie_word_embeddings": False, "vocab_size": 400}
    )


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_a_prompt_and_a_token_are_run_of_every_kind(
    options: dict[str, Any], model: Path, tmp_path: Path, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the graph of prompts and that of single tokens, over weights as they lie: in little memory."""
    lean: list[bool] = []
    real = open_graph.open_session

    def noted(*args: Any, **settings: Any) -> Any:
        lean.append(settings["lean"])
        return real(*args, **settings)

    monkeypatch.setattr(open_graph, "open_session", noted)
    made = export(model, tmp_path / "out", **options)
    assert steps[0] > 1
    assert steps[1] == 1
    measured = options.get("dtype") in ("int8", "int4")  # what quantizing cost, by a session as users have it
    assert (len(steps) > 2) is measured
    assert lean[0]
    assert all(lean) is not measured
    assert not [note for note in made.notes if "not run" in note]
    steps.clear()
    export(model, tmp_path / "unchecked", check=False, **options)
    assert steps == []


@pytest.mark.parametrize("max_context", [2, 3, 4, 64])
@pytest.mark.parametrize("dtype", ["f32", "int8"])
def test_a_context_of_a_few_tokens_is_run_too(
    dtype: str, max_context: int, tmp_path: Path, model: Path
) -> None:
    made = export(model, tmp_path / "out", max_context=max_context, dtype=dtype)
    tokens = [*load(made.folder, provider="cpu").generate([1], max_new_tokens=1)]
    assert len(tokens) == 1


def test_a_context_without_room_for_an_answer_is_refused(model: Path, tmp_path: Path) -> None:
    refused(export, model, tmp_path / "out", max_context=1, mentions=("the context holds 1 with the answer",))


def test_without_a_tokenizer_it_runs_ids(tmp_path: Path, steps: list[int]) -> None:
    write_checkpoint(tmp_path / "model", QWEN3)
    export(tmp_path / "model", tmp_path / "out")
    assert steps == [1, 1]


def poison(folder: Path, number: float) -> None:
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][:] = number
    safetensors.numpy.save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("layout", ["plain", "triton"])
def test_what_no_command_could_run_is_refused_and_the_earlier_export_stays(
    layout: str, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "to"
    before = export(model, out, layout=layout).folder
    held = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    poison(model, 3e38)
    refused(export, model, out, layout=layout, force=True, mentions=("logits are not finite", "check=False"))
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == held
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "to"]
    export(model, out, layout=layout, force=True, check=False)
    refused(load(before, provider="cpu"), "Hi", mentions=("logits are not finite",))


def test_what_is_said_names_the_folder_that_was_asked_for(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the one beside it that is gone by then."""

    def odd(folder: Path, *_: object) -> list[str]:
        raise UserError(f"{folder / 'tokenizer.json'}: odd")

    monkeypatch.setattr(trial, "_run", odd)
    line = refused(export, model, tmp_path / "out", mentions=(tmp_path / "out" / "tokenizer.json",))
    assert ".new-" not in line


def test_numbers_that_overflow_are_found_at_export(model: Path, tmp_path: Path) -> None:
    poison(model, 3e38)
    poisoned = command("export", model, tmp_path / "out")
    assert "the logits are not finite" in poisoned.error
    assert not (tmp_path / "out").exists()
    assert command("export", model, tmp_path / "out", "--no-check").code == 0


def test_a_decode_graph_that_does_not_run_is_found(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise UserError("this graph is broken")

    monkeypatch.setattr(FixedShape, "advance", broken)  # of f32, that of single tokens alone
    refused(export, model, tmp_path / "out", mentions=("would not run", "this graph is broken"))
    assert not (tmp_path / "out").exists()


def test_a_template_that_takes_no_question_is_a_note(model: Path, tmp_path: Path) -> None:
    """`run --raw` works."""
    write_folder(model, {"tokenizer_config.json": {"eos_token": "<|im_end|>", "chat_template": REFUSES}})
    made = export(model, tmp_path / "out")
    [note] = [note for note in made.notes if "--raw" in note]
    assert "no users here" in note
    assert (
        command("run", made.folder, "--raw", "-p", "Hi", "--max-new-tokens", 1, "--provider", "cpu").code == 0
    )


def test_where_memory_is_short_it_is_said_that_it_was_not_run(
    model: Path, tmp_path: Path, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "free_memory", lambda: 1000)
    made = export(model, tmp_path / "out", dtype="f16")
    [note] = made.notes
    assert note.startswith(f"{tmp_path / 'out'}: not run: about ")
    assert "1,000 are free" in note
    assert steps == []


def test_memory_that_ends_meanwhile_is_said_too(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*args: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(LogitsModel, "_append", ended)
    [note] = export(model, tmp_path / "out").notes
    assert note == f"{tmp_path / 'out'}: not run: out of memory"
