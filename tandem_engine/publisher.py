"""Announces blocks to other processes: names the region and the slots where they can be read.

The scheduler speaks of blocks of the pool. Where the pool is the region, they are its slots (`PoolPublisher`). Where
others cannot read the pool, blocks are copied to a region first (`tandem_engine.staging`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec.structs import replace

from tandem_engine.messages import FilledBlocks, SealedBlocks


class Publisher(Protocol):
    """Takes blocks of the pool, and returns them as slots of a region once others can read them."""

    def publish(self, sealed: Sequence[SealedBlocks], filled: Sequence[FilledBlocks]) -> None:
        """Take complete blocks of the pool; those of one request are announced in this order."""
        ...

    def take_sealed(self) -> list[SealedBlocks]:
        """Return, once, the blocks of prefills that others can read now."""
        ...

    def take_filled(self) -> list[FilledBlocks]:
        """Return, once, the full blocks for caches that others can read now."""
        ...

    def release(self, request_id: str, num_blocks: int) -> None:
        """Nobody reads the leading `num_blocks` that were announced for a prefill, in the order of announcement."""
        ...

    def forget(self, request_id: str) -> None:
        """Nobody reads any block that was announced for a prefill; announce no further ones."""
        ...

    def wait(self) -> None:
        """Return once the copies that are under way have ended; `publish` then announces them."""
        ...

    @property
    def is_copying(self) -> bool:
        """Whether the next `publish` can announce more without any command before it."""
        ...

    @property
    def state(self) -> Mapping[str, float]:
        """Numbers for the engine's stats, by name."""
        ...


class PoolPublisher:
    """Announces the pool's blocks as they are: the pool is the region."""

    def __init__(
        self,
        region_id: str,
        checksums: Callable[[Sequence[int]], list[int]],
        wait_written: Callable[[], None] = lambda: None,
    ) -> None:
        """`checksums` returns those of complete blocks, or an empty list.

        `wait_written` returns once the running step's blocks are written, so that others may read them.
        """
        self._region_id = region_id
        self._checksums = checksums
        self._wait_written = wait_written
        self._sealed: list[SealedBlocks] = []
        self._filled: list[FilledBlocks] = []

    def publish(self, sealed: Sequence[SealedBlocks], filled: Sequence[FilledBlocks]) -> None:
        if not (sealed or filled):
            return
        self._wait_written()
        region_id, checksums = self._region_id, self._checksums
        self._sealed += [replace(each, region_id=region_id, checksums=checksums(each.slots)) for each in sealed]
        self._filled += [replace(each, region_id=region_id, checksums=checksums(each.slots)) for each in filled]

    def take_sealed(self) -> list[SealedBlocks]:
        taken, self._sealed = self._sealed, []
        return taken

    def take_filled(self) -> list[FilledBlocks]:
        taken, self._filled = self._filled, []
        return taken

    def release(self, request_id: str, num_blocks: int) -> None:
        """The scheduler keeps the blocks of a prefill until all of them are released."""

    def forget(self, request_id: str) -> None:
        self._sealed = [each for each in self._sealed if each.request_id != request_id]

    def wait(self) -> None:
        """Nothing is copied."""

    @property
    def is_copying(self) -> bool:
        return False

    @property
    def state(self) -> Mapping[str, float]:
        return {}
