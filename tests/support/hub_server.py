"""A Hub in a thread: what `huggingface_hub` asks of huggingface.co for a download, and every request it made.

Weights lie on a second port, as on the real Hub, where large files are redirected to a CDN.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

LISTING = "the listing"
NO_ANSWER = -1
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclasses.dataclass(frozen=True)
class Request:
    method: str
    path: str
    range: str | None


@dataclasses.dataclass
class Hub:
    """What the server serves, and what has been asked of it."""

    repos: dict[str, dict[str, bytes]]
    """Model id to its files."""
    gated: dict[str, HTTPStatus] = dataclasses.field(default_factory=dict)
    """Model id to what its files answer: UNAUTHORIZED without a token, FORBIDDEN with the wrong one."""
    broken: dict[str, HTTPStatus] = dataclasses.field(default_factory=dict)
    """Model id to what it always answers, without the Hub's own error headers."""
    cut: dict[str, int] = dataclasses.field(default_factory=dict)
    """File name to the bytes sent before its connection is cut; once each."""
    severed: dict[str, int] = dataclasses.field(default_factory=dict)
    """File name, or LISTING, to the bytes that are ever sent of it; NO_ANSWER is not even a header."""
    stall: dict[str, int] = dataclasses.field(default_factory=dict)
    """File name to the bytes sent before the server falls silent."""
    stalled: threading.Event = dataclasses.field(default_factory=threading.Event)
    closing: threading.Event = dataclasses.field(default_factory=threading.Event)
    requests: list[Request] = dataclasses.field(default_factory=list)
    url: str = ""
    cdn: str = ""

    def fetched(self) -> list[str]:
        """The names of the files whose bytes were asked for, in order."""
        got = [request.path for request in self.requests if request.method == "GET"]
        names = [re.sub(r".*/resolve/[^/]+/|/cdn/", "", path) for path in got if not path.startswith("/api/")]
        return [self.blobs().get(name, ("", name))[1] for name in names]

    def blobs(self) -> dict[str, tuple[bytes, str]]:
        """The weights by their digest, as the CDN knows them."""
        files = [(data, name) for files in self.repos.values() for name, data in files.items()]
        return {hashlib.sha256(data).hexdigest(): (data, name) for data, name in files}


@contextlib.contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Serve `hub` on two ports of 127.0.0.1 until the block ends."""

    class Handler(_Handler):
        served = hub

    servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
    hub.url, hub.cdn = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    threads = [threading.Thread(target=server.serve_forever, args=(0.02,)) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        hub.closing.set()
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        hub = self.served
        path = urllib.parse.unquote(self.path.split("?")[0])
        hub.requests.append(Request(self.command, path, self.headers.get("Range")))
        if broken := [status for repo, status in hub.broken.items() if repo in path]:
            self._fail(broken[0])
        elif match := re.fullmatch(r"/api/models/(.+?)(?:/(revision|tree)/(.+))?", path):
            self._answer_api(match[1], match[2], match[3] or "main")
        elif match := re.fullmatch(r"/(.+)/resolve/([^/]+)/(.+)", path):
            self._answer_file(match[1], match[2], match[3])
        elif match := re.fullmatch(r"/cdn/([0-9a-f]{64})", path):
            data, name = hub.blobs()[match[1]]
            self._send_file(name, data, {})
        else:
            self._fail(HTTPStatus.NOT_FOUND)

    do_HEAD = do_GET

    def _answer_api(self, repo: str, kind: str | None, revision: str) -> None:
        if not self._exists(repo, revision):
            return
        files = self.served.repos[repo]
        if kind == "tree":
            self._send_json([_tree_entry(name, data) for name, data in files.items()])
        else:
            self._send_json({"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]})

    def _answer_file(self, repo: str, revision: str, name: str) -> None:
        hub = self.served
        if not self._exists(repo, revision):
            return
        headers, data = {"X-Repo-Commit": COMMIT}, hub.repos[repo].get(name)
        if repo in hub.gated:
            self._fail(hub.gated[repo], "GatedRepo", f"Access to model {repo} is restricted.")
        elif data is None:
            self._fail(HTTPStatus.NOT_FOUND, "EntryNotFound")
        elif name.endswith(".safetensors"):
            digest = hashlib.sha256(data).hexdigest()
            linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
            self._send(HTTPStatus.FOUND, {**headers, **linked, "Location": f"{hub.cdn}/cdn/{digest}"})
        else:
            self._send_file(name, data, {**headers, "ETag": f'"{_git_oid(data)}"'})

    def _exists(self, repo: str, revision: str) -> bool:
        if self.headers.get("Authorization") == "Bearer hf_expired":
            self._fail(HTTPStatus.UNAUTHORIZED, "", "Invalid credentials in Authorization header")
            return False
        if repo not in self.served.repos:
            # Without a token the Hub does not say whether a private model of that name exists.
            if self.headers.get("Authorization"):
                self._fail(HTTPStatus.NOT_FOUND, "RepoNotFound", "Repository not found")
            else:
                self._fail(HTTPStatus.UNAUTHORIZED, "", "Invalid username or password.")
            return False
        if revision not in ("main", COMMIT):
            self._fail(HTTPStatus.NOT_FOUND, "RevisionNotFound", f"Invalid rev id: {revision}")
            return False
        return True

    def _send_file(self, name: str, data: bytes, headers: dict[str, str]) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first, status = int(asked[1]) if asked else 0, HTTPStatus.OK
        if first:
            status = HTTPStatus.PARTIAL_CONTENT
            headers = {**headers, "Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}"}
        body = memoryview(data)[first:]
        got = self.command == "GET"
        if self._severed(name, status, headers, body, first):
            return
        cut, stall = (self.served.cut.pop(name, None), self.served.stall.get(name)) if got else (None, None)
        self._send(status, headers, body, cut if cut is not None else stall)
        if stall is not None:
            self.served.stalled.set()
            self.served.closing.wait()
        if cut is not None or stall is not None:
            self.close_connection = True

    def _send_json(self, value: Any) -> None:
        headers, body = {"Content-Type": "application/json"}, json.dumps(value).encode()
        if not self._severed(LISTING, HTTPStatus.OK, headers, body):
            self._send(HTTPStatus.OK, headers, body)

    def _severed(
        self,
        name: str,
        status: HTTPStatus,
        headers: dict[str, str],
        body: bytes | memoryview,
        first: int = 0,
    ) -> bool:
        """The connection is cut in this file, and all that is ever sent of it was sent."""
        end = self.served.severed.get(name) if self.command == "GET" else None
        if end is None:
            return False
        self.close_connection = True
        if end != NO_ANSWER:
            self._send(status, headers, body, max(0, end - first))
        return True

    def _fail(self, status: HTTPStatus, code: str = "", message: str = "") -> None:
        said = {"X-Error-Code": code, "X-Error-Message": message}
        self._send(status, {key: text for key, text in said.items() if text})

    def _send(
        self,
        status: HTTPStatus,
        headers: dict[str, str],
        body: bytes | memoryview = b"",
        limit: int | None = None,
    ) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            # A client that was killed is what some tests are about.
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body[:limit])

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _tree_entry(name: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": _git_oid(data)}
    if name.endswith(".safetensors"):
        digest = hashlib.sha256(data).hexdigest()
        entry["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 134}
    return entry


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
