"""Chooses the transport for each peer, and falls back to gRPC when a transport fails.

- First contact: OpenLink, then probes. The link takes the first of shm and tcp that is allowed here, offered by the
  peer and answers a probe; otherwise gRPC.
- A read fails, or its bytes are corrupt: this read and the following reads use gRPC.
- Meanwhile the link searches for the better transport again, in the background: at once after the first failure, then
  after 1, 2, 4 ... 60 s.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

from kv_transfer_svc.transport.handshake import link_request
from kv_transfer_svc.transport.interface import GrpcTransport, LinkBroken, Transport
from kv_transfer_svc.transport.link_tls import LinkTls
from kv_transfer_svc.transport.shm_transport import ShmTransport
from kv_transfer_svc.transport.stats import LinkStats
from kv_transfer_svc.transport.tcp_transport import TcpTransport
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.certificates.names import Identity, Role
from tandem_runtime.errors import KvCorrupt, TandemError, Unsupported
from tandem_runtime.kv.client import LEASE_SECONDS, KvClient, expected_service
from tandem_runtime.kv.keys import KvKeys
from tandem_runtime.log import get_logger

log = get_logger(__name__)

TRANSPORTS = ("shm", "tcp", "grpc")
"""Every transport, best first."""

_CALL_SECONDS = 2.0
"""Deadline of calls to peers; the waiting reader has its own deadline."""
_NUM_THREADS = 64
"""As many as sixteen pulls have reads at once; each is made when it is needed."""
_SHOWN_SECONDS = 600.0
"""A link unused for longer is left out of the report: its peer may be gone."""

ReadCall = Callable[[Transport], Awaitable[list[int]]]
"""Reads over a transport and returns the checksums of the filled buffers."""

PROBE_BYTES = 1 << 20
_PROBE_SECONDS = 2.0
_MAX_PAUSE_SECONDS = 60.0


@dataclass(frozen=True)
class LinkContext:
    """What all links of one service share: the identity of the reader, its transports and its threads."""

    incarnation: str
    host_id: str
    transports: Sequence[str]
    keys: Callable[[], KvKeys]
    clock: Callable[[], float]
    counters: Counter[str]
    threads: Executor
    tls: LinkTls | None


@dataclass(frozen=True)
class Received:
    """The transport of a read and the checksums of its blocks: verified, for shm as far as they were known."""

    transport: str
    checksums: list[int]


class Links:
    """One link per peer, created at first use. Owned by the puller; others may read through the links too.

    With a member, a peer must prove the id that a gateway has named with its address: another KV service of the fleet
    cannot answer in its place.
    """

    def __init__(
        self,
        incarnation: str,
        keys: Callable[[], KvKeys],
        *,
        transports: Sequence[str] = ("grpc",),
        host_id: str = "",
        clock: Callable[[], float] = time.monotonic,
        lease_seconds: float = LEASE_SECONDS,
        counters: Counter[str] | None = None,
        member: FleetMember | None = None,
        tls: LinkTls | None = None,
    ) -> None:
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "kv-receive")
        self._context = LinkContext(
            incarnation,
            host_id,
            transports,
            keys,
            clock,
            Counter() if counters is None else counters,
            self._threads,
            tls,
        )
        self._lease_seconds = lease_seconds
        self._member = member
        self._links: dict[tuple[str, str], Link] = {}

    def to(self, address: str, id: str) -> Link:
        """Return the link to the service `id` at `address`. Raise Unavailable if that is no id of a certificate.

        Without a member any service at `address` will do, and until the end of `--plaintext-until`, for an id of
        release 0.2, any KV service.
        """
        key = address, id
        expect = expected_service(self._member, id, address)
        if key not in self._links:
            client = KvClient(
                address,
                self._context.incarnation,
                call_seconds=_CALL_SECONDS,
                lease_seconds=self._lease_seconds,
                member=self._member,
                expect=expect,
            )
            self._links[key] = Link(self._context, client, expect)
        return self._links[key]

    def report(self) -> list[pb.KvLink]:
        """Return the stats of each recently used link; may be called from any thread."""
        return [link.report() for link in list(self._links.values()) if link.idle_seconds < _SHOWN_SECONDS]

    async def close(self) -> None:
        """Close every link; reads must have ended before."""
        for link in self._links.values():
            await link.close()
        self._threads.shutdown(wait=False)


class Link:
    """Reads from the service at `client`'s address, which must be `expect` on data connections too."""

    def __init__(self, context: LinkContext, client: KvClient, expect: Identity | Role = "kv") -> None:
        self.client = client
        self._expect = expect
        self.stats = LinkStats()
        self.note = ""
        self.host_id = ""
        self._context = context
        self._grpc = GrpcTransport(client)
        self._transport: Transport = self._grpc
        self._search: asyncio.Task[None] | None = None
        self._was_opened = False
        self._used_at = context.clock()
        self._num_failures = 0
        self._retry_at = 0.0
        self._num_reading = self._num_begun = 0
        """Reads that run, and all that have begun."""

    @property
    def transport(self) -> str:
        return self._transport.name if self._was_opened else ""

    @property
    def idle_seconds(self) -> float:
        return self._context.clock() - self._used_at

    def open(self) -> None:
        """Start the search for the best transport, unless it is known or the next search is not due."""
        self._used_at = self._context.clock()
        is_due = not self._was_opened or (self.note != "" and self._context.clock() >= self._retry_at)
        if self._search is None and is_due:
            self._search = asyncio.create_task(self._find_transport(), name=f"link-{self.client.address}")

    async def read(
        self, handle: pb.KvHandle, reader_id: str, slab: kv.Slab, into: Sequence[memoryview], first_block: int
    ) -> Received:
        """Fill one buffer per block of `slab` from `first_block` on, over any transport that works.

        Raises KvCorrupt if the bytes were corrupt twice, and the errors of the holder.
        """
        return await self._read(lambda transport: transport.read(handle, reader_id, slab, into, first_block), into)

    async def read_blocks(self, request: kv.ReadBlocksRequest, into: Sequence[memoryview]) -> list[int]:
        """Fill one leading buffer per block of a chain in the peer's store; return their verified checksums."""
        return (await self._read(lambda transport: transport.read_blocks(request, into), into)).checksums

    async def _read(self, read: ReadCall, into: Sequence[memoryview]) -> Received:
        transport = await self._best_transport()
        try:
            return await self._measured(transport, read, into)
        except Unsupported:
            if transport is self._grpc:
                raise
        except LinkBroken as error:
            await self._set_aside(transport, error.message)
        except KvCorrupt as error:
            if error.field != "checksums":
                raise
            await self._corrupt(transport, error)
        try:
            return await self._measured(self._grpc, read, into)
        except KvCorrupt as error:
            if error.field == "checksums":
                await self._corrupt(self._grpc, error)
            raise

    def report(self) -> pb.KvLink:
        stats = self.stats
        return pb.KvLink(
            address=self.client.address,
            transport=self.transport,
            bytes_per_second=stats.bytes_per_second,
            best_bytes_per_second=stats.best_bytes_per_second,
            latency_ms=1000 * stats.latency_seconds,
            num_transfers=stats.num_transfers,
            num_bytes=stats.num_bytes,
            num_errors=stats.num_errors,
            num_fallbacks=stats.num_fallbacks,
            note=self.note or stats.slowness,
            host_id=self.host_id,
            bytes_per_run=stats.bytes_per_run,
        )

    async def close(self) -> None:
        if self._search is not None:
            self._search.cancel()
            await asyncio.gather(self._search, return_exceptions=True)
        await self._transport.close()
        await self.client.close()

    # ---------------------------------------------------------------------------------------------------- reading

    async def _best_transport(self) -> Transport:
        """Return the current transport; only the first contact waits for the search."""
        self.open()
        if self._search is not None and not self._was_opened:
            await asyncio.shield(self._search)
        return self._transport

    async def _measured(self, transport: Transport, read: ReadCall, into: Sequence[memoryview]) -> Received:
        begun = time.monotonic()
        self._num_begun += 1
        number, is_first = self._num_begun, self._num_reading == 0
        self._num_reading += 1
        try:
            checksums = await read(transport)
        finally:
            self._num_reading -= 1
        if transport is self._transport:
            is_alone = is_first and self._num_begun == number
            num_bytes = sum(map(len, into[: len(checksums)]))
            self.stats.transferred(num_bytes, begun, time.monotonic(), is_alone=is_alone)
        if transport is not self._grpc:
            self._num_failures = 0
        elif self.note:
            self.stats.num_fallbacks += 1
            self._context.counters["link_fallbacks"] += 1
        return Received(transport.name, checksums)

    async def _corrupt(self, transport: Transport, error: KvCorrupt) -> None:
        self._context.counters["checksum_failures"] += 1
        if transport is self._grpc:
            self._count_error()
        else:
            await self._set_aside(transport, error.message)

    async def _set_aside(self, transport: Transport, reason: str) -> None:
        """Use gRPC until a better transport has been found again."""
        self._count_error()
        if transport is self._transport:  # of reads that fail together the first counts
            self._num_failures += 1
            self._fall_back(reason)
            await transport.close()

    # ------------------------------------------------------------------------------------- choosing the transport

    async def _find_transport(self) -> None:
        """Take the first candidate that answers a probe."""
        errors: list[str] = []
        try:
            for transport in await self._candidates():
                if await self._works(transport, errors):
                    self._take(transport, errors)
                    return
            if errors:
                self._not_found("; ".join(errors))
            else:
                self.note = ""
                await self._works(self._grpc, errors)
        except TandemError as error:
            self._not_found(f"no answer to OpenLink: {error.message}")
        finally:
            self._was_opened = True
            self._search = None

    async def _candidates(self) -> list[Transport]:
        """Return the transports better than gRPC that both sides allow, best first."""
        context = self._context
        if set(context.transports) <= {"grpc"}:
            return []
        peer = await self._open_link()
        candidates: list[Transport] = []
        if "shm" in context.transports and peer.kv_socket and peer.host_id == context.host_id:
            candidates.append(ShmTransport(peer.kv_socket, context.threads))
        if "tcp" in context.transports and peer.tcp_address:
            candidates.append(TcpTransport(self._open_link, context.threads, context.tls))
        return candidates

    async def _open_link(self) -> kv.OpenLinkReply:
        context = self._context
        reply = await self.client.open_link(link_request(context.incarnation, self.client.address, context.keys()))
        self.host_id = reply.host_id
        if isinstance(self._expect, Identity) and reply.identity != self._expect.uri:
            raise LinkBroken(f"{self._expect} offers data connections to {reply.identity[:64]!r} instead of itself")
        return reply

    async def _works(self, transport: Transport, errors: list[str]) -> bool:
        """Probe a transport with zeros; the measured times become the link's stats."""
        probed = LinkStats()
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                await transport.probe(0)  # connects, which is not measured
                for num_bytes in (0, PROBE_BYTES):
                    begun = time.monotonic()
                    if await transport.probe(num_bytes) == num_bytes:
                        probed.measured(num_bytes, begun, time.monotonic())
        except (TandemError, TimeoutError) as error:
            self._count_error()
            reason = error.message if isinstance(error, TandemError) else f"a probe took more than {_PROBE_SECONDS:g} s"
            errors.append(f"{transport.name}: {reason}")
            await transport.close()
            return False
        self.stats.begin_with(probed)
        return True

    def _take(self, transport: Transport, errors: Sequence[str]) -> None:
        if self.note:
            log.info("kv_link_recovered", peer=self.client.address, transport=transport.name)
        self._transport = transport
        self.note = f"fallback: {'; '.join(errors)}" if errors else ""

    def _not_found(self, reason: str) -> None:
        self._num_failures = max(1, self._num_failures) + 1
        self._fall_back(reason)

    def _fall_back(self, reason: str) -> None:
        pause = min(_MAX_PAUSE_SECONDS, 2.0 ** min(self._num_failures - 2, 10)) if self._num_failures > 1 else 0.0
        self._retry_at = self._context.clock() + pause
        self._transport = self._grpc
        self.stats.reset_rate()
        if not self.note:
            log.warning("kv_link_fell_back", peer=self.client.address, transport="grpc", reason=reason)
        self.note = f"fallback: {reason}"

    def _count_error(self) -> None:
        self.stats.num_errors += 1
        self._context.counters["link_errors"] += 1
