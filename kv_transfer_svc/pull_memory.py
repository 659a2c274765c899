"""The arena memory of one pull.

    WindowMemory         slab ──▶ windows ──▶ read ──▶ sealed ──▶ copied by every reader ──▶ freed, for the next window
    WholePromptMemory    all blocks at once, freed at the end: for readers of release 0.2, which acknowledge nothing

A pull with windows holds a share of the arena at most, and waits for its readers beyond that. Readers copy without the
arena's help, so each waiting pull gets memory in the end, and prompts of any length pass through an arena of any size
from one block on. A pull of a whole prompt waits while it holds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from kv_transfer_svc.arena import Arena
from kv_transfer_svc.handle_record import Broadcast
from kv_transfer_svc.slab_checks import block_part_bytes
from kv_transfer_svc.transport.tcp_transport import MAX_CONNECTIONS
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import InvalidRequest
from tandem_runtime.kv.slabs import first_handed_over, trim_slab

MAX_WINDOW_BYTES = 4 << 20
"""An engine copies as much in about a millisecond; a network needs some more for it than for its round trip."""
READS_AT_ONCE = MAX_CONNECTIONS
"""Of a pull. Each waits a round trip for its window, so one after the other would leave a far link idle most of the
time; and one connection alone is limited by its send buffer."""
_NUM_PARTS = READS_AT_ONCE - 1
"""Of a slab whose windows would be fewer: one read is left for the slab of the last step."""
_LEAST_BYTES = 1 << 20
"""A shorter window is not made to have more of them."""
_SHARE = 4
"""A pull may hold a quarter of the arena."""


class PullMemory(Protocol):
    """Where a pull puts blocks."""

    is_windowed: bool

    @property
    def held_bytes(self) -> int:
        """Bytes of the arena that the pull holds, in whole pages."""

    def cut(self, slab: kv.Slab) -> Iterator[kv.Slab]:
        """Yield the parts of a slab that are read each by itself; raises InvalidRequest for an impossible slab."""

    async def allocate(self, part: kv.Slab) -> list[pb.Extent]:
        """Return an extent per block of a part; wait until there is room. Raises Overloaded if there never will be."""

    def sealed(self, index: int) -> None:
        """Note the index of the slab that the next allocated extents became: they are sealed in their order."""

    def free_copied(self, is_copied: Callable[[int, int], bool]) -> int:
        """Free each window for which `is_copied(slab index, end block)`; return the blocks' bytes."""

    def serves(self, first_block: int) -> bool:
        """Return whether all blocks from `first_block` on are here or are still to come."""

    def close(self) -> None:
        """Free everything."""


def pull_memory(arena: Arena, layout: pb.KvLayout, num_tokens: int, first_block: int, *, windows: bool) -> PullMemory:
    """Return the memory of a pull; `windows`: its readers acknowledge what they have copied."""
    return (WindowMemory if windows else WholePromptMemory)(arena, layout, num_tokens, first_block)


@dataclass(eq=False)
class _Window:
    end_block: int
    extents: list[pb.Extent]
    index: int | None = None
    """Of the slab in the copy; None until it is sealed."""


class WindowMemory:
    """Windows of a prompt, each freed once it is copied."""

    is_windowed = True

    def __init__(self, arena: Arena, layout: pb.KvLayout, num_tokens: int, first_block: int) -> None:
        self._arena = arena
        self._layout = layout
        self._num_tokens = num_tokens
        self._window_bytes = min(MAX_WINDOW_BYTES, arena.total_bytes // _SHARE)
        self._limit_bytes = max(2 * self._window_bytes, arena.total_bytes // _SHARE)
        self._windows: list[_Window] = []
        self._freed_end = 0
        self._freed = Broadcast()

    @property
    def held_bytes(self) -> int:
        return sum(self._arena.held_bytes(extent.num_bytes) for window in self._windows for extent in window.extents)

    def cut(self, slab: kv.Slab) -> Iterator[kv.Slab]:
        num_bytes = self._arena.held_bytes(_part_bytes(self._layout, slab, self._num_tokens))
        least, of_part = -(-_LEAST_BYTES // num_bytes), -(-slab.num_blocks // _NUM_PARTS)
        max_blocks = max(1, min(self._window_bytes // num_bytes, max(least, of_part)))
        for first_block in range(slab.first_block, slab.first_block + slab.num_blocks, max_blocks):
            part = trim_slab(slab, first_block, max_blocks)
            assert part is not None, "the range ends with the slab"
            yield part

    async def allocate(self, part: kv.Slab) -> list[pb.Extent]:
        size = block_part_bytes(self._layout.groups[part.group], part.num_layers)
        num_bytes = part.num_blocks * self._arena.held_bytes(size)
        while self._windows and self.held_bytes + num_bytes > self._limit_bytes:
            await self._freed.next().wait()
        extents = await self._arena.allocate([size] * part.num_blocks)
        self._windows.append(_Window(part.first_block + part.num_blocks, extents))
        return extents

    def sealed(self, index: int) -> None:
        next(window for window in self._windows if window.index is None).index = index

    def free_copied(self, is_copied: Callable[[int, int], bool]) -> int:
        num_bytes = 0
        for window in list(self._windows):
            if window.index is None or not is_copied(window.index, window.end_block):
                continue
            self._windows.remove(window)
            self._freed_end = max(self._freed_end, window.end_block)
            self._arena.free(window.extents)
            num_bytes += sum(extent.num_bytes for extent in window.extents)
        if num_bytes:
            self._freed.fire()
        return num_bytes

    def serves(self, first_block: int) -> bool:
        return first_block >= self._freed_end

    def close(self) -> None:
        windows, self._windows = self._windows, []
        self._arena.free([extent for window in windows for extent in window.extents])


class WholePromptMemory:
    """All blocks of a prompt from `first_block` on. The layers of a block lie together."""

    is_windowed = False

    def __init__(self, arena: Arena, layout: pb.KvLayout, num_tokens: int, first_block: int) -> None:
        self._arena = arena
        self._layout = layout
        self._num_tokens = num_tokens
        self._first_block = first_block
        self._blocks: list[list[pb.Extent]] = []  # per group, from `_first_of` the group on

    @property
    def held_bytes(self) -> int:
        return sum(self._arena.held_bytes(extent.num_bytes) for blocks in self._blocks for extent in blocks)

    def cut(self, slab: kv.Slab) -> Iterator[kv.Slab]:
        _part_bytes(self._layout, slab, self._num_tokens)
        yield slab

    async def allocate(self, part: kv.Slab) -> list[pb.Extent]:
        if not self._blocks:
            await self._allocate_all()
        group = self._layout.groups[part.group]
        first = part.first_block - self._first_of(group)
        blocks = self._blocks[part.group][first : first + part.num_blocks] if first >= 0 else []
        if len(blocks) != part.num_blocks:
            raise _outside(part, self._num_tokens)
        start = block_part_bytes(group, list(group.layers).index(part.first_layer))
        num_bytes = block_part_bytes(group, part.num_layers)
        return [_part_of(block, start, num_bytes) for block in blocks]

    def sealed(self, index: int) -> None: ...

    def free_copied(self, is_copied: Callable[[int, int], bool]) -> int:
        return 0

    def serves(self, first_block: int) -> bool:
        return True

    def close(self) -> None:
        blocks, self._blocks = self._blocks, []
        self._arena.free([extent for group in blocks for extent in group])

    async def _allocate_all(self) -> None:
        """Allocate memory for all blocks at once: such pulls would deadlock if they allocated piece by piece."""
        counts = []
        for group in self._layout.groups:
            num_blocks = -(-self._num_tokens // group.tokens_per_block) - self._first_of(group)
            counts.append((max(0, num_blocks), group.bytes_per_block))
        extents = await self._arena.allocate([size for count, size in counts for _ in range(count)])
        for count, _ in counts:
            self._blocks.append(extents[:count])
            extents = extents[count:]

    def _first_of(self, group: pb.KvGroup) -> int:
        return max(self._first_block, first_handed_over(group, self._num_tokens))


def _part_bytes(layout: pb.KvLayout, slab: kv.Slab, num_tokens: int) -> int:
    """Return the bytes of a slab's layers in one block; raises InvalidRequest for a slab outside the prompt."""
    if slab.group >= len(layout.groups):
        raise InvalidRequest(f"slab {slab.index}: the layout has no group {slab.group}", field="slabs.group")
    group = layout.groups[slab.group]
    is_inside = slab.first_block + slab.num_blocks <= -(-num_tokens // group.tokens_per_block)
    if not is_inside or slab.first_layer not in group.layers or slab.num_layers == 0:
        raise _outside(slab, num_tokens)
    return block_part_bytes(group, slab.num_layers)


def _outside(slab: kv.Slab, num_tokens: int) -> InvalidRequest:
    return InvalidRequest(
        f"slab {slab.index} reaches from block {slab.first_block} to {slab.first_block + slab.num_blocks}, "
        f"outside a prompt of {num_tokens} tokens",
        field="slabs.first_block",
    )


def _part_of(block: pb.Extent, start: int, num_bytes: int) -> pb.Extent:
    part = pb.Extent()
    part.CopyFrom(block)
    part.offset += start
    part.num_bytes = num_bytes
    return part
