r"""The state machine of a stored block in memory.

    begin -> FILLING -> SEALED <-> LEASED(n)         free + cached + leased + filling = total, in bytes, always;
                \          \\                        cached = SEALED; filling = FILLING and DEMOTING
                 \          \`--> DEMOTING
                  \          \        \
                   `----------`--------`--> gone: memory free, generation of the slot raised

    edge      needs                          changes
    begin     an unknown key, and memory     -> FILLING: the caller fills the extent, then seals or discards it
    seal      FILLING                        -> SEALED: readable from now on, content fixed for good
    discard   FILLING                        -> gone: the copy failed
    lease     SEALED, LEASED                 -> LEASED: not evicted until every lease is released or has expired
    evict     SEALED, not pinned, a leaf     -> DEMOTING if `demote` copies it first, else gone
    demoted   DEMOTING                       -> gone: the block is on disk, or could not be written
    drop      SEALED, LEASED                 -> gone at once: the bytes are corrupt

A caller that fills or demotes a block passes the extent it received. Slot and generation are the fence: a call for an
earlier use of the memory changes nothing. Every edge is idempotent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kv_transfer_svc.blocks.allocator import BlockAllocator, Extent
from kv_transfer_svc.blocks.block import KNOWN, Block, BlockKey, BlockState, Known, LeasedBlock, StoreStats
from kv_transfer_svc.blocks.evictor import Demote, Evictor
from kv_transfer_svc.blocks.leases import BlockLeases
from kv_transfer_svc.blocks.quotas import EvictionOrder, Quotas
from kv_transfer_svc.blocks.table import BlockTable
from tandem_runtime.errors import InvalidRequest, KvCorrupt, KvNotFound
from tandem_runtime.kv.known_blocks import BlockCounters

_LATE_COPY_SECONDS = 60.0
"""A block that is FILLING or DEMOTING for longer counts as orphaned."""

_LATE_SWEEP_SECONDS = 1.0


class BlockStore:
    """The only writer of blocks in `allocator`. Called from one thread; does no I/O and never waits.

    Eviction ahead keeps `headroom_bytes` free, so `begin` need not wait for blocks that are being demoted.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        quotas: Quotas | None = None,
        demote: Demote | None = None,
        headroom_bytes: int = 0,
        counters: BlockCounters | None = None,
    ) -> None:
        self.allocator = allocator
        self._counters: Counter[str] = Counter()
        self._order = EvictionOrder(quotas or Quotas())
        self._leases = BlockLeases()
        self._table = BlockTable(allocator, counters)
        self._evictor = Evictor(allocator, self._table, self._order, self._counters, demote, headroom_bytes)

    # ------------------------------------------------------------------------------------------------ fill

    def keep_free(self, headroom_bytes: int) -> None:
        """Keep so much free by eviction ahead, from now on."""
        self._evictor.headroom_bytes = headroom_bytes

    def begin(
        self,
        keys: Sequence[BlockKey],
        sizes: Sequence[int],
        account_tag: bytes,
        now: float,
        *,
        parent: BlockKey | None = None,
    ) -> list[Extent | Known | None]:
        """Allocate a chain's blocks, which follow `parent`. Per key: KNOWN, an extent to fill, or None for "not now".

        The caller seals or discards each extent. After a None no later block is allocated: a block without its
        predecessor is useless. Raises InvalidRequest for impossible sizes.
        """
        self._check_sizes(keys, sizes)
        needed = {*keys, parent}
        begun: list[Extent | Known | None] = []
        is_broken = False
        for key, num_bytes in zip(keys, sizes, strict=True):
            if key in self._table:
                begun.append(KNOWN)
            else:
                extent = None if is_broken else self._evictor.allocate(num_bytes, account_tag, now, needed)
                begun.append(extent)
                is_broken = extent is None
                if extent is not None:
                    self._enter(Block(key, extent, account_tag, now), parent)
            parent = key
        self._counters["refused"] += begun.count(None)
        self._counters["deduplicated"] += begun.count(KNOWN)
        self._evictor.keep_headroom(now, needed)
        return begun

    def seal(self, key: BlockKey, extent: Extent, checksum: int) -> bool:
        """FILLING -> SEALED. False: the block was sealed before.

        Raises KvNotFound if the block has lost this extent, KvCorrupt if the block was sealed with another checksum.
        """
        block = self._table.in_state(key, extent, *BlockState)
        if block is None:
            raise KvNotFound(f"{key} is not being filled in slot {extent.slot}: the block was discarded or evicted")
        if block.state is not BlockState.FILLING:
            if block.checksum != checksum:
                raise KvCorrupt(f"{key} is sealed with checksum {block.checksum:016x}, not {checksum:016x}")
            return False
        block.checksum = checksum
        self._table.change(block, BlockState.SEALED)
        self._counters["stored"] += 1
        return True

    def discard(self, key: BlockKey, extent: Extent) -> bool:
        """FILLING -> gone. False: the block is not being filled there."""
        block = self._table.in_state(key, extent, BlockState.FILLING)
        if block is not None:
            self._forget(block, "discarded")
        return block is not None

    # ------------------------------------------------------------------------------------------------ find

    def state(self, key: BlockKey) -> BlockState | None:
        """Return the state of a block, None if the block is not stored."""
        block = self._table.get(key)
        return block.state if block is not None else None

    def find_run(self, keys: Sequence[BlockKey]) -> int:
        """Return how many leading keys can be leased now. Does not count as a use."""
        return next((index for index, key in enumerate(keys) if self._table.find(key) is None), len(keys))

    def lease(self, keys: Sequence[BlockKey], reader_id: str, now: float, seconds: float) -> list[LeasedBlock | None]:
        """Lease blocks to a reader. Per key: the place to read from, or None if not stored. Counts as one use together.

        A reader has one lease; a later call adds to the lease and extends it. Raises InvalidRequest without a reader
        or with `seconds` <= 0.
        """
        if not reader_id or seconds <= 0:
            raise InvalidRequest(f"a lease for reader {reader_id!r} and {seconds} seconds; name one, and more than 0")
        found = [self._table.find(key) for key in keys]
        new_keys = self._leases.open(reader_id, [block.key for block in found if block is not None], now + seconds)
        new_blocks = [self._table[key] for key in new_keys]
        for block in new_blocks:
            block.num_leases += 1
            self._table.change(block, BlockState.LEASED)
        self._order.use(new_blocks)
        self._counters["hits"] += len(new_blocks)
        self._counters["misses"] += found.count(None)
        return [LeasedBlock(block.extent, block.checksum) if block is not None else None for block in found]

    def release(self, reader_id: str) -> int:
        """End a reader's lease; return its number of blocks, 0 without a lease."""
        keys = self._leases.end(reader_id)
        for key in keys:
            block = self._table[key]
            block.num_leases -= 1
            if not block.num_leases:
                self._table.change(block, BlockState.SEALED)
        return len(keys)

    def expire(self, now: float) -> list[str]:
        """End the leases whose time has passed; return their readers."""
        lapsed = self._leases.lapsed(now)
        for reader_id in lapsed:
            self.release(reader_id)
        self._counters["leases_expired"] += len(lapsed)
        return lapsed

    # ------------------------------------------------------------------------------------------------ keep or drop

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Count one use of these blocks together, for a worker that has its own copy and needs no lease."""
        self._order.use([block for key in keys if (block := self._table.find(key)) is not None])

    def pin(self, keys: Sequence[BlockKey]) -> int:
        """Keep blocks from eviction until `unpin`; return how many are stored, and pinned now."""
        return self._set_pinned(keys, is_pinned=True)

    def unpin(self, keys: Sequence[BlockKey]) -> int:
        """Allow eviction again; return how many of the blocks are stored."""
        return self._set_pinned(keys, is_pinned=False)

    def demoted(self, key: BlockKey, extent: Extent) -> bool:
        """DEMOTING -> gone: the block is on disk, or could not be written. False: the block is not being demoted."""
        block = self._table.in_state(key, extent, BlockState.DEMOTING)
        if block is not None:
            self._table.remove(block)
        return block is not None

    def drop(self, key: BlockKey, extent: Extent) -> bool:
        """SEALED | LEASED -> gone, pinned or not: the bytes are corrupt. False: the block is not stored there.

        Leases on the block end. A reader that is still copying sees another generation.
        """
        block = self._table.in_state(key, extent, BlockState.SEALED, BlockState.LEASED)
        if block is not None:
            self._leases.forget(key)
            self._forget(block, "dropped")
        return block is not None

    # ------------------------------------------------------------------------------------------------ stats

    def stats(self) -> StoreStats:
        held, count = self._table.held_bytes, self._counters
        return StoreStats(
            total_bytes=self.allocator.total_bytes,
            free_bytes=self.allocator.free_bytes,
            cached_bytes=held(BlockState.SEALED),
            leased_bytes=held(BlockState.LEASED),
            filling_bytes=held(BlockState.FILLING) + held(BlockState.DEMOTING),
            demoting_bytes=held(BlockState.DEMOTING),
            pinned_bytes=sum(block.extent.held_bytes for block in self._table if block.is_pinned),
            num_blocks=len(self._table),
            num_leases=len(self._leases),
            hits=count["hits"],
            misses=count["misses"],
            stored=count["stored"],
            deduplicated=count["deduplicated"],
            evictions=count["evictions"],
            demotions=count["demotions"],
            refused=count["refused"],
            refused_over_quota=count["refused_over_quota"],
            discarded=count["discarded"],
            dropped=count["dropped"],
            leases_expired=count["leases_expired"],
        )

    def orphan_bytes(self, now: float) -> int:
        """Return the bytes of copies that take too long, and of blocks kept only by leases past their end."""
        late = sum(block.extent.held_bytes for block in self.late_copies(now))
        lapsed = Counter(key for lease in self._leases.over(now - _LATE_SWEEP_SECONDS) for key in lease.keys)
        blocks = ((self._table[key], num_over) for key, num_over in lapsed.items())
        return late + sum(block.extent.held_bytes for block, num_over in blocks if num_over == block.num_leases)

    def late_copies(self, now: float) -> list[Block]:
        """Return the blocks that are FILLING or DEMOTING for more than 60 s."""
        return [block for block in self._table.unsettled if block.since < now - _LATE_COPY_SECONDS]

    def leases(self) -> list[tuple[str, float, int]]:
        """Return (reader, end of the lease, leased bytes) for every lease."""
        held = self._table
        return [
            (reader_id, lease.until, sum(held[key].extent.held_bytes for key in lease.keys))
            for reader_id, lease in self._leases.by_reader()
        ]

    def check(self) -> None:
        """Assert conservation of bytes and the other invariants that hold between two calls."""
        self._table.check()
        self._order.check(block for block in self._table if block.state is not BlockState.DEMOTING)
        num_leases = Counter(key for lease in self._leases for key in lease.keys)
        assert num_leases.keys() <= {block.key for block in self._table}, "a lease names a removed block"
        for block in self._table:
            assert block.num_leases == num_leases[block.key], f"the leases of {block.key} are miscounted"
            assert (block.state is BlockState.LEASED) == (block.num_leases > 0), f"{block.key} is {block.state.name}"

    # ------------------------------------------------------------------------------------------------ helpers

    def _check_sizes(self, keys: Sequence[BlockKey], sizes: Sequence[int]) -> None:
        if len(keys) != len(sizes):
            raise InvalidRequest(f"{len(keys)} blocks with {len(sizes)} sizes", field="sizes")
        for key, num_bytes in zip(keys, sizes, strict=True):
            known = self._table.get(key)
            if num_bytes <= 0:
                raise InvalidRequest(f"{key} cannot have {num_bytes} bytes", field="sizes")
            if known is not None and known.extent.num_bytes != num_bytes:
                raise InvalidRequest(f"{key} has {known.extent.num_bytes} bytes, not {num_bytes}", field="sizes")

    def _enter(self, block: Block, parent: BlockKey | None) -> None:
        self._table.enter(block)
        self._order.add(block, parent)

    def _set_pinned(self, keys: Sequence[BlockKey], *, is_pinned: bool) -> int:
        blocks = [block for key in dict.fromkeys(keys) if (block := self._table.get(key)) is not None]
        staying = [block for block in blocks if block.state is not BlockState.DEMOTING]
        for block in staying:
            block.is_pinned = is_pinned
        return len(staying)

    def _forget(self, block: Block, counter: str) -> None:
        self._order.remove(block)
        self._table.remove(block)
        self._counters[counter] += 1
