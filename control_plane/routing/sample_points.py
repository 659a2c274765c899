"""Maps sample points of chains of blocks to the pools and stores that have them, in numpy arrays of bounded size.

Sample points are the blocks 1, 2, 4, 8 and 16 of a chain, then each 16th. A block's hash covers all blocks before it,
so a place that has a sample point has the chain up to there. What a gateway learns from its own requests adds the last
block of the chain, so that the next turn of a session finds all of it.

    block events of a host    the whole truth about its store and the pools that it tells of
    this gateway's requests   count for 2 s if block events tell of the place, else until they age out

A point is 8 bytes of a block's key, up to four pools and four stores, newest first, and a stamp: 28 bytes. A key lies
in one of two buckets of eight; a full bucket drops its oldest point. Entries may be wrong: a wrong one costs time, and
never changes an answer.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from control_plane.block_chain import BlockHashes, packed_hashes
from control_plane.routing.compiled_library import CompiledRouting, IndexMemory, address
from control_plane.routing.place_table import MAX_PLACE_ID, PlaceTable
from control_plane.routing.prefix_index import PrefixMatch
from tandem_engine.scheduling.block_hash import NUM_HASH_BYTES

Keys = npt.NDArray[np.uint64]
_Ints = npt.NDArray[np.intp]
_Rows = npt.NDArray[np.uint16]

DEFAULT_MAX_BLOCKS = 10_000_000
_BLOCKS_PER_POINT = 8
"""A prompt of 2,000 tokens has 12 sample points and an end for its 125 blocks; a longer one has fewer per block."""
_WAYS = 8
_NUM_TURNS = 1 << 15
_NUM_PLACES = 4
"""Pools of a point, and stores of a point."""
_FRESH_SECONDS = 2.0
_UNCONFIRMED = np.uint16(1 << 15)
"""Marks a place that only this gateway's own request names, while block events will tell."""
_ID = np.uint16(MAX_PLACE_ID)
_MAX_STAMP = (1 << 32) - (1 << 24)
_SPACING = 16
_COLUMNS = np.arange(_NUM_PLACES)
_HALF = np.array(32, np.uint64)
_EACH_BYTE = np.uint64(0x0101010101010101)
_EMPTY, _ONE = np.uint64(0), np.uint64(1)
"""Keys: of an empty slot, and in place of a key that is 0."""


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

        `compiled`: finds places; None: numpy does.
        """
        num_buckets = max(1, max_blocks // _BLOCKS_PER_POINT // _WAYS)
        self._num_buckets = np.array(num_buckets, np.uint64)  # faster in a product than a scalar
        self._keys = np.zeros((num_buckets, _WAYS), np.uint64)  # 0: the slot is empty
        self._places = np.zeros((num_buckets * _WAYS, 2 * _NUM_PLACES), np.uint16)  # pools, then stores; 0: none
        self._fours = self._places.reshape(-1).view(np.uint64)  # the same memory: the pools, then the stores of a slot
        self._stamps = np.zeros((num_buckets, _WAYS), np.uint32)
        self._stamp = _WAYS  # above every number of used slots
        self._turns = np.zeros(_NUM_TURNS, np.int32)
        """Of `_by_four` alone: which place has its turn at a four. Fours whose numbers end alike take turns too."""
        self._table = PlaceTable()
        self._clock = clock
        self._lessons: deque[_Lesson] = deque()
        self._compiled = compiled
        self._found = np.zeros((MAX_PLACE_ID + 1 if compiled else 0, 2), np.int32)
        self._memory = IndexMemory(
            address(self._keys, np.uint64),
            address(self._places, np.uint16),
            num_buckets,
            address(self._found, np.int32),
        )
        self._address = ctypes.addressof(self._memory)

    def __len__(self) -> int:
        return int(np.count_nonzero(self._keys))

    @property
    def num_bytes(self) -> int:
        """The memory of a full index. Without `take_memory`, the system gives it as points are added."""
        return sum(array.nbytes for array in self._arrays)

    @property
    def _arrays(self) -> tuple[npt.NDArray[Any], ...]:
        return self._keys, self._places, self._stamps, self._turns

    def take_memory(self) -> None:
        """Take the memory of an empty index from the system at once: some 2 ms a MB.

        The first thousands of points lie on nearly all of its pages, so the first block events would wait for it.
        """
        assert not len(self), "the points of an index would be lost"
        for array in self._arrays:
            array.fill(0)

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

    def _find_compiled(self, compiled: CompiledRouting, block_hashes: Sequence[bytes], space: bytes) -> PrefixMatch:
        packed = packed_hashes(block_hashes)
        number = compiled.find_places(self._address, packed, len(block_hashes), _leading_bytes(space))
        if not number:
            return PrefixMatch()
        pools: dict[str, int] = {}
        stores: dict[str, int] = {}
        for place, num_blocks in self._found[:number].tolist():
            if name := self._table.name(place & MAX_PLACE_ID):
                (stores if place > MAX_PLACE_ID else pools)[name] = num_blocks
        return PrefixMatch(pools, stores)

    def _deepest(self, points: Sequence[tuple[int, list[int]]], ends: Sequence[tuple[int, list[int]]]) -> PrefixMatch:
        """Return the blocks of each place, by the last point that names it; points and ends in chain order.

        An end of a chain counts for a place that has the last point before it: block events do not tell of ends.
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
                    (pools if column < _NUM_PLACES else stores).setdefault(name, position + 1)
        return PrefixMatch(pools, stores)

    def _rows_at(self, block_hashes: Sequence[bytes], positions: _Ints, space: bytes) -> list[tuple[int, list[int]]]:
        """Return the positions whose blocks are in the index, in order, with the numbers of their places."""
        keys = _keys_at(block_hashes, positions, space)
        buckets = self._buckets(keys)
        hits = (self._keys.take(buckets, 0) == keys[:, None, None]).reshape(-1).nonzero()[0]  # of [num_keys, 2, 8]
        if not len(hits):
            return []
        slots = buckets.reshape(-1).take(hits // _WAYS) * _WAYS
        slots += hits % _WAYS
        rows = (self._places.take(slots, 0) & _ID).tolist()
        return list(zip(positions.take(hits // (2 * _WAYS)).tolist(), rows, strict=True))

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
        slots, is_kept = self._slots_for(keys, in_order=True)
        pool, store = self._table.pool(incarnation), self._table.host(host_id) if host_id else 0
        are_fresh = self._table.is_reported(incarnation), is_told and self._table.is_live(host_id)
        for four, (place, is_fresh) in enumerate(zip((pool, store), are_fresh, strict=True)):
            if not place:
                continue
            places = np.full(len(keys), place, np.uint16)
            if is_fresh:
                places[:num_points] |= _UNCONFIRMED
                self._lessons.append(_Lesson(self._clock() + _FRESH_SECONDS, keys[:num_points], place))
            _put_first(self._fours, 2 * slots[is_kept] + four, places[is_kept])

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
            self._remove(keys[is_point], places[is_point], only_unconfirmed=True)
            keys, places = keys[~is_point], places[~is_point]
        self._remove(keys, places)

    def _settle(self) -> None:
        """Forget what own requests taught 2 s ago and block events have not told since."""
        now = self._clock()
        while self._lessons and self._lessons[0].until <= now:
            lesson = self._lessons.popleft()
            if self._table.name(lesson.place):
                self._remove(lesson.keys, np.full(len(lesson.keys), lesson.place, np.uint16), only_unconfirmed=True)

    # ---------------------------------------------------------------------------------------------- from block events

    def report(self, changes: Sequence[PlaceChanges]) -> None:
        """Take in the changes of several places: first what was evicted, then what was stored."""
        if not changes:
            return
        places = np.array([self._place_of(change) for change in changes], np.uint16)
        for attribute in ("evicted", "stored"):
            of_places: list[Keys] = [getattr(change, attribute) for change in changes]
            of_keys = np.repeat(places, [len(keys) for keys in of_places])
            keys = _not_zero(np.concatenate(of_places))[of_keys != 0]
            of_keys = of_keys[of_keys != 0]
            if attribute == "evicted":
                self._remove(keys, of_keys)
            else:
                self._add(keys, of_keys)

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
            self._places[...] = self._table.without_dead()[self._places]

    # ---------------------------------------------------------------------------------------------------- the arrays

    def _look_up(self, keys: Keys) -> tuple[_Ints, npt.NDArray[np.bool_]]:
        """Return for each key its slot, and whether the key is there; the slot of an absent key means nothing."""
        buckets = self._buckets(keys)
        hits = (self._keys.take(buckets, 0) == keys[:, None, None]).reshape(len(keys), 2 * _WAYS)  # [num_keys, 2 * 8]
        way = hits.argmax(axis=1)
        rows = np.arange(len(keys))
        slots = buckets[rows, way // _WAYS] * _WAYS + way % _WAYS
        return slots, hits[rows, way]

    def _buckets(self, keys: Keys) -> _Ints:
        """Return the two buckets of each key, by its halves. Keys are digests: all of their bits are equally good."""
        buckets = keys.view("<u4").reshape(-1, 2) * self._num_buckets
        buckets >>= _HALF
        return buckets.view(np.intp)

    def _add(self, keys: Keys, places: _Rows) -> None:
        """Name a place at each key, newest first."""
        different, which = np.unique(keys, return_inverse=True)
        slots, is_kept = self._slots_for(different)
        slots, is_kept = slots[which], is_kept[which]
        for fours, to_name in self._by_four(slots[is_kept], places[is_kept]):
            _put_first(self._fours, fours, to_name)

    def _remove(self, keys: Keys, places: _Rows, *, only_unconfirmed: bool = False) -> None:
        """Take a place away from each key; a point without places is gone."""
        different, which = np.unique(keys, return_inverse=True)
        slots, found = self._look_up(different)
        slots, places = slots[which][found[which]], places[found[which]]
        for fours, to_take in self._by_four(slots, places):
            _take_away(self._fours, fours, to_take, only_unconfirmed=only_unconfirmed)
        pools, stores = self._fours.take(2 * slots), self._fours.take(2 * slots + 1)
        self._keys.reshape(-1)[slots[pools | stores == 0]] = _EMPTY

    def _by_four(self, slots: _Ints, places: _Rows) -> Iterator[tuple[_Ints, _Rows]]:
        """Yield the four of each place (the pools or the stores of its slot) and the place; a four once at a time."""
        fours = 2 * slots + self._table.are_hosts(places & _ID)
        while len(fours):
            cells, order = fours % _NUM_TURNS, np.arange(len(fours), dtype=np.int32)
            self._turns[cells[::-1]] = order[::-1]  # the first place of each four is written last
            is_first = self._turns.take(cells) == order
            if is_first.all():
                yield fours, places
                return
            yield fours[is_first], places[is_first]
            fours, places = fours[~is_first], places[~is_first]

    def _slots_for(self, keys: Keys, *, in_order: bool = False) -> tuple[_Ints, npt.NDArray[np.bool_]]:
        """Return slots for different keys, used now, and whether each key has its slot.

        New ones get an empty slot, or that of the oldest point. Of more keys than fit two buckets, some get none.
        `in_order`: the last ones are dropped first.
        """
        slots, found = self._look_up(keys)
        while not found.all():
            new = np.flatnonzero(~found)
            buckets = self._buckets(keys[new])
            is_empty = self._keys.take(buckets, 0) == _EMPTY  # [num_new, 2, 8]
            num_used = _WAYS - _num_true(is_empty)
            scores = np.where(is_empty, num_used[:, :, None], self._stamps.take(buckets, 0))
            best = scores.reshape(len(new), 2 * _WAYS).argmin(axis=1)
            chosen = buckets[np.arange(len(new)), best // _WAYS] * _WAYS + best % _WAYS
            taken, winners = np.unique(chosen, return_index=True)  # two keys may want one slot
            self._keys.reshape(-1)[taken] = keys[new[winners]]
            self._places[taken] = 0
            self._stamps.reshape(-1)[taken] = _MAX_STAMP  # not the oldest while this call lasts
            slots[new[winners]] = taken
            found[new[winners]] = True
        is_kept = self._keys.reshape(-1)[slots] == keys
        self._stamps.reshape(-1)[slots[is_kept]] = self._new_stamps(len(keys), in_order)[is_kept]
        return slots, is_kept

    def _new_stamps(self, count: int, in_order: bool) -> npt.NDArray[np.uint32]:
        num_stamps = count if in_order else 1
        if self._stamp + num_stamps > _MAX_STAMP:  # after days: halves all ages
            self._stamps >>= np.uint32(1)
            self._stamp >>= 1
        self._stamp += num_stamps
        newest = np.uint32(self._stamp)
        return newest - np.arange(count, dtype=np.uint32) if in_order else np.full(count, newest)


def _num_true(are_true: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint64]:
    """Return how many of the last axis are true, which has 8 entries; some 20 times as fast as sum()."""
    return (are_true.view(np.uint64)[..., 0] * _EACH_BYTE) >> np.uint64(56)


def _put_first(all_fours: Keys, fours: _Ints, places: _Rows) -> None:
    """Put a place first in each of these fours, all different."""
    rows = all_fours.take(fours).view(np.uint16).reshape(-1, _NUM_PLACES)
    equal = (rows & _ID) == (places & _ID)[:, None]
    is_there = equal.any(axis=1)
    at = np.where(is_there, equal.argmax(axis=1), _NUM_PLACES - 1)
    was = rows[np.arange(len(rows)), at]
    moved = rows.take([0, 0, 1, 2], 1)
    moved[:, 0] = np.where(is_there & (places > _ID), was, places)  # what block events have told stays told
    all_fours[fours] = np.where(at[:, None] >= _COLUMNS, moved, rows).view(np.uint64)[:, 0]


def _take_away(all_fours: Keys, fours: _Ints, places: _Rows, *, only_unconfirmed: bool) -> None:
    """Take a place out of each of these fours, all different."""
    rows = all_fours.take(fours).view(np.uint16).reshape(-1, _NUM_PLACES)
    equal = rows == (places | _UNCONFIRMED)[:, None] if only_unconfirmed else (rows & _ID) == places[:, None]
    at = np.where(equal.any(axis=1), equal.argmax(axis=1), _NUM_PLACES)
    shifted = rows.take([1, 2, 3, 3], 1)
    shifted[:, 3] = 0
    all_fours[fours] = np.where(at[:, None] <= _COLUMNS, shifted, rows).view(np.uint64)[:, 0]


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
    return _not_zero(hashes ^ np.uint64(_leading_bytes(space)))


def _leading_bytes(space: bytes) -> int:
    return int.from_bytes(space[:8], "little")


def _not_zero(keys: Keys) -> Keys:
    return keys if np.count_nonzero(keys) == len(keys) else np.where(keys == _EMPTY, _ONE, keys)
