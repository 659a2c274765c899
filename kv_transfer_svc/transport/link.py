"""Which way do bytes take from one peer, and what if it breaks?

first contact --OpenLink, probe--> the first of shm, tcp that is allowed, offered and answers; else gRPC
a read breaks, or its bytes were spoilt --> that read goes over gRPC, and so do the next ones until, in the
background, the better way has been found again: at once after a first failure, then after 1, 2, 4 ... 60 s
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from kv_transfer_svc.transport.grpc_transport import GrpcTransport
from kv_transfer_svc.transport.interface import LinkBroken, Transport
from kv_transfer_svc.transport.offer import link_request
from kv_transfer_svc.transport.shm_transport import ShmTransport
from kv_transfer_svc.transport.stats import LinkFigures
from kv_transfer_svc.transport.tcp_transport import TcpTransport
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import KvCorrupt, TandemError, Unsupported
from tandem_runtime.kv.client import KvClient
from tandem_runtime.log import get_logger

log = get_logger(__name__)

Ask = Callable[[Transport], Awaitable[list[int]]]
"""Reads over a way and returns the checksums of the buffers that were filled."""

PROBE_BYTES = 1 << 20
_PROBE_SECONDS = 2.0
_MAX_PAUSE_SECONDS = 60.0


@dataclass(frozen=True)
class Reader:
    """What all links of one service have in common: who reads, and how it may."""

    incarnation: str
    host_id: str
    transports: Sequence[str]
    handle_key: Callable[[], bytes]
    clock: Callable[[], float]
    counters: Counter[str]
    threads: Executor


@dataclass(frozen=True)
class Received:
    """What came, over which transport; the blocks' checksums are verified (shm: as far as they were known)."""

    transport: str
    checksums: list[int]


class Link:
    """One pair: this service reads from the one at `client`'s address."""

    def __init__(self, reader: Reader, client: KvClient) -> None:
        self.client = client
        self.figures = LinkFigures()
        self.note = ""
        self._reader = reader
        self._grpc = GrpcTransport(client)
        self._way: Transport = self._grpc
        self._finding: asyncio.Task[None] | None = None
        self._was_opened = False
        self._used_at = reader.clock()
        self._num_failures = 0
        self._retry_at = 0.0

    @property
    def transport(self) -> str:
        return self._way.name if self._was_opened else ""

    @property
    def idle_seconds(self) -> float:
        return self._reader.clock() - self._used_at

    def open(self) -> None:
        """Begin to look for the best way, unless one is known or was looked for just now."""
        self._used_at = self._reader.clock()
        is_due = not self._was_opened or (self.note != "" and self._reader.clock() >= self._retry_at)
        if self._finding is None and is_due:
            self._finding = asyncio.create_task(self._find_way(), name=f"link-{self.client.address}")

    async def read(
        self, handle: pb.KvHandle, reader_id: str, slab: kv.Slab, into: Sequence[memoryview], first_block: int
    ) -> Received:
        """Fill one buffer per block of `slab` from `first_block` on, by whichever way works.

        Raises KvCorrupt if the bytes were spoilt twice, and what the holder refuses.
        """
        return await self._read(lambda way: way.read(handle, reader_id, slab, into, first_block), into)

    async def read_blocks(self, request: kv.ReadBlocksRequest, into: Sequence[memoryview]) -> list[int]:
        """Fill the leading buffers with what the peer's store has of a chain; return their checksums, verified."""
        return (await self._read(lambda way: way.read_blocks(request, into), into)).checksums

    async def _read(self, ask: Ask, into: Sequence[memoryview]) -> Received:
        way = await self._best_way()
        try:
            return await self._measured(way, ask, into)
        except Unsupported:
            if way is self._grpc:
                raise
        except LinkBroken as error:
            await self._set_aside(way, error.message)
        except KvCorrupt as error:
            if error.field != "checksums":
                raise
            await self._spoilt(way, error)
        try:
            return await self._measured(self._grpc, ask, into)
        except KvCorrupt as error:
            if error.field == "checksums":
                await self._spoilt(self._grpc, error)
            raise

    def report(self) -> pb.KvLink:
        figures = self.figures
        return pb.KvLink(
            address=self.client.address,
            transport=self.transport,
            bytes_per_second=figures.bytes_per_second,
            best_bytes_per_second=figures.best_bytes_per_second,
            latency_ms=1000 * figures.latency_seconds,
            num_transfers=figures.num_transfers,
            num_bytes=figures.num_bytes,
            num_errors=figures.num_errors,
            num_fallbacks=figures.num_fallbacks,
            note=self.note or figures.slowness,
        )

    async def close(self) -> None:
        if self._finding is not None:
            self._finding.cancel()
            await asyncio.gather(self._finding, return_exceptions=True)
        await self._way.close()
        await self.client.close()

    # ---------------------------------------------------------------------------------------------------- reading

    async def _best_way(self) -> Transport:
        """Return the way known to work; only at first contact wait until one is found."""
        self.open()
        if self._finding is not None and not self._was_opened:
            await asyncio.shield(self._finding)
        return self._way

    async def _measured(self, way: Transport, ask: Ask, into: Sequence[memoryview]) -> Received:
        begun = time.monotonic()
        checksums = await ask(way)
        if way is self._way:
            self.figures.transferred(sum(map(len, into[: len(checksums)])), time.monotonic() - begun)
        if way is not self._grpc:
            self._num_failures = 0
        elif self.note:
            self.figures.num_fallbacks += 1
            self._reader.counters["link_fallbacks"] += 1
        return Received(way.name, checksums)

    async def _spoilt(self, way: Transport, error: KvCorrupt) -> None:
        self._reader.counters["checksum_failures"] += 1
        if way is self._grpc:
            self._count_error()
        else:
            await self._set_aside(way, error.message)

    async def _set_aside(self, way: Transport, why: str) -> None:
        """Use gRPC until a better way has been found again."""
        self._count_error()
        if way is self._way:  # of reads that break together the first decides
            self._num_failures += 1
            self._fall_back(why)
            await way.close()

    # ------------------------------------------------------------------------------------------- finding the way

    async def _find_way(self) -> None:
        """Take the first of the allowed ways that is offered and gets a probe through."""
        troubles: list[str] = []
        try:
            for way in await self._offered():
                if await self._works(way, troubles):
                    self._take(way, troubles)
                    return
            if troubles:
                self._not_found("; ".join(troubles))
            else:
                self.note = ""
                await self._works(self._grpc, troubles)
        except TandemError as error:
            self._not_found(f"no answer to OpenLink: {error.message}")
        finally:
            self._was_opened = True
            self._finding = None

    async def _offered(self) -> list[Transport]:
        """Return the ways better than gRPC that both sides have, best first."""
        reader = self._reader
        if set(reader.transports) <= {"grpc"}:
            return []
        offer = await self._open_link()
        ways: list[Transport] = []
        if "shm" in reader.transports and offer.kv_socket and offer.host_id == reader.host_id:
            ways.append(ShmTransport(offer.kv_socket, reader.threads))
        if "tcp" in reader.transports and offer.tcp_address:
            ways.append(TcpTransport(self._open_link, reader.threads))
        return ways

    async def _open_link(self) -> kv.OpenLinkReply:
        reader = self._reader
        return await self.client.open_link(link_request(reader.incarnation, self.client.address, reader.handle_key()))

    async def _works(self, way: Transport, troubles: list[str]) -> bool:
        """Send zeroes through a way; what they took are the link's figures from now on."""
        found = LinkFigures()
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                await way.probe(0)  # it connects, which is not to be measured
                for num_bytes in (0, PROBE_BYTES):
                    begun = time.monotonic()
                    if await way.probe(num_bytes) == num_bytes:
                        found.measured(num_bytes, time.monotonic() - begun)
        except (TandemError, TimeoutError) as error:
            self._count_error()
            why = error.message if isinstance(error, TandemError) else f"a probe took more than {_PROBE_SECONDS:g} s"
            troubles.append(f"{way.name}: {why}")
            await way.close()
            return False
        self.figures.reset_rate()
        self.figures.bytes_per_second = self.figures.best_bytes_per_second = found.bytes_per_second
        self.figures.latency_seconds = found.latency_seconds
        return True

    def _take(self, way: Transport, troubles: Sequence[str]) -> None:
        if self.note:
            log.info("kv_link_recovered", peer=self.client.address, transport=way.name)
        self._way = way
        self.note = f"fallback: {'; '.join(troubles)}" if troubles else ""

    def _not_found(self, why: str) -> None:
        self._num_failures = max(1, self._num_failures) + 1
        self._fall_back(why)

    def _fall_back(self, why: str) -> None:
        pause = min(_MAX_PAUSE_SECONDS, 2.0 ** min(self._num_failures - 2, 10)) if self._num_failures > 1 else 0.0
        self._retry_at = self._reader.clock() + pause
        self._way = self._grpc
        self.figures.reset_rate()
        if not self.note:
            log.warning("kv_link_fell_back", peer=self.client.address, transport="grpc", reason=why)
        self.note = f"fallback: {why}"

    def _count_error(self) -> None:
        self.figures.num_errors += 1
        self._reader.counters["link_errors"] += 1
