"""How do slabs of another host get here?

One task per copy: it watches the handle at its holder in its first reader's name, copies each slab into the arena as it
is sealed, seals it here, and gives the arena back when the copy has ended, however it ended.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

from kv_transfer_svc.arena import Arena
from kv_transfer_svc.record import Record
from kv_transfer_svc.slab_checks import block_part_bytes
from kv_transfer_svc.store import HandleStore
from kv_transfer_svc.transport.link import Link
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_runtime import tracing
from tandem_runtime.errors import InternalError, InvalidRequest, TandemError
from tandem_runtime.kv.layout import check_memory_kind
from tandem_runtime.kv.slabs import first_handed_over
from tandem_runtime.log import get_logger

log = get_logger(__name__)


class Pull:
    """Fills one record with blocks from `first_block` on."""

    def __init__(self, store: HandleStore, arena: Arena, link: Link, record: Record, first_block: int) -> None:
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
        self._blocks: list[list[pb.Extent]] = []  # of each group, from `_first_of` it on
        self._layout = record.layout or pb.KvLayout()

    @property
    def num_arena_bytes(self) -> int:
        """Memory of the arena that it has."""
        return sum(self._arena.held_bytes(extent) for blocks in self._blocks for extent in blocks)

    def hold_for(self, reader_id: str) -> None:
        """One more reader here needs the handle at its holder."""
        self._readers.add(reader_id)
        self._holder.hold(self.record.handle, reader_id)

    async def run(self, reader_id: str) -> None:
        """Pull until the record has ended; its readers are told what went wrong."""
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
        """Take memory for every block still to come: pulls that take it piece by piece can wait for each other."""
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
        """Where a slab's blocks lie here: in whole blocks, or in the part of them that its layers take."""
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
