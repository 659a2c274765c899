"""Announces blocks of a pool that others cannot read: copies them to slots of a bounded region first.

    pool (private)  ──copies, beside the step──▶  slots of the region  ──▶  BlocksSealed, StepDone
                                                  a ring: the slot used least recently is taken next

Slots of a prefill are held until its readers have copied them: ReleaseSlabs, or ReleaseHeld for all of them. Slots of
blocks for caches are not held. If no slot is free, copies wait in order, those of prefills first. A prefill holds half
of the ring at most, so that a long prompt does not stop all others.

A copy is a read like that of any other process: it counts if the generation of the block is the same before and after
it. So nothing keeps a block that was freed while it waited for its copy: the copy is dropped.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from tandem_engine.messages import FilledBlocks, SealedBlocks

_PIECES_PER_RING = 8
"""A run of blocks is announced in pieces of an eighth of the ring: readers copy one while the next is filled."""


def max_held_slots(num_slots: int) -> int:
    """Return the slots that one prefill holds at most."""
    return max(1, num_slots // 2)


class SlotMemory(Protocol):
    """The region's memory, and the copies into it."""

    region_id: str
    num_slots: int
    generations: MutableSequence[int]
    """One per slot, in the region."""

    def start_copies(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to slots, (block, slot), behind what the running step has written so far."""
        ...

    def take_copied(self, *, wait: bool = False) -> int:
        """Return, once, how many of the copies have ended, oldest first; with `wait`, all of them."""
        ...

    def checksums(self, slots: Sequence[int]) -> list[int]:
        """Return the checksums of the slots' bytes; an empty list if this engine computes none."""
        ...


class SlotRing:
    """Which slot has which block in which generation, and how many hold it."""

    def __init__(self, memory: SlotMemory, block_generations: Sequence[int]) -> None:
        self._memory = memory
        self._block_generations = block_generations
        self._content: list[tuple[int, int] | None] = [None] * memory.num_slots
        self._slot_of: dict[int, int] = {}
        self._holders = [0] * memory.num_slots
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(memory.num_slots))
        """Slots without a holder, those to be taken first at the front."""
        self._copying: deque[int] = deque()
        self._unready: set[int] = set()

    @property
    def num_held(self) -> int:
        return len(self._content) - len(self._idle)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_copying(self) -> int:
        return len(self._copying)

    def is_ready(self, slot: int) -> bool:
        """Whether the slot has its content."""
        return slot not in self._unready

    def has(self, slot: int, block: int, generation: int) -> bool:
        """Whether the slot has, or is getting, a block of this generation."""
        return self._content[slot] == (block, generation)

    def is_there(self, block: int, generation: int) -> bool:
        """Whether a block of this generation can be held: a slot has it, or the pool does."""
        slot = self._slot_of.get(block)
        return self._block_generations[block] == generation or (slot is not None and self.has(slot, block, generation))

    def hold(self, block: int, generation: int) -> tuple[int, bool] | None:
        """Hold the slot of a block; return it and whether the block must be copied to it. None: no slot is idle."""
        slot = self._slot_of.get(block)
        is_new = slot is None or self._content[slot] != (block, generation)
        if slot is None or is_new:
            if not self._idle:
                return None
            slot = self._take(block, generation)
        self._idle.pop(slot, None)
        self._holders[slot] += 1
        return slot, is_new

    def let_go(self, slot: int) -> None:
        self._holders[slot] -= 1
        assert self._holders[slot] >= 0, f"slot {slot} was let go twice"
        if not self._holders[slot]:
            self._idle[slot] = None

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Start copies to slots that were just taken; each keeps its slot until it has ended."""
        for _, slot in pairs:
            self._holders[slot] += 1
            self._copying.append(slot)
            self._unready.add(slot)
        if pairs:
            self._memory.start_copies(pairs)

    def collect(self, *, wait: bool = False) -> None:
        """Note which copies have ended; forget those whose block was allocated anew meanwhile."""
        for _ in range(self._memory.take_copied(wait=wait) if self._copying else 0):
            slot = self._copying.popleft()
            self._unready.discard(slot)
            content = self._content[slot]
            assert content is not None, f"slot {slot} is being copied to and has no block"
            block, generation = content
            if self._block_generations[block] != generation:
                self._forget(slot)
            self.let_go(slot)

    def check(self) -> None:
        """Assert that the books agree."""
        idle = [slot for slot, holders in enumerate(self._holders) if not holders]
        assert sorted(self._idle) == idle, "an idle slot is held, or a slot without a holder is not idle"
        assert all(self._content[slot] is not None for slot in self._copying), "a copy has no block"
        known = {content[0]: slot for slot, content in enumerate(self._content) if content is not None}
        assert all(known.get(block) is not None for block in self._slot_of), "a block's slot has another block"

    def _take(self, block: int, generation: int) -> int:
        slot, _ = self._idle.popitem(last=False)
        self._memory.generations[slot] += 1  # first: a late reader notices
        self._forget(slot)
        self._content[slot] = block, generation
        self._slot_of[block] = slot
        return slot

    def _forget(self, slot: int) -> None:
        content, self._content[slot] = self._content[slot], None
        if content is not None and self._slot_of.get(content[0]) == slot:
            del self._slot_of[content[0]]


@dataclass
class _Run:
    """Blocks of one event, on their way out: the first ones are announced, the next ones have slots, the rest waits."""

    event: SealedBlocks | FilledBlocks
    slots: list[int] = field(default_factory=list)
    num_announced: int = 0

    @property
    def num_blocks(self) -> int:
        return len(self.event.slots)

    @property
    def next_block(self) -> tuple[int, int]:
        index = len(self.slots)
        return self.event.slots[index], self.event.generations[index]


@dataclass
class _Held:
    """The slots of one prefill, in the order of announcement."""

    slots: deque[int] = field(default_factory=deque)
    num_announced: int = 0
    num_released: int = 0


class StagedPublisher:
    """Implements `tandem_engine.publisher.Publisher`."""

    def __init__(self, memory: SlotMemory, block_generations: Sequence[int]) -> None:
        """`block_generations`: those of the pool's blocks, as its owner counts them."""
        self.ring = SlotRing(memory, block_generations)
        self.counters: Counter[str] = Counter(blocks_staged=0, blocks_not_staged=0)
        self._memory = memory
        self._most_held = max_held_slots(memory.num_slots)
        self._piece = max(1, memory.num_slots // _PIECES_PER_RING)
        self._sealed: deque[_Run] = deque()
        self._filled: deque[_Run] = deque()
        self._held: dict[str, _Held] = {}
        self._out_sealed: list[SealedBlocks] = []
        self._out_filled: list[FilledBlocks] = []

    @property
    def state(self) -> Mapping[str, float]:
        """Totals since start, and the slots and waiting blocks of this moment."""
        waiting = sum(run.num_blocks - len(run.slots) for run in (*self._sealed, *self._filled))
        return {
            **self.counters,
            "staging_slots": self._memory.num_slots,
            "staging_slots_held": self.ring.num_held,
            "staging_blocks_waiting": waiting,
        }

    @property
    def is_copying(self) -> bool:
        return self.ring.num_copying > 0 or (bool(self._filled) and self.ring.num_idle > 0)

    def publish(self, sealed: Sequence[SealedBlocks], filled: Sequence[FilledBlocks]) -> None:
        self._sealed += map(_Run, sealed)
        self._filled += map(_Run, filled)
        self._move()

    def take_sealed(self) -> list[SealedBlocks]:
        taken, self._out_sealed = self._out_sealed, []
        return taken

    def take_filled(self) -> list[FilledBlocks]:
        taken, self._out_filled = self._out_filled, []
        return taken

    def wait(self) -> None:
        self.ring.collect(wait=True)

    def release(self, request_id: str, num_blocks: int) -> None:
        held = self._held.get(request_id)
        while held is not None and held.num_released < min(num_blocks, held.num_announced):
            self.ring.let_go(held.slots.popleft())
            held.num_released += 1

    def forget(self, request_id: str) -> None:
        held = self._held.pop(request_id, None)
        for slot in held.slots if held is not None else ():
            self.ring.let_go(slot)
        self._sealed = deque(run for run in self._sealed if run.event.request_id != request_id)
        self._out_sealed = [each for each in self._out_sealed if each.request_id != request_id]

    # ------------------------------------------------------------------------------------------------- helpers

    def _move(self) -> None:
        """Do what can be done now: take slots, copy, announce."""
        self.ring.collect()
        self._give_slots_to_sealed()
        self._give_slots_to_filled()
        self.ring.collect()
        self._announce_sealed()
        self._announce_filled()

    def _give_slots_to_sealed(self) -> None:
        waiting: set[str] = set()  # requests of which a block waits: the blocks after it wait too
        for run in self._sealed:
            request_id = run.event.request_id
            if request_id in waiting:
                continue
            slots = self._held.setdefault(request_id, _Held()).slots
            num_before = len(run.slots)
            self._fill(run, self._most_held - len(slots))
            slots.extend(run.slots[num_before:])
            if len(run.slots) < run.num_blocks:
                waiting.add(request_id)

    def _give_slots_to_filled(self) -> None:
        for run in self._filled:
            first = len(run.slots)
            end = first
            event = run.event
            while end < run.num_blocks and self.ring.is_there(event.slots[end], event.generations[end]):
                end += 1
            self._fill(run, end - first)
            if len(run.slots) == end < run.num_blocks:
                self._drop_from(run, end)

    def _fill(self, run: _Run, most: int) -> None:
        """Hold slots for at most so many further blocks of a run, and start the copies."""
        pairs = []
        for _ in range(min(most, run.num_blocks - len(run.slots))):
            block, generation = run.next_block
            if (found := self.ring.hold(block, generation)) is None:
                break
            slot, is_new = found
            run.slots.append(slot)
            if is_new:
                pairs.append((block, slot))
        self.ring.copy(pairs)
        self.counters["blocks_staged"] += len(pairs)

    def _drop_from(self, run: _Run, index: int) -> None:
        """Give up a run of blocks for caches from `index` on: the pool has used a block for something else."""
        for slot in run.slots[index:]:
            self.ring.let_go(slot)
        del run.slots[index:]
        self.counters["blocks_not_staged"] += run.num_blocks - index
        event = run.event
        run.event = replace(event, slots=event.slots[:index], generations=event.generations[:index])

    def _announce_sealed(self) -> None:
        waiting: set[str] = set()
        for run in self._sealed:
            event = run.event
            if event.request_id in waiting:
                continue
            assert isinstance(event, SealedBlocks)
            held = self._held[event.request_id]
            end = self._num_ready(run)
            while run.num_announced < end:
                start, stop = run.num_announced, min(end, run.num_announced + self._piece)
                is_last = event.is_last and stop == run.num_blocks
                self._out_sealed.append(
                    replace(event, first_block=event.first_block + start, is_last=is_last, **self._at(run, start, stop))
                )
                held.num_announced += stop - start
                run.num_announced = stop
            if run.num_announced < run.num_blocks:
                waiting.add(event.request_id)
        self._sealed = deque(run for run in self._sealed if run.num_announced < run.num_blocks)

    def _announce_filled(self) -> None:
        for run in self._filled:
            event = run.event
            assert isinstance(event, FilledBlocks)
            for index in range(run.num_announced, len(run.slots)):
                if not self.ring.has(run.slots[index], event.slots[index], event.generations[index]):
                    self._drop_from(run, index)  # allocated anew while it was copied
                    break
            start, end = run.num_announced, self._num_ready(run)
            if start < end:
                parent = event.hashes[start - 1] if start else event.parent
                hashes = event.hashes[start:end]
                first_block = event.first_block + start
                self._out_filled.append(
                    replace(event, parent=parent, hashes=hashes, first_block=first_block, **self._at(run, start, end))
                )
                run.num_announced = end
                for slot in run.slots[start:end]:
                    self.ring.let_go(slot)
        self._filled = deque(run for run in self._filled if run.num_announced < len(run.event.slots))

    def _num_ready(self, run: _Run) -> int:
        """Return how many leading blocks of a run are copied."""
        end = run.num_announced
        while end < len(run.slots) and self.ring.is_ready(run.slots[end]):
            end += 1
        return end

    def _at(self, run: _Run, start: int, end: int) -> dict[str, object]:
        """Return the fields of an event that say where blocks of a run are."""
        slots = run.slots[start:end]
        return {
            "region_id": self._memory.region_id,
            "slots": slots,
            "generations": [self._memory.generations[slot] for slot in slots],
            "checksums": self._memory.checksums(slots),
        }
