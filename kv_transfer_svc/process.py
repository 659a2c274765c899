"""The process of a KV service: start, serve, drain, stop."""

from __future__ import annotations

import asyncio
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kv_transfer_svc.arena import Arena
from kv_transfer_svc.blocks.allocator import BlockAllocator
from kv_transfer_svc.blocks.quotas import Quotas
from kv_transfer_svc.disk import DiskTier
from kv_transfer_svc.host_cache import HostCache
from kv_transfer_svc.load import load_report
from kv_transfer_svc.service import SERVICE_NAME, KvTransferService
from kv_transfer_svc.settings import KvSettings
from kv_transfer_svc.store import HandleStore
from kv_transfer_svc.transport.data_server import DataServer
from kv_transfer_svc.transport.links import Links
from kv_transfer_svc.transport.stats import export_gauges
from tandem.v1 import kv_transfer_pb2_grpc as kv_grpc
from tandem.v1 import types_pb2 as pb
from tandem_runtime import paths
from tandem_runtime.identity import default_host_id, new_incarnation
from tandem_runtime.kv.region_server import RegionServer
from tandem_runtime.log import get_logger
from tandem_runtime.memory import MemoryProbe
from tandem_runtime.paths import forget_dead_sockets, socket_path
from tandem_runtime.registration import Registrar
from tandem_runtime.server import GrpcServer, split_address
from tandem_runtime.settings import describe
from tandem_runtime.tasks import supervised

log = get_logger(__name__)

_SWEEP_SECONDS = 0.25
_GRACE_SECONDS = 1.0


class KvProcess:
    """One KV service with its arena, socket, server and registration."""

    def __init__(self, settings: KvSettings) -> None:
        incarnation = new_incarnation()
        self._settings = settings
        self._arena = Arena(f"arena-{incarnation}", settings.arena_bytes)
        self._store = HandleStore(lease_seconds=settings.lease_seconds, max_handles=settings.max_handles)
        self._host_cache = _host_cache(settings, self._store, incarnation)
        links = Links(
            incarnation,
            self._handle_key,
            transports=settings.transports,
            host_id=settings.host_id or default_host_id(),
            clock=self._store.clock,
            lease_seconds=settings.lease_seconds,
            counters=self._store.counters,
        )
        self._service = KvTransferService(
            self._store,
            self._arena,
            incarnation,
            self._handle_key,
            self._stats,
            self._host_cache,
            links,
            verify_kv=settings.verify_kv,
        )
        forget_dead_sockets("kv-*.sock")
        path = socket_path(f"kv-{os.getpid()}-{incarnation[:4]}.sock")
        self._regions = RegionServer(path, self._store.regions)
        self._server = GrpcServer(
            settings.listen,
            lambda server: kv_grpc.add_KvTransferServiceServicer_to_server(self._service, server),
            [SERVICE_NAME],
            insecure=settings.insecure,
        )
        self._data = DataServer(
            settings.data_address,
            self._service.handshake.tokens.verify,
            self._service.open_source,
            insecure=settings.insecure,
        )
        export_gauges(links.report)
        self._memory = MemoryProbe(lambda: [os.getpid()])
        self._info = self._describe(incarnation)
        self._registrar = Registrar(settings.control, self._info, self._load)

    async def run(self, drain: asyncio.Event) -> int:
        """Serve until `drain` is set, then until every handle has ended."""
        await self._regions.start()
        if self._host_cache is not None:
            self._host_cache.fetch = self._service.puller.fetch_blocks
            await self._host_cache.open()
        # Without the sweeper no lease would expire: it is restarted at once, whatever has ended it.
        sweeping = supervised("sweep", self._sweep, longest_pause_seconds=_SWEEP_SECONDS)
        sweeper = asyncio.create_task(sweeping, name="sweep")
        try:
            bound = await self._server.start()
            self._info.address = self._settings.advertise or bound
            self._service.set_address(self._info.address)
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
        return 0

    async def _open_transports(self) -> None:
        """Offer to peers the transports beside gRPC that the settings allow."""
        settings, handshake = self._settings, self._service.handshake
        handshake.host_id = self._info.host_id
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
        self._store.regions.close()
        if self._host_cache is not None:
            await self._host_cache.close()
        self._arena.close()

    async def _sweep(self) -> None:
        """Expire leases on a timer. A task of its own, so that no wait can delay it."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self._service.sweep()

    def _describe(self, incarnation: str) -> pb.WorkerInfo:
        host_id = self._settings.host_id or default_host_id()
        return pb.WorkerInfo(
            worker_id=self._settings.worker_id or f"kv-{host_id}-{os.getpid()}",
            incarnation=incarnation,
            role=pb.WORKER_ROLE_KV,
            host_id=host_id,
            kv_socket=str(self._regions.path),
            version=_version(),
            settings=describe(self._settings),
        )

    def _handle_key(self) -> bytes:
        return self._registrar.handle_key

    def _load(self) -> pb.LoadReport:
        report = load_report(self._store, self._arena, self._host_cache, self._service.puller.links.report())
        report.memory.CopyFrom(self._memory.report())
        return report

    def _stats(self) -> pb.StatsReply:
        return pb.StatsReply(info=self._info, load=self._load())


def _host_cache(settings: KvSettings, store: HandleStore, incarnation: str) -> HostCache | None:
    """Return the host cache that the settings describe; None with --store-bytes 0."""
    if not settings.store_bytes:
        return None
    disk = None
    if settings.disk_bytes:
        disk = DiskTier(Path(settings.disk_dir or paths.state_dir() / "kv-disk"), settings.disk_bytes)
    return HostCache(
        BlockAllocator(settings.store_bytes),
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
