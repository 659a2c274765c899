"""Pulls slabs from the KV services of other hosts.

`Puller` owns the pulls and the links. There is one `Pull` task per copy of a handle. The task watches the handle at its
holder in the name of the first reader, copies each sealed slab into the arena, some windows at once, and seals the
windows here in their order. A window is freed when all readers have acknowledged it; the rest when the copy has ended,
for any reason.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

from kv_transfer_svc.arena import Arena
from kv_transfer_svc.blocks.block import BlockKey
from kv_transfer_svc.handle_record import HandleRecord, handle_name
from kv_transfer_svc.pull_memory import READS_AT_ONCE, PullMemory, pull_memory
from kv_transfer_svc.store import HandleStore
from kv_transfer_svc.transport.links import Link, Links, Received
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_runtime import tracing
from tandem_runtime.errors import InternalError, KvNotFound, TandemError
from tandem_runtime.kv.layout import check_memory_kind
from tandem_runtime.kv.time_left import stated_seconds_left
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
            if pull is not None and pull.serves(request):
                self._store.lease(record, reader_id)
                pull.hold_for(reader_id, request.first_block)
                return record
        link = self._link_to_holder(handle)
        left = stated_seconds_left(request)
        record = self._store.add_copy(handle, self._arena.region_id, request.layout, left)
        self._store.lease(record, reader_id)
        memory = pull_memory(
            self._arena, request.layout, handle.num_tokens, request.first_block, windows=request.acknowledges
        )
        record.is_windowed = memory.is_windowed
        self._start(Pull(self._store, self._arena, link, record, request.first_block, memory), reader_id)
        return record

    @property
    def arena(self) -> Arena:
        return self._arena

    def pulls(self) -> list[Pull]:
        return list(self._pulls.values())

    def acknowledge(self, handle: pb.KvHandle, reader_id: str, num_slabs: int) -> None:
        """Free the windows that a reader was the last to copy; raises KvNotFound for one without a lease on a copy."""
        reading = [pull for record, pull in self._pulls.items() if _is_copy_of(record, handle, reader_id)]
        if not reading:
            raise KvNotFound(f"no copy of the {handle_name(handle)} is leased to {reader_id}", field="reader_id")
        for pull in reading:
            pull.acknowledge(reader_id, num_slabs)

    def renew(self, handle: pb.KvHandle, reader_id: str) -> HandleState:
        """Extend a reader's lease here. The KV client extends the lease at the holder while the copy lives."""
        for record in self._store.copies(handle):
            if record.machine.is_reader(reader_id):
                self._store.lease(record, reader_id)
                return record.machine.state
        return HandleState.AWAITED

    async def release(self, handle: pb.KvHandle, reader_id: str | None, seconds_left: float | None) -> HandleState:
        """Release the copy here and the handle at its holder; return the state at the holder."""
        for record in self._store.copies(handle):
            if reader_id is None or record.machine.is_reader(reader_id):
                self._store.release(record, reader_id)
        self._free_copied()
        try:
            holder = self._link_to_holder(handle).client
            if reader_id is None:
                return await holder.release_all(handle, seconds_left)
            return await holder.release(handle, reader_id, seconds_left)
        except TandemError as error:  # the lease at the holder expires
            log.warning("kv_release_forward_failed", request_id=handle.request_id, reason=error.message)
            return HandleState.RELEASED

    async def abort(self, handle: pb.KvHandle, reason: TandemError, seconds_left: float | None) -> HandleState:
        for record in self._store.copies(handle):
            self._store.abort(record, reason)
        try:
            return await self._link_to_holder(handle).client.abort(handle, reason, seconds_left)
        except TandemError as error:
            log.warning("kv_abort_forward_failed", request_id=handle.request_id, reason=error.message)
            return HandleState.ABORTED

    async def fetch_blocks(
        self, address: str, id: str, keys: Sequence[BlockKey], into: Sequence[memoryview]
    ) -> list[int]:
        """Copy the leading blocks that the store of the KV service `id` has; return their verified checksums."""
        if not keys:
            return []
        request = kv.ReadBlocksRequest(
            layout_digest=keys[0].layout_digest,
            group=keys[0].group,
            block_hashes=[key.block_hash for key in keys],
            bytes_per_block=len(into[0]),
        )
        return await self.links.to(address, id).read_blocks(request, into)

    def sweep(self) -> None:
        """Renew the writer's lease of every copy in progress, since the pull is the writer; wait for no lost reader."""
        for record in self._pulls:
            record.machine.renew_writer(self._store.clock())
        self._free_copied()

    async def close(self) -> None:
        await self._tasks.cancel()
        await self.links.close()

    def _free_copied(self) -> None:
        for pull in self._pulls.values():
            pull.free_copied()

    def _start(self, pull: Pull, reader_id: str) -> None:
        self._pulls[pull.record] = pull
        task = self._tasks.spawn(pull.run(reader_id), name=f"pull-{pull.record.handle.request_id}")
        task.add_done_callback(lambda _: self._pulls.pop(pull.record))

    def _link_to_holder(self, handle: pb.KvHandle) -> Link:
        return self.links.to(handle.holder_address, handle.holder_id)


class Pull:
    """Fills one record with the blocks from `first_block` on, and frees what its readers have copied."""

    def __init__(
        self, store: HandleStore, arena: Arena, link: Link, record: HandleRecord, first_block: int, memory: PullMemory
    ) -> None:
        self.record = record
        self.first_block = first_block
        self._link = link
        self._holder = link.client
        self._readers: dict[str, int] = {}  # the first block that each needs
        self._joined = asyncio.Event()
        self._num_copied: Counter[str] = Counter()  # by reader: its leading slabs that it has copied
        self._num_bytes = 0
        self._has_failed = False
        self._start_ns = time.time_ns()
        self._traceparent = tracing.current_traceparent()
        self._store = store
        self._memory = memory
        self._region = arena.region
        self._layout = record.layout or pb.KvLayout()

    @property
    def num_arena_bytes(self) -> int:
        """Bytes of the arena that the pull holds."""
        return self._memory.held_bytes

    def serves(self, request: kv.WatchRequest) -> bool:
        """Return whether one more reader finds here all blocks that it needs."""
        is_able = request.acknowledges or not self._memory.is_windowed
        has_blocks = self.first_block <= request.first_block and self._memory.serves(request.first_block)
        return is_able and has_blocks

    def hold_for(self, reader_id: str, first_block: int) -> None:
        """Keep the handle at its holder for one more reader of this host."""
        self._readers[reader_id] = first_block
        self._holder.hold(self.record.handle, reader_id, self._seconds_left)
        self._joined.set()

    def acknowledge(self, reader_id: str, num_slabs: int) -> None:
        """Note that a reader has copied the leading slabs; a repeated or late call changes nothing."""
        self._num_copied[reader_id] = max(self._num_copied[reader_id], num_slabs)
        self.free_copied()

    def free_copied(self) -> None:
        """Free each window that every reader with a lease has copied, or does not need."""
        is_reader = self.record.machine.is_reader
        readers = [(reader, first_block) for reader, first_block in self._readers.items() if is_reader(reader)]
        if not readers:  # the record ends, and everything is freed
            return

        def is_copied(index: int, end_block: int) -> bool:
            return all(self._num_copied[reader] > index or end_block <= first for reader, first in readers)

        self._store.freed(self.record, self._memory.free_copied(is_copied))

    async def run(self, reader_id: str) -> None:
        """Pull until the record has ended. An error ends the record and so reaches its readers."""
        self.hold_for(reader_id, self.first_block)
        self._link.open()
        copying = asyncio.create_task(self._copy_until_closed(reader_id))
        copying.add_done_callback(self._record_span)
        introducing = asyncio.create_task(self._introduce_readers(reader_id))
        try:
            await self.record.wait_ended()
        finally:
            copying.cancel()
            introducing.cancel()
            await asyncio.gather(copying, introducing, return_exceptions=True)
            self._memory.close()
            for reader in self._readers:
                self._holder.let_go(self.record.handle, reader)

    @property
    def _seconds_left(self) -> float:
        return self.record.machine.deadline - self._store.clock()

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
        except* TandemError:
            assert self._has_failed, "each task tells of its errors"

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Tell the readers of an error at once: the other reads of this pull may take a second to end."""
        try:
            yield
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                self._fail(error)
            raise

    def _fail(self, error: Exception) -> None:
        request_id = self.record.handle.request_id
        if isinstance(error, TandemError):
            log.warning("kv_pull_failed", request_id=request_id, reason=error.message)
        else:
            log.exception("kv_pull_failed", request_id=request_id)
            error = InternalError(f"a KV pull failed: {error}")
        self._store.abort(self.record, error)

    async def _copy(self, reader_id: str) -> None:
        """Read the parts of each slab, some at once, and seal them in their order."""
        begun: asyncio.Queue[_Read | int | kv.Closed | None] = asyncio.Queue()
        whole: asyncio.Queue[int | None] = asyncio.Queue()
        slots = asyncio.Semaphore(READS_AT_ONCE)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._seal_in_order(begun, slots, whole))
            group.create_task(self._acknowledge_whole(whole, reader_id))
            with self._told():
                async with aclosing(self._watch(reader_id)) as events:
                    async for event in events:
                        if event.WhichOneof("kind") != "slab":
                            begun.put_nowait(event.closed)
                            continue
                        for part in self._memory.cut(event.slab):
                            await slots.acquire()
                            extents = await self._allocate(part)
                            task = group.create_task(self._read(part, extents, reader_id))
                            begun.put_nowait(_Read(part, extents, task))
                        if event.is_window:
                            begun.put_nowait(event.slab.index + 1)
                begun.put_nowait(None)

    def _watch(self, reader_id: str) -> AsyncGenerator[kv.WatchEvent, None]:
        seconds_left = self._seconds_left
        return self._holder.watch(
            self.record.handle, reader_id, self._layout, self.first_block, seconds_left=seconds_left, acknowledges=True
        )

    async def _seal_in_order(
        self,
        begun: asyncio.Queue[_Read | int | kv.Closed | None],
        slots: asyncio.Semaphore,
        whole: asyncio.Queue[int | None],
    ) -> None:
        """Seal what was read; pass on the numbers of the holder's windows: so many slabs are whole here."""
        with self._told():
            while (item := await begun.get()) is not None:
                if isinstance(item, _Read):
                    self._seal(item, await item.task)
                    slots.release()
                elif isinstance(item, int):
                    whole.put_nowait(item)
                else:
                    self._store.seal(self.record, [], item)
            whole.put_nowait(None)

    async def _acknowledge_whole(self, whole: asyncio.Queue[int | None], reader_id: str) -> None:
        """Acknowledge the holder's windows beside the reads. A call takes a round trip, so the latest number counts."""
        with self._told():
            is_open = True
            while is_open:
                numbers = [await whole.get()]
                while not whole.empty():
                    numbers.append(whole.get_nowait())
                is_open = None not in numbers
                if num_slabs := max((each for each in numbers if each is not None), default=0):
                    await self._acknowledge(reader_id, num_slabs)

    async def _introduce_readers(self, reader_id: str) -> None:
        """Tell the holder for whom we copy besides the reader that watches: it waits for the others in vain."""
        while True:
            await self._joined.wait()
            self._joined.clear()
            if len(self._readers) > 1:
                try:
                    await self._acknowledge(reader_id, 0)
                except TandemError as error:  # the next acknowledgement says it again
                    log.info("kv_acknowledge_failed", request_id=self.record.handle.request_id, reason=error.message)

    async def _acknowledge(self, reader_id: str, num_slabs: int) -> None:
        await self._holder.acknowledge(self.record.handle, reader_id, num_slabs, list(self._readers))

    async def _allocate(self, part: kv.Slab) -> list[pb.Extent]:
        for extent in part.extents:
            check_memory_kind(extent)
        return await self._memory.allocate(part)

    async def _read(self, part: kv.Slab, extents: Sequence[pb.Extent], reader_id: str) -> Received:
        targets = [self._region.view(extent.offset, extent.num_bytes) for extent in extents]
        try:
            with self._told():
                return await self._link.read(self.record.handle, reader_id, part, targets, part.first_block)
        finally:
            for target in targets:
                target.release()

    def _seal(self, read: _Read, received: Received) -> None:
        part, num_bytes = read.part, sum(extent.num_bytes for extent in read.extents)
        self.record.transport = received.transport
        self._num_bytes += num_bytes
        self._store.counters["bytes_pulled"] += num_bytes
        self._store.counters["slabs_pulled"] += 1
        index = len(self.record.machine.slabs)
        copied = kv.Slab(
            index=index,
            group=part.group,
            first_block=part.first_block,
            num_blocks=part.num_blocks,
            first_layer=part.first_layer,
            num_layers=part.num_layers,
            extents=read.extents,
            checksums=received.checksums,
        )
        self._store.seal(self.record, [copied], None)
        self._memory.sealed(index)


@dataclass(frozen=True)
class _Read:
    """A read of a part that has begun, into these extents."""

    part: kv.Slab
    extents: list[pb.Extent]
    task: asyncio.Task[Received]


def _is_copy_of(record: HandleRecord, handle: pb.KvHandle, reader_id: str) -> bool:
    return record.handle.handle_id == handle.handle_id and record.machine.is_reader(reader_id)
