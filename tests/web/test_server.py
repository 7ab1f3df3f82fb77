"""`qwen-onnx web` without a browser: what it serves, to whom, and what it refuses."""

from __future__ import annotations

import hashlib
import http.client
import json
import lzma
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from qwen_onnx import export
from qwen_onnx.contract.manifest import read_manifest
from qwen_onnx.errors import UserError
from qwen_onnx.web.server import PageServer
from qwen_onnx.web.site import LIBRARIES, PAGE, Site, refuse_size
from support.command import child, command
from support.patience import PATIENCE


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("web") / "tiny"
    export("tiny", folder, target="portable")
    (folder / "notes.txt").write_text("private")
    return folder


@pytest.fixture(scope="module")
def server(portable: Path) -> Iterator[PageServer]:
    with PageServer(Site.of(portable), 0) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield serving
        serving.shutdown()


def get(
    server: PageServer, path: str, method: str = "GET", **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=PATIENCE)
    connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def test_page_libraries_and_the_files_of_the_manifest_are_served(server: PageServer, portable: Path) -> None:
    answer, body = get(server, "/")
    assert (answer.status, body) == (200, (PAGE / "index.html").read_bytes())
    assert answer.getheader("Content-Type") == "text/html; charset=utf-8"
    for name in ("export.json", *read_manifest(portable).files):
        answer, body = get(server, f"/model/{name}")
        assert (answer.status, body) == (200, (portable / name).read_bytes()), name
    for path, kind in {
        "/chat.js": "text/javascript; charset=utf-8",
        "/style.css": "text/css; charset=utf-8",
        "/libraries/markdown-it.mjs": "text/javascript; charset=utf-8",
        "/libraries/ort-wasm-simd-threaded.wasm": "application/wasm",
        "/model/config.json": "application/json",
        "/model/weights.safetensors": "application/octet-stream",
    }.items():
        answer, body = get(server, path, "HEAD")
        assert (answer.status, answer.getheader("Content-Type"), body) == (200, kind, b"")
    _, body = get(server, "/libraries/ort-wasm-simd-threaded.wasm")
    assert body == lzma.decompress((LIBRARIES / "ort-wasm-simd-threaded.wasm.xz").read_bytes())
    assert body[:4] == b"\0asm"


@pytest.mark.parametrize(
    "path",
    [
        "/model/notes.txt", "/model/", "/model/../notes.txt", "/../../../../../etc/passwd", "/model/%2e%2e/x",
        "/%2e%2e%2f%2e%2e%2fetc/passwd", "/model//etc/passwd", "/model/..%5c..%5cx", "//etc/passwd", "/page/chat.js",
        "/libraries/", "/libraries/libraries.json", "/libraries/ort-wasm-simd-threaded.wasm.xz", "/site.py",
        "/model/export.json%00", "/model/export.json/", "/%ff", "/chat.js/../../site.py", "http:", "/CON",
    ],
)  # fmt: skip
def test_nothing_else_is_served(server: PageServer, path: str) -> None:
    answer, body = get(server, path)
    assert (answer.status, body) == (404, b"404 Not Found\n")


def test_only_this_machine_s_own_names_are_answered(server: PageServer) -> None:
    """A page elsewhere whose name leads here (DNS rebinding) sends that name."""
    port = server.server_port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"LOCALHOST:{port}"):
        assert get(server, "/", Host=host)[0].status == 200
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port}.evil.example", ""):
        answer, body = get(server, "/model/export.json", Host=host)
        assert (answer.status, b"export" in body) == (421, False), host
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as raw:
        raw.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert raw.makefile("rb").readline().split()[1] == b"421"
    assert server.server_address[0] == "127.0.0.1"


def test_only_reading_is_answered(server: PageServer) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "<script>"):
        answer, _ = get(server, "/", method)
        assert answer.status == 501
        assert answer.getheader("Content-Type") == "text/plain; charset=utf-8"
    assert get(server, "/", Content_Length="5")[0].status == 400


def test_ranges_and_etags(server: PageServer, portable: Path) -> None:
    path, whole = "/model/weights.safetensors", (portable / "weights.safetensors").read_bytes()
    answer, _ = get(server, path, "HEAD")
    etag, size = str(answer.getheader("ETag")), len(whole)
    for asked, start, stop in (
        ("bytes=0-9", 0, 10),
        ("bytes=10-", 10, size),
        ("bytes=-7", size - 7, size),
        (f"bytes=5-{10**30}", 5, size),
    ):
        answer, body = get(server, path, Range=asked, If_Range=etag)
        assert (answer.status, body) == (206, whole[start:stop]), asked
        assert answer.getheader("Content-Range") == f"bytes {start}-{stop - 1}/{size}"
    for asked in (f"bytes={size}-", "bytes=-0"):
        answer, body = get(server, path, Range=asked)
        assert (answer.status, body, answer.getheader("Content-Range")) == (416, b"", f"bytes */{size}")
    for asked in ("bytes=9-5", "bytes=0-1,3-4", "lines=0-1", "bytes=-", "bytes=\u00b2-"):
        assert len(get(server, path, Range=asked)[1]) == size
    assert len(get(server, path, Range="bytes=0-9", If_Range='"other"')[1]) == size
    answer, body = get(server, path, If_None_Match=f'"x", {etag}')
    assert (answer.status, body, answer.getheader("ETag")) == (304, b"", etag)


def test_every_answer_isolates_the_page(server: PageServer) -> None:
    for path in ("/", "/model/export.json", "/nothing"):
        answer, _ = get(server, path)
        found = {name.lower(): value for name, value in answer.getheaders()}
        assert found["cross-origin-opener-policy"] == "same-origin"
        assert found["cross-origin-embedder-policy"] == "require-corp"
        assert found["cross-origin-resource-policy"] == "same-origin"
        assert found["x-content-type-options"] == "nosniff"
        assert "default-src 'none'; script-src 'self' 'wasm-unsafe-eval';" in found["content-security-policy"]
        assert "access-control-allow-origin" not in found


def test_an_export_that_no_browser_loads_is_refused_with_the_command(tmp_path: Path) -> None:
    export("tiny", tmp_path / "default")
    error = command("web", tmp_path / "default").error
    assert "an export for ONNX Runtime outside browsers; the page needs a portable one: " in error
    assert error.endswith("`qwen-onnx web tiny` makes it")
    assert "--dtype" in command("web", tmp_path / "default", "--dtype", "f16").error
    with pytest.raises(UserError, match=r"9\.9 GB of weights, .* take a smaller model, or --dtype f16"):
        refuse_size("big", 9_900_000_000)


def test_damaged_files_and_links_out_of_the_folder_are_refused(portable: Path, tmp_path: Path) -> None:
    def damaged(name: str) -> tuple[Path, Path]:
        folder = tmp_path / name.replace(".", "_")
        shutil.copytree(portable, folder)
        return folder, folder / name

    folder, path = damaged("config.json")
    path.unlink()
    assert "config.json: missing" in command("web", folder).error
    folder, path = damaged("tokenizer.json")
    path.unlink()
    path.symlink_to(portable / "tokenizer.json")
    assert "a link out of the folder" in command("web", folder).error
    folder, path = damaged("tokenizer_config.json")
    path.write_text("{}")
    assert "tokenizer_config.json" in command("web", folder).error
    folder, path = damaged("weights.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    assert "weights.safetensors" in command("web", folder).error


def test_a_port_that_is_taken_is_named(portable: Path, server: PageServer) -> None:
    error = command("web", portable, "--port", server.server_port).error
    assert f"127.0.0.1:{server.server_port}" in error
    assert "--port" in error


def test_one_command_from_a_model_to_a_page_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    with child("web", "tiny", "--port", 0, "--cache-dir", tmp_path, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        address = process.stdout.readline().decode().strip()
        assert address.startswith("http://127.0.0.1:")
        connection = http.client.HTTPConnection(address.removeprefix("http://").strip("/"), timeout=PATIENCE)
        connection.request("GET", "/model/export.json")
        found = json.loads(connection.getresponse().read())
        assert (found["model_id"], found["target"], found["dtype"]) == ("tiny", "portable", "f32")
        process.send_signal(signal.SIGINT)  # while the browser's connection is open
        assert process.wait(PATIENCE) == 0
        assert process.stdout.read() == b""
        said = process.stderr.read().decode()
        assert "Traceback" not in said
        assert "only this machine can reach it" in said
    assert command("cache", "ls", "--cache-dir", tmp_path).out.count("f32-portable") == 1


def test_the_libraries_are_those_that_the_list_names() -> None:
    listed = json.loads((LIBRARIES / "libraries.json").read_text(encoding="utf-8"))
    for package in listed.values():
        assert package["integrity"].startswith("sha512-")
        for name, spec in package["files"].items():
            assert hashlib.sha256((LIBRARIES / name).read_bytes()).hexdigest() == spec["sha256"], name
    names = {name for package in listed.values() for name in package["files"]}
    beside = {"libraries.json", "licenses/onnxruntime-web.txt", "licenses/onnxruntime-web-third-party.txt.xz"}
    held = {path.relative_to(LIBRARIES).as_posix() for path in LIBRARIES.rglob("*") if path.is_file()}
    assert held == names | beside
