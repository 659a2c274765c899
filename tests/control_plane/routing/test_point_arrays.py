"""The library names and takes away places as numpy does: the same places in the same order, marks and stamps."""

from __future__ import annotations

import numpy as np
import pytest

from control_plane.routing.place_table import MAX_PLACE_ID
from control_plane.routing.point_arrays import UNCONFIRMED, CompiledPointArrays, Keys, PointArrays, Rows
from tests.control_plane.routing.compiled import compiled_routing

NUM_PLACES = 12
ARE_HOSTS = np.arange(MAX_PLACE_ID + 1) % 3 == 0


def rows_of(arrays: PointArrays) -> dict[int, list[int]]:
    """Return the places of each key, with their marks, and the key's stamp."""
    keys, stamps = arrays._keys.reshape(-1), arrays._stamps.reshape(-1)
    return {int(keys[slot]): [*arrays._places[slot].tolist(), int(stamps[slot])] for slot in np.flatnonzero(keys)}


@pytest.mark.parametrize("seed", range(20))
def test_the_library_changes_places_as_numpy_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    both = CompiledPointArrays(8_000, ARE_HOSTS, compiled_routing()), PointArrays(8_000, ARE_HOSTS)  # never full
    all_keys = rng.integers(1, 1 << 64, 300, np.uint64, endpoint=False)
    most = 0
    for _ in range(300):
        what, number = rng.random(), int(rng.integers(0, 60))
        keys: Keys = rng.choice(all_keys, number)
        places: Rows = rng.integers(1, NUM_PLACES, number).astype(np.uint16)
        marked = places | np.where(rng.random(number) < 0.5, UNCONFIRMED, 0).astype(np.uint16)
        different = rng.permutation(all_keys)[:number]
        numbers = np.arange(1 << 16, dtype=np.uint16)
        numbers[1 + MAX_PLACE_ID + 4] = numbers[4] = 0
        for arrays in both:
            if what < 0.4:
                arrays.add(keys, marked)
            elif what < 0.6:
                arrays.add(different, marked, in_order=True)
            elif what < 0.98:
                arrays.remove(keys, places, only_unconfirmed=what < 0.75)
            else:
                arrays.renumber(numbers)
        ours, wanted = map(rows_of, both)
        assert ours == wanted
        assert [each.tolist() for each in both[0].rows_at(all_keys)] == [
            each.tolist() for each in both[1].rows_at(all_keys)
        ]
        most = max(most, len(wanted))
    assert most > 150


def test_a_full_bucket_drops_what_was_used_longest_ago() -> None:
    for arrays in (CompiledPointArrays(8, ARE_HOSTS, compiled_routing()), PointArrays(8, ARE_HOSTS)):
        keys = np.arange(1, 13, dtype=np.uint64)
        arrays.add(keys[:8], np.full(8, 1, np.uint16), in_order=True)
        arrays.add(keys[2:6], np.full(4, 2, np.uint16))
        arrays.add(keys[8:], np.full(4, 1, np.uint16), in_order=True)  # keys 7 and 8 are the oldest, then 2 and 1
        assert sorted(rows_of(arrays)) == [3, 4, 5, 6, 9, 10, 11, 12]


@pytest.mark.parametrize("in_order", [False, True])
def test_of_more_points_at_once_than_fit_as_many_as_fit_are_kept(in_order: bool) -> None:
    for arrays in (CompiledPointArrays(16, ARE_HOSTS, compiled_routing()), PointArrays(16, ARE_HOSTS)):
        keys = np.random.default_rng(3).integers(1, 1 << 64, 100, np.uint64, endpoint=False)
        arrays.add(keys, np.arange(1, 101).astype(np.uint16), in_order=in_order)
        rows = rows_of(arrays)
        assert len(rows) == 16
        place_of = dict(zip(keys.tolist(), range(1, 101), strict=True))
        assert all(place_of[key] in row[:-1] for key, row in rows.items())
