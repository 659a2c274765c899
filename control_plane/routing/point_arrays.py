"""Numpy arrays of bounded size that name places at points: the memory of a prefix index.

A point is 8 bytes of a block's key, up to four pools and four stores, newest first, and a stamp: 28 bytes. A key lies
in one of two buckets of eight; a full bucket drops its oldest point.

`CompiledPointArrays` does the same in C++ (cpp/point_arrays.hpp, places.hpp), a point after the other. Numpy gives all
new points of a call their slots at once, so in full buckets the two may keep different points.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from control_plane.routing.compiled_library import CompiledRouting, IndexMemory, address
from control_plane.routing.place_table import MAX_PLACE_ID

Keys = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.uint16]
_Ints = npt.NDArray[np.intp]

NUM_PLACES = 4
"""Pools of a point, and stores of a point."""
UNCONFIRMED = np.uint16(1 << 15)
"""Marks a place that only this gateway's own request names, while block events will tell."""
_WAYS = 8
_NUM_TURNS = 1 << 15
_ID = np.uint16(MAX_PLACE_ID)
_MAX_STAMP = (1 << 32) - (1 << 24)
_COLUMNS = np.arange(NUM_PLACES)
_HALF = np.array(32, np.uint64)
_EACH_BYTE = np.uint64(0x0101010101010101)
_EMPTY, _ONE = np.uint64(0), np.uint64(1)
"""Keys: of an empty slot, and in place of a key that is 0."""


class PointArrays:
    """Points with their places; places are numbers of a `PlaceTable`."""

    def __init__(self, max_points: int, are_hosts: npt.NDArray[np.bool_]) -> None:
        """`are_hosts`: of all numbers of places, whether each is a host; read whenever places change."""
        num_buckets = max(1, max_points // _WAYS)
        self._num_buckets = np.array(num_buckets, np.uint64)  # faster in a product than a scalar
        self._keys = np.zeros((num_buckets, _WAYS), np.uint64)  # 0: the slot is empty
        self._places = np.zeros((num_buckets * _WAYS, 2 * NUM_PLACES), np.uint16)  # pools, then stores; 0: none
        self._fours = self._places.reshape(-1).view(np.uint64)  # the same memory: the pools, then the stores of a slot
        self._stamps = np.zeros((num_buckets, _WAYS), np.uint32)
        self._stamp = _WAYS  # above every number of used slots
        self._turns = np.zeros(_NUM_TURNS, np.int32)
        """Of `_by_four` alone: which place has its turn at a four. Fours whose numbers end alike take turns too."""
        self._are_hosts = are_hosts

    def __len__(self) -> int:
        return int(np.count_nonzero(self._keys))

    @property
    def num_bytes(self) -> int:
        """The memory of full arrays. Without `take_memory`, the system gives it as points are added."""
        return sum(array.nbytes for array in (self._keys, self._places, self._stamps, self._turns))

    def take_memory(self) -> None:
        """Take the memory of empty arrays from the system at once: some 2 ms a MB."""
        assert not len(self), "the points would be lost"
        for array in (self._keys, self._places, self._stamps, self._turns):
            array.fill(0)

    def rows_at(self, keys: Keys) -> tuple[_Ints, Rows]:
        """Return which of these keys there are, in order, and the row of places of each: [found, 8], without marks."""
        buckets = self._buckets(keys)
        hits = (self._keys.take(buckets, 0) == keys[:, None, None]).reshape(-1).nonzero()[0]  # of [num_keys, 2, 8]
        slots = buckets.reshape(-1).take(hits // _WAYS) * _WAYS
        slots += hits % _WAYS
        return hits // (2 * _WAYS), self._places.take(slots, 0) & _ID

    def add(self, keys: Keys, places: Rows, *, in_order: bool = False) -> None:
        """Name a place at each key, newest first. Of more keys than fit two buckets, some are dropped.

        `in_order`: the keys are different, and the last ones are dropped first.
        """
        if in_order:
            slots, is_kept = self._slots_for(keys, in_order=True)
        else:
            different, which = np.unique(keys, return_inverse=True)
            slots, is_kept = self._slots_for(different)
            slots, is_kept = slots[which], is_kept[which]
        for fours, to_name in self._by_four(slots[is_kept], places[is_kept]):
            _put_first(self._fours, fours, to_name)

    def remove(self, keys: Keys, places: Rows, *, only_unconfirmed: bool = False) -> None:
        """Take a place away from each key; a point without places is gone."""
        different, which = np.unique(keys, return_inverse=True)
        slots, found = self._look_up(different)
        slots, places = slots[which][found[which]], places[found[which]]
        for fours, to_take in self._by_four(slots, places):
            _take_away(self._fours, fours, to_take, only_unconfirmed=only_unconfirmed)
        pools, stores = self._fours.take(2 * slots), self._fours.take(2 * slots + 1)
        self._keys.reshape(-1)[slots[pools | stores == 0]] = _EMPTY

    def renumber(self, numbers: Rows) -> None:
        """Replace each place, with or without its mark, by `numbers[place]`."""
        self._places[...] = numbers[self._places]

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

    def _by_four(self, slots: _Ints, places: Rows) -> Iterator[tuple[_Ints, Rows]]:
        """Yield the four of each place (the pools or the stores of its slot) and the place; a four once at a time."""
        fours = 2 * slots + self._are_hosts[places & _ID]
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
        newest = np.uint32(self._new_stamps(len(keys) if in_order else 1))
        stamps = newest - np.arange(len(keys), dtype=np.uint32) if in_order else np.full(len(keys), newest)
        self._stamps.reshape(-1)[slots[is_kept]] = stamps[is_kept]
        return slots, is_kept

    def _new_stamps(self, number: int) -> int:
        """Return the newest of so many new stamps."""
        if self._stamp + number > _MAX_STAMP:  # after days: halves all ages
            self._stamps >>= np.uint32(1)
            self._stamp >>= 1
        self._stamp += number
        return self._stamp


class CompiledPointArrays(PointArrays):
    """The same by the compiled library; finds the places of a prompt, too."""

    def __init__(self, max_points: int, are_hosts: npt.NDArray[np.bool_], compiled: CompiledRouting) -> None:
        super().__init__(max_points, are_hosts)
        self._compiled = compiled
        self._found = np.zeros((MAX_PLACE_ID + 1, 2), np.int32)
        self._memory = IndexMemory(
            address(self._keys, np.uint64),
            address(self._places, np.uint16),
            address(self._stamps, np.uint32),
            int(self._num_buckets),
            address(are_hosts, np.bool_),
            address(self._found, np.int32),
        )
        self._address = ctypes.addressof(self._memory)

    def add(self, keys: Keys, places: Rows, *, in_order: bool = False) -> None:
        newest = self._new_stamps(len(keys) if in_order else 1)
        of_keys, of_places = address(keys, np.uint64), address(places, np.uint16)
        self._compiled.add_places(self._address, of_keys, of_places, len(keys), newest, in_order)

    def remove(self, keys: Keys, places: Rows, *, only_unconfirmed: bool = False) -> None:
        of_keys, of_places = address(keys, np.uint64), address(places, np.uint16)
        self._compiled.remove_places(self._address, of_keys, of_places, len(keys), only_unconfirmed)

    def find(self, packed: bytes, num_blocks: int, space: int) -> list[list[int]]:
        """Return the places of a prompt's blocks, deepest first: numbers, above MAX_PLACE_ID for stores, and blocks.

        `packed`: 16 bytes of each block's hash. `space`: the first bytes of the blocks' space, to be XORed.
        """
        number = self._compiled.find_places(self._address, packed, num_blocks, space)
        found: list[list[int]] = self._found[:number].tolist()
        return found


def not_zero(keys: Keys) -> Keys:
    """Return keys, of which 1 stands for 0."""
    return keys if np.count_nonzero(keys) == len(keys) else np.where(keys == _EMPTY, _ONE, keys)


def _num_true(are_true: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint64]:
    """Return how many of the last axis are true, which has 8 entries; some 20 times as fast as sum()."""
    return (are_true.view(np.uint64)[..., 0] * _EACH_BYTE) >> np.uint64(56)


def _put_first(all_fours: Keys, fours: _Ints, places: Rows) -> None:
    """Put a place first in each of these fours, all different."""
    rows = all_fours.take(fours).view(np.uint16).reshape(-1, NUM_PLACES)
    equal = (rows & _ID) == (places & _ID)[:, None]
    is_there = equal.any(axis=1)
    at = np.where(is_there, equal.argmax(axis=1), NUM_PLACES - 1)
    was = rows[np.arange(len(rows)), at]
    moved = rows.take([0, 0, 1, 2], 1)
    moved[:, 0] = np.where(is_there & (places > _ID), was, places)  # what block events have told stays told
    all_fours[fours] = np.where(at[:, None] >= _COLUMNS, moved, rows).view(np.uint64)[:, 0]


def _take_away(all_fours: Keys, fours: _Ints, places: Rows, *, only_unconfirmed: bool) -> None:
    """Take a place out of each of these fours, all different."""
    rows = all_fours.take(fours).view(np.uint16).reshape(-1, NUM_PLACES)
    equal = rows == (places | UNCONFIRMED)[:, None] if only_unconfirmed else (rows & _ID) == places[:, None]
    at = np.where(equal.any(axis=1), equal.argmax(axis=1), NUM_PLACES)
    shifted = rows.take([1, 2, 3, 3], 1)
    shifted[:, 3] = 0
    all_fours[fours] = np.where(at[:, None] <= _COLUMNS, shifted, rows).view(np.uint64)[:, 0]
