"""Memory for slabs pulled from other hosts, until the readers of this host have copied them.

The arena is one region, cut into pages. An extent is a run of pages, and its slot is the first page. Freeing an extent
raises the generation of its slot, so a late reader notices.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import Overloaded
from tandem_runtime.kv.shared_region import SharedRegion

PAGE_BYTES = 4096
_MAX_WAITING = 1024


class ExtentAllocator:
    """Allocates runs of pages: uses the first hole that fits and merges neighbouring holes."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._starts = [0] if num_pages else []
        self._lengths = {0: num_pages} if num_pages else {}

    @property
    def num_free_pages(self) -> int:
        return sum(self._lengths.values())

    def allocate(self, num_pages: int) -> int | None:
        """Return the first page of a run, or None if no hole is that long."""
        for index, start in enumerate(self._starts):
            length = self._lengths[start]
            if length < num_pages:
                continue
            del self._starts[index], self._lengths[start]
            if length > num_pages:
                self._starts.insert(index, start + num_pages)
                self._lengths[start + num_pages] = length - num_pages
            return start
        return None

    def free(self, start: int, num_pages: int) -> None:
        index = bisect_left(self._starts, start)
        if index < len(self._starts):
            assert start + num_pages <= self._starts[index], f"pages from {start} are freed twice"
        if index > 0:
            before = self._starts[index - 1]
            assert before + self._lengths[before] <= start, f"pages from {start} are freed twice"
        if index < len(self._starts) and self._starts[index] == start + num_pages:
            num_pages += self._lengths.pop(self._starts.pop(index))
        if index > 0 and self._starts[index - 1] + self._lengths[self._starts[index - 1]] == start:
            self._lengths[self._starts[index - 1]] += num_pages
            return
        self._starts.insert(index, start)
        self._lengths[start] = num_pages


@dataclass
class _Waiting:
    sizes: Sequence[int]
    granted: asyncio.Future[list[pb.Extent]]


class Arena:
    """Extents for pulled blocks, first come, first served. All extents of one call are granted at once.

    Who waits here holds nothing that only another waiting pull could free: pull_memory.py says how.
    """

    def __init__(self, region_id: str, num_bytes: int) -> None:
        self.region_id = region_id
        num_pages = num_bytes // PAGE_BYTES
        self.region = SharedRegion.reserve("tandem-kv-arena", num_pages * PAGE_BYTES, num_pages)
        self._allocator = ExtentAllocator(num_pages)
        self._waiting: deque[_Waiting] = deque()
        self._num_used_pages = 0

    @property
    def total_bytes(self) -> int:
        return self._allocator.num_pages * PAGE_BYTES

    @property
    def free_bytes(self) -> int:
        return self._allocator.num_free_pages * PAGE_BYTES

    @property
    def used_bytes(self) -> int:
        return self._num_used_pages * PAGE_BYTES

    async def allocate(self, sizes: Sequence[int]) -> list[pb.Extent]:
        """Return one extent per size; wait until all fit. The caller frees them.

        Raises Overloaded if they can never fit, or if 1,024 pulls wait already.
        """
        num_pages = sum(map(_pages, sizes))
        if num_pages > self._allocator.num_pages:
            raise Overloaded(
                f"{num_pages * PAGE_BYTES} bytes of KV are needed at once, the arena has {self.total_bytes}; "
                "raise --arena-bytes of the KV service"
            )
        if len(self._waiting) >= _MAX_WAITING:
            raise Overloaded(f"{len(self._waiting)} pulls wait for arena memory already", retry_after_seconds=1.0)
        waiting = _Waiting(sizes, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._grant()
        try:
            return await waiting.granted
        except asyncio.CancelledError:
            self._withdraw(waiting)
            raise

    def free(self, extents: Sequence[pb.Extent]) -> None:
        for extent in extents:
            self.region.next_generation(extent.slot)
            self._allocator.free(extent.slot, _pages(extent.num_bytes))
            self._num_used_pages -= _pages(extent.num_bytes)
        self._grant()

    @staticmethod
    def held_bytes(num_bytes: int) -> int:
        """Return the bytes that an extent of `num_bytes` takes, in whole pages."""
        return _pages(num_bytes) * PAGE_BYTES

    def close(self) -> None:
        self.region.close()

    def _withdraw(self, waiting: _Waiting) -> None:
        if waiting in self._waiting:
            self._waiting.remove(waiting)
            self._grant()
        elif waiting.granted.done() and not waiting.granted.cancelled():
            self.free(waiting.granted.result())

    def _grant(self) -> None:
        while self._waiting:
            if self._waiting[0].granted.cancelled():  # its task has not run yet to withdraw it
                self._waiting.popleft()
                continue
            extents = self._try_allocate(self._waiting[0].sizes)
            if extents is None:
                return
            self._waiting.popleft().granted.set_result(extents)

    def _try_allocate(self, sizes: Sequence[int]) -> list[pb.Extent] | None:
        """Allocate extents for all sizes, or for none."""
        starts: list[int] = []
        for size in sizes:
            start = self._allocator.allocate(_pages(size))
            if start is None:
                for taken, taken_size in zip(starts, sizes, strict=False):
                    self._allocator.free(taken, _pages(taken_size))
                return None
            starts.append(start)
        self._num_used_pages += sum(map(_pages, sizes))
        return [self._extent(start, size) for start, size in zip(starts, sizes, strict=True)]

    def _extent(self, start: int, num_bytes: int) -> pb.Extent:
        self.region.take(start * PAGE_BYTES + num_bytes)
        return pb.Extent(
            kind=pb.MEMORY_KIND_HOST,
            region_id=self.region_id,
            offset=start * PAGE_BYTES,
            num_bytes=num_bytes,
            slot=start,
            generation=self.region.generation(start),
        )


def _pages(num_bytes: int) -> int:
    return max(1, -(-num_bytes // PAGE_BYTES))
