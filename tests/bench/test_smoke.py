"""`make smoke` needs the Hub; its script is run here on the bundled model, with what is known of that."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TINY = {
    "architecture": "Qwen2ForCausalLM",
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 2048,
    "context_length": 2048,
    "eos_token_ids": (0, 2),
}


@pytest.fixture
def smoke(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = Path(__file__).parents[2] / "bench" / "smoke.py"
    spec = importlib.util.spec_from_file_location("smoke", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "DEFAULT_MODEL", "tiny")
    monkeypatch.setattr(module, "EXPECTED", TINY)
    monkeypatch.setattr(module, "PARAMETERS", 2_756_928)
    monkeypatch.setattr(module, "TABLES", 2 * 2048 * 16 * 4)
    monkeypatch.setattr(module, "PROMPT", [{"role": "user", "content": "What is the capital of France?"}])
    return module


@pytest.mark.thorough
def test_what_is_as_expected_passes(smoke: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert smoke.main() == 0
    assert capsys.readouterr().out.count("as expected") == 3


@pytest.mark.parametrize(
    ("name", "value"), [("EXPECTED", {**TINY, "head_dim": 64}), ("PARAMETERS", 3_000_000), ("ANSWER", "Rome")]
)
@pytest.mark.thorough
def test_what_is_not_as_expected_fails(name: str, value: object, smoke: ModuleType) -> None:
    setattr(smoke, name, value)
    assert smoke.main() == 1
