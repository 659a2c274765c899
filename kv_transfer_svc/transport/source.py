"""Where do the bytes of an answer come from? Out of a region's memory, not copied on the way to the socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from kv_transfer_svc.transport.pieces import RunningChecksums, groups
from tandem.v1 import types_pb2 as pb
from tandem_runtime.kv.shared_region import SharedRegion

MAX_PROBE_BYTES = 16 << 20


class Source(Protocol):
    """What one request is answered with. Made on the event loop, read once, in a thread or not."""

    num_bytes: int

    def __iter__(self) -> Iterator[list[memoryview]]:
        """Yield the bytes, in groups of at most 1 MiB."""

    def verdict(self) -> list[int]:
        """Return each block's checksum, after the last byte was sent; raises KvCorrupt if a slot was reused before."""


class BlockSource:
    """Blocks of regions that may be reused at any time.

    `checksums` are the blocks', if all are known already; else they are made on the way, and given to `keep`.
    """

    def __init__(
        self,
        extents: Sequence[pb.Extent],
        memory_of: Callable[[str], SharedRegion],
        checksums: Sequence[int] = (),
        keep: Callable[[list[int]], None] = lambda made: None,
    ) -> None:
        self._pairs = [(memory_of(extent.region_id), extent) for extent in extents]
        self._blocks = [memory.view(extent.offset, extent.num_bytes) for memory, extent in self._pairs]
        self._known = list(checksums) if len(checksums) == len(self._blocks) else None
        self._made = RunningChecksums(self._blocks)
        self._keep = keep
        self.num_bytes = sum(map(len, self._blocks))

    def __iter__(self) -> Iterator[list[memoryview]]:
        for group in groups(self._blocks):
            if self._known is None:
                self._made.add(group)
            yield group

    def verdict(self) -> list[int]:
        for memory, extent in self._pairs:
            memory.check_generation(extent)
        if self._known is not None:
            return self._known
        self._keep(self._made.values)
        return self._made.values


class Zeroes:
    """What a probe is answered with."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = min(num_bytes, MAX_PROBE_BYTES)
        self._blocks = [memoryview(bytes(self.num_bytes))] if self.num_bytes else []
        self._made = RunningChecksums(self._blocks)

    def __iter__(self) -> Iterator[list[memoryview]]:
        for group in groups(self._blocks):
            self._made.add(group)
            yield group

    def verdict(self) -> list[int]:
        return self._made.values
