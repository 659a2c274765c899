"""The index finds the places of a prompt's leading blocks, and stays within its bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from control_plane.routing.prefix_index import CachedPrefix, PrefixIndex

CHAIN = [bytes([index]) * 16 for index in range(8)]


def test_a_run_is_counted_in_the_pool_then_on_the_host_then_elsewhere() -> None:
    index = PrefixIndex()
    index.learn(CHAIN[:2], "a-1", "host-a")
    index.learn(CHAIN[:4], "b-1", "host-a")
    index.learn(CHAIN[:7], "c-1", "host-c")
    match = index.find(CHAIN)
    assert match.seen_from("a-1", "host-a") == CachedPrefix(own=2, host=2, remote=3, remote_host="host-c")
    assert match.seen_from("c-1", "host-c") == CachedPrefix(own=7)
    assert match.seen_from("new", "host-b") == CachedPrefix(remote=7, remote_host="host-c")


def test_a_hosts_blocks_outlive_the_worker_and_a_pools_do_not() -> None:
    index = PrefixIndex()
    index.learn(CHAIN, "a-1", "host-a")
    assert index.find(CHAIN).seen_from("a-2", "host-a") == CachedPrefix(own=0, host=8)


def test_what_was_pulled_is_in_the_pool_and_not_on_the_host() -> None:
    index = PrefixIndex()
    index.learn(CHAIN, "d-1", "")
    assert index.find(CHAIN).seen_from("d-1", "host-a") == CachedPrefix(own=8)
    assert index.find(CHAIN).seen_from("d-2", "host-a") == CachedPrefix()


def test_a_gap_ends_a_run() -> None:
    index = PrefixIndex()
    index.learn(CHAIN, "a-1", "host-a")
    index.forget(CHAIN[3:4], "host-a")
    assert index.find(CHAIN).seen_from("other", "host-a") == CachedPrefix(host=3)
    assert index.find(CHAIN).seen_from("a-1", "host-a") == CachedPrefix(own=8)
    assert index.find([b"unknown" * 2, *CHAIN]).seen_from("a-1", "host-a") == CachedPrefix()


def test_the_end_of_the_prompt_used_longest_ago_is_forgotten_first() -> None:
    index = PrefixIndex(max_blocks=6)
    other = [bytes([100 + number]) * 16 for number in range(3)]
    index.learn(CHAIN[:4], "a-1", "")
    index.learn(other, "a-1", "")
    assert len(index) == 6
    assert index.find(CHAIN).pools == {"a-1": 3}
    assert index.find(other).pools == {"a-1": 3}


def test_of_many_places_the_latest_are_kept() -> None:
    index = PrefixIndex()
    for number in range(6):
        index.learn(CHAIN[:1], f"w-{number}", f"host-{number}")
    index.learn(CHAIN[:1], "w-2", "host-2")
    match = index.find(CHAIN)
    assert set(match.pools) == {"w-2", "w-3", "w-4", "w-5"}
    assert set(match.hosts) == {"host-2", "host-3", "host-4", "host-5"}


@given(st.lists(st.tuples(st.integers(1, 8), st.sampled_from("abc"), st.sampled_from(("h", "i", ""))), max_size=12))
def test_a_place_has_as_many_blocks_as_the_longest_prompt_it_was_given(
    lessons: Sequence[tuple[int, str, str]],
) -> None:
    index = PrefixIndex()
    for num_blocks, worker, host in lessons:
        index.learn(CHAIN[:num_blocks], worker, host)
    match = index.find(CHAIN)
    pools = {worker: max(num for num, other, _ in lessons if other == worker) for _, worker, _ in lessons}
    hosts = {host: max(num for num, _, other in lessons if other == host) for _, _, host in lessons if host}
    assert (match.pools, match.hosts) == (pools, hosts)


def long_chain(num_blocks: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in range(num_blocks)]


def test_of_a_long_chain_every_16th_block_is_held_and_a_prefix_is_found_to_within_15_blocks() -> None:
    chain, index = long_chain(31_250), PrefixIndex()
    index.learn(chain, "a-1", "host-a")
    index.learn(chain[:2_047], "b-1", "")
    assert len(index) == 1024 + (31_250 - 1024) // 16
    assert index.find(chain).pools == {"a-1": 31_248, "b-1": 2_032}
    assert index.find(chain[:2_000]).pools == {"a-1": 2_000, "b-1": 2_000}
    assert index.find(chain[:1_500]).hosts == {"host-a": 1_488}
    assert index.find(chain[:700]).pools == {"a-1": 700, "b-1": 700}


def test_the_blocks_of_an_answer_go_on_where_the_prompts_points_end() -> None:
    chain, index = long_chain(1_100), PrefixIndex()
    index.learn(chain[:1_030], "a-1", "")
    index.learn(chain[1_030:], "a-1", "", first=1_030)
    assert index.find(chain).pools == {"a-1": 1_088}
    index.forget(chain[1_040:], "host-a", first=1_040)
    assert index.find(chain).pools == {"a-1": 1_088}


def test_of_a_long_chain_only_the_held_blocks_are_looked_up() -> None:
    class Counted(list[bytes]):
        num_read = 0

        def __getitem__(self, place: Any) -> Any:
            self.num_read += 1
            return super().__getitem__(place)

    chain, index = Counted(long_chain(94_000)), PrefixIndex()
    index.learn(chain, "a-1", "host-a")
    held = len(index)
    assert chain.num_read == held < 7_000
    rest = Counted(long_chain(94_000)[50_000:])
    index.forget(rest, "host-a", first=50_000)
    assert rest.num_read == len(rest) // 16
    match = index.find(chain)
    assert (match.hosts, match.pools) == ({"host-a": 50_000}, {"a-1": 94_000})
