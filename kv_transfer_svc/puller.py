"""Which pulls are under way, and what of this host's readers must their holders be told?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kv_transfer_svc.arena import Arena
from kv_transfer_svc.blocks.keys import BlockKey
from kv_transfer_svc.pull import Pull
from kv_transfer_svc.record import Record
from kv_transfer_svc.store import HandleStore
from kv_transfer_svc.transport.links import Links
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import TandemError
from tandem_runtime.kv.client import KvClient
from tandem_runtime.kv_handle import HandleState
from tandem_runtime.log import get_logger

log = get_logger(__name__)


class Puller:
    """Owns the pulls and the links to their holders."""

    def __init__(self, store: HandleStore, arena: Arena, links: Links) -> None:
        self.links = links
        self._store = store
        self._arena = arena
        self._pulls: dict[Record, Pull] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, request: kv.WatchRequest) -> Record:
        """Return the copy that a reader shall watch, lent to it; starts a pull if none has its blocks."""
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
        """Extend a reader's lease here; at the holder the client does so as long as the copy lives."""
        for record in self._store.copies(handle):
            if record.machine.is_reader(reader_id):
                self._store.lease(record, reader_id)
                return record.machine.state
        return HandleState.AWAITED

    async def release(self, handle: pb.KvHandle, reader_id: str | None) -> HandleState:
        """Release the copy here and the handle at its holder, of which the answer is."""
        for record in self._store.copies(handle):
            if reader_id is None or record.machine.is_reader(reader_id):
                self._store.release(record, reader_id)
        holder = self._holder(handle)
        try:
            return await (holder.release_all(handle) if reader_id is None else holder.release(handle, reader_id))
        except TandemError as error:  # its lease there runs out by itself
            log.warning("kv_release_not_passed_on", request_id=handle.request_id, reason=error.message)
            return HandleState.RELEASED

    async def abort(self, handle: pb.KvHandle, reason: TandemError) -> HandleState:
        for record in self._store.copies(handle):
            self._store.abort(record, reason)
        try:
            return await self._holder(handle).abort(handle, reason)
        except TandemError as error:
            log.warning("kv_abort_not_passed_on", request_id=handle.request_id, reason=error.message)
            return HandleState.ABORTED

    async def fetch_blocks(self, address: str, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[int]:
        """Copy the leading blocks that another host's store has; return their checksums, which were verified."""
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
        """A copy that is being filled is alive: the pull is its writer."""
        for record in self._pulls:
            record.machine.renew_writer(self._store.clock())

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.links.close()

    def _start(self, pull: Pull, reader_id: str) -> None:
        self._pulls[pull.record] = pull
        task = asyncio.get_running_loop().create_task(pull.run(reader_id))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._finished(pull, done))

    def _finished(self, pull: Pull, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        del self._pulls[pull.record]

    def _holder(self, handle: pb.KvHandle) -> KvClient:
        return self.links.to(handle.holder_address).client
