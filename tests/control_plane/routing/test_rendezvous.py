"""Prompts and sessions that nobody holds go to the same workers at every gateway, within bounds of load."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from control_plane.fleet.registry import Worker
from control_plane.routing.cost_model import RoutingRequest
from control_plane.routing.groups import index_space
from control_plane.routing.rendezvous import MAX_SHARE, home, key_of
from control_plane.routing.session_affinity import SessionRoute
from control_plane.routing.worker_table import SESSIONS, TableKey, WorkerTable
from tandem.v1 import types_pb2 as pb
from tests.control_plane.routing.test_worker_columns import CHAIN, DECODE, GRAIN, NUM_WORKERS, PROMPT, Harness

NUM_KEYS = 4_000


def table_of(*workers: tuple[str, str]) -> WorkerTable:
    """Return a table of workers of these names, on these hosts."""
    table = WorkerTable(TableKey(DECODE, "m", b"", b"", b"", ""))
    for name, host in workers:
        info = pb.WorkerInfo(worker_id=name, incarnation=f"{name}-1", role=DECODE, host_id=host)
        table.put(Worker(info, pb.LoadReport(), 0.0), [0.0] * SESSIONS)
    return table


def homes(
    table: WorkerTable, weights: list[float] | None = None, loads: list[float] | None = None, light: float = 0.0
) -> list[str]:
    """Return the name of each key's worker."""
    number, chance = len(table), random.Random(1)
    shares = table.weights(np.array(weights or [1.0] * number))
    arrays = shares, np.array(loads or [0.0] * number), np.ones(number, bool), light
    rows = [home(table, chance.getrandbits(64), *arrays) for _ in range(NUM_KEYS)]
    return [table.workers[row].worker_id for row in rows if row is not None]


WORKERS = [(f"w{number}", f"h{number // 4}") for number in range(16)]


def test_keys_are_spread_by_weight() -> None:
    counts = Counter(homes(table_of(*WORKERS), [3.0] + [1.0] * 15))
    share = NUM_KEYS / 18
    assert 2.6 * share <= counts["w0"] <= 3.4 * share
    assert all(0.75 * share <= counts[f"w{number}"] <= 1.25 * share for number in range(1, 16))


def test_a_host_that_leaves_moves_only_its_own_keys_and_a_worker_few_of_its_hosts() -> None:
    before = homes(table_of(*WORKERS))
    without_host = homes(table_of(*WORKERS[4:]))
    assert all(old == new for old, new in zip(before, without_host, strict=True) if old not in ("w0", "w1", "w2", "w3"))
    without_worker = homes(table_of(*WORKERS[1:]))
    moved = [(old, new) for old, new in zip(before, without_worker, strict=True) if old != new]
    assert {old for old, _ in moved} <= {"w0", "w1", "w2", "w3"}, "other hosts keep their keys"
    assert len(moved) <= 2.2 * before.count("w0"), "its own, and its host's share of the weight is less by as much"


def test_the_order_in_which_workers_came_makes_no_difference() -> None:
    assert homes(table_of(*WORKERS)) == homes(table_of(*reversed(WORKERS)))
    table = table_of(("gone", "h9"), *WORKERS)
    table.remove("gone-1")
    assert homes(table) == homes(table_of(*WORKERS))


def test_a_worker_above_its_share_of_the_load_is_passed_over_for_the_next_on_its_host() -> None:
    table = table_of(*WORKERS)
    before, loads = homes(table), [100.0] * 16
    loads[0] = 124.0
    assert homes(table, loads=loads) == before
    loads[0] = 140.0
    after = homes(table, loads=loads)
    assert MAX_SHARE * np.mean(loads) < 140.0 and "w0" not in after
    moved = {new for old, new in zip(before, after, strict=True) if old != new}
    assert moved == {"w1", "w2", "w3"}


def test_a_busy_host_is_passed_over_for_the_next_host() -> None:
    table = table_of(*WORKERS)
    loads = [1000.0] * 4 + [0.0] * 12
    before, after = homes(table), homes(table, loads=loads)
    assert not {"w0", "w1", "w2", "w3"} & set(after) and len(set(after)) == 12
    assert all(old == new for old, new in zip(before, after, strict=True) if old not in ("w0", "w1", "w2", "w3"))


def test_nobody_is_passed_over_while_the_whole_load_is_light() -> None:
    table = table_of(*WORKERS)
    before, loads = homes(table), [90.0, *[0.0] * 15]
    assert "w0" not in homes(table, loads=loads)
    assert homes(table, loads=loads, light=16 * 90.0 / MAX_SHARE) == before
    assert "w0" not in homes(table, loads=loads, light=15 * 90.0 / MAX_SHARE)


def test_sessions_begin_at_their_workers_though_these_have_a_few_other_answers() -> None:
    """Two gateways: one has sent each worker of a quarter an answer, the other one has sent nothing."""
    first, second = Harness(1), Harness(2)
    for number in range(0, NUM_WORKERS, 4):
        first.send(f"d{number}", 0, 1000 * GRAIN // 10)
    asked = [replace(PROMPT, session_id=f"s{number}") for number in range(60)]
    routes = [(first.router.choose(request), second.router.choose(request)) for request in asked]
    assert all(one.decode_id == two.decode_id for one, two in routes)
    assert any(int(one.decode_id[1:]) % 4 == 0 for one, _ in routes)


def test_a_session_begins_at_its_worker_though_another_would_be_a_few_milliseconds_sooner() -> None:
    short = RoutingRequest("m", 10, 1, session_id="s", hand_over="never")
    harness = Harness()
    home_of_session = harness.router.choose(short).decode_id
    for num_prompt, is_home in ((2, True), (9, False)):
        harness.send(home_of_session, num_prompt)
        assert (harness.router.choose(short).decode_id == home_of_session) is is_home


def test_a_key_is_of_the_session_or_else_of_how_the_prompt_begins() -> None:
    other_end = [*CHAIN[:16], *CHAIN[40:]]
    assert key_of(PROMPT) == key_of(replace(PROMPT, block_hashes=other_end)) != key_of(replace(PROMPT, session_id="s"))
    assert key_of(replace(PROMPT, block_hashes=CHAIN[8:])) != key_of(PROMPT)
    assert key_of(replace(PROMPT, session_id="s")) == key_of(RoutingRequest("m", 9, 9, session_id="s"))
    assert key_of(replace(PROMPT, block_hashes=CHAIN[:16])) == key_of(PROMPT)
    assert key_of(replace(PROMPT, block_hashes=CHAIN[:15])) is None is key_of(replace(PROMPT, block_hashes=()))


def prompts(number: int) -> list[RoutingRequest]:
    chance = random.Random(5)
    chains = [[chance.randbytes(16) for _ in range(64)] for _ in range(number)]
    return [replace(PROMPT, block_hashes=chain) for chain in chains]


@pytest.mark.parametrize("by", ["prompt", "session"])
def test_two_gateways_choose_alike(by: str) -> None:
    first, second = Harness(1), Harness(2)
    requests = prompts(60) if by == "prompt" else [replace(PROMPT, session_id=f"s{number}") for number in range(60)]
    routes = [(first.router.choose(request), second.router.choose(request)) for request in requests]
    assert all((one.prefill_id, one.decode_id) == (two.prefill_id, two.decode_id) for one, two in routes)
    assert len({one.prefill_id for one, _ in routes}) > NUM_WORKERS / 2


def test_who_holds_the_prompt_wins_over_the_worker_of_the_key() -> None:
    for holder in ("p3", "p7"):
        harness = Harness()
        harness.learn(holder, 60)
        assert harness.names(PROMPT)[holder] == 40
    harness = Harness()
    harness.router.affinity.remember("s", SessionRoute("p3-1", "d11-1"))
    assert harness.names(replace(PROMPT, session_id="s")) == {"p3": 40, "d11": 40}


def test_who_has_only_the_beginning_that_all_prompts_have_does_not_keep_sessions_from_their_workers() -> None:
    asked = [replace(PROMPT, session_id=f"s{number}") for number in range(20)]
    first, second = Harness(1), Harness(2)
    for holder in ("p3", "p7"):
        first.learn(holder, 4)
    routes = [(first.router.choose(request), second.router.choose(request)) for request in asked]
    assert all((one.prefill_id, one.decode_id) == (two.prefill_id, two.decode_id) for one, two in routes)


def test_a_worker_that_is_much_later_than_others_gets_no_keys() -> None:
    harness = Harness()
    (prefill,) = {harness.router.choose(PROMPT).prefill_id}
    harness.send(prefill, 5000)
    assert {harness.router.choose(PROMPT).prefill_id for _ in range(10)}.isdisjoint({prefill})


def test_the_keys_of_an_ejected_worker_go_to_one_other() -> None:
    harness = Harness()
    (home_of_prompt,) = {harness.router.choose(PROMPT).prefill_id for _ in range(10)}
    worker = harness.registry.get(home_of_prompt)
    assert worker is not None and index_space(worker)
    for _ in range(3):
        harness.router.health.watch(worker, None).failed("it broke", "failed", is_certain=False)
    others = {harness.router.choose(PROMPT).prefill_id for _ in range(10)}
    assert len(others) == 1 and others != {home_of_prompt}


def test_load_stays_within_bounds_while_one_beginning_is_asked_for_again_and_again() -> None:
    """Nothing is learnt: each request counts as unknown, as it does until the first one has been read."""
    harness = Harness()
    for _ in range(20 * NUM_WORKERS):
        route = harness.router.choose(PROMPT)
        harness.send(route.prefill_id, 64 * GRAIN)
        harness.send(route.decode_id, 0, 64 * GRAIN)
    sent = harness.router.in_flight.decode_tokens
    assert max(sent.values()) <= 1.3 * sent.total() / NUM_WORKERS
