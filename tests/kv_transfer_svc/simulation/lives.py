"""One life of a KV service or a worker, from its start to kill -9.

Everything is product code, except the engine's model, the network below gRPC and the Unix sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from decode_svc.kv_consumer import KVConsumer
from kv_transfer_svc.arena import Arena
from kv_transfer_svc.blocks.allocator import BlockAllocator
from kv_transfer_svc.clock import ServiceClock
from kv_transfer_svc.handle_record import HandleRecord
from kv_transfer_svc.host_cache import HostCache
from kv_transfer_svc.service import KvTransferService
from kv_transfer_svc.store import HandleStore
from prefill_svc.kv_producer import KVProducer
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem.v1 import worker_pb2
from tandem_engine import messages
from tandem_runtime.kv.keys import KvKeys
from tandem_runtime.kv.packets import PacketSocket
from tandem_runtime.kv.region_server import RegionServer
from tandem_runtime.kv.signatures import HandleSigner
from tandem_worker.engine_link import EngineRegions
from tandem_worker.front import WorkerFront
from tandem_worker.kv_link import KvLink
from tandem_worker.kv_offload import KVOffload
from tandem_worker.model_card import AssetStore
from tandem_worker.requests import RequestTable
from tandem_worker.service import WorkerService
from tandem_worker.settings import WorkerSettings
from tests.kv_transfer_svc.simulation.engine import SimulatedEngine
from tests.kv_transfer_svc.simulation.network import Network, Server
from tests.kv_transfer_svc.simulation.packets import SocketFolder
from tests.kv_transfer_svc.simulation.servers import methods_of
from tests.kv_transfer_svc.simulation.truth import Truth
from tests.kv_transfer_svc.simulation.virtual_loop import Process, VirtualLoop
from tests.kv_transfer_svc.simulation.virtual_time import VirtualTime

SIGNER = HandleSigner(bytes(range(32)))
KEYS = KvKeys((SIGNER.public_key,), b"a key that only KV services have")
LEASE_SECONDS = 10.0
SWEEP_SECONDS = 0.25
_ARENA_BYTES = 4096 * 6
"""Six blocks: a prompt has up to twelve. A window is one block, and a pull holds at most three."""
_STORE_BYTES = 4096 * 12
_NUM_SLOTS = (1, 4, 10)
"""Of the rings of workers whose pool is private."""


@dataclass(frozen=True)
class Environment:
    """The surroundings of every process of one run."""

    loop: VirtualLoop
    rng: random.Random
    network: Network
    sockets: SocketFolder
    truth: Truth
    time: VirtualTime


class Life(ABC):
    """One process of the system; `info` is what it registers with."""

    def __init__(self, around: Environment, info: pb.WorkerInfo, host: int) -> None:
        self.around = around
        self.info = info
        self.is_ready = False
        self.process = Process(f"{info.worker_id}/{info.incarnation}", host, around.loop)
        self.process.call(self._begin)

    def kill(self) -> None:
        self.process.kill()
        self.around.network.killed(self.process)

    def stop(self) -> None:
        self.process.stop()
        self.around.network.stopped(self.process)

    def close(self) -> None:  # noqa: B027 - most lives have nothing to close
        """Close the descriptors, which the end of the run would leave open."""

    @abstractmethod
    def _begin(self) -> None:
        """Start the process's tasks; called inside the process."""


class KvLife(Life):
    """A KV service."""

    def _begin(self) -> None:
        around, incarnation = self.around, self.info.incarnation
        self.arena = Arena(f"arena-{incarnation}", _ARENA_BYTES)
        self.clock = ServiceClock(around.time.monotonic, around.time.time)
        self.store = HandleStore(clock=self.clock, wall_clock=around.time.time, lease_seconds=LEASE_SECONDS)
        self.cache = HostCache(
            BlockAllocator(_STORE_BYTES), None, self.store.regions, f"store-{incarnation}", self.clock
        )
        self.service = KvTransferService(self.store, self.arena, incarnation, lambda: KEYS, pb.StatsReply, self.cache)
        self.cache.fetch = self.service.puller.fetch_blocks
        self.service.set_address(self.info.address)
        self._note_what_is_sealed()
        descriptor = kv.DESCRIPTOR.services_by_name["KvTransferService"]
        around.network.servers[self.info.address] = Server(self.process, methods_of(descriptor, self.service))
        regions = RegionServer(Path(self.info.kv_socket), self.store.regions)
        around.sockets.listen(
            self.info.kv_socket, self.process, lambda end: regions._tasks.spawn(regions._serve(cast(PacketSocket, end)))
        )
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())
        self.is_ready = True

    @property
    def named(self) -> cp.KvServiceAddress:
        info = self.info
        return cp.KvServiceAddress(
            address=info.address, incarnation=info.incarnation, host_id=info.host_id, socket=info.kv_socket
        )

    def close(self) -> None:
        if self.is_ready:
            lent = [region.memory for region in self.store.regions]
            for memory in (*lent, self.arena.region, self.cache.blocks.allocator.region):
                with contextlib.suppress(BufferError):  # a pull was copying into the region when the process was killed
                    memory.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.service.sweep()

    def _note_what_is_sealed(self) -> None:
        """Record sealed bytes in the service's own regions: pulled copies and stored blocks."""
        truth, arena, store, blocks = self.around.truth, self.arena, self.store, self.cache.blocks
        seal_record, seal_block, allocator = store.seal, blocks.seal, blocks.allocator
        freed = store.freed

        def note_freed(record: HandleRecord, num_bytes: int) -> None:
            truth.counts["windows freed before the end of their pull"] += num_bytes > 0
            freed(record, num_bytes)

        def seal_handle(record: HandleRecord, slabs: Sequence[kv.Slab], closed: kv.Closed | None) -> None:
            for slab in slabs if record.transport == "grpc" else ():
                for extent in slab.extents:
                    truth.sealed(extent, bytes(arena.region.view(extent.offset, extent.num_bytes)))
            seal_record(record, slabs, closed)

        def seal_stored(key: Any, extent: Any, checksum: int) -> bool:
            placed = pb.Extent(region_id=f"store-{self.info.incarnation}", offset=extent.offset, slot=extent.slot)
            placed.num_bytes, placed.generation = extent.num_bytes, extent.generation
            truth.sealed(placed, bytes(allocator.region.view(extent.offset, extent.num_bytes)))
            return seal_block(key, extent, checksum)

        store.seal, blocks.seal, store.freed = seal_handle, seal_stored, note_freed  # type: ignore[method-assign]


class WorkerLife(Life):
    """A prefill or decode worker, its front and its engine together."""

    def __init__(
        self,
        around: Environment,
        info: pb.WorkerInfo,
        host: int,
        kv_of_host: Callable[[], cp.KvServiceAddress | None],
    ) -> None:
        super().__init__(around, info, host)
        self.sealed: dict[str, list[tuple[int, int]]] = {}
        """Slots and generations that the engine said are complete, by its request."""
        self._kv_of_host = kv_of_host

    def _begin(self) -> None:
        around, incarnation = self.around, self.info.incarnation
        num_slots = around.rng.choice([None, None, *_NUM_SLOTS])
        self.engine = SimulatedEngine(self.process, f"pool-{incarnation}", around.rng, around.truth, num_slots)
        self.engine.on_sealed = self._note_what_is_sealed
        self.link = KvLink(incarnation, LEASE_SECONDS)
        regions = EngineRegions(self.engine, self.link)
        settings = WorkerSettings(kv_transport="auto" if around.rng.random() < 0.8 else "grpc")
        requests = RequestTable()
        make = KVProducer if self.info.role == pb.WORKER_ROLE_PREFILL else KVConsumer
        self.connector = make(self.engine, self.link, regions, requests, settings)
        offload = KVOffload(self.engine, self.link, regions, incarnation)
        self.front = WorkerFront(incarnation, self.engine, requests, self.connector, offload)
        self.front.when_ready(self._ready)
        self.link.follow(self._kv_of_host)
        self._pump = asyncio.get_running_loop().create_task(self.front.pump())
        service = WorkerService(self.front, AssetStore(), lambda: self.info)
        descriptor = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]
        around.network.servers[self.info.address] = Server(self.process, methods_of(descriptor, service))

    @property
    def holds(self) -> dict[bytes, tuple[str, str]]:
        """The handles for whose readers a prefill worker keeps blocks: the engine's request and the holder of each."""
        return self.connector._pinned._pinned if isinstance(self.connector, KVProducer) else {}

    @property
    def kv_address(self) -> str:
        return self.front.kv_address

    def _ready(self, paths: dict[str, str]) -> None:
        self.is_ready = True
        assert self.front.card is not None, "ready with its card"
        self.info.card.CopyFrom(self.front.card)

    def _note_what_is_sealed(self, sealed: messages.SealedBlocks) -> None:
        runner = self.engine.runner
        self.sealed.setdefault(sealed.request_id, []).extend(zip(sealed.slots, sealed.generations, strict=True))
        for slot, generation in zip(sealed.slots, sealed.generations, strict=True):
            content = runner.read_slot(slot)
            extent = pb.Extent(region_id=runner.region_id, offset=slot * len(content), num_bytes=len(content))
            extent.slot, extent.generation = slot, generation
            self.around.truth.sealed(extent, content)
