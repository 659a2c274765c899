"""Pulls slabs from the KV services of other hosts.

`Puller` owns the pulls and the links. There is one `Pull` task per copy of a handle. The task watches the handle at its
holder in the name of the first reader, copies each sealed slab into the arena, and seals the copy here. The task frees
the arena memory when the copy has ended, for any reason.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing

from kv_transfer_svc.arena import Arena
from kv_transfer_svc.blocks.block import BlockKey
from kv_transfer_svc.handle_record import HandleRecord
from kv_transfer_svc.slab_checks import block_part_bytes
from kv_transfer_svc.store import HandleStore
from kv_transfer_svc.transport.links import Link, Links
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_runtime import tracing
from tandem_runtime.errors import InternalError, InvalidRequest, TandemError
from tandem_runtime.kv.client import KvClient
from tandem_runtime.kv.layout import check_memory_kind
from tandem_runtime.kv.slabs import first_handed_over
from tandem_runtime.kv_handle import HandleState
from tandem_runtime.log import get_logger
from tandem_runtime.tasks import TaskSet

log = get_logger(__name__)


class Puller:
    """Owns the pulls and the links to their holders."""

    def __init__(self, store: HandleStore, arena: Arena, links: Links) -> None:
        self.links = links
        self._store = store
        self._arena = arena
        self._pulls: dict[HandleRecord, Pull] = {}
        self._tasks = TaskSet()

    def watch(self, request: kv.WatchRequest) -> HandleRecord:
        """Return a copy for a reader to watch, under a lease; start a pull if no copy has the reader's blocks."""
        handle, reader_id = request.handle, request.reader_id
        for record in self._store.copies(handle):
            pull = self._pulls.get(record)
            if pull is not None and pull.first_block <= request.first_block:
                self._store.lease(record, reader_id)
                pull.hold_for(reader_id)
                return record
        record = self._store.add_copy(handle, self._arena.region_id, request.layout)
        self._store.lease(record, reader_id)
        self._start(
            Pull(self._store, self._arena, self.links.to(handle.holder_address), record, request.first_block), reader_id
        )
        return record

    @property
    def arena(self) -> Arena:
        return self._arena

    def pulls(self) -> list[Pull]:
        return list(self._pulls.values())

    def renew(self, handle: pb.KvHandle, reader_id: str) -> HandleState:
        """Extend a reader's lease here. The KV client extends the lease at the holder while the copy lives."""
        for record in self._store.copies(handle):
            if record.machine.is_reader(reader_id):
                self._store.lease(record, reader_id)
                return record.machine.state
        return HandleState.AWAITED

    async def release(self, handle: pb.KvHandle, reader_id: str | None) -> HandleState:
        """Release the copy here and the handle at its holder; return the state at the holder."""
        for record in self._store.copies(handle):
            if reader_id is None or record.machine.is_reader(reader_id):
                self._store.release(record, reader_id)
        holder = self._holder(handle)
        try:
            return await (holder.release_all(handle) if reader_id is None else holder.release(handle, reader_id))
        except TandemError as error:  # the lease at the holder expires
            log.warning("kv_release_forward_failed", request_id=handle.request_id, reason=error.message)
            return HandleState.RELEASED

    async def abort(self, handle: pb.KvHandle, reason: TandemError) -> HandleState:
        for record in self._store.copies(handle):
            self._store.abort(record, reason)
        try:
            return await self._holder(handle).abort(handle, reason)
        except TandemError as error:
            log.warning("kv_abort_forward_failed", request_id=handle.request_id, reason=error.message)
            return HandleState.ABORTED

    async def fetch_blocks(self, address: str, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[int]:
        """Copy the leading blocks that another host's store has; return their verified checksums."""
        if not keys:
            return []
        request = kv.ReadBlocksRequest(
            layout_digest=keys[0].layout_digest,
            group=keys[0].group,
            block_hashes=[key.block_hash for key in keys],
            bytes_per_block=len(into[0]),
        )
        return await self.links.to(address).read_blocks(request, into)

    def sweep(self) -> None:
        """Renew the writer's lease of every copy in progress: the pull is the writer."""
        for record in self._pulls:
            record.machine.renew_writer(self._store.clock())

    async def close(self) -> None:
        await self._tasks.cancel()
        await self.links.close()

    def _start(self, pull: Pull, reader_id: str) -> None:
        self._pulls[pull.record] = pull
        task = self._tasks.spawn(pull.run(reader_id), name=f"pull-{pull.record.handle.request_id}")
        task.add_done_callback(lambda _: self._pulls.pop(pull.record))

    def _holder(self, handle: pb.KvHandle) -> KvClient:
        return self.links.to(handle.holder_address).client


class Pull:
    """Fills one record with the blocks from `first_block` on."""

    def __init__(self, store: HandleStore, arena: Arena, link: Link, record: HandleRecord, first_block: int) -> None:
        self.record = record
        self.first_block = first_block
        self._link = link
        self._holder = link.client
        self._readers: set[str] = set()
        self._num_bytes = 0
        self._start_ns = time.time_ns()
        self._traceparent = tracing.current_traceparent()
        self._store = store
        self._arena = arena
        self._blocks: list[list[pb.Extent]] = []  # per group, from `_first_of` the group on
        self._layout = record.layout or pb.KvLayout()

    @property
    def num_arena_bytes(self) -> int:
        """Bytes of the arena that the pull holds."""
        return sum(self._arena.held_bytes(extent) for blocks in self._blocks for extent in blocks)

    def hold_for(self, reader_id: str) -> None:
        """Keep the handle at its holder for one more reader of this host."""
        self._readers.add(reader_id)
        self._holder.hold(self.record.handle, reader_id)

    async def run(self, reader_id: str) -> None:
        """Pull until the record has ended. An error ends the record and so reaches its readers."""
        self.hold_for(reader_id)
        self._link.open()
        copying = asyncio.create_task(self._copy_until_closed(reader_id))
        copying.add_done_callback(self._record_span)
        try:
            await self.record.wait_ended()
        finally:
            copying.cancel()
            await asyncio.gather(copying, return_exceptions=True)
            self._arena.free([extent for blocks in self._blocks for extent in blocks])
            self._blocks = []
            for reader in self._readers:
                self._holder.let_go(self.record.handle, reader)

    def _record_span(self, _: object) -> None:
        attributes: dict[str, str | int] = {
            "tandem.kv.bytes": self._num_bytes,
            "tandem.kv.holder": self.record.handle.holder_address,
            "tandem.kv.transport": self.record.transport,
        }
        tracing.record_span("kv.pull", self._traceparent, self._start_ns, time.time_ns(), attributes)

    async def _copy_until_closed(self, reader_id: str) -> None:
        try:
            await self._copy(reader_id)
        except TandemError as error:
            log.warning("kv_pull_failed", request_id=self.record.handle.request_id, reason=error.message)
            self._store.abort(self.record, error)
        except Exception as error:
            log.exception("kv_pull_failed", request_id=self.record.handle.request_id)
            self._store.abort(self.record, InternalError(f"a KV pull failed: {error}"))
            raise

    async def _copy(self, reader_id: str) -> None:
        watch = self._holder.watch(self.record.handle, reader_id, self._layout, self.first_block)
        async with aclosing(watch) as events:
            async for event in events:
                if event.WhichOneof("kind") == "slab":
                    await self._copy_slab(event.slab, reader_id)
                else:
                    self._store.seal(self.record, [], event.closed)

    async def _copy_slab(self, slab: kv.Slab, reader_id: str) -> None:
        if not self._blocks:
            await self._allocate()
        extents = self._destination(slab)
        targets = [self._arena.region.view(extent.offset, extent.num_bytes) for extent in extents]
        try:
            received = await self._link.read(self.record.handle, reader_id, slab, targets, self.first_block)
        finally:
            for target in targets:
                target.release()
        num_bytes = sum(extent.num_bytes for extent in extents)
        self.record.transport = received.transport
        self._num_bytes += num_bytes
        self._store.counters["bytes_pulled"] += num_bytes
        self._store.counters["slabs_pulled"] += 1
        copied = kv.Slab()
        copied.CopyFrom(slab)
        copied.index = len(self.record.machine.slabs)
        del copied.extents[:], copied.checksums[:]
        copied.extents.extend(extents)
        copied.checksums.extend(received.checksums)
        self._store.seal(self.record, [copied], None)

    async def _allocate(self) -> None:
        """Allocate memory for all remaining blocks at once: pulls that allocate piece by piece can deadlock."""
        counts = []
        for group in self._layout.groups:
            num_blocks = -(-self.record.handle.num_tokens // group.tokens_per_block) - self._first_of(group)
            counts.append((max(0, num_blocks), group.bytes_per_block))
        extents = await self._arena.allocate([size for count, size in counts for _ in range(count)])
        for count, _ in counts:
            self._blocks.append(extents[:count])
            extents = extents[count:]

    def _first_of(self, group: pb.KvGroup) -> int:
        return max(self.first_block, first_handed_over(group, self.record.handle.num_tokens))

    def _destination(self, slab: kv.Slab) -> list[pb.Extent]:
        """Return the place of a slab's blocks here: whole blocks, or the part for the slab's layers."""
        for extent in slab.extents:
            check_memory_kind(extent)
        group = self._layout.groups[slab.group]
        first = slab.first_block - self._first_of(group)
        blocks = self._blocks[slab.group][first : first + slab.num_blocks] if first >= 0 else []
        if len(blocks) != slab.num_blocks or slab.first_layer not in group.layers:
            raise InvalidRequest(
                f"slab {slab.index} reaches from block {slab.first_block} to {slab.first_block + slab.num_blocks}, "
                f"outside a prompt of {self.record.handle.num_tokens} tokens",
                field="slabs.first_block",
            )
        start = block_part_bytes(group, list(group.layers).index(slab.first_layer))
        num_bytes = block_part_bytes(group, slab.num_layers)
        return [_part(block, start, num_bytes) for block in blocks]


def _part(block: pb.Extent, start: int, num_bytes: int) -> pb.Extent:
    part = pb.Extent()
    part.CopyFrom(block)
    part.offset += start
    part.num_bytes = num_bytes
    return part
