"""Cuts blocks into pieces, computes their checksums on the way, and runs the copies in threads.

A piece that was just copied is still in the processor's cache. Its checksum costs a third there of what it costs later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import TypeVar

import xxhash

Result = TypeVar("Result")

GROUP_BYTES = 1 << 20
_GROUP_PIECES = 64


def groups(blocks: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Cut blocks, in order, into groups that one system call moves: some small blocks, or a part of a large block."""
    group: list[memoryview] = []
    num_bytes = 0
    for block in blocks:
        for start in range(0, len(block), GROUP_BYTES):
            piece = block[start : start + GROUP_BYTES]
            if num_bytes + len(piece) > GROUP_BYTES or len(group) == _GROUP_PIECES:
                yield group
                group, num_bytes = [], 0
            group.append(piece)
            num_bytes += len(piece)
    if group:
        yield group


def leading(blocks: Sequence[memoryview], num_bytes: int) -> list[memoryview] | None:
    """Return the leading blocks whose sizes add up to `num_bytes`, or None if no number of blocks does."""
    count = 0
    for block in blocks:
        if num_bytes <= 0:
            break
        num_bytes -= len(block)
        count += 1
    return list(blocks[:count]) if num_bytes == 0 else None


def rest_of(group: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """Return the part of a group that is left after `num_bytes` have moved."""
    rest: list[memoryview] = []
    for piece in group:
        if num_bytes < len(piece):
            rest.append(piece[num_bytes:])
        num_bytes = max(0, num_bytes - len(piece))
    return rest


class RunningChecksums:
    """Computes the xxh3-64 of each block from groups of pieces, in order."""

    def __init__(self, blocks: Sequence[memoryview]) -> None:
        self.values: list[int] = []
        self._sizes = [len(block) for block in blocks]
        self._digest = xxhash.xxh3_64()
        self._num_fed = 0

    def add(self, group: Sequence[memoryview]) -> None:
        for piece in group:
            self._digest.update(piece)
            self._num_fed += len(piece)
            if self._num_fed == self._sizes[len(self.values)]:
                self.values.append(self._digest.intdigest())
                self._digest.reset()
                self._num_fed = 0


async def run_interruptible(
    threads: Executor, work: Callable[[], Result], interrupt: Callable[[], None], finish_seconds: float = 0.0
) -> Result:
    """Run `work` in one of `threads` and return its result.

    A cancelled caller lets the work end within `finish_seconds`, then calls `interrupt`. It waits for the end of the
    work in any case, which uses the caller's memory.
    """
    loop = asyncio.get_running_loop()
    future = loop.run_in_executor(threads, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        interrupting = loop.call_later(finish_seconds, interrupt)
        while not future.done():
            try:
                await asyncio.wait({future})
            except asyncio.CancelledError:  # cancelled again: keep waiting
                continue
        interrupting.cancel()
        future.exception()  # mark as retrieved: the caller has left
        raise
