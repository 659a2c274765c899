"""How do workers fill this host's store of blocks, and take from it?

    publish   blocks of a worker's region --copied--> DRAM        --when it is full--> disk
    load      DRAM, lent; before that: disk --read and verified--> DRAM, another host --read and verified--> DRAM

Every block is verified where its bytes come from elsewhere, and nothing that fails is served. What takes time (copies,
the disk, another host) is done off the event loop and finished also if whoever asked is gone.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from kv_transfer_svc.blocks.allocator import Extent, Room
from kv_transfer_svc.blocks.block import Known, Leased
from kv_transfer_svc.blocks.block_store import BlockStore
from kv_transfer_svc.blocks.keys import BlockKey
from kv_transfer_svc.blocks.quotas import Quotas
from kv_transfer_svc.disk.disk_tier import DiskTier
from kv_transfer_svc.offered import Offered, block_keys
from kv_transfer_svc.region_table import RegionTable
from kv_transfer_svc.transport.source import BlockSource
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import TandemError
from tandem_runtime.kv.checksum import block_checksum
from tandem_runtime.kv.known_blocks import REGION_ID, KnownBlocks
from tandem_runtime.log import get_logger

log = get_logger(__name__)

FetchBlocks = Callable[[str, Sequence[BlockKey], Sequence[memoryview]], Awaitable[list[int]]]
"""Reads a chain's blocks from the KV service at an address; returns the checksums of the leading ones that came."""

_MAX_LEASE_SECONDS = 60.0
_HEADROOM_SHARE = 16
"""With a disk tier one part in so many is kept free, so that a new block need not wait for others to be written."""


class PromptCache:
    """The host's stored blocks, in memory and on disk. Runs on the event loop; the only caller of `blocks`."""

    def __init__(
        self,
        room: Room,
        disk: DiskTier | None,
        regions: RegionTable,
        region_id: str,
        clock: Callable[[], float],
        *,
        quotas: Quotas | None = None,
        verify_kv: bool = False,
    ) -> None:
        headroom_bytes = room.total_bytes // _HEADROOM_SHARE if disk is not None else 0
        self.known = KnownBlocks.create()
        self.blocks = BlockStore(
            room,
            quotas=quotas,
            demote=self._demote if disk is not None else None,
            headroom_bytes=headroom_bytes,
            counters=self.known.memory,
        )
        self.disk = disk
        if disk is not None:
            disk.count_in(self.known.disk)
        self.counters: Counter[str] = Counter()
        self.fetch: FetchBlocks | None = None
        self._regions = regions
        self._region_id = region_id
        self._clock = clock
        self._verify_kv = verify_kv
        self._tasks: set[asyncio.Task[int]] = set()
        regions.add_own(region_id, room.region)
        regions.add_own(REGION_ID, self.known.region)

    async def publish(self, request: kv.PublishRequest) -> kv.PublishReply:
        """Copy what is wanted of a worker's blocks. Raises InvalidRequest for extents that are not in its region."""
        offered = Offered(request, self._regions)
        begun = self.blocks.begin(
            offered.keys, offered.sizes, request.account_tag, self._clock(), parent=offered.parent
        )
        num_known = sum(isinstance(each, Known) for each in begun)
        wanted = [(index, extent) for index, extent in enumerate(begun) if isinstance(extent, Extent)]
        num_stored = await self._finish(self._copy(offered, wanted)) if wanted else 0
        num_refused = len(offered.keys) - num_known - num_stored
        return kv.PublishReply(num_stored=num_stored, num_known=num_known, num_refused=num_refused)

    async def _copy(self, offered: Offered, wanted: Sequence[tuple[int, Extent]]) -> int:
        views = [self._view(extent) for _, extent in wanted]
        checksums: list[int] = []
        try:
            checksums = await asyncio.to_thread(offered.copy, [index for index, _ in wanted], views)
        finally:
            for view in views:
                view.release()
        if offered.num_corrupt:
            self.counters["memory_corrupt"] += offered.num_corrupt
            log.error("offered_block_corrupt", num_blocks=offered.num_corrupt)
        return self._settle([(offered.keys[index], extent) for index, extent in wanted], checksums)

    # ---------------------------------------------------------------------------------------------------- load

    async def load(self, request: kv.LoadRequest) -> kv.LoadReply:
        """Lend the longest run of a chain that can be had here."""
        keys = block_keys(request.layout_digest, request.group, request.block_hashes)
        reply = kv.LoadReply(num_from_memory=self.blocks.find_run(keys))
        num_here = reply.num_from_memory
        if num_here < len(keys) and self.disk is not None and keys[num_here] in self.disk:
            num_here += await self._finish(self._promote(keys, num_here, request.bytes_per_block))
            reply.num_from_disk = num_here - reply.num_from_memory
        if num_here < len(keys) and request.source_address and self.fetch is not None:
            num_here += await self._finish(self._fetch(keys, num_here, request))
            reply.num_from_host = num_here - reply.num_from_memory - reply.num_from_disk
        seconds = min(request.lease_ms / 1000, _MAX_LEASE_SECONDS)
        leased = self.blocks.lease(keys[:num_here], request.reader_id, self._clock(), seconds) if num_here else []
        for index, (key, each) in enumerate(await self._run(keys, leased)):
            reply.blocks.append(self._stored(index, key, each))
        self.counters["blocks_loaded"] += len(reply.blocks)
        return reply

    @asynccontextmanager
    async def lent(self, request: kv.ReadBlocksRequest) -> AsyncIterator[BlockSource]:
        """Lend the longest run of a chain to another host's service, to be sent once."""
        keys = block_keys(request.layout_digest, request.group, request.block_hashes)
        reader_id = f"remote/{secrets.token_hex(8)}"
        num_here = self.blocks.find_run(keys)
        if num_here < len(keys) and self.disk is not None and keys[num_here] in self.disk:
            num_here += await self._finish(self._promote(keys, num_here, request.bytes_per_block))
        leased = self.blocks.lease(keys[:num_here], reader_id, self._clock(), _MAX_LEASE_SECONDS) if num_here else []
        try:
            stored = [self._stored(0, key, each) for key, each in await self._run(keys, leased)]
            extents, checksums = [each.extent for each in stored], [each.checksum for each in stored]
            yield BlockSource(extents, self._regions.memory, checksums)
        finally:
            self.unload(reader_id)

    def unload(self, reader_id: str) -> None:
        """Take back what was lent to a reader; no harm if nothing was."""
        self.blocks.release(reader_id)

    async def _promote(self, keys: Sequence[BlockKey], first: int, bytes_per_block: int) -> int:
        """Bring a run of blocks from disk into memory; return how many are there now."""
        disk = self.disk
        assert disk is not None, "asked only where there is a disk tier"
        run = keys[first : next((i for i in range(first, len(keys)) if keys[i] not in disk), len(keys))]
        taken = self._begin(keys, first, len(run), bytes_per_block)
        views = [self._view(extent) for _, extent in taken]
        try:
            payloads = await disk.get([key for key, _ in taken], views)
            checksums: list[int] = []
            for payload in payloads:
                if payload is None:
                    break
                checksums.append(block_checksum(payload))
        finally:
            for view in views:
                view.release()
        self._settle(taken, checksums)
        return self.blocks.find_run(keys[first:])

    async def _fetch(self, keys: Sequence[BlockKey], first: int, request: kv.LoadRequest) -> int:
        """Bring a run of blocks from another host's service into memory; return how many are there now."""
        assert self.fetch is not None, "asked only where there is a way"
        taken = self._begin(keys, first, len(keys) - first, request.bytes_per_block)
        views = [self._view(extent) for _, extent in taken]
        checksums: list[int] = []
        try:
            checksums = await self.fetch(request.source_address, [key for key, _ in taken], views)
        except TandemError as error:
            self.counters["fetch_failures"] += 1
            log.info("blocks_not_fetched", source=request.source_address, error=error.message)
        finally:
            for view in views:
                view.release()
        self._settle(taken, checksums)
        return self.blocks.find_run(keys[first:])

    def _begin(
        self, keys: Sequence[BlockKey], first: int, count: int, bytes_per_block: int
    ) -> list[tuple[BlockKey, Extent]]:
        """Take room for a run of blocks that are not in memory; the leading ones that there is room for."""
        run = keys[first : first + count]
        parent = keys[first - 1] if first else None
        begun = self.blocks.begin(run, [bytes_per_block] * len(run), b"", self._clock(), parent=parent)
        return [(key, extent) for key, extent in zip(run, begun, strict=True) if isinstance(extent, Extent)]

    async def _run(
        self, keys: Sequence[BlockKey], leased: Sequence[Leased | None]
    ) -> Sequence[tuple[BlockKey, Leased]]:
        """Return the leading blocks that are lent; with --verify-kv, up to the first that is not what was sealed."""
        run: list[tuple[BlockKey, Leased]] = []
        for key, each in zip(keys, leased, strict=False):
            if each is None:  # evicted since it was found
                break
            if self._verify_kv and await asyncio.to_thread(self._checksum, each.extent) != each.checksum:
                self.counters["memory_corrupt"] += 1
                log.error("stored_block_corrupt", block=str(key))
                self.blocks.drop(key, each.extent)
                break
            run.append((key, each))
        return run

    def _stored(self, index: int, key: BlockKey, leased: Leased) -> kv.StoredBlock:
        extent = leased.extent
        return kv.StoredBlock(
            index=index,
            block_hash=key.block_hash,
            checksum=leased.checksum,
            extent=pb.Extent(
                kind=pb.MEMORY_KIND_HOST,
                region_id=self._region_id,
                offset=extent.offset,
                num_bytes=extent.num_bytes,
                slot=extent.slot,
                generation=extent.generation,
            ),
        )

    # ------------------------------------------------------------------------------------------------ demoting

    def _demote(self, key: BlockKey, extent: Extent, checksum: int) -> bool:
        """Copy a block to disk before it is forgotten; the store's callback. False: there is no way, let it go."""
        disk = self.disk
        if disk is None:
            return False
        if key in disk:
            return False  # a copy is there: nothing to wait for
        view = self._view(extent)

        def written(is_kept: bool) -> None:
            view.release()
            self.blocks.demoted(key, extent)

        if not disk.put(key, view, checksum=checksum, done=written):
            view.release()
            return False
        return True

    # ---------------------------------------------------------------------------------------------- the clock

    def sweep(self) -> None:
        """Let the clock act; called by the service's timer."""
        self.blocks.expire(self._clock())

    def orphan_bytes(self) -> int:
        return self.blocks.orphan_bytes(self._clock())

    async def open(self) -> None:
        """Own the disk tier's folder; a service that cannot goes on without."""
        if self.disk is None:
            return
        try:
            await self.disk.open()
        except TandemError as error:
            log.warning("no_disk_tier", error=error.message)
            self.disk = None

    async def close(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.disk is not None:
            await self.disk.close()
        self.blocks.room.close()
        self.known.close()

    # ----------------------------------------------------------------------------------------------- workings

    async def _finish(self, work: Awaitable[int]) -> int:
        """Wait for work that goes on to its end whoever leaves: blocks that are begun must be sealed or discarded."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    def _settle(self, taken: Sequence[tuple[BlockKey, Extent]], checksums: Sequence[int]) -> int:
        """Seal the leading blocks, whose bytes came, and discard the others; return how many were sealed."""
        for (key, extent), checksum in zip(taken, checksums, strict=False):
            self.blocks.seal(key, extent, checksum)
        for key, extent in taken[len(checksums) :]:
            self.blocks.discard(key, extent)
        return len(checksums)

    def _view(self, extent: Extent) -> memoryview:
        return self.blocks.room.region.view(extent.offset, extent.num_bytes)

    def _checksum(self, extent: Extent) -> int:
        with self._view(extent) as view:
            return block_checksum(view)
