"""A small object store: the files of a folder over HTTP, with counters and failures on request.

As in S3, a folder in it is a bucket that can be listed: ``s3://BUCKET`` with the server as anonymous endpoint.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

FAULTS = ("503", "reset", "cut", "empty")


class ObjectServer(ThreadingHTTPServer):
    """Serves a folder: GET of objects or byte ranges, and HEAD.

    Attributes
    ----------
    requests, sent_bytes
        Number of requests and of sent bytes per path.
    faults
        Share of requests that fail, each by one of `FAULTS`.
    latency_s, stalled
        Delay before a response; whether no body follows the head of a response.
    status
        Status of all responses, unless it is 0.
    ranges
        Whether it supports byte ranges; otherwise it always sends whole objects.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.requests, self.failed = folder, Counter[str](), Counter[str]()
        self.sent_bytes = Counter[str]()
        self.faults, self.latency_s, self.stalled, self.status = 0.0, 0.0, False, 0
        self.ranges = True
        self.random = random.Random(0)
        self.looking = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answering(self, path: str) -> None:
        """Run before each response; tests override it."""

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore disconnected clients."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # Otherwise each body waits 40 ms for the acknowledgment of its head.
    server: ObjectServer

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        server = self.server
        path, query = unquote(urlsplit(self.path).path), parse_qs(urlsplit(self.path).query)
        with server.looking:
            server.requests[path] += 1
            fault = server.random.choice(FAULTS) if server.random.random() < server.faults else None
            server.failed[fault or "none"] += 1
        time.sleep(server.latency_s)
        server.answering(path)
        file = server.folder / path.lstrip("/")
        if server.status or fault == "503":
            self._plain(server.status or 503, "<Error><Code>Made</Code><Signature>PLANTED-SECRET</Signature></Error>")
        elif fault == "reset":
            self._reset()
        elif "list-type" in query:
            self._plain(200, _listing(file, query.get("prefix", [""])[0]))
        elif not file.is_file():
            self._plain(404, "no such object")
        else:
            self._object(path, file, fault, with_body=with_body)

    def _plain(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def _object(self, path: str, file: Path, fault: str | None, *, with_body: bool) -> None:
        data, requested_range = file.read_bytes(), self.headers.get("Range") if self.server.ranges else None
        first, _, last = (requested_range or "").removeprefix("bytes=").partition("-")
        start, stop = int(first or 0), min(int(last or len(data)) + 1, len(data))
        if requested_range and start >= len(data):
            self._plain(416, "<Error><Code>InvalidRange</Code></Error>")
            return
        body = data[start:stop]
        with self.server.looking:
            self.server.sent_bytes[path] += len(body) * with_body
        self.send_response(206 if requested_range else 200)
        if requested_range:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", _tag(file))
        self.send_header("Last-Modified", "Mon, 23 Nov 2026 10:00:00 GMT")
        self.end_headers()
        if fault is not None:
            self.wfile.write(body[: len(body) // 2] if fault == "cut" else b"")
            self.wfile.flush()
            self._reset()
        elif self.server.stalled:
            time.sleep(60)
        elif with_body:
            self.wfile.write(body)

    def _reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


def _tag(file: Path) -> str:
    return f'"{file.stat().st_mtime_ns:x}-{file.stat().st_size}"'


def _listing(bucket: Path, prefix: str) -> str:
    """Return the S3 listing of the objects of a bucket whose names start with a prefix."""
    files = ((str(path.relative_to(bucket)), path) for path in sorted(bucket.rglob("*")) if path.is_file())
    contents = "".join(
        f"<Contents><Key>{escape(name)}</Key><LastModified>2026-11-23T10:00:00.000Z</LastModified>"
        f"<ETag>{escape(_tag(file))}</ETag><Size>{file.stat().st_size}</Size></Contents>"
        for name, file in files
        if name.startswith(prefix)
    )
    return f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>"


@contextmanager
def serving(folder: Path) -> Iterator[ObjectServer]:
    """Serve a folder while the context is active."""
    server = ObjectServer(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
