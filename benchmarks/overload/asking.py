"""Asks for the requests of a load at their times, and records what becomes of each."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from benchmarks.gateway.sse_readers import post
from benchmarks.overload.arrivals import Arrivals
from control_plane.simulator.traces import TraceRequest

Address = tuple[str, int]
Body = Callable[[TraceRequest], dict[str, object]]
_TAIL_BYTES = 2048
_NUM_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')


@dataclass
class Asked:
    """One request, and what became of it; seconds since the beginning of its load."""

    request: TraceRequest
    gateway: int
    at: float = 0.0
    """When it was sent."""
    status: int = 0
    """0: no gateway answered."""
    refused_after: float | None = None
    first_at: float | None = None
    ended_at: float | None = None
    """None: the answer did not come to its end."""
    num_tokens: int = 0

    @property
    def ttft_seconds(self) -> float | None:
        return None if self.first_at is None else self.first_at - self.at

    @property
    def tpot_seconds(self) -> float | None:
        if self.first_at is None or self.ended_at is None:
            return None
        return (self.ended_at - self.first_at) / max(1, self.num_tokens - 1)


async def ask(addresses: Sequence[Address], arrivals: Arrivals, body: Body) -> list[Asked]:
    """Return once each request has ended. Nobody comes again; who finds no gateway asks the next one."""
    started = time.perf_counter()
    asked = [Asked(request, gateway) for request, gateway in zip(arrivals.requests, arrivals.gateways, strict=True)]
    async with asyncio.TaskGroup() as group:
        for each in asked:
            await asyncio.sleep(max(0.0, started + each.request.arrival - time.perf_counter()))
            each.at = time.perf_counter() - started
            group.create_task(_run(addresses, each, body(each.request), started))
    return asked


async def _run(addresses: Sequence[Address], asked: Asked, body: dict[str, object], started: float) -> None:
    request = asked.request
    message = post(f"/client/v4/accounts/{request.account}/ai/run/{request.model}", body)
    for turn in range(len(addresses)):
        with suppress(ConnectionError):
            await _ask_at(addresses[(asked.gateway + turn) % len(addresses)], message, asked, started)
        if asked.status:
            return


async def _ask_at(address: Address, message: bytes, asked: Asked, started: float) -> None:
    loop = asyncio.get_running_loop()
    transport, reading = await loop.create_connection(lambda: _Reading(message, asked, started), *address)
    try:
        await reading.done
    finally:
        transport.close()


class _Reading(asyncio.Protocol):
    """Asks on a connection, and looks at each piece as it comes: a task that reads would cost the gateways' core more.

    `done` has a result once the answer has ended, was refused, or the connection is lost.
    """

    def __init__(self, message: bytes, asked: Asked, started: float) -> None:
        self._message, self._asked, self._started = message, asked, started
        self._head, self._tail = b"", b""
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport), "a TCP connection can be written to"
        transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter() - self._started
        asked = self._asked
        if not asked.status:
            self._head += data
            line, end, data = self._head.partition(b"\r\n")
            if not end:
                return
            asked.status = int(line.split()[1])
            if asked.status != 200:
                asked.refused_after = now - asked.at
                self._end()
                return
        if asked.first_at is None and b'"response":"' in data:
            asked.first_at = now
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        if asked.ended_at is None and b"[DONE]" in self._tail:
            asked.ended_at = now
            found = _NUM_TOKENS.search(self._tail)
            asked.num_tokens = int(found[1]) if found else 0
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
