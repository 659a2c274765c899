"""The index of sample points finds the places of a prompt's leading blocks, and stays within its bound."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.block_chain import BlockHashes
from control_plane.fleet.registry import WorkerRegistry
from control_plane.routing.point_arrays import Keys
from control_plane.routing.prefix_index import PrefixMatch
from control_plane.routing.router import Router
from control_plane.routing.sample_points import PlaceChanges, SamplePointIndex, num_sample_points, sample_positions
from tests.control_plane.routing.compiled import compiled_routing

SPACE = bytes(range(16))
NONE = np.empty(0, np.uint64)

NewIndex = Callable[..., SamplePointIndex]


@pytest.fixture(params=["numpy", "compiled"], scope="module")
def new_index(request: pytest.FixtureRequest) -> NewIndex:
    return partial(SamplePointIndex, compiled=compiled_routing() if request.param == "compiled" else None)


def a_chain(num_blocks: int, name: str = "") -> BlockHashes:
    return BlockHashes(
        b"".join(hashlib.blake2b(f"{name}{index}".encode(), digest_size=16).digest() for index in range(num_blocks))
    )


CHAIN = a_chain(300)


def keys_of(chain: Sequence[bytes], space: bytes = b"") -> Keys:
    """Return the keys of a chain's sample points, as a KV service makes them of keys of blocks."""
    points = [chain[position] for position in sample_positions(num_sample_points(len(chain)))]
    mask = int.from_bytes(space[:8], "little")
    return np.array([int.from_bytes(block_hash[:8], "little") ^ mask for block_hash in points], np.uint64)


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_sample_points_are_blocks_1_2_4_8_16_and_then_each_16th() -> None:
    assert (sample_positions(8) + 1).tolist() == [1, 2, 4, 8, 16, 32, 48, 64]
    for num_blocks in range(200):
        ends = (sample_positions(num_sample_points(num_blocks)) + 1).tolist()
        assert ends == [end for end in (1, 2, 4, 8, *range(16, 200, 16)) if end <= num_blocks]


def test_the_longest_run_of_each_pool_and_store_is_found(new_index: NewIndex) -> None:
    index = new_index()
    index.learn(CHAIN[:2], "a-1", "host-a", space=SPACE)
    index.learn(CHAIN[:4], "b-1", "host-a", space=SPACE)
    index.learn(CHAIN[:8], "c-1", "host-c", space=SPACE)
    match = index.find(CHAIN, SPACE)
    assert match.pools == {"a-1": 2, "b-1": 4, "c-1": 8}
    assert match.hosts == {"host-a": 4, "host-c": 8}
    assert index.find(CHAIN) == PrefixMatch()  # of another space
    assert index.find(a_chain(40, "other"), SPACE) == PrefixMatch()
    assert index.find([], SPACE) == PrefixMatch()


def test_what_was_pulled_is_in_the_pool_and_not_on_the_host(new_index: NewIndex) -> None:
    index = new_index()
    index.learn(CHAIN[:8], "d-1", "")
    assert index.find(CHAIN) == PrefixMatch({"d-1": 8}, {})


def test_the_next_turn_of_a_session_finds_the_end_of_the_turn_before(new_index: NewIndex) -> None:
    index = new_index()
    index.learn(CHAIN[:100], "a-1", "host-a")
    index.learn(CHAIN[100:107], "a-1", "host-a", first=100)
    index.learn(CHAIN[:32], "b-1", "")
    assert index.find(CHAIN) == PrefixMatch({"a-1": 107, "b-1": 32}, {"host-a": 107})
    assert index.find(CHAIN[:106]) == PrefixMatch({"a-1": 100, "b-1": 32}, {"host-a": 100})
    assert index.find(CHAIN[:99]) == PrefixMatch({"a-1": 96, "b-1": 32}, {"host-a": 96})  # to a sample point


def test_a_store_that_lacked_blocks_is_not_expected_to_have_them(new_index: NewIndex) -> None:
    index = new_index()
    index.learn(CHAIN[:100], "a-1", "host-a")
    index.forget(CHAIN[50:100], "host-a", first=50)
    assert index.find(CHAIN) == PrefixMatch({"a-1": 100}, {"host-a": 48})
    index.forget(CHAIN[:100], "unknown")
    assert index.find(CHAIN).hosts == {"host-a": 48}


def test_what_block_events_told_of_a_store_stays_though_a_request_did_not_get_it(new_index: NewIndex) -> None:
    """The store was slow, or the blocks were too late: events tell only of changes, and would never tell of them again.

    They tell nothing of the last block of a chain, and of what the gateway's own requests taught since.
    """
    index = new_index()
    index.begin_snapshot("host-a")
    index.report([PlaceChanges("", "host-a", keys_of(CHAIN[:64]), NONE)])
    index.learn(CHAIN[:70], "a-1", "host-a")
    index.learn(CHAIN[70:100], "a-1", "host-a", first=70)
    assert index.find(CHAIN).hosts == {"host-a": 100}
    index.forget(CHAIN[40:100], "host-a", first=40)
    assert index.find(CHAIN).hosts == {"host-a": 64}
    index.stream_ended("host-a")
    index.forget(CHAIN[40:64], "host-a", first=40)
    assert index.find(CHAIN).hosts == {"host-a": 32}


def test_of_many_places_the_latest_four_are_kept(new_index: NewIndex) -> None:
    index = new_index()
    for number in range(6):
        index.learn(CHAIN[:1], f"w-{number}", f"host-{number}")
    index.learn(CHAIN[:1], "w-2", "host-2")
    match = index.find(CHAIN)
    assert set(match.pools) == {"w-2", "w-3", "w-4", "w-5"}
    assert set(match.hosts) == {"host-2", "host-3", "host-4", "host-5"}


def test_a_deep_prefix_stays_known_while_others_share_its_beginning(new_index: NewIndex) -> None:
    index = new_index()
    index.learn(CHAIN[:64], "deep", "")
    for number in range(6):
        index.learn(CHAIN[:2], f"w-{number}", "")
    assert index.find(CHAIN).pools["deep"] == 64


@given(st.lists(st.tuples(st.integers(1, 40), st.sampled_from("abc"), st.sampled_from(("h", "i", ""))), max_size=12))
def test_a_place_has_no_more_blocks_than_it_was_given_and_all_of_the_last_prompt(
    new_index: NewIndex,
    lessons: Sequence[tuple[int, str, str]],
) -> None:
    index = new_index(max_blocks=640)
    for num_blocks, worker, host in lessons:
        index.learn(CHAIN[:num_blocks], worker, host)
    match = index.find(CHAIN[:40])
    pools = {worker: max(num for num, other, _ in lessons if other == worker) for _, worker, _ in lessons}
    hosts = {host: max(num for num, _, other in lessons if other == host) for _, _, host in lessons if host}
    for found, given_to in ((match.pools, pools), (match.hosts, hosts)):
        assert found.keys() == given_to.keys()
        for place, most in given_to.items():
            assert (sample_positions(num_sample_points(most))[-1] + 1) <= found[place] <= most
    for num_blocks, worker, _ in lessons:
        assert index.find(CHAIN[:num_blocks]).pools[worker] == num_blocks


# -------------------------------------------------------------------------------------------------------------- bounds


def test_ten_million_blocks_take_less_than_50_mb_and_at_most_40_bytes_a_point(new_index: NewIndex) -> None:
    index = new_index(max_blocks=10_000_000)
    assert index.num_bytes < 50e6
    small = new_index(max_blocks=160_000)
    keys = np.random.default_rng(5).integers(1, (1 << 64) - 1, 18_000, np.uint64)
    for run in np.split(keys, 100):
        small.report([PlaceChanges("", "host-a", run, NONE)])
    assert small.num_bytes / len(small) < 40
    assert len(small) > 17_800  # with 90 % of the slots taken, less than 1.2 % were dropped


def test_memory_is_taken_before_the_first_point_and_never_again(new_index: NewIndex) -> None:
    index = new_index()
    index.take_memory()
    index.learn(CHAIN[:8], "a-1", "host-a")
    assert index.find(CHAIN) == PrefixMatch({"a-1": 8}, {"host-a": 8})
    with pytest.raises(AssertionError, match="would be lost"):
        index.take_memory()


def test_a_full_index_keeps_its_size_and_what_was_learnt_last(new_index: NewIndex) -> None:
    index = new_index(max_blocks=8_000)
    num_bytes = index.num_bytes
    for number in range(300):
        index.learn(a_chain(60, f"{number}/"), f"w-{number % 7}", "host")
    assert (index.num_bytes, len(index)) == (num_bytes, 1_000)
    found = [index.find(a_chain(60, f"{number}/")).pools.get(f"w-{number % 7}") for number in range(300)]
    assert found[-40:] == [60] * 40
    assert sum(each is not None for each in found) < 180


def test_of_a_prompt_the_last_blocks_are_dropped_first(new_index: NewIndex) -> None:
    index = new_index(max_blocks=64)  # one bucket of eight
    index.learn(CHAIN[:64], "a-1", "")  # 8 points: 1, 2, 4, 8, 16, 32, 48, 64
    assert index.find(CHAIN).pools == {"a-1": 64}
    index.learn(a_chain(3, "other"), "a-1", "")  # 3 points: 1, 2 and the end
    assert len(index) == 8
    assert index.find(CHAIN).pools == {"a-1": 16}
    assert index.find(a_chain(3, "other")).pools == {"a-1": 3}


def test_more_new_points_at_once_than_fit_are_never_mixed_up(new_index: NewIndex) -> None:
    index = new_index(max_blocks=512)
    chains = [a_chain(16, f"{number}/") for number in range(200)]
    index.report([PlaceChanges(f"w-{number}", "host", keys_of(chain), NONE) for number, chain in enumerate(chains)])
    assert len(index) <= 64
    for number, chain in enumerate(chains):
        assert index.find(chain).pools.keys() <= {f"w-{number}"}


def test_ages_go_on_after_their_numbers_are_used_up(new_index: NewIndex) -> None:
    index = new_index(max_blocks=8_000)
    index.learn(CHAIN[:64], "a-1", "")
    index._points._stamp = (1 << 32) - (1 << 24)
    for number in range(300):
        index.learn(a_chain(60, f"{number}/"), "a-1", "")
    assert index.find(a_chain(60, "299/")).pools == {"a-1": 60}
    assert index.find(CHAIN).pools.get("a-1", 0) < 64


# --------------------------------------------------------------------------------------------------------- block events


def test_block_events_tell_of_pools_and_stores_and_of_what_they_evict(new_index: NewIndex) -> None:
    index = new_index()
    keys = keys_of(CHAIN[:64], SPACE)  # 8 points
    index.report([PlaceChanges("a-1", "host-a", keys, NONE), PlaceChanges("", "host-a", keys[:6], NONE)])
    assert index.find(CHAIN, SPACE) == PrefixMatch({"a-1": 64}, {"host-a": 32})
    index.report([PlaceChanges("a-1", "host-a", NONE, keys[5:]), PlaceChanges("", "host-a", keys[6:], NONE)])
    assert index.find(CHAIN, SPACE) == PrefixMatch({"a-1": 16}, {"host-a": 64})
    index.report([PlaceChanges("a-1", "host-a", NONE, keys), PlaceChanges("", "host-a", NONE, keys)])
    assert len(index) == 0


def test_of_a_session_that_has_moved_events_tell_who_has_most_of_it(new_index: NewIndex) -> None:
    """Each of two gateways had some of the turns."""
    index = new_index()
    index.report([PlaceChanges(f"w-{number}", "host-a", keys_of(CHAIN[:20]), NONE) for number in (1, 2)])
    index.learn(CHAIN[:20], "w-1", "")
    end = np.array([int.from_bytes(CHAIN[22][:8], "little")], np.uint64)
    index.report([PlaceChanges("w-2", "host-a", end, NONE)])
    assert index.find(CHAIN[:26]).pools == {"w-1": 20, "w-2": 23}
    index.report([PlaceChanges("w-2", "host-a", NONE, end)])
    assert index.find(CHAIN[:26]).pools == {"w-1": 20, "w-2": 16}


def test_a_gateways_own_requests_count_for_two_seconds_unless_events_confirm_them(new_index: NewIndex) -> None:
    time = Time()
    index = new_index(clock=time)
    index.report([PlaceChanges("a-1", "host-a", NONE, NONE)])
    index.learn(CHAIN[:70], "a-1", "host-a")
    assert index.find(CHAIN) == PrefixMatch({"a-1": 70}, {"host-a": 70})
    index.report([PlaceChanges("a-1", "host-a", keys_of(CHAIN[:64]), NONE)])  # the pool's, not the store's
    time.now += 1.9
    assert index.find(CHAIN) == PrefixMatch({"a-1": 70}, {"host-a": 70})
    time.now += 0.2
    assert index.find(CHAIN) == PrefixMatch({"a-1": 70})
    index.learn(CHAIN[:70], "a-1", "host-a")  # confirmed already: this changes nothing
    time.now += 2.1
    assert index.find(CHAIN) == PrefixMatch({"a-1": 70})
    index.report([PlaceChanges("a-1", "host-a", NONE, keys_of(CHAIN[:64])[-1:])])
    assert index.find(CHAIN) == PrefixMatch({"a-1": 48})  # the end went with the point before it


def test_without_block_events_what_requests_taught_stays(new_index: NewIndex) -> None:
    time = Time()
    index = new_index(clock=time)
    index.learn(CHAIN[:64], "old", "host-b")
    index.report([PlaceChanges("a-1", "host-a", NONE, NONE)])
    index.stream_ended("host-a")
    index.learn(CHAIN[:64], "a-1", "host-a")
    time.now += 1000
    assert index.find(CHAIN) == PrefixMatch({"old": 64, "a-1": 64}, {"host-b": 64, "host-a": 64})


def test_a_snapshot_replaces_what_a_host_had(new_index: NewIndex) -> None:
    index = new_index()
    keys = keys_of(CHAIN[:64])
    index.learn(CHAIN[:64], "other", "host-b")
    index.report([PlaceChanges("a-1", "host-a", keys, NONE), PlaceChanges("", "host-a", keys, NONE)])
    index.stream_ended("host-a")
    assert index.find(CHAIN).pools == {"a-1": 64, "other": 64}  # stays until the stream is back
    index.begin_snapshot("host-a")
    index.report([PlaceChanges("a-1", "host-a", keys[:3], NONE)])
    assert index.find(CHAIN) == PrefixMatch({"a-1": 4, "other": 64}, {"host-b": 64})


def test_a_pool_is_of_the_host_that_told_of_it_last(new_index: NewIndex) -> None:
    index = new_index()
    keys = keys_of(CHAIN[:64])
    index.report([PlaceChanges("a-1", "host-a", keys, NONE)])
    index.report([PlaceChanges("a-1", "host-b", keys[:3], NONE)])
    index.begin_snapshot("host-a")
    assert index.find(CHAIN).pools == {"a-1": 64}
    index.begin_snapshot("host-b")
    assert index.find(CHAIN).pools == {}


def test_a_pool_ends_with_its_worker_and_a_store_with_its_kv_service(new_index: NewIndex) -> None:
    index = new_index()
    keys = keys_of(CHAIN[:64])
    index.report([PlaceChanges("a-1", "host-a", keys, NONE), PlaceChanges("", "host-a", keys, NONE)])
    index.forget_pool("a-1")
    assert index.find(CHAIN) == PrefixMatch({}, {"host-a": 64})
    index.forget_host("host-a")
    assert index.find(CHAIN) == PrefixMatch()
    index.forget_pool("never-known")
    index.forget_host("never-known")


def test_numbers_of_places_are_used_again_and_never_bring_old_blocks_back(new_index: NewIndex) -> None:
    index = new_index()
    for number in range(5_000):
        index.learn(CHAIN[:2], f"w-{number}", "")
        index.forget_pool(f"w-{number}")
    assert index.find(CHAIN) == PrefixMatch()
    for number in range(1_500):
        index.learn(a_chain(1, f"{number}"), f"new-{number}", "")
    assert index.find(CHAIN) == PrefixMatch()
    assert all(index.find(a_chain(1, f"{number}")).pools == {f"new-{number}": 1} for number in range(1_500))


def test_of_a_long_prompt_only_the_sampled_blocks_are_read(new_index: NewIndex) -> None:
    class Counted(list[bytes]):
        num_read = 0

        def __getitem__(self, place):  # type: ignore[no-untyped-def]
            self.num_read += 1
            return super().__getitem__(place)

    whole = list(BlockHashes(np.random.default_rng(1).bytes(16 * 94_000)))
    chain, index = Counted(whole), new_index()
    index.learn(chain, "a-1", "host-a")
    assert chain.num_read == 4 + 94_000 // 16
    assert index.find(chain) == PrefixMatch({"a-1": 94_000}, {"host-a": 94_000})
    assert chain.num_read < 3 * 94_000 // 16


def test_a_router_uses_the_index_that_it_is_given_also_while_it_is_empty(new_index: NewIndex) -> None:
    index = new_index()
    assert Router(WorkerRegistry(5.0, 10.0), prefixes=index).prefixes is index
