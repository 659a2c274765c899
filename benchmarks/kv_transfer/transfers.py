"""Defines the transfers: each moves some bytes once, and only the move is timed."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.kv_transfer.bare_socket import BareSocket, bare_socket
from benchmarks.kv_transfer.hosts import BLOCK_BYTES, KEYS, EngineReader, KvHost, Pool, kv_hosts
from kv_transfer_svc.transport.links import Link, Links
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb

_WATCH_SECONDS = 0.02


@dataclass
class Took:
    """What one move cost; CPU time of all processes that had a part in it."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0


Transfer = Callable[[int], Awaitable[Took]]


@asynccontextmanager
async def transfers(largest_bytes: int) -> AsyncIterator[dict[str, Transfer]]:
    """Start everything and yield the transfers by name; see `benchmarks.kv_transfer` for what they are."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-bench-"))
        bare = stack.enter_context(bare_socket(largest_bytes))
        flags = {"holder": (), "tcp": ("--transports", "tcp,grpc"), "grpc": ("--transports", "grpc")}
        hosts = await stack.enter_async_context(kv_hosts(Path(folder), largest_bytes, flags))
        pool = Pool(hosts["holder"], largest_bytes)
        await pool.lend()
        readers = await _readers(hosts, pool, largest_bytes)
        links = Links("benchmark", lambda: KEYS, transports=("tcp", "grpc"))
        stack.push_async_callback(links.close)
        pids = [bare.pid, *(host.pid for host in hosts.values())]
        plain = PlainTransfers(bare, largest_bytes, pids)
        holder = hosts["holder"].info
        services = ServiceTransfers(pool, readers, links.to(holder.address, holder.worker_id), pids)
        yield {**plain.by_name(), **services.by_name()}


class PlainTransfers:
    """What the others are compared with."""

    def __init__(self, bare: BareSocket, largest_bytes: int, pids: Sequence[int]) -> None:
        self._bare = bare
        self._pids = pids
        self._source = memoryview(bytearray(b"\1") * largest_bytes)
        self._target = memoryview(bytearray(b"\2") * largest_bytes)

    def by_name(self) -> dict[str, Transfer]:
        return {"memcpy": self._memcpy, "bare_socket": self._bare_socket}

    async def _memcpy(self, num_bytes: int) -> Took:
        with _timed(self._pids) as took:
            self._target[:num_bytes] = self._source[:num_bytes]
        return took

    async def _bare_socket(self, num_bytes: int) -> Took:
        with _timed(self._pids) as took:
            self._bare.receive(self._target[:num_bytes])
        return took


class ServiceTransfers:
    """Moves from a worker's pool to a reader, through KV services."""

    def __init__(self, pool: Pool, readers: Mapping[str, EngineReader], link: Link, pids: Sequence[int]) -> None:
        self._pool = pool
        self._readers = readers
        self._link = link
        self._pids = pids
        self._private = np.full(len(pool.memory), 1, np.uint8)

    def by_name(self) -> dict[str, Transfer]:
        return {
            "tcp_link": self._read,
            "tcp": partial(self._pulled, "tcp"),
            "grpc": partial(self._pulled, "grpc"),
            "shm": self._shared,
            "shm_copied_in": partial(self._shared, copied_in=True),
            "shm_checked": partial(self._shared, copied_in=True, checked=True),
        }

    async def _read(self, num_bytes: int) -> Took:
        """One read of the transport by itself, into this process's memory."""
        reader = self._readers["shm"]
        self._pool.write(num_bytes)
        handle = await self._pool.reserve(num_bytes)
        slab = await self._pool.seal(handle, num_bytes)
        into = [reader.pool[start : start + BLOCK_BYTES] for start in range(0, num_bytes, BLOCK_BYTES)]
        with _timed(self._pids) as took:
            received = await self._link.read(handle, "reader", slab, into, 0)
        _check_way("tcp", received.transport)
        await self._finish(reader, handle, num_bytes)
        return took

    async def _pulled(self, transport: str, num_bytes: int) -> Took:
        """From the seal at one host until a reader on another can read every byte."""
        reader = self._readers[transport]
        self._pool.write(num_bytes)
        handle, watching = await self._expected(reader, num_bytes, copies=False)
        with _timed(self._pids) as took:
            await self._pool.seal(handle, num_bytes)
            slab, came_by = await watching
        _check_way(transport, came_by)
        reader.copy(slab)
        await self._finish(reader, handle, num_bytes)
        return took

    async def _shared(self, num_bytes: int, *, copied_in: bool = False, checked: bool = False) -> Took:
        """From the last byte written until a reader of the same host has every byte in its own pool."""
        reader = self._readers["shm"]
        self._pool.write(num_bytes)
        handle, watching = await self._expected(reader, num_bytes, copies=True)
        with _timed(self._pids) as took:
            if copied_in:
                self._pool.copy_in(self._private[:num_bytes])
            await self._pool.seal(handle, num_bytes, checksums=checked)
            await watching
        await self._finish(reader, handle, num_bytes)
        return took

    async def _expected(
        self, reader: EngineReader, num_bytes: int, *, copies: bool
    ) -> tuple[pb.KvHandle, asyncio.Future[tuple[kv.Slab, str]]]:
        """Reserve a handle and watch it: both happen long before a prefill ends."""
        handle = await self._pool.reserve(num_bytes)
        watching = asyncio.ensure_future(reader.watch(handle, copies=copies))
        await asyncio.sleep(_WATCH_SECONDS)
        return handle, watching

    async def _finish(self, reader: EngineReader, handle: pb.KvHandle, num_bytes: int) -> None:
        """See that the bytes are the right ones, and give everything back."""
        if reader.pool[:num_bytes] != self._pool.memory[:num_bytes]:
            raise RuntimeError("the reader has other bytes than the writer")
        await reader.host.client.release(handle, "reader")
        await reader.host.until_empty()
        await self._pool.host.until_empty()
        self._pool.forget(num_bytes)


async def _readers(hosts: Mapping[str, KvHost], pool: Pool, largest_bytes: int) -> dict[str, EngineReader]:
    readers = {"shm": EngineReader(hosts["holder"], largest_bytes)}
    await readers["shm"].map(pool.region_id)
    for transport in ("tcp", "grpc"):
        readers[transport] = EngineReader(hosts[transport], largest_bytes)
        await readers[transport].map(f"arena-{hosts[transport].info.incarnation}")
    return readers


def _check_way(wanted: str, came_by: str) -> None:
    if came_by != wanted:
        raise RuntimeError(f"what should have come by {wanted} came by {came_by}: its figures would have a wrong name")


@contextmanager
def _timed(pids: Sequence[int]) -> Iterator[Took]:
    took = Took()
    cpu_before = cpu_seconds(pids)
    begun = time.perf_counter()
    yield took
    took.seconds = time.perf_counter() - begun
    took.cpu_seconds = cpu_seconds(pids) - cpu_before


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return the CPU time so far of this process and others, to the nanosecond (proc(5), schedstat)."""
    total = time.process_time()
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            total += int((thread / "schedstat").read_text().split()[0]) / 1e9
    return total
