"""The workers whose streams to this gateway are open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSet


class Attached(MutableSet[str]):
    """Their incarnations. `version` is another after each change, so that what follows from them can be kept."""

    def __init__(self, incarnations: Iterable[str] = ()) -> None:
        self._incarnations, self.version = set(incarnations), 0

    def __contains__(self, incarnation: object) -> bool:
        return incarnation in self._incarnations

    def __iter__(self) -> Iterator[str]:
        return iter(self._incarnations)

    def __len__(self) -> int:
        return len(self._incarnations)

    def add(self, value: str) -> None:
        if value not in self._incarnations:
            self._incarnations.add(value)
            self.version += 1

    def discard(self, value: str) -> None:
        if value in self._incarnations:
            self._incarnations.discard(value)
            self.version += 1


class Everyone(Attached):
    """Has all incarnations: for as long as nobody says which streams are open."""

    def __contains__(self, incarnation: object) -> bool:
        return True
