"""Maps sample points of chains of blocks to the pools and stores that have them, in numpy arrays of bounded size.

Sample points are the blocks 1, 2, 4, 8 and 16 of a chain, then each 16th. A block's hash covers all blocks before it,
so a place that has a sample point has the chain up to there. Events of pools, and what a gateway learns from its own
requests, add the last blocks of prompts and answers, so that the next turn of a session finds all of the last one.

    block events of a host    the whole truth about its store and the pools that it tells of
    this gateway's requests   count for 2 s if block events tell of the place, else until they age out, as ends do

Entries may be wrong: a wrong one costs time, and never changes an answer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from control_plane.block_chain import BlockHashes, packed_hashes
from control_plane.routing.compiled_library import CompiledRouting
from control_plane.routing.place_table import MAX_PLACE_ID, PlaceTable
from control_plane.routing.point_arrays import (
    NUM_PLACES,
    UNCONFIRMED,
    CompiledPointArrays,
    Keys,
    PointArrays,
    not_zero,
)
from control_plane.routing.prefix_index import PrefixMatch
from tandem_engine.scheduling.block_hash import NUM_HASH_BYTES

_Ints = npt.NDArray[np.intp]

DEFAULT_MAX_BLOCKS = 10_000_000
_BLOCKS_PER_POINT = 8
"""A prompt of 2,000 tokens has 11 sample points and two ends for its 125 blocks; a session of short turns has more."""
_FRESH_SECONDS = 2.0
_SPACING = 16


class PlaceChanges(NamedTuple):
    """What a pool (`incarnation`), or the store of a host ("" there), has and no longer has: keys of sample points."""

    incarnation: str
    host_id: str
    stored: Keys
    evicted: Keys


class _Lesson(NamedTuple):
    """What one request taught about a place whose blocks are in block events, until they have told."""

    until: float
    keys: Keys
    place: int


class SamplePointIndex:
    """A bounded index from sample points to places. Used on one event loop; nothing in it waits."""

    def __init__(
        self,
        max_blocks: int = DEFAULT_MAX_BLOCKS,
        clock: Callable[[], float] = time.monotonic,
        compiled: CompiledRouting | None = None,
    ) -> None:
        """`max_blocks`: the index has room for a point for each eight of them; 3.5 bytes a block.

        `compiled`: finds, names and takes away places; None: numpy does.
        """
        self._table = PlaceTable()
        max_points = max_blocks // _BLOCKS_PER_POINT
        self._compiled = None if compiled is None else CompiledPointArrays(max_points, self._table.are_hosts, compiled)
        self._points = PointArrays(max_points, self._table.are_hosts) if self._compiled is None else self._compiled
        self._clock = clock
        self._lessons: deque[_Lesson] = deque()

    def __len__(self) -> int:
        return len(self._points)

    @property
    def num_bytes(self) -> int:
        """The memory of a full index. Without `take_memory`, the system gives it as points are added."""
        return self._points.num_bytes

    def take_memory(self) -> None:
        """Take the memory of an empty index from the system at once: some 2 ms a MB.

        The first thousands of points lie on nearly all of its pages, so the first block events would wait for it.
        """
        self._points.take_memory()

    # ------------------------------------------------------------------------------------------------------- finding

    def find(self, block_hashes: Sequence[bytes], space: bytes = b"") -> PrefixMatch:
        """Return how many leading blocks each place has: those up to the last point that names the place."""
        self._settle()
        if self._compiled is not None:
            return self._find_compiled(self._compiled, block_hashes, space)
        num_points = num_sample_points(len(block_hashes))
        points = self._rows_at(block_hashes, sample_positions(num_points), space) if num_points else []
        if not points:
            return PrefixMatch()
        base = points[-1][0]
        stop = min(len(block_hashes), next_sample_point(base))
        ends = self._rows_at(block_hashes, np.arange(base + 1, stop), space) if base + 1 < stop else []
        return self._deepest(points, ends)

    def _find_compiled(self, points: CompiledPointArrays, block_hashes: Sequence[bytes], space: bytes) -> PrefixMatch:
        pools: dict[str, int] = {}
        stores: dict[str, int] = {}
        for place, num_blocks in points.find(packed_hashes(block_hashes), len(block_hashes), _leading_bytes(space)):
            if name := self._table.name(place & MAX_PLACE_ID):
                (stores if place > MAX_PLACE_ID else pools)[name] = num_blocks
        return PrefixMatch(pools, stores)

    def _deepest(self, points: Sequence[tuple[int, list[int]]], ends: Sequence[tuple[int, list[int]]]) -> PrefixMatch:
        """Return the blocks of each place, by the last point that names it; points and ends in chain order.

        An end of a chain counts for a place that has the last point before it: events of stores do not tell of ends,
        and of their eviction.
        """
        pools: dict[str, int] = {}
        stores: dict[str, int] = {}
        previous: list[int] = []
        base, at_base = points[-1]
        for position, row in reversed((*points, *ends)):
            if row == previous:  # neighbours mostly have the same places
                continue
            previous = row
            for column, place in enumerate(row):
                if place and (position <= base or place in at_base) and (name := self._table.name(place)):
                    (pools if column < NUM_PLACES else stores).setdefault(name, position + 1)
        return PrefixMatch(pools, stores)

    def _rows_at(self, block_hashes: Sequence[bytes], positions: _Ints, space: bytes) -> list[tuple[int, list[int]]]:
        """Return the positions whose blocks are in the index, in order, with the numbers of their places."""
        which, rows = self._points.rows_at(_keys_at(block_hashes, positions, space))
        return list(zip(positions.take(which).tolist(), rows.tolist(), strict=True))

    # ------------------------------------------------------------------------------------- from this gateway's requests

    def learn(
        self,
        block_hashes: Sequence[bytes],
        incarnation: str,
        host_id: str,
        first: int = 0,
        space: bytes = b"",
        *,
        is_told: bool = True,
    ) -> None:
        """Record that a worker has these blocks of a chain, whose first one is block `first` of the chain.

        `host_id`: the host whose store has them too, or "". Each counts for 2 s if block events tell of it.
        `is_told`: whether events of that host, if there are any, tell of what this worker stores.
        """
        self._settle()
        positions, num_points = _taught(first, first + len(block_hashes))
        if not len(positions):
            return
        keys = _keys_at(block_hashes, positions - first, space)
        pool, store = self._table.pool(incarnation), self._table.host(host_id) if host_id else 0
        are_fresh = self._table.is_reported(incarnation), is_told and self._table.is_live(host_id)
        for place, is_fresh in zip((pool, store), are_fresh, strict=True):
            if not place:
                continue
            places = np.full(len(keys), place, np.uint16)
            if is_fresh:
                places[:num_points] |= UNCONFIRMED
                self._lessons.append(_Lesson(self._clock() + _FRESH_SECONDS, keys[:num_points], place))
            self._points.add(keys, places, in_order=True)

    def forget(self, block_hashes: Sequence[bytes], host_id: str, first: int = 0, space: bytes = b"") -> None:
        """Record that a request did not get these blocks, the first one `first` of their chain, from a host's store.

        What the host's block events have told stays while they go on: they tell of what is evicted, too, and a store
        that was slow still has the blocks.
        """
        place = self._table.known_host(host_id)
        end = first + len(block_hashes)
        positions = np.union1d(_taught(first, end)[0], np.arange(max(first, end - _SPACING), end))
        if not place or not len(positions):
            return
        keys = _keys_at(block_hashes, positions - first, space)
        places = np.full(len(keys), place, np.uint16)
        if self._table.is_live(host_id):  # events tell of sample points, and of nothing between them
            is_point = np.isin(positions, sample_positions(num_sample_points(end)))
            self._points.remove(keys[is_point], places[is_point], only_unconfirmed=True)
            keys, places = keys[~is_point], places[~is_point]
        self._points.remove(keys, places)

    def _settle(self) -> None:
        """Forget what own requests taught 2 s ago and block events have not told since."""
        now = self._clock()
        while self._lessons and self._lessons[0].until <= now:
            lesson = self._lessons.popleft()
            if self._table.name(lesson.place):
                places = np.full(len(lesson.keys), lesson.place, np.uint16)
                self._points.remove(lesson.keys, places, only_unconfirmed=True)

    # ---------------------------------------------------------------------------------------------- from block events

    def report(self, changes: Sequence[PlaceChanges]) -> None:
        """Take in the changes of several places: first what was evicted, then what was stored."""
        if not changes:
            return
        places = np.array([self._place_of(change) for change in changes], np.uint16)
        for attribute in ("evicted", "stored"):
            of_places: list[Keys] = [getattr(change, attribute) for change in changes]
            of_keys = np.repeat(places, [len(keys) for keys in of_places])
            keys = not_zero(np.concatenate(of_places))[of_keys != 0]
            of_keys = of_keys[of_keys != 0]
            if attribute == "evicted":
                self._points.remove(keys, of_keys)
            else:
                self._points.add(keys, of_keys)

    def _place_of(self, change: PlaceChanges) -> int:
        self._table.told(change.host_id)
        if not change.incarnation:
            return self._table.host(change.host_id)
        return self._table.reported_pool(change.incarnation, change.host_id)

    def begin_snapshot(self, host_id: str) -> None:
        """Forget what a host's store and the reported pools of its workers have: all of it comes again."""
        self._table.told(host_id)
        self._drop(self._table.forget_reported(host_id))

    def stream_ended(self, host_id: str) -> None:
        """A host's events end: its places stay as they are, and requests teach for good again."""
        self._table.unreported(host_id)

    def forget_pool(self, incarnation: str) -> None:
        """A worker is gone, and its pool with it."""
        self._drop(self._table.forget_pool(incarnation))

    def forget_host(self, host_id: str) -> None:
        """A host's KV service is gone, and with it its events and its store; pools are the workers'."""
        self._table.unreported(host_id)
        self._drop(self._table.forget_host(host_id))

    def _drop(self, num_dead: int) -> None:
        """Sweep the ids of places that are gone out of the rows, once there are many."""
        if num_dead >= self._table.max_dead:
            self._points.renumber(self._table.without_dead())


def num_sample_points(num_blocks: int) -> int:
    """Return how many sample points the first blocks of a chain have."""
    return num_blocks.bit_length() if num_blocks < _SPACING else 4 + num_blocks // _SPACING


def next_sample_point(position: int) -> int:
    """Return the position of the sample point that follows one."""
    end = position + 1
    return (2 * end if end < _SPACING else end + _SPACING) - 1


@lru_cache(maxsize=1024)
def sample_positions(num_points: int) -> _Ints:
    """Return the positions of a chain's first sample points, from 0; an array that others read too."""
    ends = np.arange(-3, num_points - 3) * _SPACING
    ends[:5] = (1, 2, 4, 8, 16)[:num_points]
    ends -= 1
    ends.setflags(write=False)
    return ends


def _taught(first: int, end: int) -> tuple[_Ints, int]:
    """Return the positions that a chain's blocks [first, end) teach, and how many are sample points.

    One more is the last block, unless it is a sample point.
    """
    positions = sample_positions(num_sample_points(end))[num_sample_points(first) :]
    if end > first and (not len(positions) or positions[-1] != end - 1):
        return np.append(positions, end - 1), len(positions)
    return positions, len(positions)


def _keys_at(block_hashes: Sequence[bytes], positions: _Ints, space: bytes) -> Keys:
    """Return the leading 8 bytes of the keys of some blocks of a chain."""
    if isinstance(block_hashes, BlockHashes):
        hashes = np.frombuffer(block_hashes.packed, "<u8").take(positions * (NUM_HASH_BYTES // 8))
    else:
        hashes = np.frombuffer(b"".join([block_hashes[position][:8] for position in positions.tolist()]), "<u8")
    return not_zero(hashes ^ np.uint64(_leading_bytes(space)))


def _leading_bytes(space: bytes) -> int:
    return int.from_bytes(space[:8], "little")
