"""Sends scripted bytes over raw connections, and notes when the answer came."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_WRITE_BYTES = 1 << 16
_READ_BYTES = 1 << 16
_HEAD_BYTES = 1 << 16
_CONNECT_SECONDS = 10.0
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3})")
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)

Address = tuple[str, int]


@dataclass(frozen=True)
class Script:
    """What one connection sends: bytes, and seconds to wait in between."""

    steps: Sequence[bytes | float]

    @property
    def num_bytes(self) -> int:
        return sum(len(step) for step in self.steps if isinstance(step, bytes))


@dataclass(frozen=True)
class Answer:
    """What came back on one connection."""

    status: int | None
    """None: nothing came before the end."""
    is_closed: bool
    """The server closed the connection, with or without an answer."""
    seconds: float
    """From the last byte sent to the answer's first byte, or to the close; 0 if the answer came earlier."""
    since_first_byte: float
    """The same from the first byte sent on."""
    body: bytes = b""
    """The answer's beginning, head included."""

    @property
    def is_refused(self) -> bool:
        return (self.status or 0) >= 400 or (self.status is None and self.is_closed)


def request(
    method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None, token: str = ""
) -> bytes:
    """Return a whole HTTP request."""
    return head(method, path, {"Content-Length": str(len(body)), **(headers or {})}, token) + body


def head(method: str, path: str, headers: Mapping[str, str], token: str = "") -> bytes:
    """Return the head of a request."""
    fields = {"Host": "localhost", "Content-Type": "application/json", **headers}
    if token:
        fields["Authorization"] = f"Bearer {token}"
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode()


def post(path: str, body: Mapping[str, Any] | bytes, token: str, headers: Mapping[str, str] | None = None) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return request("POST", path, content, headers, token)


async def exchange(address: Address, script: Script, give_up_seconds: float) -> Answer:
    """Send the script and return its answer. A connection that the server refuses to open counts as closed."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(*address)
    except (OSError, TimeoutError):
        return Answer(None, is_closed=True, seconds=time.monotonic() - began, since_first_byte=time.monotonic() - began)
    sending = asyncio.create_task(_send(writer, script))
    receiving = asyncio.create_task(_receive(reader))
    try:
        done, _ = await asyncio.wait({receiving}, timeout=give_up_seconds)
        if not done:
            return Answer(None, False, time.monotonic() - began, time.monotonic() - began)
        status, is_closed, answered_at, body = receiving.result()
        sent_at = sending.result() if sending.done() else answered_at
        return Answer(status, is_closed, max(0.0, answered_at - sent_at), answered_at - began, body)
    finally:
        for task in (sending, receiving):
            task.cancel()
        await asyncio.gather(sending, receiving, return_exceptions=True)
        writer.transport.abort()


async def _send(writer: asyncio.StreamWriter, script: Script) -> float:
    """Return when the last byte was taken, or when the server took no more."""
    with suppress(ConnectionError):
        for step in script.steps:
            if isinstance(step, float):
                await asyncio.sleep(step)
                continue
            for start in range(0, len(step), _WRITE_BYTES):
                writer.write(step[start : start + _WRITE_BYTES])
                await writer.drain()
    return time.monotonic()


async def _receive(reader: asyncio.StreamReader) -> tuple[int | None, bool, float, bytes]:
    """Return status, whether the server closed, when the first byte came, and the first bytes."""
    kept, tail, answered_at, num_bytes = b"", b"", 0.0, 0
    while True:
        try:
            piece = await reader.read(_READ_BYTES)
        except ConnectionError:
            piece = b""
        answered_at = answered_at or time.monotonic()
        if not piece:
            return _status(kept), True, answered_at, kept
        num_bytes += len(piece)
        kept = (kept + piece)[:_HEAD_BYTES] if len(kept) < _HEAD_BYTES else kept
        tail = (tail + piece)[-8:]
        if _is_whole(kept, num_bytes, tail):
            return _status(kept), False, answered_at, kept


def _is_whole(kept: bytes, num_bytes: int, tail: bytes) -> bool:
    top, end, _ = kept.partition(b"\r\n\r\n")
    if not end or top.startswith(b"HTTP/1.1 100"):
        return False
    length = _LENGTH.search(top)
    return num_bytes >= len(top) + 4 + int(length[1]) if length else tail.endswith(b"0\r\n\r\n")


def _status(kept: bytes) -> int | None:
    statuses = [int(found) for found in _STATUS.findall(kept[:_HEAD_BYTES]) if found != b"100"]
    return statuses[0] if statuses else None
