"""Numbers the pools and stores of a fleet, so that an index can name them in two bytes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

MAX_PLACE_ID = (1 << 15) - 1
_MAX_DEAD = 1024


class PlaceTable:
    """Small numbers for pools (by incarnation) and stores (by host); 0 is no place.

    The number of a place that is gone is used again after `without_dead` was applied to all rows.
    """

    max_dead = _MAX_DEAD

    def __init__(self) -> None:
        self._names: list[str] = [""]
        self.are_hosts = np.zeros(MAX_PLACE_ID + 1, bool)
        """Of each number. Others keep this array."""
        self._pools: dict[str, int] = {}
        self._hosts: dict[str, int] = {}
        self._reported: dict[str, set[str]] = {}
        """The pools that block events told of, by host."""
        self._host_of: dict[str, str] = {}
        self._live: set[str] = set()
        """The hosts whose block events go on."""
        self._free: list[int] = []
        self._dead: list[int] = []

    def name(self, place: int) -> str:
        """Return the incarnation or host of a number; "" if the place is gone."""
        return self._names[place]

    def pool(self, incarnation: str) -> int:
        """Return the number of a pool, a new one if needed; 0 if there are none left."""
        return self._pools.get(incarnation) or self._new(incarnation, self._pools, is_host=False)

    def host(self, host_id: str) -> int:
        return self._hosts.get(host_id) or self._new(host_id, self._hosts, is_host=True)

    def known_host(self, host_id: str) -> int:
        return self._hosts.get(host_id, 0)

    def reported_pool(self, incarnation: str, host_id: str) -> int:
        """Return the number of a pool, and note that the block events of a host tell of it: of one host at a time."""
        before = self._host_of.get(incarnation)
        if before != host_id:
            if before is not None:
                self._reported[before].discard(incarnation)
            self._host_of[incarnation] = host_id
            self._reported.setdefault(host_id, set()).add(incarnation)
        return self.pool(incarnation)

    def is_reported(self, incarnation: str) -> bool:
        """Return whether block events tell of a pool now."""
        return self._host_of.get(incarnation) in self._live

    def told(self, host_id: str) -> None:
        """Note that a host's block events go on."""
        self._live.add(host_id)

    def is_live(self, host_id: str) -> bool:
        """Return whether block events tell of a host's store now."""
        return host_id in self._live

    def unreported(self, host_id: str) -> None:
        """A host's block events end."""
        self._live.discard(host_id)

    def forget_pool(self, incarnation: str) -> int:
        """A pool is gone; returns how many numbers wait to be used again."""
        host_id = self._host_of.pop(incarnation, None)
        if host_id is not None:
            self._reported[host_id].discard(incarnation)
        return self._forget([self._pools.pop(incarnation, 0)])

    def forget_host(self, host_id: str) -> int:
        """A store is gone; returns as `forget_pool` does."""
        return self._forget([self._hosts.pop(host_id, 0)])

    def forget_reported(self, host_id: str) -> int:
        """A store, and the pools that its host's events told of, get new numbers; returns as `forget_pool` does."""
        incarnations = self._reported.pop(host_id, set())
        for incarnation in incarnations:
            del self._host_of[incarnation]
        places = [self._pools.pop(incarnation, 0) for incarnation in incarnations]
        return self._forget([*places, self._hosts.pop(host_id, 0)])

    def without_dead(self) -> npt.NDArray[np.uint16]:
        """Return what each number in a row is to become, with and without its mark; the dead ones are free then."""
        numbers = np.arange(1 << 16, dtype=np.uint16)
        for place in self._dead:
            numbers[place] = numbers[place + MAX_PLACE_ID + 1] = 0
        self._free += self._dead
        self._dead = []
        return numbers

    def _new(self, name: str, places: dict[str, int], *, is_host: bool) -> int:
        if not self._free and len(self._names) > MAX_PLACE_ID:
            return 0
        if self._free:
            place = self._free.pop()
            self._names[place] = name
        else:
            place = len(self._names)
            self._names.append(name)
        places[name] = place
        self.are_hosts[place] = is_host
        return place

    def _forget(self, places: Iterable[int]) -> int:
        for place in places:
            if place:
                self._names[place] = ""
                self._dead.append(place)
        return len(self._dead)
