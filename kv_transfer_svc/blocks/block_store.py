r"""What may happen to a stored block in DRAM, when, and what does it change?

    begin -> FILLING -> SEALED <-> LEASED(n)         free + cached + leased + filling = total, in bytes, always;
                \          \\                        cached are SEALED ones, FILLING and DEMOTING ones count as filling
                 \          \`--> DEMOTING
                  \          \        \
                   `----------`--------`--> gone, its memory free and the slot's generation raised

    edge      needs                          changes
    begin     an unknown key, and room       -> FILLING: the caller fills the extent, then seals or discards it
    seal      FILLING                        -> SEALED: found from now on, its content fixed for good
    discard   FILLING                        -> gone: what should have been copied was not
    lease     SEALED, LEASED                 -> LEASED: not evicted until all its readers gave it back or lapsed
    evict     SEALED, not pinned, a leaf     -> DEMOTING if `demote` wants to copy it first, else gone
    demoted   DEMOTING                       -> gone: it is on disk, or could not be brought there
    drop      SEALED, LEASED                 -> gone at once: its bytes were found to be wrong

Who fills or demotes a block names the extent it was given: slot and generation are its fence, and a call for an earlier
use of the memory changes nothing. Every edge taken twice is taken once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kv_transfer_svc.blocks.allocator import Extent, Room
from kv_transfer_svc.blocks.block import KNOWN, Block, BlockState, Known, Leased, StoreFigures
from kv_transfer_svc.blocks.evictor import Demote, RoomMaker
from kv_transfer_svc.blocks.keys import BlockKey
from kv_transfer_svc.blocks.leases import Leases
from kv_transfer_svc.blocks.policies import DEFAULT_POLICY
from kv_transfer_svc.blocks.quotas import NewPolicy, Quotas, VictimOrder
from kv_transfer_svc.blocks.table import BlockTable
from tandem_runtime.errors import InvalidRequest, KvCorrupt, KvNotFound
from tandem_runtime.kv.known_blocks import BlockCounters

_LATE_COPY_SECONDS = 60.0
"""A block that is filled or demoted for longer counts as orphaned."""

_LATE_SWEEP_SECONDS = 1.0


class BlockStore:
    """The only writer of blocks in `room`. Called from one thread; does no I/O and never waits.

    `headroom_bytes` are kept free by evicting ahead, so that `begin` need not wait for blocks that are being demoted.
    """

    def __init__(
        self,
        room: Room,
        *,
        new_policy: NewPolicy = DEFAULT_POLICY,
        quotas: Quotas | None = None,
        demote: Demote | None = None,
        headroom_bytes: int = 0,
        counters: BlockCounters | None = None,
    ) -> None:
        self.room = room
        self._counters: Counter[str] = Counter()
        self._order = VictimOrder(new_policy, quotas or Quotas())
        self._leases = Leases()
        self._table = BlockTable(room, counters)
        self._maker = RoomMaker(room, self._table, self._order, self._counters, demote, headroom_bytes)

    # ------------------------------------------------------------------------------------------------ fill

    def begin(
        self,
        keys: Sequence[BlockKey],
        sizes: Sequence[int],
        account_tag: bytes,
        now: float,
        *,
        parent: BlockKey | None = None,
        costs: Sequence[float] | None = None,
    ) -> list[Extent | Known | None]:
        """Take room for a chain's blocks, `parent` before the first; per key: KNOWN, an extent to fill, None: not now.

        Seal or discard each extent. After a None no later block is taken: it would be useless. `costs` are those of
        computing each block anew, in any one unit. Raises InvalidRequest for sizes or costs that cannot be.
        """
        costs = [1.0] * len(keys) if costs is None else costs
        self._check_sizes(keys, sizes, costs)
        needed = {*keys, parent}
        begun: list[Extent | Known | None] = []
        is_broken = False
        for key, num_bytes, cost in zip(keys, sizes, costs, strict=True):
            if key in self._table:
                begun.append(KNOWN)
            else:
                extent = None if is_broken else self._maker.take(num_bytes, account_tag, now, needed)
                begun.append(extent)
                is_broken = extent is None
                if extent is not None:
                    self._enter(Block(key, extent, account_tag, now), cost, parent)
            parent = key
        self._counters["refused"] += begun.count(None)
        self._counters["deduplicated"] += begun.count(KNOWN)
        self._maker.keep_headroom(now, needed)
        return begun

    def seal(self, key: BlockKey, extent: Extent, checksum: int) -> bool:
        """FILLING -> SEALED. False: it was sealed before.

        Raises KvNotFound if the extent is not that block's any more, KvCorrupt if it was sealed with other bytes.
        """
        block = self._table.in_state(key, extent, *BlockState)
        if block is None:
            raise KvNotFound(f"{key} is not being filled in slot {extent.slot}: it was discarded, or evicted since")
        if block.state is not BlockState.FILLING:
            if block.checksum != checksum:
                raise KvCorrupt(f"{key} is sealed with checksum {block.checksum:016x}, not {checksum:016x}")
            return False
        block.checksum = checksum
        self._table.change(block, BlockState.SEALED)
        self._counters["stored"] += 1
        return True

    def discard(self, key: BlockKey, extent: Extent) -> bool:
        """FILLING -> gone. False: it is not being filled there (any more)."""
        block = self._table.in_state(key, extent, BlockState.FILLING)
        if block is not None:
            self._forget(block, "discarded")
        return block is not None

    # ------------------------------------------------------------------------------------------------ find

    def state(self, key: BlockKey) -> BlockState | None:
        """Return the state of a block, None if it is not here."""
        block = self._table.get(key)
        return block.state if block is not None else None

    def find_run(self, keys: Sequence[BlockKey]) -> int:
        """Return how many of the first keys can be leased now; counts as no use."""
        return next((index for index, key in enumerate(keys) if self._table.find(key) is None), len(keys))

    def lease(self, keys: Sequence[BlockKey], reader_id: str, now: float, seconds: float) -> list[Leased | None]:
        """Lend blocks to a reader; per key: where to read it, or None: not here. Counts as one use of them together.

        A reader has one lease; a later call adds to it and extends it. Raises InvalidRequest for no reader or no time.
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
        return [Leased(block.extent, block.checksum) if block is not None else None for block in found]

    def release(self, reader_id: str) -> int:
        """End a reader's lease; return of how many blocks, 0 if it has none."""
        keys = self._leases.end(reader_id)
        for key in keys:
            block = self._table[key]
            block.num_leases -= 1
            if not block.num_leases:
                self._table.change(block, BlockState.SEALED)
        return len(keys)

    def expire(self, now: float) -> list[str]:
        """End the leases that are over; return their readers."""
        lapsed = self._leases.lapsed(now)
        for reader_id in lapsed:
            self.release(reader_id)
        self._counters["leases_expired"] += len(lapsed)
        return lapsed

    # ------------------------------------------------------------------------------------------------ keep, or not

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Count one use of these blocks together, where a worker had them itself and needed no lease."""
        self._order.use([block for key in keys if (block := self._table.find(key)) is not None])

    def pin(self, keys: Sequence[BlockKey]) -> int:
        """Keep blocks from eviction until they are unpinned; return how many of them are here, and pinned now."""
        return self._set_pinned(keys, is_pinned=True)

    def unpin(self, keys: Sequence[BlockKey]) -> int:
        """Return how many of the blocks are here, and not pinned now."""
        return self._set_pinned(keys, is_pinned=False)

    def demoted(self, key: BlockKey, extent: Extent) -> bool:
        """DEMOTING -> gone: it is on disk, or could not be brought there. False: it is not being demoted."""
        block = self._table.in_state(key, extent, BlockState.DEMOTING)
        if block is not None:
            self._table.remove(block)
        return block is not None

    def drop(self, key: BlockKey, extent: Extent) -> bool:
        """SEALED | LEASED -> gone, pinned or not: its bytes are not what was sealed. False: it is not there (any more).

        Leases on it end; readers that still copy it will see that the generation differs.
        """
        block = self._table.in_state(key, extent, BlockState.SEALED, BlockState.LEASED)
        if block is not None:
            self._leases.forget(key)
            self._forget(block, "dropped")
        return block is not None

    # ------------------------------------------------------------------------------------------------ figures

    def figures(self) -> StoreFigures:
        held, count = self._table.held_bytes, self._counters
        return StoreFigures(
            total_bytes=self.room.total_bytes,
            free_bytes=self.room.free_bytes,
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
        """Return the bytes of copies that never end, and of blocks kept only by leases that should have been ended."""
        late = sum(block.extent.held_bytes for block in self.late_copies(now))
        lapsed = Counter(key for lease in self._leases.over(now - _LATE_SWEEP_SECONDS) for key in lease.keys)
        blocks = ((self._table[key], num_over) for key, num_over in lapsed.items())
        return late + sum(block.extent.held_bytes for block, num_over in blocks if num_over == block.num_leases)

    def late_copies(self, now: float) -> list[Block]:
        """Return the blocks that are being filled or demoted for longer than that can take."""
        return [block for block in self._table.unsettled if block.since < now - _LATE_COPY_SECONDS]

    def leases(self) -> list[tuple[str, float, int]]:
        """Return every reader that has a lease, until when, and on how many bytes."""
        held = self._table
        return [
            (reader_id, lease.until, sum(held[key].extent.held_bytes for key in lease.keys))
            for reader_id, lease in self._leases.by_reader()
        ]

    def check(self) -> None:
        """Assert conservation and all that must hold between two calls."""
        self._table.check()
        self._order.check(block for block in self._table if block.state is not BlockState.DEMOTING)
        num_leases = Counter(key for lease in self._leases for key in lease.keys)
        assert num_leases.keys() <= {block.key for block in self._table}, "a lease is on a block that is gone"
        for block in self._table:
            assert block.num_leases == num_leases[block.key], f"the leases of {block.key} are miscounted"
            assert (block.state is BlockState.LEASED) == (block.num_leases > 0), f"{block.key} is {block.state.name}"

    # ------------------------------------------------------------------------------------------------ workings

    def _check_sizes(self, keys: Sequence[BlockKey], sizes: Sequence[int], costs: Sequence[float]) -> None:
        if not len(keys) == len(sizes) == len(costs):
            raise InvalidRequest(f"{len(keys)} blocks with {len(sizes)} sizes and {len(costs)} costs", field="sizes")
        for key, num_bytes, cost in zip(keys, sizes, costs, strict=True):
            known = self._table.get(key)
            if num_bytes <= 0 or cost < 0:
                raise InvalidRequest(f"{key} cannot have {num_bytes} bytes and cost {cost}", field="sizes")
            if known is not None and known.extent.num_bytes != num_bytes:
                raise InvalidRequest(f"{key} has {known.extent.num_bytes} bytes, not {num_bytes}", field="sizes")

    def _enter(self, block: Block, cost: float, parent: BlockKey | None) -> None:
        self._table.enter(block)
        self._order.add(block, cost, parent)

    def _set_pinned(self, keys: Sequence[BlockKey], *, is_pinned: bool) -> int:
        blocks = [block for key in dict.fromkeys(keys) if (block := self._table.get(key)) is not None]
        staying = [block for block in blocks if block.state is not BlockState.DEMOTING]
        for block in staying:
            block.is_pinned = is_pinned
        return len(staying)

    def _forget(self, block: Block, why: str) -> None:
        self._order.remove(block)
        self._table.remove(block)
        self._counters[why] += 1
