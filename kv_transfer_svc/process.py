"""The process of a KV service: start, serve, drain, stop."""

from __future__ import annotations

import asyncio
import os
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kv_transfer_svc import metrics
from kv_transfer_svc.arena import Arena
from kv_transfer_svc.blocks.allocator import BlockAllocator
from kv_transfer_svc.blocks.quotas import Quotas
from kv_transfer_svc.clock import ServiceClock
from kv_transfer_svc.disk import DiskTier
from kv_transfer_svc.host_cache import HostCache
from kv_transfer_svc.load import load_report
from kv_transfer_svc.service import SERVICE_NAME, KvTransferService
from kv_transfer_svc.settings import KvSettings
from kv_transfer_svc.store import HandleStore
from kv_transfer_svc.transport.data_server import DataServer
from kv_transfer_svc.transport.link_tls import LinkTls
from kv_transfer_svc.transport.links import Links
from kv_transfer_svc.transport.stats import export_gauges
from tandem.v1 import kv_transfer_pb2_grpc as kv_grpc
from tandem.v1 import types_pb2 as pb
from tandem_machine.memory import usable_memory
from tandem_runtime import paths
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.enrolment.membership import member_of_fleet
from tandem_runtime.identity import default_host_id, default_worker_id, new_incarnation
from tandem_runtime.kv.keys import KvKeys
from tandem_runtime.kv.region_server import RegionServer
from tandem_runtime.log import get_logger
from tandem_runtime.memory import MemoryProbe
from tandem_runtime.metrics_endpoint import MetricsEndpoint
from tandem_runtime.paths import forget_dead_sockets, socket_path
from tandem_runtime.registration import Registrar
from tandem_runtime.server import GrpcServer, split_address
from tandem_runtime.settings import describe
from tandem_runtime.tasks import supervised

log = get_logger(__name__)

_SWEEP_SECONDS = 0.25
_HEARTBEAT_SECONDS = 1.0
"""Between heartbeats that gateways get with the block events."""
_GRACE_SECONDS = 1.0
_STORE_SHARE_OF_FREE_MEMORY = 0.05
_LEAST_STORE_BYTES = 16 << 20


class KvProcess:
    """One KV service with its arena, socket, server and registration."""

    def __init__(
        self,
        settings: KvSettings,
        incarnation: str,
        arena: Arena,
        blocks: BlockAllocator | None,
        member: FleetMember | None,
    ) -> None:
        """`blocks`: memory for stored blocks; None: nothing is stored. Without `member`, all is in plain text."""
        self._settings = settings
        self._arena = arena
        self._member = member
        self._tls = None if self._member is None else link_tls(self._member)
        self._store = HandleStore(
            clock=ServiceClock(),
            wall_clock=time.time,
            lease_seconds=settings.lease_seconds,
            max_handles=settings.max_handles,
        )
        self._host_cache = _host_cache(settings, blocks, self._store, incarnation) if blocks is not None else None
        links = Links(
            incarnation,
            self._keys,
            transports=settings.transports,
            host_id=settings.host_id or default_host_id(),
            lease_seconds=settings.lease_seconds,
            counters=self._store.counters,
            member=self._member,
            tls=self._tls,
        )
        self._service = KvTransferService(
            self._store,
            self._arena,
            incarnation,
            self._keys,
            self._stats,
            self._host_cache,
            links,
            verify_kv=settings.verify_kv,
            macs_until=settings.macs_until,
        )
        forget_dead_sockets("kv-*.sock")
        path = socket_path(f"kv-{os.getpid()}-{incarnation[:4]}.sock")
        self._regions = RegionServer(path, self._store.regions)
        self._server = GrpcServer(
            settings.listen,
            lambda server: kv_grpc.add_KvTransferServiceServicer_to_server(self._service, server),
            [SERVICE_NAME],
            member=self._member,
            insecure=settings.allows_plaintext,
            has_reflection=settings.grpc_reflection,
        )
        self._data = DataServer(
            settings.data_address,
            self._service.handshake.tokens.verify,
            self._service.open_source,
            insecure=settings.allows_plaintext,
            tls=self._tls,
        )
        export_gauges(links.report)
        self._reported = pb.LoadReport()
        metrics.export(lambda: self._reported, lambda: [record.machine.state for record in self._store.live()])
        self._memory = MemoryProbe(lambda: [os.getpid()], has_devices=False)
        self._info = self._describe(incarnation)
        self._registrar = Registrar(settings.control, self._info, self._load, member=self._member)
        self._metrics = MetricsEndpoint(settings.metrics_listen, self._member, insecure=settings.allows_plaintext)

    @classmethod
    async def create(cls, settings: KvSettings, drain: asyncio.Event | None = None) -> KvProcess:
        """Take the memory from the machine, up to a second per GB, in a thread; join the fleet meanwhile.

        Raise StoppedEarly if `drain` is set before the service has joined, what `member_of_fleet` raises, and
        InvalidRequest at once for a folder that cannot hold the service's sockets.
        """
        paths.runtime_dir()
        joining = asyncio.create_task(member_of_fleet(settings, "kv", drain))
        try:
            return await cls._create(settings, joining)
        finally:
            joining.cancel()

    @classmethod
    async def _create(cls, settings: KvSettings, joining: asyncio.Task[FleetMember | None]) -> KvProcess:
        incarnation = new_incarnation()
        arena = await asyncio.to_thread(Arena, f"arena-{incarnation}", settings.arena_bytes)
        blocks = await asyncio.to_thread(_store_memory, settings)
        return cls(settings, incarnation, arena, blocks, await joining)

    async def run(self, drain: asyncio.Event) -> int:
        """Serve until `drain` is set, then until every handle has ended; return the exit status."""
        await asyncio.to_thread(self._memory.read)
        if self._member is not None:
            self._member.start()
        await self._regions.start()
        # Without the sweeper no lease would expire: it is restarted at once, whatever has ended it.
        sweeping = supervised("sweep", self._sweep, longest_pause_seconds=_SWEEP_SECONDS)
        sweeper = asyncio.create_task(sweeping, name="sweep")
        try:
            if self._host_cache is not None:
                self._host_cache.fetch = self._service.puller.fetch_blocks
                await self._host_cache.open()
            bound = await self._server.start()
            self._info.address = self._settings.advertise or bound
            self._service.set_address(self._info.address)
            await self._metrics.start()
            self._info.metrics_address = self._metrics.address_for_others(self._info.address)
            self._info.metrics_tls = self._metrics.is_encrypted
            await self._open_transports()
            self._registrar.update_info(self._info)
            self._registrar.start()
            self._server.set_serving(True)
            log.info("kv_service_listening", address=self._info.address, socket=str(self._regions.path))
            await drain.wait()
            await self._drain()
        finally:
            sweeper.cancel()
            await self._close()
        return self._member.exit_code if self._member is not None else 0

    async def _open_transports(self) -> None:
        """Offer to peers the transports beside gRPC that the settings allow."""
        settings, handshake = self._settings, self._service.handshake
        handshake.host_id = self._info.host_id
        handshake.identity = "" if self._tls is None else self._tls.identity.uri
        if "shm" in settings.transports:
            handshake.kv_socket = str(self._regions.path)
        if "tcp" in settings.transports:
            _, port = split_address(await self._data.start())
            host, _ = split_address(self._info.address)
            handshake.tcp_address = settings.data_advertise or f"{host}:{port}"

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._settings.drain_seconds):
                draining = asyncio.create_task(self._service.drained())
                await asyncio.sleep(0)  # the drain has begun before the next heartbeat
                self._registrar.beat_now()
                await draining
        except TimeoutError:
            log.warning("drain_timed_out", num_handles=self._store.num_live)

    async def _close(self) -> None:
        await self._registrar.stop()
        await self._regions.close()
        await self._service.puller.close()
        await self._data.stop()
        await self._server.stop(_GRACE_SECONDS)
        await self._metrics.stop()
        self._store.regions.close()
        if self._host_cache is not None:
            await self._host_cache.close()
        await asyncio.to_thread(self._arena.close)
        if self._member is not None:
            await self._member.close()

    async def _sweep(self) -> None:
        """Expire leases on a timer. A task of its own, so that no wait can delay it."""
        loop = asyncio.get_running_loop()
        beat_at = loop.time()
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self._service.sweep()
            if loop.time() >= beat_at:
                beat_at = loop.time() + _HEARTBEAT_SECONDS
                self._service.points.heartbeat(self._registrar.heartbeat_request())

    def _describe(self, incarnation: str) -> pb.WorkerInfo:
        host_id = self._settings.host_id or default_host_id()
        own_id = self._member.identity.id if self._member is not None else self._settings.worker_id
        return pb.WorkerInfo(
            worker_id=own_id or default_worker_id("kv", host_id, incarnation),
            incarnation=incarnation,
            role=pb.WORKER_ROLE_KV,
            host_id=host_id,
            kv_socket=str(self._regions.path),
            version=_version(),
            settings=describe(self._settings),
        )

    def _keys(self) -> KvKeys:
        return self._registrar.kv_keys

    def _load(self) -> pb.LoadReport:
        report = load_report(self._store, self._arena, self._host_cache, self._service.puller.links.report())
        report.memory.CopyFrom(self._memory.report())
        self._reported = report
        return report

    def _stats(self) -> pb.StatsReply:
        return pb.StatsReply(info=self._info, load=self._load())


def _store_memory(settings: KvSettings) -> BlockAllocator | None:
    """Reserve memory for stored blocks: as configured, else a share of what is free, for use as pools are lent."""
    if settings.store_bytes is not None:
        return BlockAllocator(settings.store_bytes) if settings.store_bytes else None
    most = int(_STORE_SHARE_OF_FREE_MEMORY * usable_memory().available_bytes)
    return BlockAllocator(max(_LEAST_STORE_BYTES, most), initial_bytes=0)


def link_tls(member: FleetMember) -> LinkTls:
    """Return what data connections need, so that they are encrypted as gRPC is."""
    return LinkTls(member.identity, member.certificate.ssl_context, member.peers, member.plaintext.until)


def _host_cache(settings: KvSettings, blocks: BlockAllocator, store: HandleStore, incarnation: str) -> HostCache:
    """Return the host cache that the settings describe."""
    disk = None
    if settings.disk_bytes:
        folder = settings.disk_dir or paths.state_dir(settings.state_dir or None, "--state-dir") / "kv-disk"
        disk = DiskTier(Path(folder), settings.disk_bytes)
    return HostCache(
        blocks,
        disk,
        store.regions,
        f"store-{incarnation}",
        store.clock,
        quotas=Quotas(settings.account_bytes),
        verify_kv=settings.verify_kv,
    )


def _version() -> str:
    try:
        return version("tandem-serve")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0"
