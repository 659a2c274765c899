"""How much of a prompt has a store, if layers with a window need the end of it only, and the others need all?"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from itertools import chain

from tandem_engine.messages import PrefixBlock

LoadBlocks = Callable[[int, int, int], Awaitable[list[PrefixBlock]]]
"""Returns the leading ones of a group's blocks [first, end) that the store lends."""

_MOST_ROUNDS = 3
"""Each ends where a window has a gap; a store that has lost so many is not asked for ever."""


async def longest_prefix(load: LoadBlocks, num_blocks: int, windows: Mapping[int, int]) -> list[PrefixBlock]:
    """Return the blocks of all groups that make up the beginning of a prompt of `num_blocks`.

    Group 0 needs all blocks, a group of `windows` as many of the last ones as it says there.
    """
    found = await load(0, 0, num_blocks)
    end = len(found)
    for _ in range(_MOST_ROUNDS if windows else 0):
        if not end:
            break
        firsts = {group: max(0, end - num_needed) for group, num_needed in windows.items() if num_needed}
        parts = await asyncio.gather(*(load(group, first, end) for group, first in firsts.items()))
        reached = min((first + len(part) for first, part in zip(firsts.values(), parts, strict=True)), default=end)
        if reached == end:
            return [*found[:end], *chain.from_iterable(parts)]
        end = reached
    return [] if windows else found
