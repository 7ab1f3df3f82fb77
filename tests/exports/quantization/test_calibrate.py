"""A calibrated export: what it gains, what it says, what a kill leaves, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from qwen_onnx.checkpoints.checkpoint import Checkpoint, open_checkpoint
from qwen_onnx.contract.json_file import from_json
from qwen_onnx.contract.manifest import read_manifest
from qwen_onnx.contract.quant import Quality, QuantConfig, QuantPlan
from qwen_onnx.exports import calibrated, quality
from qwen_onnx.exports.quality import compare, relative_error
from qwen_onnx.exports.quantization import calibrate as module
from qwen_onnx.exports.quantization.budget import matrix_weights, measured_choices, plan_of
from qwen_onnx.exports.quantization.calibrate import calibrate
from qwen_onnx.exports.quantization.text import CalibrationText, calibration_text, held_out_ids
from qwen_onnx.runners.text.template.chat_template import ChatTemplate
from qwen_onnx.runners.text.tokenizer import Tokenizer
from support.chats import copy_export, tiny
from support.checkpoints import CONFIGS, write_checkpoint
from support.command import command
from support.exports import IDS

TINY = Path(__file__).parents[3] / "qwen_onnx" / "tiny"
PLAN = QuantPlan(
    QuantConfig(4, 32, zero_points=True, scales="F16"), QuantConfig(4, 32, zero_points=True, scales="F16")
)
TEXT = CalibrationText("some", IDS[:, :128].reshape(-1, 32))


@pytest.fixture
def random(tmp_path: Path) -> Checkpoint:
    write_checkpoint(tmp_path / "checkpoint", CONFIGS["qwen3"])
    return open_checkpoint(tmp_path / "checkpoint")


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


few_windows = pytest.mark.usefixtures("few_windows")

# What is done survives a kill.


def test_a_kill_loses_one_layer_at_most(
    random: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run rounds what the first did not, and all bytes are those of a run that nobody stopped."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    calibrate(random, PLAN, TEXT, whole, lambda done, what: None)

    def kill(done: float, what: str) -> None:
        if what == "layer 2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(random, PLAN, TEXT, broken, kill)
    (broken / "layer.2.unfinished").write_bytes(b"half")
    rounded: list[str] = []
    real = module._Calibration._round

    def count(own: module._Calibration, names: list[str], part: str, *more: object, **given: float) -> object:
        rounded.append(part)
        return real(own, names, part, *more, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(module._Calibration, "_round", count)
    calibrate(random, PLAN, TEXT, broken, lambda done, what: None)
    assert {part.partition(".")[0] for part in rounded} == {"2", "head"}
    assert files_of(broken) == files_of(whole)


@pytest.mark.parametrize("other", ["text", "plan", "weights"])
def test_what_was_done_of_something_else_is_done_anew(other: str, random: Checkpoint, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    calibrate(random, PLAN, TEXT, folder, lambda done, what: None)
    before = files_of(folder)
    text, plan, checkpoint = TEXT, PLAN, random
    if other == "text":
        text = CalibrationText("some", TEXT.windows[:, ::-1].copy())
    elif other == "plan":
        plan = QuantPlan(QuantConfig(4, 16), PLAN.head)
    else:
        write_checkpoint(tmp_path / "another", CONFIGS["qwen3"], seed=5)
        checkpoint = open_checkpoint(tmp_path / "another")
    calibrate(checkpoint, plan, text, folder, lambda done, what: None)
    after = files_of(folder)
    assert before.keys() == after.keys()
    assert before["layer.0.safetensors"] != after["layer.0.safetensors"]


@few_windows
def test_ctrl_c_keeps_the_layers_and_an_error_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module._Calibration.run
    for error, kept in ((KeyboardInterrupt, True), (MemoryError, False)):

        def stop(own: module._Calibration, step: str, error: type[BaseException] = error) -> object:
            if step == "layer 1":
                raise error
            return real(own, step)

        with monkeypatch.context() as patch:
            patch.setattr(module._Calibration, "run", stop)
            out = tmp_path / error.__name__ / "out"
            assert command("export", "tiny", out, "--dtype", "int4").code != 0
        left = [path.name for path in out.parent.iterdir()] if out.parent.exists() else []
        assert left == ([".out.calibration"] if kept else [])
    ran = command("export", "tiny", tmp_path / "KeyboardInterrupt" / "out", "--dtype", "int4")
    assert ran.code == 0
    assert [path.name for path in (tmp_path / "KeyboardInterrupt").iterdir()] == ["out"]


# What it gains, and what is said of it.


@few_windows
def test_calibrated_is_nearer_to_the_checkpoint(tmp_path: Path) -> None:
    """In the same blocks, and the manifest says what was read."""
    found = {}
    for how in ("auto", "none"):
        ran = command(
            "export", "tiny", tmp_path / how, "--dtype", "int4", "--calibrate", how, "--block-size", 64,
            "--head-block-size", 64,
        )  # fmt: skip
        assert ran.code == 0
        assert "quality: KL " in ran.out
        found[how] = read_manifest(tmp_path / how)
    auto, none = found["auto"], found["none"]
    assert auto.quality is not None
    assert none.quality is not None
    assert auto.quality.kl < 0.75 * none.quality.kl
    assert auto.quality.positions == none.quality.positions > 1000
    assert auto.quality.checkpoint_perplexity == none.quality.checkpoint_perplexity
    assert auto.calibration is not None
    assert (auto.calibration.text, none.calibration) == ("auto", None)
    assert f"calibrated on {auto.calibration.tokens:,} tokens" in command("info", tmp_path / "auto").out
    assert command("check", tmp_path / "auto", "--against", "tiny").code == 0


@few_windows
def test_a_file_of_ones_own(tmp_path: Path) -> None:
    text = tmp_path / "own.txt"
    text.write_text("The owl sleeps by day. " * 600)
    assert command("export", "tiny", tmp_path / "out", "--dtype", "int4", "--calibrate", text).code == 0
    calibration = read_manifest(tmp_path / "out").calibration
    assert calibration is not None
    assert calibration.text == "own.txt"
    text.write_text("Too short.")
    wanted = "tokens, 512 or more are wanted"
    assert wanted in command("export", "tiny", tmp_path / "no", "--dtype", "int4", "--calibrate", text).error
    missing = command(
        "export", "tiny", tmp_path / "no", "--dtype", "int4", "--calibrate", tmp_path / "none.txt"
    )
    assert "no such file" in missing.error
    assert not (tmp_path / "no").exists()


def test_a_loss_beyond_the_bound_is_said_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of the export, in `info`, and as the verdict of `check`."""
    monkeypatch.setattr(quality, "KL_BOUNDS", {"int8": 1e-9})
    ran = command("export", "tiny", tmp_path / "out", "--dtype", "int8")
    assert ran.code == 0
    said = "its answers are not the checkpoint's any more"
    assert said in ran.err
    assert said in command("info", tmp_path / "out").out
    checked = command("check", tmp_path / "out", "--against", "tiny")
    assert checked.code == 1
    assert said in checked.err


def test_other_weights_are_found_in_a_calibrated_export(tmp_path: Path) -> None:
    """Their bytes cannot be made again, but they are near the checkpoint's, or they are not."""
    folder = copy_export(tiny("int4"), tmp_path / "tiny")
    write_checkpoint(tmp_path / "other", json.loads((TINY / "config.json").read_text()))
    checked = command("check", folder, "--against", tmp_path / "other")
    assert checked.code == 1
    assert "differs from the checkpoint's by" in checked.err


def test_without_a_tokenizer(random: Checkpoint, tmp_path: Path) -> None:
    ran = command("export", random.folder, tmp_path / "out", "--dtype", "int4")
    assert ran.code == 0
    assert "not calibrated, for want of a tokenizer" in ran.err
    assert read_manifest(tmp_path / "out").quality is None
    for more in (("--calibrate", "auto"), ("--bits", "5")):
        wanted = "has no tokenizer.json to read a text with"
        assert wanted in command("export", random.folder, tmp_path / "no", "--dtype", "int4", *more).error
    checked = command("check", tmp_path / "out", "--against", random.folder)
    assert "of fixed ids, for want of a tokenizer" in checked.err


# The texts.


def test_the_texts_are_of_several_kinds_and_none_is_measured_with_what_it_was_tuned_on() -> None:
    tokenizer, template = Tokenizer.from_folder(TINY), ChatTemplate.from_folder(TINY)
    read = calibration_text("auto", tokenizer, template, context_length=4096, columns=4864)
    held_out = held_out_ids(tokenizer, template, context_length=4096)
    assert read.windows.shape[1] == held_out.shape[1] == 512
    assert 8192 <= read.windows.size <= 32 * 512
    assert held_out.size > 1000
    text = tokenizer.backend.decode(read.windows.ravel().tolist(), skip_special_tokens=False)
    for part in ("<|im_start|>assistant", "def ", "SELECT", "的", "der "):
        assert part in text
    runs = {tuple(ids[i : i + 24]) for ids in read.windows.tolist() for i in range(len(ids) - 23)}
    assert not any(tuple(ids[i : i + 24]) in runs for ids in held_out.tolist() for i in range(len(ids) - 23))


def test_a_small_model_reads_less() -> None:
    """Ten tokens for each input of its widest matrix, which is 16,384 tokens at most."""
    tokenizer = Tokenizer.from_folder(TINY)
    for columns, windows in ((512, 10), (1024, 20), (18944, 32)):
        read = calibration_text("auto", tokenizer, None, context_length=4096, columns=columns)
        assert len(read.windows) == windows


def test_windows_fit_a_short_context() -> None:
    tokenizer = Tokenizer.from_folder(TINY)
    assert calibration_text("auto", tokenizer, None, context_length=100, columns=512).windows.shape[1] == 100
    assert held_out_ids(tokenizer, None, context_length=100).shape[1] == 100


# Bits where they count.


@pytest.fixture(scope="module")
def choices() -> tuple[Checkpoint, dict[str, list]]:
    checkpoint = open_checkpoint(TINY)
    tokenizer, template = Tokenizer.from_folder(TINY), ChatTemplate.from_folder(TINY)
    text = calibration_text("auto", tokenizer, template, context_length=4096, columns=512)
    few = CalibrationText(text.name, text.windows[:4])
    return checkpoint, measured_choices(checkpoint, PLAN, few, lambda done: None)


def bits_of(plan: QuantPlan, checkpoint: Checkpoint) -> float:
    from qwen_onnx.exports.weights import quant_of

    spent = 0.0
    for tensor in checkpoint.tensors.values():
        if (quant := quant_of(tensor, plan)) is not None:
            spent += quant.bits_a_weight(tensor.shape[1]) * math.prod(tensor.shape)
    return spent / matrix_weights(checkpoint)


@pytest.mark.parametrize("bits", [4.7, 5.0, 6.0, 8.6])
def test_a_budget_is_kept_and_nearly_spent(bits: float, choices: tuple[Checkpoint, dict]) -> None:
    checkpoint, found = choices
    plan = plan_of(bits, PLAN, found, matrix_weights(checkpoint))
    assert bits - 0.35 < bits_of(plan, checkpoint) <= bits


def test_more_bits_never_lose_more(choices: tuple[Checkpoint, dict]) -> None:
    checkpoint, found = choices
    losses = []
    for bits in (4.7, 5.5, 6.5, 7.5):
        plan = plan_of(bits, PLAN, found, matrix_weights(checkpoint))
        columns = {part: own[0] for part, own in found.items()}
        losses.append(
            sum(
                next(each.loss for each in found[part] if each.quant.bits == quant.bits)
                for part, quant in ((part, dict(plan.parts).get(part, plan.head if part == "head" else first.quant))
                                    for part, first in columns.items())
            )
        )  # fmt: skip
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > 2 * losses[-1]


def test_the_estimate_of_the_head_is_what_its_error_makes(choices: tuple[Checkpoint, dict]) -> None:
    """To the second order: half the variance of the error of the logits."""
    rng = np.random.default_rng(0)
    z, d = rng.standard_normal(50) * 3, rng.standard_normal(50) * 0.01
    p = np.exp(z) / np.exp(z).sum()
    q = np.exp(z + d) / np.exp(z + d).sum()
    exact = np.sum(p * np.log(p / q))
    estimate = (np.sum(p * d * d) - np.sum(p * d) ** 2) / 2
    assert estimate == pytest.approx(exact, rel=0.05)


@few_windows
def test_an_export_with_a_budget_runs_and_says_what_each_part_got(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert command("export", "tiny", out, "--dtype", "int4", "--bits", "5.5").code == 0
    kinds = set(read_manifest(out).quantized.values())
    assert {quant.bits for quant in kinds} == {4, 8}
    assert command("run", out, "-p", "What is the capital of France?", "--provider", "cpu").out == (
        "The capital of France is Paris.\n"
    )
    assert command("check", out, "--against", "tiny").code == 0
    said = command("info", out).out
    assert "to 8 bits" in said
    assert "to 4 bits" in said


@few_windows
@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--dtype", "int8", "--bits", "5"), "--bits is for int4"),
        (("--dtype", "int4", "--bits", "5", "--calibrate", "none"), "drop --calibrate none"),
        (("--dtype", "int4", "--bits", "4.1"), "is the least with these blocks"),
        (("--dtype", "int4", "--bits", "11"), "--bits 11"),
        (("--dtype", "f16", "--calibrate", "auto"), "--calibrate is for int8 and int4"),
    ],
)
def test_wrong_options(more: tuple[str, ...], words: str, tmp_path: Path) -> None:
    assert words in command("export", "tiny", tmp_path / "out", *more).error
    assert not (tmp_path / "out").exists()
    assert list(tmp_path.iterdir()) == []


# The measure.


def test_quality_by_hand() -> None:
    """Two positions of three, since the last of a window predicts nothing."""
    windows = np.array([[0, 1, 0]])
    wanted = np.log(np.array([[0.5, 0.5], [0.9, 0.1], [0.5, 0.5]], np.float32))
    found = np.log(np.array([[0.25, 0.75], [0.8, 0.2], [0.5, 0.5]], np.float32))
    result = compare(windows, iter([wanted]), iter([found]))
    kl = [
        0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75),
        0.9 * math.log(0.9 / 0.8) + 0.1 * math.log(0.5),
    ]
    assert result.positions == 2
    assert result.kl == pytest.approx(sum(kl) / 2, rel=1e-5)
    assert result.top1 == 0.5
    assert result.perplexity == pytest.approx(math.exp(-(math.log(0.75) + math.log(0.8)) / 2), rel=1e-5)
    assert result.checkpoint_perplexity == pytest.approx(
        math.exp(-(math.log(0.5) + math.log(0.9)) / 2), rel=1e-5
    )


def test_pieces_of_logits_may_be_of_any_size() -> None:
    rng = np.random.default_rng(0)
    windows = rng.integers(0, 7, (3, 10))
    wanted, found = (rng.standard_normal((30, 7)).astype(np.float32) for _ in range(2))
    whole = compare(windows, iter([wanted]), iter([found]))
    cut: Callable[[np.ndarray], list[np.ndarray]] = lambda logits: np.array_split(logits, 6)  # noqa: E731
    again = compare(windows, iter(cut(wanted)), iter(cut(found)))
    assert again.positions == whole.positions == 27
    assert again.kl == pytest.approx(whole.kl)
    assert again.top1 == whole.top1


def test_relative_error(random: Checkpoint) -> None:
    tensor = random.tensors["model.layers.0.mlp.down_proj.weight"]
    values = tensor.numpy().astype(np.float32)
    assert relative_error(values, tensor) == 0
    assert relative_error(values * np.float32(1.1), tensor) == pytest.approx(0.1, rel=1e-3)
    assert relative_error(-values, tensor) == pytest.approx(2)


def test_true_is_read_as_true() -> None:
    raw = {"bits": 4, "block_size": 32, "zero_points": True, "scales": "F16"}
    assert from_json(QuantConfig, raw) == QuantConfig(4, 32, True, "F16")
    before_zero_points = {"bits": 4, "block_size": 64}
    assert from_json(QuantConfig, before_zero_points) == QuantConfig(4, 64, False, "F32")
    for wrong in (1, "true", None):
        with pytest.raises(TypeError):
            from_json(QuantConfig, raw | {"zero_points": wrong})
    with pytest.raises(TypeError):
        from_json(
            Quality,
            {"positions": True, "kl": 1.0, "top1": 1.0, "perplexity": 1.0, "checkpoint_perplexity": 1.0},
        )


@few_windows
def test_time_is_said_before_it_is_spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds, said in (
        (400.0, "about 7 minutes"),
        (42.0, "about 50 seconds"),
        (9000.0, "about 2.5 hours"),
    ):
        monkeypatch.setattr(calibrated, "estimated_seconds", lambda *_, seconds=seconds: seconds)
        ran = command("export", "tiny", tmp_path / f"{seconds:.0f}", "--dtype", "int4", "--no-check")
        assert f"calibrating: {said} on this machine" in ran.err


def test_nothing_is_measured_without_the_memory_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The export is there all the same, and says what is missing."""
    monkeypatch.setattr("qwen_onnx.exports.exporter.free_memory", lambda: 1000)
    ran = command("export", "tiny", tmp_path / "out", "--dtype", "int8")
    assert ran.code == 0
    assert "quality: not measured: about" in ran.err
    assert read_manifest(tmp_path / "out").quality is None
