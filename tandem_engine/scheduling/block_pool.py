"""Tracks which KV blocks are free, used or cached, and finds cached blocks by their hash.

A block is always in exactly one of three states, so `num_blocks = num_free + num_cached + num_used`:

    free    has no content that could be found
    used    in one or more block tables (references > 0), with or without a hash
    cached  in no block table; its content can be found by its hash; evicted, oldest first, once no block is free
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, MutableSequence, Sequence

from tandem_engine.messages import PoolPoints
from tandem_engine.scheduling.block_hash import BlockHash
from tandem_engine.scheduling.sample_points import NUM_KEY_BYTES


class BlockPool:
    """The only writer of references, hashes and generations. Block i is slot i of the pool's memory region.

    `generations[i]` grows by one each time block i is allocated. With a sequence in shared memory, readers in other
    processes notice that a block was reused while they copied it.
    """

    def __init__(self, num_blocks: int, block_size: int, generations: MutableSequence[int] | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.generations = array("Q", bytes(8 * num_blocks)) if generations is None else generations
        assert len(self.generations) >= num_blocks, "the table of generations is shorter than the pool"
        self._free: deque[int] = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._references = [0] * num_blocks
        self._held_references = [0] * num_blocks
        self._num_held = 0
        self._counted: Counter[int] = Counter()
        self._num_counted = 0
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._found: dict[BlockHash, int] = {}
        self._points: set[int] = set()
        """The registered blocks that others are told of: sample points, and ends of chains."""
        self._changed_points: dict[bytes, bool] = {}
        """By point, since the last `take_points`: whether the pool has it now."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free) + len(self._cached)

    @property
    def num_spare(self) -> int:
        """Available blocks without those that holders of claims may need (see `share`)."""
        return self.num_available - self._num_counted

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_held(self) -> int:
        """Used blocks that only holds keep."""
        return self._num_held

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Allocate blocks to be written, free ones first; return None and change nothing if there are too few.

        The blocks are in ascending order, because adjacent blocks are moved in one copy.
        """
        if num_blocks > self.num_available:
            return None
        return sorted(self._hand_out() for _ in range(num_blocks))

    def find(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Return the blocks of the longest known prefix of a chain; `share` them before the next allocation."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._found.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def find_last(self, hashes: Sequence[BlockHash], num_needed: int) -> tuple[int, list[int]]:
        """Return how many blocks come before the last `num_needed` blocks of a prefix, and those last blocks.

        It is the longest prefix whose last `num_needed` blocks are known. A shorter prefix needs all its blocks.
        """
        blocks: list[int] = []  # the last one first
        for index in range(len(hashes) - 1, -1, -1):
            block = self._found.get(hashes[index])
            if block is None:
                blocks = []
                continue
            blocks.append(block)
            if len(blocks) >= num_needed:
                return index, blocks[::-1]
        return 0, blocks[::-1]

    def num_unused(self, blocks: Iterable[int]) -> int:
        """Count the blocks that sharing would take out of `num_available`."""
        return sum(not self._references[block] for block in blocks)

    def share(self, blocks: Iterable[int], *, is_claim: bool = False) -> None:
        """Add a reference to blocks that `find` returned.

        With a claim, a used block costs a spare block too, and freeing it returns one. So an owner that frees blocks
        can always allocate as many others, shared or not.
        """
        for block in blocks:
            if is_claim and self._references[block]:
                self._counted[block] += 1
                self._num_counted += 1
            self._cached.pop(block, None)
            self._refer(block, 1)

    def register(self, block: int, block_hash: BlockHash) -> None:
        """Make a used, full block findable; does nothing if its content is known already. Nobody may write it again."""
        assert self._references[block], f"block {block} is not used"
        if block_hash not in self._found and self._hashes[block] is None:
            self._found[block_hash] = block
            self._hashes[block] = block_hash

    def mark_point(self, block_hash: BlockHash) -> None:
        """Note that others are to be told of a registered block; does nothing if it was evicted, or is marked."""
        block = self._found.get(block_hash)
        if block is not None and block not in self._points:
            self._points.add(block)
            self._point_changed(block_hash, is_stored=True)

    def take_points(self) -> PoolPoints | None:
        """Return, once, which sample points the pool has and no longer has since the last call; None: the same."""
        if not self._changed_points:
            return None
        changes, self._changed_points = self._changed_points, {}
        stored = b"".join(key for key, is_stored in changes.items() if is_stored)
        return PoolPoints(stored, b"".join(key for key, is_stored in changes.items() if not is_stored))

    def hold(self, blocks: Iterable[int]) -> None:
        """Turn one reference to each block into a hold, counted separately; `free(..., held=True)` ends it."""
        for block in blocks:
            self._refer(block, 0, held=1)

    def free(self, blocks: Sequence[int], *, held: bool = False) -> None:
        """Remove one reference to each block of a table; the last blocks of a chain are evicted first."""
        for block in reversed(blocks):
            assert self._references[block], f"block {block} was freed twice"
            if self._counted[block]:
                self._counted[block] -= 1
                self._num_counted -= 1
            self._refer(block, -1, held=-1 if held else 0)
            if not self._references[block]:
                self._put_back(block)

    def check(self) -> None:
        """Assert that every block is in exactly one state."""
        used = [block for block in range(self.num_blocks) if self._references[block]]
        assert sorted([*self._free, *self._cached, *used]) == list(range(self.num_blocks)), "a block is in two states"
        assert all(self._hashes[block] is None for block in self._free), "a free block has a hash"
        assert all(self._hashes[block] is not None for block in self._cached), "a cached block has no hash"
        assert all(self._hashes[block] is not None for block in self._points), "a sample point has no hash"
        assert {h: b for b, h in enumerate(self._hashes) if h is not None} == self._found, "hashes do not match"
        assert self._num_held == sum(map(self._is_only_held, used)), "held blocks are miscounted"
        assert self._num_counted == self._counted.total(), "claims are miscounted"
        assert all(self._counted[block] < self._references[block] for block in used), "more claims than references"
        assert self.num_spare >= 0, "more claims than blocks"

    def _hand_out(self) -> int:
        block = self._free.popleft() if self._free else self._evict()
        self._refer(block, 1)
        self.generations[block] += 1
        return block

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        block_hash = self._hashes[block]
        assert block_hash is not None, f"cached block {block} has no hash"
        del self._found[block_hash]
        self._hashes[block] = None
        if block in self._points:
            self._points.discard(block)
            self._point_changed(block_hash, is_stored=False)
        return block

    def _point_changed(self, block_hash: BlockHash, *, is_stored: bool) -> None:
        key = block_hash[:NUM_KEY_BYTES]
        if self._changed_points.pop(key, is_stored) == is_stored:  # else it is as it was at the last `take_points`
            self._changed_points[key] = is_stored

    def _put_back(self, block: int) -> None:
        if self._hashes[block] is None:
            self._free.append(block)
        else:
            self._cached[block] = None

    def _refer(self, block: int, change: int, *, held: int = 0) -> None:
        self._num_held -= self._is_only_held(block)
        self._references[block] += change
        self._held_references[block] += held
        self._num_held += self._is_only_held(block)

    def _is_only_held(self, block: int) -> bool:
        return 0 < self._references[block] == self._held_references[block]
