"""Sessions stay where their caches are, follow them when another gateway moved them, and begin evenly spread."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from control_plane.routing.cost_model import RoutingRequest
from control_plane.routing.rendezvous import MAX_SESSIONS
from control_plane.routing.session_affinity import SessionAffinity, SessionRoute
from control_plane.routing.worker_table import SESSIONS
from tests.control_plane.routing.test_worker_columns import (
    DECODE,
    NUM_WORKERS,
    PREFILL,
    PROMPT,
    Harness,
    way,
)

pytestmark = pytest.mark.usefixtures(way.__name__)
LOCAL = replace(PROMPT, session_id="s", hand_over="never")
"""A turn of 64 blocks whose prompt a decode worker computes."""


def begin(harness: Harness, number: int, request: RoutingRequest = PROMPT, name: str = "s") -> Counter[str]:
    """Let so many new sessions begin, each with a prompt of its own; return how many began at each worker."""
    begun: Counter[str] = Counter()
    for which in range(number):
        asked = replace(request, block_hashes=(), session_id=f"{name}{which}")
        route = harness.router.choose(asked)
        assert route.prefill is not None
        begun.update((route.prefill_id, route.decode_id))
        harness.router.affinity.remember(
            asked.session_id, SessionRoute(route.prefill.incarnation, route.decodes[0].incarnation)
        )
    return begun


def test_new_sessions_are_spread_evenly_over_the_workers_of_both_roles() -> None:
    per_worker = 20
    begun = begin(Harness(), per_worker * NUM_WORKERS, replace(PROMPT, hand_over="always"))
    assert len(begun) == 2 * NUM_WORKERS
    assert max(begun.values()) <= MAX_SESSIONS * per_worker + 1


def test_sessions_keep_no_prompt_without_one_from_its_worker() -> None:
    harness = Harness()
    before = harness.router.choose(PROMPT)
    for which in range(200):
        harness.router.affinity.remember(f"s{which}", SessionRoute(f"{before.prefill_id}-1", f"{before.decode_id}-1"))
    after = harness.router.choose(PROMPT)
    assert (after.prefill_id, after.decode_id) == (before.prefill_id, before.decode_id)


def test_a_worker_that_joins_gets_as_many_new_sessions_as_its_peers() -> None:
    harness, asked = Harness(), replace(PROMPT, hand_over="always")
    for name in [f"{role}{number}" for role in "dp" for number in range(3, NUM_WORKERS)]:
        harness.registry.deregister(name, f"{name}-1")
    begin(harness, 90, asked)
    harness.add("d-new", DECODE, "h0")
    harness.add("p-new", PREFILL, "h0")
    begun = begin(harness, 40, asked, "later")
    assert len(begun) == 8 and max(begun.values()) <= 20, "no flood to one that is new, or that starts again and again"


def test_a_worker_that_had_more_than_its_share_gets_no_new_session() -> None:
    harness = Harness()
    for which in range(200):
        harness.router.affinity.remember(f"s{which}", SessionRoute("p0-1", "d0-1"))
    begun = begin(harness, 60, replace(PROMPT, hand_over="always"), "new")
    assert "d0" not in begun and "p0" not in begun


def test_where_load_and_sessions_leave_no_worker_the_costs_decide() -> None:
    harness = Harness()
    for number in range(2, NUM_WORKERS):
        harness.registry.deregister(f"d{number}", f"d{number}-1")
    for which in range(100):
        harness.router.affinity.remember(f"s{which}", SessionRoute("", "d0-1"))
    harness.send("d1", 0, 10_000)
    assert harness.names(replace(PROMPT, block_hashes=(), session_id="new", hand_over="never")) == {"d0": 40}


def test_a_session_stays_at_its_worker_while_another_is_a_few_milliseconds_sooner() -> None:
    harness = Harness()
    harness.router.affinity.remember("s", SessionRoute("", "d11-1"))
    for num_tokens, stays in ((100, True), (10_000, False)):
        harness.send("d11", 0, num_tokens)
        assert (harness.router.choose(LOCAL).decode_id == "d11") is stays


def test_a_session_that_another_gateway_has_moved_goes_where_most_of_it_is() -> None:
    """A gateway remembers where it sent the session last, and block events tell that another worker has more."""
    harness = Harness()
    harness.router.affinity.remember("s", SessionRoute("", "d11-1"))
    harness.learn("d11", 32)
    assert harness.names(LOCAL) == {"d11": 40}
    harness.learn("d3", 60)
    assert harness.names(LOCAL) == {"d3": 40}
    harness.learn("d11", 60)
    assert harness.names(LOCAL) == {"d11": 40}, "both have as much: the session stays"


def test_a_session_that_another_gateway_began_goes_where_half_of_it_is_though_others_are_as_soon() -> None:
    harness = Harness()
    harness.learn("d3", 40)
    harness.send("d3", 1_250)  # its queue takes longer than what it has cached saves
    assert "d3" not in harness.names(replace(LOCAL, session_id=""))
    assert harness.names(LOCAL) == {"d3": 40}
    harness.learn("d5", 40)
    harness.send("d5", 1_250)
    assert {"d3", "d5"}.isdisjoint(harness.names(LOCAL)), "two have as much of it: the costs decide"


def test_what_most_sessions_begin_with_keeps_none_at_a_worker() -> None:
    harness = Harness()
    harness.learn("d3", 20)
    harness.send("d3", 0, 10_000)
    assert "d3" not in harness.names(replace(LOCAL, session_id="new"))


def test_sessions_are_forgotten_oldest_first() -> None:
    affinity = SessionAffinity(max_sessions=2)
    for session_id in ("a", "b", "a", "c", ""):
        affinity.remember(session_id, SessionRoute("", session_id))
    assert len(affinity) == 2
    assert (affinity.of("b"), affinity.of("a"), affinity.of("")) == (None, SessionRoute("", "a"), None)


def test_a_session_comes_to_a_worker_once_and_leaves_another() -> None:
    affinity, told = SessionAffinity(), list[tuple[str, str]]()
    affinity.listen(lambda came, left: told.append((came, left)))
    affinity.remember("a", SessionRoute("p", "d"))
    affinity.remember("a", SessionRoute("p", "d"))
    assert told == [("d", ""), ("p", "")], "a turn is no arrival"
    affinity.remember("a", SessionRoute("", "e"))
    assert told[2:] == [("e", "d")] and affinity.of("a") == SessionRoute("p", "e"), "its prompts may go there again"


def test_older_sessions_count_for_less_and_a_worker_that_starts_counts_as_its_peers() -> None:
    harness = Harness()
    table = harness.router._columns.groups(PROMPT)[0].decodes[0]
    for which in range(64 * NUM_WORKERS):
        harness.router.affinity.remember(f"s{which}", SessionRoute("", f"d{which % NUM_WORKERS}-1"))
    assert set(table.columns[SESSIONS].tolist()) == {64}
    harness.router.affinity.remember("one more", SessionRoute("", "d0-1"))
    assert set(table.columns[SESSIONS].tolist()) == {32, 32.5}
    harness.add("d-new", DECODE, "h0")
    assert table.columns[SESSIONS].tolist()[-1] == 32
    harness.report("d0", harness.load())
    harness.router.affinity.remember("one more", SessionRoute("", "d1-1"))
    assert table.columns[SESSIONS].tolist()[:2] == [31.5, 33], (
        "reports keep the count, and a session that moves takes it"
    )
    harness.registry.deregister("d0", "d0-1")
    harness.router.affinity.remember("one more", SessionRoute("", "d0-1"))
    assert sorted(table.columns[SESSIONS].tolist()) == [32] * (NUM_WORKERS - 1) + [33]
