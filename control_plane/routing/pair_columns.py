"""Columns of what hand-overs to the hosts of a table take; made when a prefill host is first asked about, then kept."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from control_plane.routing.compiled_library import MAX_CANDIDATES, address
from control_plane.routing.hand_overs import REFRESH_SECONDS, HandOvers, Shown, share_left, whole_second

Floats = npt.NDArray[np.float64]

_MAX_PAIRS = 1 << 18
"""Of a table; 64 bytes each."""


class _Row:
    """Of one prefill host."""

    def __init__(self, known: Floats) -> None:
        """`known`: the fields of `Known`; [6, hosts]."""
        self.known = known
        self.ms_per_byte: Floats = known[1].copy()
        self.fixed_ms: Floats = known[0].copy()
        self.latency_ms: Floats = known[5]
        columns = self.ms_per_byte, self.fixed_ms, self.latency_ms
        self.addresses = tuple([address(each, np.float64) for each in columns])
        """Of these three arrays, which are changed and not made anew."""
        self.until = 0.0
        """When it is refreshed next, monotonic seconds; inf: once a pair has changed."""

    def refresh(self, now: float) -> None:
        """Let what was learnt return to what is assumed; of most hosts nothing was, and then nothing changes."""
        assumed_ms, assumed_ms_per_byte, learnt_ms, learnt_ms_per_byte, learnt_at, _ = self.known
        if learnt_at.max() == -math.inf:
            self.fixed_ms[:], self.ms_per_byte[:] = assumed_ms, assumed_ms_per_byte
            self.until = math.inf
            return
        at = whole_second(now)
        share = share_left(learnt_at, at)
        self.fixed_ms[:] = assumed_ms + share * (learnt_ms - assumed_ms)
        self.ms_per_byte[:] = assumed_ms_per_byte + share * (learnt_ms_per_byte - assumed_ms_per_byte)
        self.until = at + REFRESH_SECONDS


class Sources:
    """Where the compiled library finds what hand-overs from the hosts of a table of prefill workers take."""

    def __init__(self, hosts: Sequence[str], places: Mapping[str, int]) -> None:
        """`places`: of decode hosts."""
        self.hosts = hosts
        self.number_of = {host: number for number, host in enumerate(hosts)}
        self.places = np.array([places.get(host, -1 - number) for host, number in self.number_of.items()], np.int64)
        """Of decode hosts; a number below 0 for each host that is none."""
        self.rows = np.zeros((3, len(hosts)), np.int64)
        """Addresses of milliseconds per byte, of fixed ones, and of those of a round trip."""
        self.until = np.full(len(hosts), -math.inf)
        """When these are refreshed next; -inf: they are not made yet."""
        self.addresses = (
            address(self.places, np.int64),
            *[address(each, np.int64) for each in self.rows],
            address(self.until, np.float64),
        )

    def put(self, host: str, row: _Row) -> None:
        if (number := self.number_of.get(host)) is not None:
            self.rows[:, number] = row.addresses
            self.until[number] = row.until

    def forget(self, host: str) -> None:
        if (number := self.number_of.get(host)) is not None:
            self.until[number] = -math.inf


class PairColumns:
    """Of the hosts of one table of decode workers."""

    def __init__(self, hosts: Iterable[str], hand_overs: HandOvers, clock: Callable[[], float]) -> None:
        self.hosts = tuple(hosts)
        self.places = {host: place for place, host in enumerate(self.hosts)}
        self._hand_overs, self._clock = hand_overs, clock
        self._rows: OrderedDict[str, _Row] = OrderedDict()
        """By prefill host, the one that was asked for last at the end."""
        self._strangers = np.array([hand_overs.of_strangers(host) for host in self.places], np.float64).T
        """The fields of `Known` of a prefill host of which nothing is known; [6, hosts]."""
        self._arenas = np.array([hand_overs.arena(host) for host in self.places], np.float64).T.copy("C")
        """Free bytes and those of a window; [2, hosts]."""
        self._sources = Sources((), self.places)
        self.arena_addresses = address(self._arenas[0], np.float64), address(self._arenas[1], np.float64)
        self.least_free = float(self._arenas[0].min())

    def ms(self, shown: Shown, from_host: str, bytes_per_token: float) -> Floats:
        """Return `HandOverCost.ms` of a prompt of which a worker has nothing; [hosts]."""
        row = self.row(from_host)
        num_bytes, last = shown.num_tokens * bytes_per_token, shown.num_last_tokens * bytes_per_token
        found: Floats = row.ms_per_byte * num_bytes
        if last < num_bytes:
            found -= shown.overlap_ms
            np.maximum(found, row.ms_per_byte * last, out=found)
        found += row.fixed_ms
        found += np.maximum(0.0, row.latency_ms - shown.first_ms)
        if num_bytes > self.least_free:
            free, window = self._arenas
            lacking = np.maximum(0.0, np.minimum(num_bytes, 2 * window) - free)
            if (place := self.places.get(from_host)) is not None:
                lacking[place] = 0.0
            found += lacking * row.ms_per_byte
        return found

    def pair_changed(self, from_host: str, to_host: str) -> None:
        row, place = self._rows.get(from_host), self.places.get(to_host)
        if row is not None and place is not None:
            row.known[:, place] = self._hand_overs.known(from_host, to_host)
            row.until = 0.0
            self._sources.forget(from_host)

    def host_changed(self, host_id: str) -> None:
        self._rows.pop(host_id, None)
        self._sources.forget(host_id)
        if (place := self.places.get(host_id)) is not None:
            self._strangers[:, place] = self._hand_overs.of_strangers(host_id)
        for from_host in self._rows:
            self.pair_changed(from_host, host_id)

    def arena_changed(self, host_id: str) -> None:
        place = self.places.get(host_id)
        if place is not None:
            self._arenas[:, place] = self._hand_overs.arena(host_id)
            self.least_free = float(self._arenas[0].min())

    def row(self, from_host: str) -> _Row:
        """Return what hand-overs from a host take, as of this second."""
        row, now = self._rows.get(from_host), self._clock()
        if row is None:
            known = self._strangers.copy("C")
            for host in self._hand_overs.not_strange_to(from_host):
                if (place := self.places.get(host)) is not None:
                    known[:, place] = self._hand_overs.known(from_host, host)
            row = self._rows[from_host] = _Row(known)
            while len(self._rows) > max(MAX_CANDIDATES, _MAX_PAIRS // len(self.places)):
                self._sources.forget(self._rows.popitem(last=False)[0])
        self._rows.move_to_end(from_host)
        if now >= row.until:
            row.refresh(now)
            self._sources.put(from_host, row)
        return row

    def sources(self, hosts: Sequence[str]) -> Sources:
        """Return the sources of a table of prefill workers, whose hosts these are."""
        if self._sources.hosts is not hosts:
            self._sources = Sources(hosts, self.places)
            for host, row in self._rows.items():
                self._sources.put(host, row)
        return self._sources
