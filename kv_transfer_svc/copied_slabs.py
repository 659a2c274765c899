"""Counts which slabs of a handle its readers have copied, so that the slots of a bounded region can be used again."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection


class CopiedSlabs:
    """The leading slabs that each reader of a handle has copied, or does not need."""

    def __init__(self) -> None:
        self.num_by_all = 0
        """Leading slabs that every reader has copied; never fewer than before."""
        self._copied: Counter[str] = Counter()
        self._skipped: defaultdict[str, set[int]] = defaultdict(set)
        self._leaders: dict[str, str] = {}

    def copied(self, reader_id: str, num_slabs: int) -> None:
        """A reader has copied its leading slabs; a repeated or late call changes nothing."""
        self._copied[reader_id] = max(self._copied[reader_id], num_slabs)
        self._pass_skipped(reader_id)

    def skipped(self, reader_id: str, index: int) -> None:
        """A reader does not need this slab, and is not sent it."""
        self._skipped[reader_id].add(index)
        self._pass_skipped(reader_id)

    def follow(self, leader: str, followers: Collection[str]) -> None:
        """What `leader` has copied serves these readers too."""
        self._leaders.update((follower, leader) for follower in followers if follower != leader)

    def update(self, readers: Collection[str], num_released: int, num_expected: int) -> bool:
        """Count the slabs that all have copied; return whether these are more than before.

        `readers` have a lease; `num_released` need nothing more; a reader that is still expected needs everything.
        """
        if len(readers) + num_released < num_expected or not readers:
            return False
        num_slabs = min(self._copied[self._leaders.get(reader, reader)] for reader in readers)
        is_more = num_slabs > self.num_by_all
        self.num_by_all = max(self.num_by_all, num_slabs)
        return is_more

    def _pass_skipped(self, reader_id: str) -> None:
        while self._copied[reader_id] in self._skipped[reader_id]:
            self._skipped[reader_id].discard(self._copied[reader_id])
            self._copied[reader_id] += 1
