"""An HTTP server for one page on this machine: GET and HEAD of the addresses of a Site, with ranges and ETags."""

from __future__ import annotations

import contextlib
import http
import re
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, BinaryIO

from qwen_onnx.web.site import Site

HOST = "127.0.0.1"
_CHUNK = 1 << 20
_HEADERS = {
    # The two that give WebAssembly its threads.
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    # What a model wrote can load nothing from elsewhere, even if it came past the sanitizer.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self' blob:; style-src 'self'; "
        "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # kept, and asked after by its ETag
}


class PageServer(ThreadingHTTPServer):
    """Serves a site on 127.0.0.1 until it is interrupted; a thread for each connection."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, site: Site, port: int) -> None:
        """`port` 0: any free one.

        Raises:
            OSError: the port is taken.
        """
        self.site = site
        super().__init__((HOST, port), _Handler)

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self.server_port}/"

    @property
    def host_names(self) -> set[str]:
        """The values of `Host` that are answered. A page elsewhere whose name leads here sends its own."""
        return {f"{name}:{self.server_port}" for name in (HOST, "localhost")}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that left needs no word."""


class _Handler(BaseHTTPRequestHandler):
    server: PageServer  # pyright: ignore[reportIncompatibleVariableOverride] - only PageServer makes it
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "qwen-onnx", ""
    timeout = 60  # seconds that a connection may say nothing

    def do_GET(self) -> None:
        """Answer with a file, or with a part of it."""
        self._answer()

    def do_HEAD(self) -> None:
        """Answer with its headers."""
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: stderr is for what the user must know."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """One line of plain text, after which the connection ends."""
        text = f"{code} {message or http.HTTPStatus(code).phrase}\n".encode("latin-1", "replace")
        self.close_connection = True
        headers = {"Content-Type": "text/plain; charset=utf-8", "Content-Length": len(text)}
        self._begin(code, {**headers, "Connection": "close"})
        if self.command != "HEAD":
            self.wfile.write(text)

    def _answer(self) -> None:
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or hosts[0].lower() not in self.server.host_names:
            self.send_error(421, f"this page is at {self.server.address} only")
            return
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self.send_error(400, "a GET has no body")
            return
        try:
            address = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path, errors="strict")
            resource = self.server.site.resources[address]
            file, size, etag = resource.open()
        except (KeyError, ValueError, OSError):
            self.send_error(404)
            return
        headers = {"Content-Type": resource.content_type, "ETag": etag, "Accept-Ranges": "bytes"}
        with file:
            if etag in re.split(r"\s*,\s*", self.headers.get("If-None-Match", "")):
                self._begin(304, {"ETag": etag})
                return
            try:
                part = self._range(size, etag)
            except ValueError:
                self._begin(416, {"Content-Range": f"bytes */{size}", "Content-Length": 0})
                return
            start, stop = part or (0, size)
            if part:
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
            self._begin(206 if part else 200, {**headers, "Content-Length": stop - start})
            if self.command != "HEAD":
                with contextlib.suppress(ConnectionError, TimeoutError):
                    self._copy(file, start, stop)

    def _begin(self, code: int, headers: dict[str, Any]) -> None:
        self.send_response(code)
        for name, value in {**_HEADERS, **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()

    def _range(self, size: int, etag: str) -> tuple[int, int] | None:
        """First byte and the one after the last; None for the whole, as for what is no single range of bytes.

        Raises:
            ValueError: there is no such byte.
        """
        found = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "").strip(), re.ASCII)
        if not found or found.groups() == ("", "") or self.headers.get("If-Range", etag) != etag:
            return None
        first, last = ((int(text) if len(text) < 20 else 10**20) if text else None for text in found.groups())
        if first is None:
            if not last or not size:
                raise ValueError
            return max(0, size - last), size
        if first >= size:
            raise ValueError
        if last is not None and last < first:
            return None
        return first, size if last is None else min(size, last + 1)

    def _copy(self, file: BinaryIO, start: int, stop: int) -> None:
        file.seek(start)
        while start < stop:
            chunk = file.read(min(_CHUNK, stop - start))
            if not chunk:  # cut short while it was sent: the browser must not wait for the rest
                self.close_connection = True
                return
            self.wfile.write(chunk)
            start += len(chunk)
