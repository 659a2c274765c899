"""Keeps this host's stored blocks: workers publish blocks and load them.

    publish   a worker's region --copy--> memory --when memory is full--> disk
    load      memory, under a lease; missing blocks come first: disk --read, verify--> memory,
              another host --read, verify--> memory

Bytes from disk or from another host are always verified, and a block that fails is never served. Slow work (copies,
disk, another host) runs off the event loop, and goes on to its end when the caller leaves.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kv_transfer_svc.blocks.allocator import BlockAllocator, Extent
from kv_transfer_svc.blocks.block import BlockKey, Known, LeasedBlock
from kv_transfer_svc.blocks.block_store import BlockStore
from kv_transfer_svc.blocks.quotas import Quotas
from kv_transfer_svc.device_region import readable
from kv_transfer_svc.disk.disk_tier import DiskTier
from kv_transfer_svc.handle_record import Broadcast
from kv_transfer_svc.host_points import HostPoints
from kv_transfer_svc.region_table import LentRegion, RegionTable
from kv_transfer_svc.stored_points import StoredPoints
from kv_transfer_svc.transport.source import BlockSource
from kv_transfer_svc.turn_budget import TurnBudget
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import InvalidRequest, KvCorrupt, TandemError
from tandem_runtime.kv.checksum import block_checksum
from tandem_runtime.kv.known_blocks import REGION_ID, KnownBlocks
from tandem_runtime.kv.layout import check_memory_kind
from tandem_runtime.kv.shared_region import SharedRegion
from tandem_runtime.log import get_logger
from tandem_runtime.tasks import TaskSet

log = get_logger(__name__)

FetchBlocks = Callable[[str, str, Sequence[BlockKey], Sequence[memoryview]], Awaitable[list[int]]]
"""Reads a chain's blocks from the KV service of an address and an id; returns the checksums of the leading blocks."""

_MAX_LEASE_SECONDS = 60.0
_HEADROOM_SHARE = 16
"""With a disk tier 1/16 of memory is kept free, so that a new block need not wait for writes to disk."""
_SHARE_OF_POOLS = 4
"""The store takes 1/4 of the bytes of this host's pools."""
_MAX_BLOCKS_PER_CALL = 4096
_UNITS_PER_TURN = 512
"""Of up to 10 us, for all calls together: 5 ms of each turn of the event loop."""
_RUN_LENGTH = 512
"""Blocks that are found, sealed or leased at once: a unit each."""
_KEYS_PER_UNIT = 8
_BEGIN_LENGTH = 64
_BEGIN_UNITS = 4
"""To begin a block may demote another one."""


class HostCache:
    """The host's stored blocks, in memory and on disk. Runs on the event loop; the only caller of `blocks`."""

    def __init__(
        self,
        allocator: BlockAllocator,
        disk: DiskTier | None,
        regions: RegionTable,
        region_id: str,
        clock: Callable[[], float],
        *,
        quotas: Quotas | None = None,
        verify_kv: bool = False,
    ) -> None:
        self.known = KnownBlocks.create()
        self.blocks = BlockStore(
            allocator,
            quotas=quotas,
            demote=self._demote if disk is not None else None,
            headroom_bytes=allocator.total_bytes // _HEADROOM_SHARE if disk is not None else 0,
            counters=self.known.memory,
        )
        self.disk = disk
        if disk is not None:
            disk.count_in(self.known.disk)
        self.points = HostPoints()
        self._stored_points = StoredPoints(self.points, self._is_stored)
        self.known.memory.on_removed = self.known.disk.on_removed = self._stored_points.on_removed
        self.counters: Counter[str] = Counter()
        self.fetch: FetchBlocks | None = None
        self._num_demotions = self._num_demoted = 0  # begun, ended
        self._demoted = Broadcast()
        self._regions = regions
        self._region_id = region_id
        self._clock = clock
        self._verify_kv = verify_kv
        self._tasks = TaskSet()
        self._turn = TurnBudget(_UNITS_PER_TURN)
        self._promoting = asyncio.Lock()
        """One call at a time reads from disk: the disk has one thread, and refuses more than it can queue."""
        regions.add_own(region_id, allocator.region)
        regions.on_lent = self._grow
        regions.add_own(REGION_ID, self.known.region)

    def _grow(self) -> None:
        """Use a share of what this host's workers have in their pools, within what the allocator may take."""
        self.blocks.allocator.grow(sum(_host_bytes(region) for region in self._regions) // _SHARE_OF_POOLS)
        if self.disk is not None:
            self.blocks.keep_free(self.blocks.allocator.total_bytes // _HEADROOM_SHARE)

    async def publish(self, request: kv.PublishRequest) -> kv.PublishReply:
        """Copy the blocks of a worker that the store lacks. Raises InvalidRequest for extents outside the region."""
        await self._turn.take(len(request.blocks))
        published = PublishedBlocks(request, self._regions)
        sizes, num_stored, num_known = published.sizes, 0, 0
        for first in range(0, len(published.keys), _BEGIN_LENGTH):
            await self._turn.take(_BEGIN_LENGTH * _BEGIN_UNITS)
            run = slice(first, first + _BEGIN_LENGTH)
            parent = published.keys[first - 1] if first else published.parent
            begun = self.blocks.begin(
                published.keys[run], sizes[run], request.account_tag, self._clock(), parent=parent
            )
            num_known += sum(isinstance(each, Known) for each in begun)
            missing = [(first + index, extent) for index, extent in enumerate(begun) if isinstance(extent, Extent)]
            num_run = await self._finish(self._copy(published, missing)) if missing else 0
            num_stored += num_run
            if num_run < len(missing) or None in begun:
                break  # a block without its predecessor is useless
        self._stored_points.mark(published.keys, request.first_block, request.tokens_per_block)
        num_refused = len(published.keys) - num_known - num_stored
        return kv.PublishReply(num_stored=num_stored, num_known=num_known, num_refused=num_refused)

    async def _copy(self, published: PublishedBlocks, missing: Sequence[tuple[int, Extent]]) -> int:
        views = [self._view(extent) for _, extent in missing]
        checksums: list[int] = []
        try:
            checksums = await asyncio.to_thread(published.copy, [index for index, _ in missing], views)
        finally:
            for view in views:
                view.release()
        if published.num_corrupt:
            self.counters["memory_corrupt"] += published.num_corrupt
            log.error("published_block_corrupt", num_blocks=published.num_corrupt)
        await self._turn.take(len(missing))
        return self._settle([(published.keys[index], extent) for index, extent in missing], checksums)

    # ---------------------------------------------------------------------------------------------------- load

    async def load(self, request: kv.LoadRequest) -> kv.LoadReply:
        """Lease to the reader the longest available run of a chain: from memory, from disk, then from another host."""
        await self._turn.take(len(request.block_hashes) // _KEYS_PER_UNIT)
        keys = _block_keys(request.layout_digest, request.group, request.block_hashes)
        reply = kv.LoadReply(num_from_memory=await self._find_run(keys))
        num_here = reply.num_from_memory
        if num_here < len(keys) and self.disk is not None and keys[num_here] in self.disk:
            num_here += await self._finish(self._promote(keys, num_here, request.bytes_per_block))
            reply.num_from_disk = num_here - reply.num_from_memory
        if num_here < len(keys) and request.source_address and self.fetch is not None:
            num_here += await self._finish(self._fetch(keys, num_here, request))
            reply.num_from_host = num_here - reply.num_from_memory - reply.num_from_disk
        self._stored_points.mark(keys[:num_here], request.first_block, request.tokens_per_block)
        seconds = min(request.lease_ms / 1000, _MAX_LEASE_SECONDS)
        reply.blocks.extend(await self._lease(keys[:num_here], request.reader_id, seconds))
        self.counters["blocks_loaded"] += len(reply.blocks)
        return reply

    @asynccontextmanager
    async def lent(self, request: kv.ReadBlocksRequest) -> AsyncIterator[BlockSource]:
        """Lease the longest run of a chain for one transfer to another host's service."""
        await self._turn.take(len(request.block_hashes) // _KEYS_PER_UNIT)
        keys = _block_keys(request.layout_digest, request.group, request.block_hashes)
        reader_id = f"remote/{secrets.token_hex(8)}"
        num_here = await self._find_run(keys)
        if num_here < len(keys) and self.disk is not None and keys[num_here] in self.disk:
            num_here += await self._finish(self._promote(keys, num_here, request.bytes_per_block))
        try:
            stored = await self._lease(keys[:num_here], reader_id, _MAX_LEASE_SECONDS)
            extents, checksums = [each.extent for each in stored], [each.checksum for each in stored]
            yield BlockSource(extents, self._regions.memory, checksums)
        finally:
            self.unload(reader_id)

    def unload(self, reader_id: str) -> None:
        """End a reader's lease, if there is one."""
        self.blocks.release(reader_id)

    async def _promote(self, keys: Sequence[BlockKey], first: int, bytes_per_block: int) -> int:
        """Read a run of blocks from disk into memory; return how many are in memory now."""
        disk = self.disk
        assert disk is not None, "called only with a disk tier"
        async with self._promoting:
            await self._turn.take(len(keys) - first)
            run = keys[first : next((i for i in range(first, len(keys)) if keys[i] not in disk), len(keys))]
            taken = await self._begin(keys, first, len(run), bytes_per_block)
            views: list[memoryview] = []
            try:
                await self._add_views(views, taken)
                blocks = await disk.get([key for key, _ in taken], views)
                checksums: list[int] = []
                for block in blocks:
                    if block is None:
                        break
                    checksums.append(block.checksum)  # made by the disk's thread: hashing here would stop the loop
            finally:
                for view in views:
                    view.release()
            await self._settle_run(taken, checksums)
        return await self._find_run(keys[first:])

    async def _fetch(self, keys: Sequence[BlockKey], first: int, request: kv.LoadRequest) -> int:
        """Read a run of blocks from another host's service into memory; return how many are in memory now."""
        assert self.fetch is not None, "called only where `fetch` is set"
        taken = await self._begin(keys, first, len(keys) - first, request.bytes_per_block)
        views: list[memoryview] = []
        checksums: list[int] = []
        try:
            await self._add_views(views, taken)
            source = request.source_address, request.source_id
            checksums = await self.fetch(*source, [key for key, _ in taken], views)
        except TandemError as error:
            self.counters["fetch_failures"] += 1
            log.info("blocks_fetch_failed", source=request.source_address, error=error.message)
        finally:
            for view in views:
                view.release()
        await self._settle_run(taken, checksums)
        return await self._find_run(keys[first:])

    async def _add_views(self, views: list[memoryview], taken: Sequence[tuple[BlockKey, Extent]]) -> None:
        """Add a view of each extent; the caller releases those that were added, also after a cancellation."""
        for first in range(0, len(taken), _RUN_LENGTH):
            await self._turn.take(_RUN_LENGTH)
            views += [self._view(extent) for _, extent in taken[first : first + _RUN_LENGTH]]

    async def _find_run(self, keys: Sequence[BlockKey]) -> int:
        """Return how many leading keys are in memory."""
        num_found = 0
        for first in range(0, len(keys), _RUN_LENGTH):
            run = keys[first : first + _RUN_LENGTH]
            await self._turn.take(len(run))
            num_run = self.blocks.find_run(run)
            num_found += num_run
            if num_run < len(run):
                break
        return num_found

    async def _begin(
        self, keys: Sequence[BlockKey], first: int, count: int, bytes_per_block: int
    ) -> list[tuple[BlockKey, Extent]]:
        """Allocate a run of blocks that are not in memory; return the leading blocks that fit.

        Waits for blocks that are being written to disk before their eviction.
        """
        parent = keys[first - 1] if first else None
        taken: list[tuple[BlockKey, Extent]] = []
        start, end, has_waited = first, first + count, False
        while start < end:
            run = keys[start : min(start + _BEGIN_LENGTH, end)]
            await self._turn.take(len(run) * _BEGIN_UNITS)
            begun = self.blocks.begin(run, [bytes_per_block] * len(run), b"", self._clock(), parent=parent)
            taken += [(key, extent) for key, extent in zip(run, begun, strict=True) if isinstance(extent, Extent)]
            num_begun = begun.index(None) if None in begun else len(run)
            if num_begun < len(run) and ((has_waited and not num_begun) or not await self._wait_for_demotions()):
                break  # no room: later blocks are useless
            has_waited = num_begun < len(run)
            parent = run[num_begun - 1] if num_begun else parent
            start += num_begun
        return taken

    async def _wait_for_demotions(self) -> bool:
        """Wait until the blocks that are being demoted now have left memory; False: there are none."""
        num_to_end = self._num_demotions
        if self._num_demoted == num_to_end:
            return False
        while self._num_demoted < num_to_end:
            await self._demoted.next().wait()
        return True

    async def _lease(self, keys: Sequence[BlockKey], reader_id: str, seconds: float) -> list[kv.StoredBlock]:
        """Lease a chain to a reader; return its leading blocks."""
        stored: list[kv.StoredBlock] = []
        for first in range(0, len(keys), _RUN_LENGTH):
            run = keys[first : first + _RUN_LENGTH]
            await self._turn.take(len(run))
            leased = await self._intact(run, self.blocks.lease(run, reader_id, self._clock(), seconds))
            stored += [self._stored(first + index, key, each) for index, (key, each) in enumerate(leased)]
            if len(leased) < len(run):
                break
        return stored

    async def _intact(
        self, keys: Sequence[BlockKey], leased: Sequence[LeasedBlock | None]
    ) -> Sequence[tuple[BlockKey, LeasedBlock]]:
        """Return the leading blocks under lease; with --verify-kv, up to the first corrupt one."""
        run: list[tuple[BlockKey, LeasedBlock]] = []
        for key, each in zip(keys, leased, strict=False):
            if each is None:  # evicted since `find_run`
                break
            if self._verify_kv and await asyncio.to_thread(self._checksum, each.extent) != each.checksum:
                self.counters["memory_corrupt"] += 1
                log.error("stored_block_corrupt", block=str(key))
                self.blocks.drop(key, each.extent)
                break
            run.append((key, each))
        return run

    def _stored(self, index: int, key: BlockKey, leased: LeasedBlock) -> kv.StoredBlock:
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
        """Copy a block to disk before its eviction; the store's callback. False: no copy is made, evict at once."""
        disk = self.disk
        if disk is None:
            return False
        if key in disk:
            return False  # already on disk: nothing to wait for
        view = self._view(extent)

        def written(is_kept: bool) -> None:
            view.release()
            self.blocks.demoted(key, extent)
            self._num_demoted += 1
            self._demoted.fire()

        if not disk.put(key, view, checksum=checksum, done=written):
            view.release()
            return False
        self._num_demotions += 1
        return True

    # ---------------------------------------------------------------------------------------------- life cycle

    def sweep(self) -> None:
        """End expired leases, and report what the store has and no longer has; called by the service's timer."""
        self.blocks.expire(self._clock())
        self._stored_points.sweep()

    def _is_stored(self, key: BlockKey) -> bool:
        return bool(self.blocks.find_run([key])) or (self.disk is not None and key in self.disk)

    def orphan_bytes(self) -> int:
        return self.blocks.orphan_bytes(self._clock())

    async def open(self) -> None:
        """Open the disk tier; after a failure the service runs without one."""
        if self.disk is None:
            return
        try:
            await self.disk.open()
        except TandemError as error:
            log.warning("disk_tier_unavailable", error=error.message)
            self.disk = None

    async def close(self) -> None:
        await self._tasks.join()
        if self.disk is not None:
            await self.disk.close()
        await asyncio.to_thread(self.blocks.allocator.close)
        self.known.close()

    # ----------------------------------------------------------------------------------------------- helpers

    async def _finish(self, work: Coroutine[Any, Any, int]) -> int:
        """Wait for work that a cancel does not stop: blocks that are begun must be sealed or discarded."""
        return await asyncio.shield(self._tasks.spawn(work))

    async def _settle_run(self, taken: Sequence[tuple[BlockKey, Extent]], checksums: Sequence[int]) -> None:
        """As `_settle`, for a long run."""
        for first in range(0, len(taken), _RUN_LENGTH):
            await self._turn.take(_RUN_LENGTH)
            end = first + _RUN_LENGTH
            self._settle(taken[first:end], checksums[first:end])

    def _settle(self, taken: Sequence[tuple[BlockKey, Extent]], checksums: Sequence[int]) -> int:
        """Seal the leading blocks, one per checksum, and discard the others; return how many were sealed."""
        for (key, extent), checksum in zip(taken, checksums, strict=False):
            self.blocks.seal(key, extent, checksum)
        for key, extent in taken[len(checksums) :]:
            self.blocks.discard(key, extent)
        return len(checksums)

    def _view(self, extent: Extent) -> memoryview:
        return self.blocks.allocator.region.view(extent.offset, extent.num_bytes)

    def _checksum(self, extent: Extent) -> int:
        with self._view(extent) as view:
            return block_checksum(view)


class PublishedBlocks:
    """The blocks of one Publish, all of one region. Raises InvalidRequest for extents outside the region."""

    def __init__(self, request: kv.PublishRequest, regions: RegionTable) -> None:
        digest, group = request.layout_digest, request.group
        self.keys = _block_keys(digest, group, [block.block_hash for block in request.blocks])
        self.parent = BlockKey(digest, group, request.parent_hash) if request.parent_hash else None
        self._extents = [block.extent for block in request.blocks]
        self._checksums = [block.checksum for block in request.blocks]
        self.num_corrupt = 0
        if self._extents:
            region_id = self._extents[0].region_id
            self._memory = readable(regions.lent(region_id, request.incarnation).memory, region_id)
            self._check(self._memory)

    @property
    def sizes(self) -> list[int]:
        return [extent.num_bytes for extent in self._extents]

    def copy(self, indices: Sequence[int], into: Sequence[memoryview]) -> list[int]:
        """Copy blocks in order and return their checksums; stop at the first block whose slot was reused.

        A block that differs from its checksum is counted in `num_corrupt` and also ends the run, since a block without
        its predecessor is useless. Called in a thread.
        """
        checksums: list[int] = []
        for index, view in zip(indices, into, strict=True):
            extent = self._extents[index]
            try:
                content = self._memory.copy_out(extent, 0, extent.num_bytes)
            except (KvCorrupt, ValueError):  # the slot was reused, or the owner is dead and its memory unmapped
                break
            view[:] = content
            checksum = block_checksum(content)
            if self._checksums[index] not in (0, checksum):
                self.num_corrupt += 1
                break
            checksums.append(checksum)
        return checksums

    def _check(self, memory: SharedRegion) -> None:
        region_id = self._extents[0].region_id
        for extent in self._extents:
            check_memory_kind(extent)
            is_inside = extent.slot < memory.num_slots and extent.offset + extent.num_bytes <= memory.generations_offset
            if extent.region_id != region_id or not is_inside or not extent.num_bytes:
                raise InvalidRequest(
                    f"a block of {extent.num_bytes} bytes at byte {extent.offset}, slot {extent.slot}, is not in "
                    f"region {region_id}",
                    field="blocks.extent",
                )


def _host_bytes(region: LentRegion) -> int:
    """Return the bytes of a worker's pool from which blocks may come; of pools in device memory, none do."""
    return region.memory.total_bytes if isinstance(region.memory, SharedRegion) else 0


def _block_keys(layout_digest: bytes, group: int, hashes: Sequence[bytes]) -> list[BlockKey]:
    """Return the keys of a chain's blocks; raises InvalidRequest for too many hashes or hashes of another length."""
    if len(hashes) > _MAX_BLOCKS_PER_CALL:
        raise InvalidRequest(f"{len(hashes)} blocks in one call; ask for {_MAX_BLOCKS_PER_CALL} at most")
    return [BlockKey(layout_digest, group, block_hash) for block_hash in hashes]
