"""Bounds what a cache keeps of what nobody serves any more: by bytes, the least recently used goes first."""

from __future__ import annotations

from collections.abc import Container
from typing import Generic, TypeVar

K = TypeVar("K")

DEFAULT_BYTES = 256 << 20
"""Of models that are gone: eight of the largest tokenizers of today, or some hundred small ones."""


class KeptBytes(Generic[K]):
    """The keys of a cache with their sizes, in the order of their last use. Holds no content."""

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes: dict[K, int] = {}

    def __len__(self) -> int:
        return len(self._num_bytes)

    def __contains__(self, key: object) -> bool:
        return key in self._num_bytes

    def put(self, key: K, num_bytes: int) -> None:
        """Note a new entry; it is the last one used."""
        self._num_bytes.pop(key, None)
        self._num_bytes[key] = num_bytes

    def use(self, key: K) -> None:
        """Note that an entry was used."""
        self._num_bytes[key] = self._num_bytes.pop(key)

    def excess(self, served: Container[K]) -> list[K]:
        """Return the entries to drop, and forget them. What is `served` stays, and counts nothing."""
        left, found = self._max_bytes, []
        for key in reversed(self._num_bytes):
            if key not in served:
                left -= self._num_bytes[key]
                if left < 0:
                    found.append(key)
        for key in found:
            del self._num_bytes[key]
        return found
