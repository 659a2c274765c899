"""A host for tests: a real KV service on port 0, real regions, and a clock that a test can advance."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from kv_transfer_svc.arena import Arena
from kv_transfer_svc.blocks.allocator import BlockAllocator
from kv_transfer_svc.disk import DiskTier
from kv_transfer_svc.host_cache import HostCache
from kv_transfer_svc.load import load_report
from kv_transfer_svc.service import SERVICE_NAME, KvTransferService
from kv_transfer_svc.store import HandleStore, steady_unix_seconds
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import kv_transfer_pb2_grpc as kv_grpc
from tandem.v1 import types_pb2 as pb
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.identity import new_incarnation
from tandem_runtime.kv.client import KvClient
from tandem_runtime.kv.region_server import RegionServer
from tandem_runtime.server import GrpcServer
from tests.kv_transfer_svc.layout import BLOCK_BYTES, KEYS, a_layout
from tests.kv_transfer_svc.writer import Writer

_STORE_BYTES = 1 << 20


class Clock:
    """The service's clock, which a test can advance."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return steady_unix_seconds() + self.ahead


class Host:
    """One KV service with its servers."""

    def __init__(
        self,
        folder: Path,
        arena_bytes: int,
        disk: DiskTier | None = None,
        *,
        verify_kv: bool = False,
        member: FleetMember | None = None,
    ) -> None:
        """`member`: the identity of the service's gRPC server, for other KV services; None: in plain text."""
        self.incarnation = new_incarnation()
        self.clock = Clock()
        self.arena = Arena(f"arena-{self.incarnation}", arena_bytes)
        self.wall_clock_ahead = 0.0
        self.store = HandleStore(clock=self.clock, wall_clock=lambda: self.clock() + self.wall_clock_ahead)
        self.host_cache = HostCache(
            BlockAllocator(_STORE_BYTES),
            disk,
            self.store.regions,
            f"store-{self.incarnation}",
            self.clock,
            verify_kv=verify_kv,
        )
        self.service = KvTransferService(
            self.store, self.arena, self.incarnation, lambda: KEYS, self._stats, self.host_cache
        )
        self.host_cache.fetch = self.service.puller.fetch_blocks
        self.regions = RegionServer(folder / f"{self.incarnation}.sock", self.store.regions)
        self.server = GrpcServer(
            "127.0.0.1:0",
            lambda server: kv_grpc.add_KvTransferServiceServicer_to_server(self.service, server),
            [SERVICE_NAME],
            member=member,
        )
        self.address = ""

    async def start(self) -> None:
        await self.regions.start()
        await self.host_cache.open()
        self.address = await self.server.start()
        self.service.set_address(self.address)

    async def stop(self) -> None:
        await self.regions.close()
        await self.service.puller.close()
        await self.server.stop(0)
        self.store.regions.close()
        await self.host_cache.close()
        self.arena.close()

    @property
    def socket(self) -> str:
        return str(self.regions.path)

    def put_forward(self, seconds: float) -> None:
        """Advance the service's clock and expire leases."""
        self.clock.ahead += seconds
        self.service.sweep()

    def _stats(self) -> pb.StatsReply:
        return pb.StatsReply(load=load_report(self.store, self.arena, self.host_cache))


@contextlib.asynccontextmanager
async def running_host(
    folder: Path,
    arena_bytes: int = 64 * BLOCK_BYTES,
    disk: DiskTier | None = None,
    *,
    verify_kv: bool = False,
    member: FleetMember | None = None,
) -> AsyncIterator[Host]:
    host = Host(folder, arena_bytes, disk, verify_kv=verify_kv, member=member)
    await host.start()
    try:
        yield host
    finally:
        await host.stop()


@contextlib.asynccontextmanager
async def running_writer(host: Host, member: FleetMember | None = None) -> AsyncIterator[Writer]:
    writer = Writer(host.socket, host.address, host.incarnation, member=member)
    try:
        await writer.lend()
        yield writer
    finally:
        await writer.close()


@contextlib.asynccontextmanager
async def a_client(host: Host, member: FleetMember | None = None) -> AsyncIterator[KvClient]:
    client = KvClient(host.address, new_incarnation(), member=member)
    try:
        yield client
    finally:
        await client.close()


async def watch_all(client: KvClient, handle: pb.KvHandle, reader_id: str, first_block: int = 0) -> list[kv.WatchEvent]:
    """Return every event of one reader until the handle is closed."""
    return [event async for event in client.watch(handle, reader_id, a_layout(), first_block)]


def nothing_is_left(host: Host) -> bool:
    """Whether no handle keeps anything, by the service's own stats."""
    load = host.service._stats().load.kv_service
    is_full = load.arena_free_bytes == load.arena_bytes and host.arena.used_bytes == 0
    return is_full and (load.num_handles, load.leased_bytes, load.orphan_bytes) == (0, 0, 0)


def closed(num_blocks: int, token_id: int = 7) -> kv.Closed:
    return kv.Closed(num_blocks=num_blocks, first_tokens=[kv.FirstToken(token_id=token_id)])


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    """Wait until `condition` holds; pytest's time limit is the deadline."""
    while True:
        result = condition()
        if result if isinstance(result, bool) else await result:
            return
        await asyncio.sleep(0.005)
