"""The RPCs of the KV service.

The store keeps the handles whose holder is this service. For a handle of another service, this service acts for the
readers of its host: it pulls the bytes, and forwards releases and aborts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

from kv_transfer_svc.arena import Arena
from kv_transfer_svc.event_stream import event_stream
from kv_transfer_svc.handle_record import HandleRecord, handle_name
from kv_transfer_svc.host_cache import HostCache
from kv_transfer_svc.host_points import HostPoints
from kv_transfer_svc.puller import Puller
from kv_transfer_svc.slab_checks import verify_checksums
from kv_transfer_svc.store import HandleStore
from kv_transfer_svc.tables import kv_tables
from kv_transfer_svc.transport.handshake import LinkHandshake
from kv_transfer_svc.transport.links import Links
from kv_transfer_svc.transport.source import BlockSource, ProbeSource, Source, slab_source, source_chunks
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import kv_transfer_pb2_grpc as kv_grpc
from tandem.v1 import tables_pb2 as tables
from tandem.v1 import types_pb2 as pb
from tandem_runtime import errors
from tandem_runtime.errors import (
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    KvNotFound,
    StaleIncarnation,
    Unsupported,
)
from tandem_runtime.kv.checksum import CHECKSUMS_METADATA, pack_checksums
from tandem_runtime.kv.keys import KvKeys
from tandem_runtime.kv.layout import check_supported
from tandem_runtime.kv.shared_region import SharedRegion
from tandem_runtime.kv.signatures import HandleVerifier
from tandem_runtime.kv.slabs import trim_slab
from tandem_runtime.kv.time_left import stated_seconds_left
from tandem_runtime.kv_handle import HandleState

_LATE_END_SECONDS = 1.0

SERVICE_NAME = kv.DESCRIPTOR.services_by_name["KvTransferService"].full_name


class KvTransferService(kv_grpc.KvTransferServiceServicer):
    """The servicer. Call `set_address` before handles arrive."""

    def __init__(
        self,
        store: HandleStore,
        arena: Arena,
        incarnation: str,
        keys: Callable[[], KvKeys],
        stats: Callable[[], pb.StatsReply],
        host_cache: HostCache | None,
        links: Links | None = None,
        *,
        verify_kv: bool = False,
        macs_until: float = 0.0,
    ) -> None:
        """`keys` returns the keys of the control plane; until `macs_until` handles of release 0.2 are accepted."""
        self.incarnation = incarnation
        self.store = store
        self.handshake = LinkHandshake(incarnation, keys, store.clock, macs_until)
        self.puller = Puller(store, arena, links or Links(incarnation, keys, lease_seconds=store.lease_seconds))
        self._handles = HandleVerifier(keys, macs_until)
        self._stats = stats
        self.host_cache = host_cache
        self.points = host_cache.points if host_cache is not None else HostPoints()
        self._verify_kv = verify_kv
        self._address = ""
        store.regions.add_own(arena.region_id, arena.region)

    def set_address(self, address: str) -> None:
        """Set the advertised address, which names this service in handles."""
        self._address = self.handshake.address = address

    def sweep(self) -> None:
        """Expire leases and handles; called by a timer, never by a request."""
        self.puller.sweep()
        if self.host_cache is not None:
            self.host_cache.sweep()
        self.store.sweep()

    async def drained(self) -> None:
        """Accept no new handles; return once all current handles have ended or expired."""
        self.store.drain()
        while True:
            ended = self.store.ended.next()
            if not self.store.num_live:
                return
            await ended.wait()

    # ---------------------------------------------------------------------------------------------- the writer

    async def Reserve(self, request: kv.ReserveRequest, context: Any) -> kv.ReserveReply:
        if not self._is_held_here(request.handle):
            raise InvalidRequest(
                f"the {handle_name(request.handle)} is held by {request.handle.holder_address}: reserve it there",
                field="holder_address",
            )
        record = self.store.reserve(request)
        state = record.machine.state.to_proto
        return kv.ReserveReply(state=state, holder_incarnation=self.incarnation, reports_copied=True)

    async def Seal(self, request: kv.SealRequest, context: Any) -> kv.SealReply:
        record = self._find(request.handle)
        if any(slab.checksums for slab in request.slabs):
            self.store.check_slabs(record, request.slabs)
            await self._verify_slabs(record, request)
        closed = kv.Closed(num_blocks=request.num_blocks, first_tokens=request.first_tokens) if request.close else None
        self.store.seal(record, request.slabs, closed)
        return kv.SealReply(state=record.machine.state.to_proto)

    async def SealStream(self, requests: AsyncIterator[kv.SealRequest], context: Any) -> AsyncIterator[kv.SealReply]:
        async for request in requests:
            yield await self.Seal(request, context)

    async def Own(self, request: kv.OwnRequest, context: Any) -> AsyncIterator[kv.OwnerEvent]:
        region = self.store.regions.lent(request.region_id, request.incarnation)
        yield kv.OwnerEvent(accepted=True)
        next_number = 0
        told: dict[bytes, int] = {}
        while not region.is_lost:
            changed = region.log.changed.next()
            now = {handle_id: copied.num_slabs for handle_id, copied in region.copied.items()}
            news = [handle_id for handle_id, num_slabs in now.items() if told.get(handle_id, 0) < num_slabs]
            told = now
            for handle_id in news:
                yield kv.OwnerEvent(copied=kv.OwnerEvent.Copied(handle_id=handle_id, num_slabs=now[handle_id]))
            for number, ended in region.log.since(next_number):
                yield kv.OwnerEvent(ended=ended)
                region.log.sent(number)
                next_number = number + 1
            await changed.wait()

    # ---------------------------------------------------------------------------------------------- the reader

    async def Watch(self, request: kv.WatchRequest, context: Any) -> AsyncIterator[kv.WatchEvent]:
        check_supported(request.layout)
        if not request.reader_id:
            raise InvalidRequest("reader_id is empty; it names who will release", field="reader_id")
        record = self._watched(request)
        reader_id = request.reader_id
        self.store.watched(record, reader_id, acknowledges=request.acknowledges)
        record.readers[reader_id] = request.reader_incarnation
        skipped = partial(self.store.skipped, record, reader_id)
        with record.watched_by(reader_id):
            async for event in record.events(request.layout, request.first_block, skipped):
                yield event

    async def Acknowledge(self, request: kv.AcknowledgeRequest, context: Any) -> kv.AcknowledgeReply:
        if not self._is_held_here(request.handle):
            self.puller.acknowledge(request.handle, request.reader_id, request.num_slabs)
        else:
            record = self.store.find(request.handle)
            self.store.acknowledge(record, request.reader_id, request.num_slabs, request.followers)
        return kv.AcknowledgeReply()

    async def Read(self, request: kv.ReadRequest, context: Any) -> AsyncIterator[pb.Chunk]:
        source = self._slab_source(request)
        for chunk in source_chunks(source):
            self.store.counters["bytes_served"] += len(chunk.data)
            yield chunk
        context.set_trailing_metadata(((CHECKSUMS_METADATA, pack_checksums(source.finish())),))

    # -------------------------------------------------------------------------------------- other hosts' services

    async def OpenLink(self, request: kv.OpenLinkRequest, context: Any) -> kv.OpenLinkReply:
        return self.handshake.answer(request)

    async def Probe(self, request: kv.ProbeRequest, context: Any) -> AsyncIterator[pb.Chunk]:
        for chunk in source_chunks(ProbeSource(request.num_bytes)):
            yield chunk

    @asynccontextmanager
    async def open_source(self, request: kv.DataRequest) -> AsyncIterator[Source]:
        """Yield the bytes to send on a data connection; raises as the RPC of the same kind does."""
        kind = request.WhichOneof("kind")
        if kind == "slab":
            source = self._slab_source(request.slab)
            yield source
            self.store.counters["bytes_served"] += source.num_bytes
        elif kind == "probe":
            yield ProbeSource(request.probe.num_bytes)
        elif kind == "blocks" and self.host_cache is not None:
            async with self.host_cache.lent(request.blocks) as blocks:
                yield blocks
                self.store.counters["bytes_served"] += blocks.num_bytes
        elif kind == "blocks":
            yield ProbeSource(0)
        else:
            raise Unsupported(f"data connections carry slabs, blocks and probes, not {kind}", field="kind")

    # ------------------------------------------------------------------------------------- the host's stored blocks

    async def Publish(self, request: kv.PublishRequest, context: Any) -> kv.PublishReply:
        if self.host_cache is None:
            return kv.PublishReply(num_refused=len(request.blocks))
        return await self.host_cache.publish(request)

    async def Load(self, request: kv.LoadRequest, context: Any) -> kv.LoadReply:
        return await self.host_cache.load(request) if self.host_cache is not None else kv.LoadReply()

    async def Unload(self, request: kv.UnloadRequest, context: Any) -> kv.UnloadReply:
        if self.host_cache is not None:
            self.host_cache.unload(request.reader_id)
        return kv.UnloadReply()

    async def BlockEvents(
        self, requests: AsyncIterator[kv.BlockEventsRequest], context: Any
    ) -> AsyncIterator[kv.BlockEventBatch]:
        async with aclosing(event_stream(self.points, self._tables, requests)) as batches:
            async for batch in batches:
                yield batch

    async def ReportPool(
        self, requests: AsyncIterator[kv.PoolReport], context: Any
    ) -> AsyncIterator[kv.PoolReportReply]:
        with self.points.reported() as pool:
            async for report in requests:
                pool.take(report)
                if report.is_whole:
                    yield kv.PoolReportReply()

    async def ReadBlocks(self, request: kv.ReadBlocksRequest, context: Any) -> AsyncIterator[pb.Chunk]:
        if self.host_cache is None:
            return
        async with self.host_cache.lent(request) as source:
            for chunk in source_chunks(source):
                yield chunk
            context.set_trailing_metadata(((CHECKSUMS_METADATA, pack_checksums(source.finish())),))

    # --------------------------------------------------------------------------------- the writer and the reader

    async def Renew(self, request: kv.RenewRequest, context: Any) -> kv.RenewReply:
        states = [self._renew(handle, request.reader_id) for handle in request.handles]
        return kv.RenewReply(states=[state.to_proto for state in states])

    async def Release(self, request: kv.ReleaseRequest, context: Any) -> kv.ReleaseReply:
        if not request.all and not request.reader_id:
            raise InvalidRequest("reader_id is empty; name the reader, or say all", field="reader_id")
        reader_id = None if request.all else request.reader_id
        left = stated_seconds_left(request)
        state = await self._end(
            request.handle,
            left,
            lambda record: self.store.release(record, reader_id),
            lambda: self.puller.release(request.handle, reader_id, left),
        )
        return kv.ReleaseReply(state=state.to_proto)

    async def Abort(self, request: kv.AbortRequest, context: Any) -> kv.AbortReply:
        reason = errors.from_proto(request.reason)
        left = stated_seconds_left(request)
        state = await self._end(
            request.handle,
            left,
            lambda record: self.store.abort(record, reason),
            lambda: self.puller.abort(request.handle, reason, left),
        )
        return kv.AbortReply(state=state.to_proto)

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsReply:
        return self._stats()

    async def Tables(self, request: tables.TablesRequest, context: Any) -> tables.TablesReply:
        return self._tables(request.max_rows)

    # ------------------------------------------------------------------------------------------------- helpers

    def _tables(self, max_rows: int) -> tables.TablesReply:
        return kv_tables(self.incarnation, self.store, self.puller, self.host_cache, max_rows)

    def _is_held_here(self, handle: pb.KvHandle) -> bool:
        """Return whether this service is the holder.

        Raises Unauthenticated unless the control plane minted the handle, StaleIncarnation if an earlier incarnation
        of this service held it.
        """
        self._handles.verify(handle)
        if handle.holder_incarnation == self.incarnation or not handle.holder_address:
            return True
        if handle.holder_address != self._address:
            return False
        if handle.holder_incarnation:
            raise StaleIncarnation(
                f"the {handle_name(handle)} was held by incarnation {handle.holder_incarnation} of this KV service, "
                f"which is {self.incarnation} now",
                field="holder_incarnation",
            )
        return True

    def _find(self, handle: pb.KvHandle) -> HandleRecord:
        if not self._is_held_here(handle):
            raise InvalidRequest(
                f"the {handle_name(handle)} is held by {handle.holder_address}", field="holder_address"
            )
        return self.store.find(handle)

    def _watched(self, request: kv.WatchRequest) -> HandleRecord:
        """Return the record that a reader watches, under a lease."""
        if not self._is_held_here(request.handle):
            return self.puller.watch(request)
        record = self.store.find_or_await(request.handle, stated_seconds_left(request))
        self.store.lease(record, request.reader_id)
        return record

    def _slab_source(self, request: kv.ReadRequest) -> BlockSource:
        slab, record = self._slab(request)
        trimmed = trim_slab(slab, request.first_block, request.num_blocks)
        if trimmed is None:
            raise InvalidRequest(
                f"slab {request.slab_index} ends before block {request.first_block}", field="first_block"
            )
        return slab_source(trimmed, record, self.store.regions.memory)

    def _slab(self, request: kv.ReadRequest) -> tuple[kv.Slab, HandleRecord]:
        records = [self.store.find(request.handle)] if self._is_held_here(request.handle) else []
        for record in records or self._copies_of(request):
            if record.machine.end_error is not None:
                raise KvNotFound(record.machine.end_error.message)
            if request.slab_index < len(record.machine.slabs):
                return record.machine.slabs[request.slab_index], record
        raise KvNotFound(
            f"the {handle_name(request.handle)} has no sealed slab {request.slab_index} here", field="slab_index"
        )

    def _copies_of(self, request: kv.ReadRequest) -> list[HandleRecord]:
        return [record for record in self.store.copies(request.handle) if record.machine.is_reader(request.reader_id)]

    def _renew(self, handle: pb.KvHandle, reader_id: str) -> HandleState:
        try:
            if not self._is_held_here(handle):
                return self.puller.renew(handle, reader_id)
            record = self.store.find(handle)
            if record.machine.ended:
                return record.machine.state
            if reader_id:
                self.store.lease(record, reader_id)
            else:
                record.machine.renew_writer(self.store.clock())
            return record.machine.state
        except StaleIncarnation:
            return HandleState.EXPIRED
        except KvNotFound:
            return HandleState.AWAITED

    async def _end(
        self,
        handle: pb.KvHandle,
        seconds_left: float | None,
        here: Callable[[HandleRecord], None],
        there: Callable[[], Any],
    ) -> HandleState:
        """Release or abort. A handle that can no longer be here counts as ended, which is the wanted state."""
        try:
            if not self._is_held_here(handle):
                state: HandleState = await there()
                return state
            # A late end is kept too: a Reserve or Watch that was sent before it may come after it.
            least = None if seconds_left is None else max(seconds_left, _LATE_END_SECONDS)
            record = self.store.find_or_await(handle, least)
        except (StaleIncarnation, DeadlineExceeded, Draining):
            return HandleState.EXPIRED
        here(record)
        return record.machine.state

    async def _verify_slabs(self, record: HandleRecord, request: kv.SealRequest) -> None:
        """Verify checksums: a sample on the event loop, or with --verify-kv all of them in a thread."""
        if record.machine.ended or not record.region_id:
            return
        memory = self.store.regions.region(record.region_id)
        if not isinstance(memory, SharedRegion):
            return  # the readers verify: this service does not read device memory
        if self._verify_kv:
            await asyncio.to_thread(verify_checksums, request.slabs, memory, all_blocks=True)
        else:
            verify_checksums(request.slabs, memory, all_blocks=False)
