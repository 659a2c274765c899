"""A client that writes bytes to a gateway's socket, for tests of what no HTTP library sends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.control_plane.api.gateway import Gateway

GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def message(self) -> str:
        return str(self.json()["error"]["message"])


def post(
    body: bytes,
    path: str = "/v1/chat/completions",
    *,
    length: int | None = None,
    headers: str = "",
    version: str = "1.1",
) -> bytes:
    """Return a request; `length` is its Content-Length if that is not the body's."""
    num_bytes = len(body) if length is None else length
    head = f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Length: {num_bytes}\r\n{headers}\r\n"
    return head.encode() + body


def chunked(*chunks: bytes, end: bytes = b"0\r\n\r\n", path: str = "/v1/chat/completions") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + end


class RawClient:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def half_close(self) -> None:
        self._writer.write_eof()

    def close(self) -> None:
        self._writer.close()

    async def answer(self) -> Answer:
        """Return the next answer on the connection; its body has a length or chunks."""
        status, headers = await self.head()
        if headers.get("transfer-encoding") == "chunked":
            return Answer(status, headers, await self._chunks())
        return Answer(status, headers, await self._reader.readexactly(int(headers.get("content-length", 0))))

    async def head(self) -> tuple[int, dict[str, str]]:
        lines = (await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), 20)).decode().split("\r\n")
        pairs = (line.split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split(" ")[1]), {name.lower(): value for name, value in pairs}

    async def rest(self) -> bytes:
        """Return everything until the server closes."""
        return await asyncio.wait_for(self._reader.read(), 20)

    async def drip(self, byte: bytes, seconds: float = 0.02) -> bytes:
        """Send a byte again and again until the server answers or closes; return the first byte that comes back."""
        while True:
            self._writer.write(byte)
            try:
                return await asyncio.wait_for(self._reader.read(1), seconds)
            except TimeoutError:
                continue

    async def _chunks(self) -> bytes:
        body = b""
        while size := int(await self._reader.readline(), 16):
            body += await self._reader.readexactly(size)
            await self._reader.readline()
        await self._reader.readline()
        return body


@asynccontextmanager
async def connect(gateway: Gateway) -> AsyncIterator[RawClient]:
    host, _, port = gateway.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield RawClient(reader, writer)
    finally:
        writer.close()


async def until(condition: Any) -> None:
    """Wait until `condition()` is true."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the server is in this process, but tells nobody
            await asyncio.sleep(0.005)
