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
_PIECE_BYTES = 1 << 16
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
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(message)
        line = await reader.readline()
        if not line:
            return
        asked.status = int(line.split()[1])
        if asked.status != 200:
            asked.refused_after = time.perf_counter() - started - asked.at
            return
        tail = b""
        while b"[DONE]" not in tail:
            piece = await reader.read(_PIECE_BYTES)
            if not piece:
                return
            if asked.first_at is None and b'"response":"' in piece:
                asked.first_at = time.perf_counter() - started
            tail = (tail + piece)[-_TAIL_BYTES:]
        asked.ended_at = time.perf_counter() - started
        found = _NUM_TOKENS.search(tail)
        asked.num_tokens = int(found[1]) if found else 0
    finally:
        writer.close()
