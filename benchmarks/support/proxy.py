"""HTTP proxy for an object store that counts, delays, limits and breaks requests.

``python -m benchmarks.support.proxy URL`` runs it as a separate process, so its work does not slow the measured one.
It prints its port. Each line of JSON that it reads replaces its settings, and it answers with a line of its counts.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("503", "reset", "cut", "lost", "stall")
_BLOCK_BYTES, _LEAST_BYTES = 2**17, 2**10
_BLOCK_S = 0.05  # Time of one block on the link. With larger blocks a slow link would pause for long.
_QUEUED = 8  # Blocks of a body that may wait for the link.
_NO_BODY = (204, 304)


@dataclass
class Settings:
    """Delays, limits and failures that the proxy applies to requests.

    Attributes
    ----------
    latency_s, jitter_s
        Fixed delay before a response, and the upper bound of a random delay added to it.
    link_bits
        Bandwidth in bits/s, shared by all response bodies, as on a link with a short queue; 0 means unlimited.
    share, kinds
        Share of the requests that fail, from 0 to 1, and their kinds of failure: ``"503"`` asks to slow down,
        ``"reset"`` disconnects before the request is forwarded, ``"cut"`` after half of the response body, ``"lost"``
        after the server handled the request but before its response, ``"stall"`` does not respond.
    methods
        HTTP methods that are delayed or fail; empty means all.
    status, code
        HTTP status and error code of all responses, unless the status is 0.
    down
        Whether all requests are disconnected immediately.
    seed
        Seed of the random delays and failures.
    """

    latency_s: float = 0.0
    jitter_s: float = 0.0
    link_bits: float = 0.0
    share: float = 0.0
    kinds: Sequence[str] = ("503", "reset", "cut")
    methods: Sequence[str] = ()
    status: int = 0
    code: str = ""
    down: bool = False
    seed: int = 0


@dataclass
class Counts:
    """Requests and bytes that the proxy counted.

    Attributes
    ----------
    requests, bytes
        Number of requests, and number of bytes in response bodies.
    at_once
        Largest number of concurrent requests.
    per_path
        Number of requests per method and path.
    failed
        Number of requests that were made to fail, per kind of failure.
    """

    requests: int = 0
    bytes: int = 0
    at_once: int = 0
    per_path: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class _Head:
    raw: bytes
    first: str
    fields: dict[str, str]

    @property
    def size_bytes(self) -> int:
        return int(self.fields.get("content-length", "0"))

    @property
    def chunked(self) -> bool:
        return self.fields.get("transfer-encoding", "").lower() == "chunked"


class _Broken(Exception):  # noqa: N818  # The settings ask for it, so it is not an error.
    """The connection must be closed without a response."""


class _Proxy:
    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self.settings, self.counts = Settings(), Counts()
        self._random = random.Random(0)  # noqa: S311  # It only selects failures.
        self._now = 0
        self._free_s = 0.0

    def apply(self, line: str) -> str:
        """Apply a line of JSON settings, and return the counts as JSON."""
        changes: dict[str, Any] = json.loads(line)
        if changes.pop("reset", False):
            self.counts = Counts(at_once=self._now)
        if changes:
            self.settings = Settings(**changes)
            self._random = random.Random(self.settings.seed)  # noqa: S311
        return json.dumps(vars(self.counts))

    async def client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client connection."""
        upward: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        try:
            while True:
                head = await _head(reader)
                self._now += 1
                self._count(head)
                try:
                    if self.settings.down:
                        raise _Broken
                    upward = upward or await asyncio.open_connection(self._host, self._port, limit=2**20)
                    if await self._answer(head, (reader, writer), upward):
                        raise _Broken
                finally:
                    self._now -= 1
        except* (asyncio.IncompleteReadError, ConnectionError, _Broken):
            writer.transport.abort()
        finally:
            for stream in (writer, *(upward[1:] if upward else ())):
                with suppress(ConnectionError, RuntimeError):
                    stream.close()

    def _count(self, head: _Head) -> None:
        method, path, _ = head.first.split(" ", 2)
        self.counts.requests += 1
        self.counts.per_path[f"{method} {path}"] += 1
        self.counts.at_once = max(self.counts.at_once, self._now)

    async def _answer(self, head: _Head, client: Any, server: Any) -> bool:
        """Answer a request; return whether the connection must be closed afterwards."""
        (reader, writer), (server_reader, server_writer) = client, server
        settings, method = self.settings, head.first.partition(" ")[0]
        is_affected = method in (settings.methods or (method,))
        drawn = self._random.random() < settings.share and is_affected
        kind = self._random.choice(settings.kinds) if drawn else ""
        delay_s = settings.latency_s + self._random.random() * settings.jitter_s
        if delay_s and is_affected:
            await asyncio.sleep(delay_s)
        if kind:
            self.counts.failed[kind] += 1
        if kind == "reset":
            return True
        if kind == "stall":
            await asyncio.sleep(3600)
        if settings.status or kind == "503":
            async for _ in _body(reader, head):
                pass
            self._plain(writer, settings.status or 503, settings.code or "SlowDown")
            return False
        server_writer.write(head.raw)
        async for block in _body(reader, head):
            server_writer.write(block)
            await server_writer.drain()
        answer = await _head(server_reader)
        while answer.first.split(" ")[1] == "100":
            answer = await _head(server_reader)
        if kind == "lost":
            return True
        writer.write(answer.raw)
        if method != "HEAD" and int(answer.first.split(" ")[1]) not in _NO_BODY:
            most = answer.size_bytes // 2 if kind == "cut" else None
            link_bytes = int(settings.link_bits / 8 * _BLOCK_S) or _BLOCK_BYTES
            block_bytes = max(_LEAST_BYTES, min(link_bytes, _BLOCK_BYTES))
            await self._through_link(_body(server_reader, answer, most, block_bytes), writer)
        await writer.drain()
        return kind == "cut" or answer.fields.get("connection", "").lower() == "close"

    def _plain(self, writer: asyncio.StreamWriter, status: int, code: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>made</Message><Signature>SECRET</Signature></Error>"
        head = f"HTTP/1.1 {status} Made\r\nContent-Type: application/xml\r\nContent-Length: {len(text)}\r\n\r\n"
        writer.write((head + text).encode())

    async def _through_link(self, blocks: AsyncIterator[bytes], writer: asyncio.StreamWriter) -> None:
        """Forward each block of a body when the link has carried it, while the next blocks wait in a queue."""
        queue: asyncio.Queue[tuple[float, bytes] | None] = asyncio.Queue(_QUEUED)

        async def fill() -> None:
            async for block in blocks:
                await queue.put((self._carried_s(len(block)), block))
            await queue.put(None)

        async with asyncio.TaskGroup() as both:
            both.create_task(fill())
            while (waiting := await queue.get()) is not None:
                carried_s, block = waiting
                if (early_s := carried_s - time.monotonic()) > 0:
                    await asyncio.sleep(early_s)
                self.counts.bytes += len(block)
                writer.write(block)
                await writer.drain()

    def _carried_s(self, size_bytes: int) -> float:
        """Return the time at which the link has carried a new block, after the blocks before it."""
        if not self.settings.link_bits:
            return 0.0
        self._free_s = max(self._free_s, time.monotonic()) + 8 * size_bytes / self.settings.link_bits
        return self._free_s


async def _head(reader: asyncio.StreamReader) -> _Head:
    raw = await reader.readuntil(b"\r\n\r\n")
    first, *lines = raw.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines if ":" in line)
    return _Head(raw, first, {name.strip().lower(): value.strip() for name, _, value in pairs})


async def _body(
    reader: asyncio.StreamReader, head: _Head, most: int | None = None, block_bytes: int = _BLOCK_BYTES
) -> AsyncIterator[bytes]:
    """Yield a body in blocks, up to ``most`` bytes."""
    sent = 0
    while True:
        if head.chunked:
            line = await reader.readline()
            block = line + await reader.readexactly(int(line.split(b";")[0], 16) + 2)
            last = block.startswith(b"0\r\n")
        else:
            block = await reader.read(min(head.size_bytes - sent, block_bytes)) if sent < head.size_bytes else b""
            if not block and sent < head.size_bytes:
                raise ConnectionResetError
            last = sent + len(block) == head.size_bytes
        if most is not None:
            block = block[: most - sent]
        yield block
        sent += len(block)
        if last or sent == most:
            return


class Proxy:
    """Handle of a running proxy process.

    Attributes
    ----------
    url
        Address of the proxy.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._looking = threading.Lock()
        assert process.stdout is not None
        self.url = f"http://127.0.0.1:{int(process.stdout.readline())}"

    def set(self, **settings: Any) -> None:
        """Apply settings to all following requests and reset the counts; defaults are those of `Settings`."""
        self._send({"seed": 0, **settings, "reset": True})

    def counts(self) -> Counts:
        """Return the counts since the last `set`."""
        counts = self._send({})
        return Counts(**{**counts, "per_path": Counter(counts["per_path"]), "failed": Counter(counts["failed"])})

    def _send(self, changes: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._looking:
            self._process.stdin.write(json.dumps(changes) + "\n")
            self._process.stdin.flush()
            counts: dict[str, Any] = json.loads(self._process.stdout.readline())
        return counts


@contextmanager
def proxying(url: str) -> Iterator[Proxy]:
    """Yield a proxy for a server. It is stopped on leaving, or when this process ends."""
    command, pipe = [sys.executable, "-m", __name__, url], subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:  # noqa: S603
        try:
            yield Proxy(process)
        finally:
            process.kill()


async def main(url: str) -> None:
    """Run the proxy until its standard input is closed."""
    upward = urlsplit(url)
    proxy = _Proxy(upward.hostname or "127.0.0.1", upward.port or 80)
    server = await asyncio.start_server(proxy.client, "127.0.0.1", 0, limit=2**20)
    print(server.sockets[0].getsockname()[1], flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(proxy.apply(line), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
