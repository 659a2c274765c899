"""Tests that blocks of a private pool are announced once they are copied, and that no held slot is used again."""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import MutableSequence, Sequence

import pytest

from tandem_engine.messages import FilledBlocks, SealedBlocks
from tandem_engine.staging import StagedPublisher


class SlowMemory:
    """Implements `SlotMemory`; a copy reads its block's bytes only when the test lets it end."""

    def __init__(self, pool: list[str], num_slots: int, *, is_slow: bool = False) -> None:
        self.region_id = "ring"
        self.num_slots = num_slots
        self.generations: MutableSequence[int] = array("Q", bytes(8 * num_slots))
        self.content = [""] * num_slots
        self.is_slow = is_slow
        self._pool = pool
        self._started: deque[tuple[int, int]] = deque()
        self._num_ended = 0

    def start_copies(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._started.extend(pairs)
        if not self.is_slow:
            self.end(len(pairs))

    def end(self, num_copies: int) -> None:
        for _ in range(num_copies):
            block, slot = self._started.popleft()
            self.content[slot] = self._pool[block]
            self._num_ended += 1

    def take_copied(self, *, wait: bool = False) -> int:
        if wait:
            self.end(len(self._started))
        taken, self._num_ended = self._num_ended, 0
        return taken

    def checksums(self, slots: Sequence[int]) -> list[int]:
        return [hash(self.content[slot]) for slot in slots]


class Ring:
    """A publisher over a pool of blocks, each with a name for its content."""

    def __init__(self, num_blocks: int, num_slots: int, *, is_slow: bool = False) -> None:
        self.generations = array("Q", bytes(8 * num_blocks))
        self.pool = ["" for _ in range(num_blocks)]
        self.memory = SlowMemory(self.pool, num_slots, is_slow=is_slow)
        self.publisher = StagedPublisher(self.memory, self.generations)
        for block in range(num_blocks):
            self.write(block)

    def write(self, block: int) -> None:
        """Allocate a block anew, and write it."""
        self.generations[block] += 1
        self.pool[block] = f"{block}.{self.generations[block]}"

    def seal(self, request_id: str, blocks: Sequence[int], first: int = 0, *, is_last: bool = False) -> None:
        stamps = [self.generations[block] for block in blocks]
        self.publisher.publish([SealedBlocks(request_id, first, list(blocks), stamps, is_last)], [])

    def fill(self, request_id: str, blocks: Sequence[int]) -> None:
        stamps, hashes = [self.generations[block] for block in blocks], [f"h{self.pool[block]}" for block in blocks]
        self.publisher.publish([], [FilledBlocks(request_id, "root", hashes, list(blocks), stamps)])

    def sealed(self) -> list[SealedBlocks]:
        """Return what is announced; check that the slots have what the events say."""
        self.publisher.publish([], [])
        taken = self.publisher.take_sealed()
        for event in taken:
            assert event.region_id == "ring"
            assert event.generations == [self.memory.generations[slot] for slot in event.slots]
            assert event.checksums == [hash(self.read(slot)) for slot in event.slots]
        return taken

    def filled(self) -> list[FilledBlocks]:
        self.publisher.publish([], [])
        taken = self.publisher.take_filled()
        for event in taken:
            for name, slot, generation in zip(event.hashes, event.slots, event.generations, strict=True):
                if self.memory.generations[slot] == generation:  # else it is used again: readers notice
                    assert f"h{self.read(slot)}" == name
        return taken

    def read(self, slot: int) -> str:
        return self.memory.content[slot]

    def contents(self, events: Sequence[SealedBlocks | FilledBlocks]) -> list[str]:
        return [self.read(slot) for event in events for slot in event.slots]

    def is_all_free(self) -> bool:
        self.publisher.ring.check()
        return self.publisher.ring.num_held == 0 and self.publisher.state["staging_blocks_waiting"] == 0


def test_a_run_comes_out_in_pieces_in_order_and_its_end_last() -> None:
    ring = Ring(num_blocks=20, num_slots=16)
    ring.seal("a", [4, 9, 1])
    ring.seal("a", [7, 3], first=3, is_last=True)
    events = ring.sealed()
    assert ring.contents(events) == ["4.1", "9.1", "1.1", "7.1", "3.1"]
    assert [event.first_block for event in events] == [0, 2, 3]  # an eighth of the ring at a time
    assert [event.is_last for event in events] == [False, False, True]


def test_nothing_is_announced_before_its_copy_has_ended() -> None:
    ring = Ring(num_blocks=20, num_slots=16, is_slow=True)
    ring.seal("a", [0, 1, 2], is_last=True)
    ring.fill("a", [0, 1, 2])
    assert not ring.sealed() and not ring.filled() and ring.publisher.is_copying
    ring.memory.end(2)
    assert ring.contents(events := ring.sealed()) == ["0.1", "1.1"] and not events[-1].is_last
    assert ring.contents(ring.filled()) == ["0.1", "1.1"]
    ring.publisher.wait()
    assert ring.sealed()[-1].is_last and ring.contents(ring.filled()) == ["2.1"]
    assert not ring.publisher.is_copying


def test_a_block_is_copied_once_for_all_who_read_it() -> None:
    ring = Ring(num_blocks=8, num_slots=8)
    ring.seal("a", [0, 1, 2])
    ring.fill("a", [0, 1])
    ring.seal("b", [0, 1, 3])
    assert ring.publisher.state["blocks_staged"] == 4
    slots = [slot for event in ring.sealed() for slot in event.slots]
    assert slots[:2] == slots[3:5] == [slot for event in ring.filled() for slot in event.slots]
    ring.publisher.forget("a")
    assert ring.publisher.state["staging_slots_held"] == 3
    ring.publisher.forget("b")
    assert ring.is_all_free()


def test_held_slots_are_not_used_again_before_they_are_released() -> None:
    ring = Ring(num_blocks=12, num_slots=4)
    ring.seal("a", [0, 1])
    ring.seal("b", [2, 3])
    events = ring.sealed()
    before = [(slot, ring.memory.generations[slot]) for event in events for slot in event.slots]
    ring.fill("c", [4, 5])
    ring.seal("d", [6, 7], is_last=True)
    assert not ring.sealed() and not ring.filled() and not ring.publisher.is_copying
    assert all(ring.memory.generations[slot] == generation for slot, generation in before)
    ring.publisher.forget("a")
    assert ring.contents(ring.sealed()) == ["6.1", "7.1"], "prefills go first"
    assert not ring.filled()
    ring.publisher.forget("b")
    assert ring.contents(ring.filled()) == ["4.1", "5.1"]


def test_a_prompt_larger_than_the_ring_passes_through_as_its_slabs_are_copied() -> None:
    ring = Ring(num_blocks=40, num_slots=4)
    ring.seal("a", range(20))
    ring.seal("a", range(20, 40), first=20, is_last=True)
    seen: list[str] = []
    events = ring.sealed()
    while events:
        seen += ring.contents(events)
        ring.publisher.release("a", len(seen))
        ring.publisher.release("a", len(seen))  # a repeated or late call changes nothing
        ring.publisher.release("a", 1)
        events = ring.sealed()
    assert seen == [f"{block}.1" for block in range(40)]
    ring.publisher.forget("a")
    assert ring.is_all_free()


def test_a_release_of_more_than_was_announced_frees_only_that() -> None:
    ring = Ring(num_blocks=8, num_slots=4, is_slow=True)
    ring.seal("a", [0, 1])
    ring.memory.end(1)
    assert len(ring.sealed()) == 1
    ring.publisher.release("a", 100)
    assert ring.publisher.state["staging_slots_held"] == 1
    ring.publisher.wait()
    assert ring.contents(ring.sealed()) == ["1.1"]
    assert ring.publisher.state["staging_slots_held"] == 1


def test_a_long_prompt_leaves_half_of_the_ring_to_others() -> None:
    ring = Ring(num_blocks=20, num_slots=4)
    ring.seal("a", range(10))
    ring.seal("b", [15, 16], is_last=True)
    assert [event.request_id for event in ring.sealed()] == ["a", "a", "b", "b"]


def test_a_forgotten_prefill_gives_everything_back_and_is_not_announced() -> None:
    ring = Ring(num_blocks=20, num_slots=4, is_slow=True)
    ring.seal("a", range(10))
    ring.memory.end(1)
    ring.publisher.publish([], [])
    ring.publisher.forget("a")
    assert not ring.sealed()
    for block in range(10):
        ring.write(block)  # its blocks are freed, and used at once: a copy under way reads what is written now
    ring.publisher.wait()
    assert not ring.sealed() and ring.is_all_free()
    ring.seal("b", [0, 1])
    ring.publisher.wait()
    assert ring.contents(ring.sealed()) == ["0.2", "1.2"], "the torn copy is not taken for the new block"


def test_a_block_for_caches_that_the_pool_used_again_is_dropped_with_those_after_it() -> None:
    ring = Ring(num_blocks=20, num_slots=8, is_slow=True)
    ring.fill("a", [0, 1, 2, 3])
    ring.memory.end(2)
    ring.write(2)  # while it is copied
    assert ring.contents(ring.filled()) == ["0.1", "1.1"]
    ring.publisher.wait()
    assert not ring.filled() and ring.is_all_free()
    assert ring.publisher.state["blocks_not_staged"] == 2


def test_a_block_for_caches_that_waits_for_a_slot_is_dropped_once_the_pool_uses_it_again() -> None:
    ring = Ring(num_blocks=20, num_slots=2)
    ring.seal("a", [0])
    ring.seal("b", [1])
    ring.fill("c", [5, 6])
    ring.write(6)
    ring.publisher.forget("a")
    ring.publisher.forget("b")
    assert [event.hashes for event in ring.filled()] == [["h5.1"]]
    assert ring.is_all_free() and not ring.publisher.is_copying


def test_blocks_for_caches_pass_through_a_smaller_ring_with_their_parents() -> None:
    ring = Ring(num_blocks=10, num_slots=3)
    ring.fill("a", range(8))
    events = ring.publisher.take_filled()
    while ring.publisher.is_copying:
        events += ring.filled()
    assert [event.parent for event in events] == ["root", "h2.1", "h5.1"]
    assert [name for event in events for name in event.hashes] == [f"h{block}.1" for block in range(8)]


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_held_slots_keep_their_bytes_and_all_are_free_in_the_end(seed: int, is_slow: bool) -> None:
    rng = random.Random(seed)
    ring = Ring(num_blocks=60, num_slots=rng.randint(1, 12), is_slow=is_slow)
    live: dict[str, list[int]] = {}
    free = list(range(60))
    due: dict[str, list[str]] = {}
    seen: dict[str, list[tuple[str, int, int]]] = {}
    released: dict[str, int] = {}
    ended: set[str] = set()

    def look() -> None:
        for event in ring.sealed():
            assert event.request_id in live, "announced after it was forgotten"
            assert event.first_block == len(seen[event.request_id])
            seen[event.request_id] += [(ring.read(slot), slot, ring.memory.generations[slot]) for slot in event.slots]
            assert not event.is_last or len(seen[event.request_id]) == len(due[event.request_id])
            ended.update([event.request_id] if event.is_last else [])
        ring.filled()
        for name, events in seen.items():
            assert [content for content, _, _ in events] == due[name][: len(events)]
            for content, slot, generation in events[released[name] :] if name in live else ():
                assert (ring.read(slot), ring.memory.generations[slot]) == (content, generation), "a held slot changed"
        ring.publisher.ring.check()

    def forget(name: str) -> None:
        ring.publisher.forget(name)
        free.extend(live.pop(name))

    for number in range(300):
        action = rng.choice(["begin", "go on", "release", "forget", "fill", "end copies"])
        name = rng.choice(list(live)) if live else ""
        if action == "begin" and len(free) >= 10:
            blocks = [free.pop(rng.randrange(len(free))) for _ in range(rng.randint(1, 10))]
            for block in blocks:
                ring.write(block)
            name = f"r{number}"
            live[name], due[name], seen[name], released[name] = blocks, [ring.pool[block] for block in blocks], [], 0
            cut = rng.randint(0, len(blocks) - 1)
            if cut:
                ring.seal(name, blocks[:cut])
            ring.seal(name, blocks[cut:], first=cut, is_last=True)
        elif action == "release" and name:
            released[name] = rng.randint(released[name], len(seen[name]))
            ring.publisher.release(name, released[name])
        elif action == "forget" and name:
            forget(name)
        elif action == "fill" and name:
            ring.fill(name, live[name])
        elif action == "end copies":
            ring.memory.end(rng.randint(0, len(ring.memory._started)))
        look()
    for name in list(live):  # readers that copy everything
        for _ in range(100):
            released[name] = len(seen[name])
            ring.publisher.release(name, released[name])
            ring.publisher.wait()
            look()
    assert set(live) <= ended
    for name in list(live):
        forget(name)
    while ring.publisher.is_copying:
        ring.publisher.wait()
        look()
    assert ring.is_all_free()
