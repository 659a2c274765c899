"""Property test of the block store: whatever the order of calls, no block that is held loses a byte.

The machine writes each block's content as a copier would, and reads as a reader does: copy, then compare the
generation. The machine knows who holds which block; the store must never give that memory to another block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kv_transfer_svc.blocks.allocator import PAGE_BYTES, BlockAllocator, Extent
from kv_transfer_svc.blocks.block import KNOWN, BlockKey, BlockState, LeasedBlock
from kv_transfer_svc.blocks.block_store import BlockStore
from kv_transfer_svc.blocks.quotas import Quotas
from tests.kv_transfer_svc.blocks.chain import block, chain, name

PROMPTS = {"a": 1, "b": 1, "c": 2, "d": 3}  # with the pages of one block, as if of different layouts
NUM_PAGES = 12
prompts = st.sampled_from(sorted(PROMPTS))
readers = st.sampled_from(["one", "two", "three"])


def size(key: BlockKey) -> int:
    return PROMPTS.get(str(name(key))[0], 1) * PAGE_BYTES - 7


def content(key: BlockKey) -> bytes:
    return (key.block_hash * (size(key) // 16 + 1))[: size(key)]


@dataclass
class Held:
    """A block that a reader may read, as the test knows."""

    key: BlockKey
    leased: LeasedBlock
    until: float


class BlockStoreMachine(RuleBasedStateMachine):
    @initialize(
        quota_pages=st.one_of(st.none(), st.integers(1, 6)),
        headroom_pages=st.integers(0, 3),
        has_disk=st.booleans(),
    )
    def start(self, quota_pages: int | None, headroom_pages: int, has_disk: bool) -> None:
        self.allocator = BlockAllocator(NUM_PAGES * PAGE_BYTES)
        self.store = BlockStore(
            self.allocator,
            quotas=Quotas(None, {b"a": quota_pages * PAGE_BYTES} if quota_pages else None),
            demote=self.demote,
            headroom_bytes=headroom_pages * PAGE_BYTES,
        )
        self.now = 0.0
        self.has_disk = has_disk
        self.filling: dict[BlockKey, Extent] = {}
        self.leaving: dict[BlockKey, Extent] = {}
        self.pinned: set[BlockKey] = set()
        self.held: dict[str, list[Held]] = {}
        self.ended: list[Held] = []
        self.num_scanned = 0
        for prompt in PROMPTS:
            self.publish(chain(prompt, 2), prompt)

    def demote(self, key: BlockKey, extent: Extent, checksum: int) -> bool:
        assert key not in self.pinned, f"{key} is pinned and was evicted"
        assert key not in self.filling, f"{key} is being filled and was evicted"
        assert not any(each.key == key for held in self.held.values() for each in held), f"{key} was evicted, leased"
        assert self.bytes_at(extent) == content(key)
        if self.has_disk:
            self.leaving[key] = extent
        return self.has_disk

    @rule()
    def plug_or_unplug_the_disk(self) -> None:
        self.has_disk = not self.has_disk

    @rule(prompt=prompts, first=st.integers(0, 3), num_blocks=st.integers(1, 4), num_sealed=st.integers(0, 4))
    def begin(self, prompt: str, first: int, num_blocks: int, num_sealed: int) -> None:
        keys = chain(prompt, first + num_blocks)[first:]
        self.publish(keys, prompt, parent=block(prompt, first - 1) if first else None, num_sealed=num_sealed)

    @rule(num_blocks=st.integers(1, 6), seconds=st.sampled_from([0.0, 0.5, 2.0]))
    def others_come_and_time_passes(self, num_blocks: int, seconds: float) -> None:
        for _ in range(num_blocks):
            self.num_scanned += 1
            self.publish([block("x", self.num_scanned)], "x")
            self.end_demotion(0)
        self.now += seconds
        lapsed = sorted(reader for reader, held in self.held.items() if held[0].until <= self.now)
        assert sorted(self.store.expire(self.now)) == lapsed
        for reader in lapsed:
            self.ended += self.held.pop(reader)

    @rule(choice=st.integers(0, 20), is_good=st.booleans())
    def end_fill(self, choice: int, is_good: bool) -> None:
        if self.filling:
            key = sorted(self.filling, key=str)[choice % len(self.filling)]
            if is_good:
                self.seal(key)
            else:
                extent = self.filling.pop(key)
                self.pinned.discard(key)
                assert self.store.discard(key, extent)
                assert not self.store.discard(key, extent)

    @rule(choice=st.integers(0, 20))
    def end_demotion(self, choice: int) -> None:
        if self.leaving:
            key = sorted(self.leaving, key=str)[choice % len(self.leaving)]
            extent = self.leaving.pop(key)
            assert self.bytes_at(extent) == content(key)
            assert self.store.demoted(key, extent)

    @rule(prompt=prompts, num_blocks=st.integers(1, 5), reader=readers, seconds=st.sampled_from([1.0, 3.0]))
    def lease(self, prompt: str, num_blocks: int, reader: str, seconds: float) -> None:
        keys = chain(prompt, num_blocks)
        self.publish(keys, prompt)
        run = self.store.find_run(keys)
        leased = self.store.lease(keys, reader, self.now, seconds)
        assert None not in leased[:run] and (run == len(keys) or leased[run] is None)
        got = [Held(key, each, 0.0) for key, each in zip(keys, leased, strict=True) if each is not None]
        old = self.held.get(reader, [])
        until = max([self.now + seconds, *(each.until for each in old)])
        merged = {each.key: each for each in [*old, *got]}
        if got:
            self.held[reader] = [Held(each.key, each.leased, until) for each in merged.values()]

    @rule(reader=readers)
    def release(self, reader: str) -> None:
        held = self.held.pop(reader, [])
        assert self.store.release(reader) == len(held)
        self.ended += held

    @rule(prompt=prompts, num_blocks=st.integers(1, 2), is_pinned=st.booleans())
    def pin(self, prompt: str, num_blocks: int, is_pinned: bool) -> None:
        keys = chain(prompt, num_blocks)
        if is_pinned:
            self.publish(keys, prompt)
        here = {key for key in keys if self.store.state(key) not in (None, BlockState.DEMOTING)}
        assert (self.store.pin if is_pinned else self.store.unpin)(keys) == len(here)
        self.pinned = self.pinned | here if is_pinned else self.pinned - here

    @rule(prompt=prompts, index=st.integers(0, 3))
    def drop(self, prompt: str, index: int) -> None:
        key = block(prompt, index)
        found = self.store.lease([key], "checker", self.now, 1.0)[0]
        if found is not None:
            assert self.store.drop(key, found.extent)
            self.pinned.discard(key)
            self.held = {
                reader: kept
                for reader, held in self.held.items()
                if (kept := [each for each in held if each.key != key])
            }

    @rule(prompt=prompts, num_blocks=st.integers(1, 4))
    def touch(self, prompt: str, num_blocks: int) -> None:
        self.store.touch(chain(prompt, num_blocks))

    @invariant()
    def the_books_balance(self) -> None:
        self.store.check()
        stats = self.store.stats()
        kept = stats.free_bytes + stats.cached_bytes + stats.leased_bytes + stats.filling_bytes
        assert kept == stats.total_bytes == NUM_PAGES * PAGE_BYTES
        assert stats.num_leases == len(self.held)
        assert self.store.orphan_bytes(self.now) == 0 or self.now > 60.0  # then fills left open are

    @invariant()
    def what_is_held_stays(self) -> None:
        for held in self.held.values():
            for each in held:
                assert self.allocator.is_current(each.leased.extent)
                assert self.bytes_at(each.leased.extent) == content(each.key)
        for key in self.pinned:
            assert self.store.state(key) is not None
        for key in self.filling:
            assert self.store.state(key) is BlockState.FILLING

    @invariant()
    def a_reader_that_comes_late_reads_the_right_bytes_or_knows(self) -> None:
        for each in self.ended:
            assert not self.allocator.is_current(each.leased.extent) or self.bytes_at(each.leased.extent) == content(
                each.key
            )

    def publish(
        self, keys: Sequence[BlockKey], prompt: str, *, parent: BlockKey | None = None, num_sealed: int = 99
    ) -> None:
        """Offer blocks to the store and fill those that are new; seal the first `num_sealed`."""
        begun = self.store.begin(keys, [size(key) for key in keys], prompt.encode(), self.now, parent=parent)
        self.store.check()
        for index, (key, extent) in enumerate(zip(keys, begun, strict=True)):
            assert extent is not KNOWN or self.store.state(key) is not None
            if isinstance(extent, Extent):
                assert extent.num_bytes == size(key)
                self.filling[key] = extent
                self.write(key, extent, is_whole=False)
                if index < num_sealed:
                    self.seal(key)

    def seal(self, key: BlockKey) -> None:
        extent = self.filling.pop(key)
        self.write(key, extent, is_whole=True)
        assert self.store.seal(key, extent, checksum=hash(key))
        assert not self.store.seal(key, extent, checksum=hash(key))

    def write(self, key: BlockKey, extent: Extent, *, is_whole: bool) -> None:
        data = content(key) if is_whole else bytes(extent.num_bytes)
        with self.allocator.region.view(extent.offset, extent.num_bytes) as view:
            view[:] = data

    def bytes_at(self, extent: Extent) -> bytes:
        with self.allocator.region.view(extent.offset, extent.num_bytes) as view:
            return bytes(view)

    def teardown(self) -> None:
        if hasattr(self, "allocator"):
            self.empty()
            self.allocator.close()

    def empty(self) -> None:
        """Release everything: all memory is free again."""
        for key, extent in self.filling.items():
            self.store.discard(key, extent)
        for reader in list(self.held):
            self.store.release(reader)
        for key, extent in self.leaving.items():
            self.store.demoted(key, extent)
        rest = [*(key for prompt in PROMPTS for key in chain(prompt, 8)), *chain("x", self.num_scanned + 1)]
        for key, leased in zip(rest, self.store.lease(rest, "last", self.now, 1.0), strict=True):
            if leased is not None:
                assert self.store.drop(key, leased.extent)
        self.store.check()
        assert self.store.stats().free_bytes == self.store.stats().total_bytes


BlockStoreMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestBlockStore = BlockStoreMachine.TestCase
