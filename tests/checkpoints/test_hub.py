"""What a user gets for MODEL, from a Hub that runs in a thread of the test.

huggingface_hub reads HF_ENDPOINT and HF_HOME when it is imported, so each download is a process of its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest

import qwen_onnx.checkpoints.hub
from qwen_onnx.checkpoints.hub import ModelSource, resolve_model
from qwen_onnx.errors import UserError
from support.hub_server import COMMIT, Hub, serve
from support.patience import PATIENCE

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 8,
}
WANTED = {
    "config.json": json.dumps(CONFIG).encode(),
    "generation_config.json": b'{"eos_token_id": 1}',
    "tokenizer.json": b'{"model": {}}',
    "tokenizer_config.json": b'{"bos_token": null}',
    "special_tokens_map.json": b'{"eos_token": "<e>"}',
    "added_tokens.json": b'{"<e>": 1}',
    "vocab.json": '{"é": 0}'.encode(),
    "merges.txt": b"#version\na b\n",
    "chat_template.jinja": b"{{ messages }}\r\n",
    "LICENSE": b"Apache",
    "model.safetensors": bytes(range(256)) * 8,
}
UNWANTED = {
    "README.md": b"card",
    "pytorch_model.bin": b"pickle",
    "flax_model.msgpack": b"flax",
    "modeling_qwen2.py": b"raise SystemExit",
    "onnx/model.onnx": b"onnx",
    "model.fp16.safetensors": b"another variant",
    "original/config.json": b"{}",
}
CHILD = """
import sys
from qwen_onnx.errors import UserError
from qwen_onnx.checkpoints.hub import resolve_model
for model in sys.argv[1:]:
    model, _, revision = model.partition("@")
    try:
        source = resolve_model(model, revision=revision or None)
        print(source.folder, source.name, source.model_id, source.revision, sep="|")
    except UserError as error:
        print("error:", error, file=sys.stderr)
    except KeyboardInterrupt:
        sys.exit("interrupted")
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve(Hub({"org/small": {**WANTED, **UNWANTED}})) as served:
        yield served


@dataclasses.dataclass(frozen=True)
class User:
    """Someone with an empty Hub cache who runs commands."""

    home: Path

    def start(
        self, hub: Hub, *models: str, code: str = CHILD, env: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        clean = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("HF_") and "proxy" not in key.lower()
        }
        return subprocess.Popen(
            [sys.executable, "-c", code, *(models or ("org/small",))],
            env={**clean, "HF_ENDPOINT": hub.url, "HF_HOME": str(self.home), **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def resolve(
        self, hub: Hub, *models: str, code: str = CHILD, env: dict[str, str] | None = None
    ) -> tuple[list[ModelSource], list[str]]:
        """The sources found, and the lines that a user reads as errors."""
        process = self.start(hub, *models, code=code, env=env)
        out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, err
        assert "Traceback" not in err
        rows = [line.split("|") for line in out.splitlines()]
        sources = [ModelSource(Path(row[0]), row[1], row[2], row[3]) for row in rows]
        return sources, [line for line in err.splitlines() if line.startswith("error: ")]


@pytest.fixture
def user(tmp_path: Path) -> User:
    return User(tmp_path / "hf home")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_download_is_byte_for_byte_and_fetches_only_what_an_export_needs_once(hub: Hub, user: User) -> None:
    sources, errors = user.resolve(hub, "org/small", "org/small", "org/small@main", f"org/small@{COMMIT}")
    assert not errors
    assert sources == [ModelSource(sources[0].folder, "small", "org/small", COMMIT)] * 4
    assert contents(sources[0].folder) == WANTED
    assert sorted(hub.fetched()) == sorted(WANTED)


def test_shards_are_those_the_index_names(hub: Hub, user: User) -> None:
    shards = {f"model-0000{k}-of-00002.safetensors": bytes([k]) * 100 for k in (1, 2)}
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    files = {"config.json": WANTED["config.json"], "model.safetensors.index.json": json.dumps(index).encode()}
    hub.repos["org/large"] = {**files, **shards, "model-extra.safetensors": b"not in the index"}
    [source], _ = user.resolve(hub, "org/large")
    assert contents(source.folder) == {**files, **shards}


@pytest.mark.thorough
def test_a_connection_cut_in_mid_file_resumes_where_it_was_cut(hub: Hub, user: User) -> None:
    weights = hub.repos["org/small"]["model.safetensors"] = os.urandom(12 << 20)
    hub.cut["model.safetensors"] = 11 << 20
    [source], errors = user.resolve(hub)
    assert not errors
    assert contents(source.folder)["model.safetensors"] == weights
    # huggingface_hub keeps what has reached the disk, in blocks of 10 MiB.
    assert [request.range for request in hub.requests if request.range] == [f"bytes={10 << 20}-"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.thorough
def test_after_an_interruption_the_next_run_fetches_only_what_is_missing(
    hub: Hub, user: User, how: signal.Signals
) -> None:
    hub.stall["model.safetensors"] = 1000
    process = user.start(hub)
    assert hub.stalled.wait(PATIENCE)
    process.send_signal(how)
    # In snapshot_download's threads Ctrl-C would wait for the whole file: here, for the end of the test.
    _, err = process.communicate(timeout=PATIENCE)
    assert "Traceback" not in err
    assert process.returncode == (1 if how == signal.SIGINT else -how)

    hub.stall.clear()
    hub.requests.clear()
    [source], _ = user.resolve(hub)
    assert contents(source.folder) == WANTED
    assert hub.fetched() == ["model.safetensors"]


def test_a_download_that_was_interrupted_is_incomplete_offline(hub: Hub, user: User) -> None:
    hub.gated["org/small"] = HTTPStatus.FORBIDDEN  # the listing can be read, the files not
    user.resolve(hub)
    [], [line] = user.resolve(hub, env={"HF_HUB_OFFLINE": "1"})
    assert "and HF_HUB_OFFLINE is set" in line


def test_each_refusal_is_one_line_that_says_what_to_do(hub: Hub, user: User) -> None:
    hub.repos |= {
        "org/llama": {"config.json": json.dumps({**CONFIG, "model_type": "llama"}).encode(), **UNWANTED},
        "org/pickled": {"config.json": json.dumps(CONFIG).encode(), **UNWANTED},
    }
    for repo in ("org/gated", "org/notlisted", "org/private", "org/busy", "org/portal"):
        hub.repos[repo] = {**WANTED}
    hub.gated = {"org/gated": HTTPStatus.UNAUTHORIZED, "org/notlisted": HTTPStatus.FORBIDDEN}
    hub.broken = {
        "org/private": HTTPStatus.FORBIDDEN,
        "org/busy": HTTPStatus.SERVICE_UNAVAILABLE,
        "org/portal": HTTPStatus.OK,
    }
    url = hub.url
    nowhere = f"no folder of this name here, and no such public model on {url}; check the name, or run"
    said = {
        "org/none": f"{nowhere} `hf auth login` if it is private",
        "none": f"{nowhere} `hf auth login` if it is private",
        "org/small@v9": f"no revision 'v9'; its branches and tags are at {url}/org/small/tree/main",
        "org/small@../x": f"no revision '../x'; its branches and tags are at {url}/org/small/tree/main",
        "org/gated": f"gated; accept its terms at {url}/org/gated, then run `hf auth login`",
        "org/notlisted": f"gated; accept its terms at {url}/org/notlisted, then run `hf auth login`",
        "org/private": f"{url} refused access (HTTP 403); run `hf auth login` with a token that may read it",
        "org/busy": f"{url} answered HTTP 503; try again later",
        "org/portal": f"{url} does not answer like a Hub (Expecting value: line 1 column 1 (char 0)); "
        "check HF_ENDPOINT and proxies",
        "org/pickled": f"no model.safetensors or model.safetensors.index.json on {url}; wanted a checkpoint "
        "in safetensors",
        "org/llama": "error: org/llama: config.json: model_type 'llama', architectures ['Qwen2ForCausalLM'] found",
    }
    sources, errors = user.resolve(hub, *said)
    assert sources == []
    *errors, unsupported = errors
    *lines, (_, found) = said.items()
    assert errors == [f"error: {model.split('@')[0]}: {line}" for model, line in lines]
    assert found in unsupported
    # What is unsupported is seen before its weights are fetched, and nothing takes their place.
    assert set(hub.fetched()) <= {"config.json", "model.safetensors", *WANTED} - {"model.fp16.safetensors"}
    assert not any(request.path.startswith("/cdn/") for request in hub.requests)


def test_l8_quantized_weights_are_seen_by_their_names_before_they_are_fetched(hub: Hub, user: User) -> None:
    """Where the names are those of floats, a quantization_config may be left over: the dtypes tell."""
    config = json.dumps({**CONFIG, "quantization_config": {"quant_method": "awq"}}).encode()
    shard = "model-00001-of-00001.safetensors"
    for repo, name in (("org/awq", "a.qweight"), ("org/left", "a.weight")):
        index = json.dumps({"weight_map": {name: shard}}).encode()
        hub.repos[repo] = {"config.json": config, "model.safetensors.index.json": index, shard: b"weights"}
    sources, [error] = user.resolve(hub, "org/awq", "org/left")
    assert error.startswith(
        "error: org/awq: config.json: quantization_config (awq) found; quantized weights are"
    )
    assert [source.name for source in sources] == ["left"]
    assert hub.fetched().count(shard) == 1


def test_unknown_name_with_a_token_is_the_same_line(hub: Hub, user: User) -> None:
    _, [line] = user.resolve(hub, "org/none", env={"HF_TOKEN": "hf_x"})
    assert "org/none: no folder of this name here, and no such public model" in line


def test_an_expired_token_is_not_called_a_missing_model(hub: Hub, user: User) -> None:
    _, [line] = user.resolve(hub, env={"HF_TOKEN": "hf_expired"})
    assert line == (
        f"error: org/small: {hub.url} does not know your token (any more); run `hf auth login`, "
        "or `hf auth logout`"
    )


def test_offline_and_server_down_with_and_without_a_cache(hub: Hub, user: User) -> None:
    hub.repos["org/other"] = WANTED
    [source], _ = user.resolve(hub)
    hub.requests.clear()
    sources, [line] = user.resolve(hub, "org/small", "org/other", env={"HF_HUB_OFFLINE": "1"})
    assert sources == [source]
    cache = user.home / "hub"
    assert (
        line
        == f"error: org/other: not (or not all) in {cache}, and HF_HUB_OFFLINE is set; unset it to download"
    )
    assert hub.requests == []

    with serve(Hub({})) as closed:
        pass
    sources, [line] = user.resolve(closed, "org/small", "org/other")
    assert sources == [source]
    assert f"org/other: no folder of this name here; lost or no connection to {closed.url} (" in line


def test_a_full_disk_names_the_cache(hub: Hub, user: User) -> None:
    full = """
import errno, huggingface_hub.file_download
def http_get(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")
huggingface_hub.file_download.http_get = http_get
"""
    _, [line] = user.resolve(hub, code=full + CHILD)
    assert line == (
        f"error: org/small: the disk is full at {user.home / 'hub'}; make room, or set HF_HOME to a folder "
        "on another disk"
    )


def test_a_cache_that_cannot_be_written(hub: Hub, user: User) -> None:
    user.home.write_bytes(b"a file where the folder should be")
    _, [line] = user.resolve(hub)
    assert f"cannot write to {user.home}" in line
    assert line.endswith("HF_HOME sets another folder")


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # importing it raises


@pytest.mark.usefixtures("no_hub")
class TestLocal:
    def test_tiny_is_the_bundled_model_even_beside_a_folder_of_that_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "tiny").mkdir()
        monkeypatch.chdir(tmp_path)
        package = Path(qwen_onnx.__file__).parent
        assert resolve_model("tiny") == ModelSource(package / "tiny", "tiny", "tiny", None)
        assert resolve_model("./tiny") == ModelSource(Path("tiny"), "tiny", "tiny", None)

    def test_an_existing_folder_wins_over_the_hub(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path))
        for model in ("Qwen/Qwen3-0.6B", "~/Qwen/Qwen3-0.6B", str(tmp_path / "Qwen/Qwen3-0.6B")):
            source = resolve_model(model)
            assert source.folder.samefile("Qwen/Qwen3-0.6B")
            assert (source.name, source.model_id, source.revision) == ("Qwen3-0.6B", "Qwen3-0.6B", None)

    def test_the_current_folder_has_a_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "möbel 7b").mkdir()
        monkeypatch.chdir(tmp_path / "möbel 7b")
        assert resolve_model(".").name == "möbel 7b"

    @pytest.mark.parametrize("model", ["./none", "/none/such", "~/none", "C:\\models\\qwen", "..\\x", "../x"])
    def test_what_reads_like_a_path_is_never_looked_up(
        self, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")  # beside which nothing is called x
        with pytest.raises(UserError, match="no such folder"):
            resolve_model(model)

    @pytest.mark.parametrize(
        "model",
        ["", "a/b/c", "https://huggingface.co/Qwen/Qwen3-0.6B", "-x", "org/na me", "org/a\0", "ä/b"],
    )
    def test_neither_a_folder_nor_an_id(self, model: str) -> None:
        with pytest.raises(UserError, match="neither a folder here nor a Hub id"):
            resolve_model(model)

    @pytest.mark.parametrize("model", ["~no-such-user-here/x", "./" + 300 * "x"])
    def test_what_the_system_refuses_is_one_line(self, model: str) -> None:
        with pytest.raises(UserError, match="cannot be opened"):
            resolve_model(model)

    def test_a_file_is_not_a_folder(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").write_bytes(b"")
        with pytest.raises(UserError, match="a file; wanted the checkpoint's folder"):
            resolve_model(str(tmp_path / "model.safetensors"))

    @pytest.mark.parametrize("model", ["tiny", "."])
    def test_a_revision_of_something_local_is_refused(self, model: str) -> None:
        with pytest.raises(UserError, match="revision='v1' is for models on the Hub"):
            resolve_model(model, revision="v1")


def test_importing_costs_no_hub_client() -> None:
    code = "import sys, qwen_onnx, qwen_onnx.checkpoints.hub; print('huggingface_hub' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
