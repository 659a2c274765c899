"""Holds a chain of block hashes in one piece of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from tandem_engine.scheduling.block_hash import NUM_HASH_BYTES


class BlockHashes(Sequence[bytes]):
    """A chain of block hashes in one piece of memory. Equal to any sequence of the same hashes."""

    __slots__ = ("packed",)

    def __init__(self, packed: bytes = b"") -> None:
        """`packed` has 16 bytes for each block."""
        self.packed = packed

    def __len__(self) -> int:
        return len(self.packed) // NUM_HASH_BYTES

    @overload
    def __getitem__(self, place: int) -> bytes: ...
    @overload
    def __getitem__(self, place: slice) -> BlockHashes: ...
    def __getitem__(self, place: int | slice) -> bytes | BlockHashes:
        if isinstance(place, slice):
            start, stop, step = place.indices(len(self))
            assert step == 1, "a part of a chain has no gaps"
            return BlockHashes(self.packed[start * NUM_HASH_BYTES : stop * NUM_HASH_BYTES])
        start = range(len(self))[place] * NUM_HASH_BYTES
        return self.packed[start : start + NUM_HASH_BYTES]

    def __iter__(self) -> Iterator[bytes]:
        packed = self.packed
        return (packed[start : start + NUM_HASH_BYTES] for start in range(0, len(packed), NUM_HASH_BYTES))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, BlockHashes):
            return self.packed == other.packed
        return isinstance(other, Sequence) and len(other) == len(self) and self.packed == b"".join(other)

    def __hash__(self) -> int:
        return hash(self.packed)


def packed_hashes(hashes: Sequence[bytes]) -> bytes:
    """Return the hashes of any sequence, joined."""
    return hashes.packed if isinstance(hashes, BlockHashes) else b"".join(hashes)
