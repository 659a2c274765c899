"""In which pieces do blocks go through a socket, and how are they summed on their way?

A piece that was just copied is still in the processor's cache: summing it there costs a third of summing it later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import xxhash

GROUP_BYTES = 1 << 20
_GROUP_PIECES = 64


def groups(blocks: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Cut blocks, in order, into what one system call moves: some small blocks, or a part of a large one."""
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
    """Return the first blocks that are `num_bytes` long together, or None if no number of them is."""
    count = 0
    for block in blocks:
        if num_bytes <= 0:
            break
        num_bytes -= len(block)
        count += 1
    return list(blocks[:count]) if num_bytes == 0 else None


class RunningChecksums:
    """xxh3-64 of each block, fed with groups of pieces in order."""

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
