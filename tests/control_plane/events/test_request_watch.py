"""Tests that requests become events: moves one by one, refusals and failures in sums, all within bounds."""

from __future__ import annotations

from typing import Any

from control_plane.events.request_watch import RequestWatch
from control_plane.explain.explanation import ClassCrossing, Explanation, Move, State, Summary


class Recorded:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.now = 100.0
        self.watch = RequestWatch(lambda kind, **values: self.events.append((kind, values)), lambda: self.now)


def _ended(state: State, error: str = "", moves: tuple[Move, ...] = ()) -> Explanation:
    summary = Summary("r1", "acme", "m", "chat", state, 0, None, 1.0, error=error)
    return Explanation(summary, moves=moves)


def test_refusals_are_summed_by_cause_and_recorded_when_their_window_ends() -> None:
    recorded = Recorded()
    for _ in range(500):
        recorded.watch.ended(_ended("failed", "Overloaded"))
    recorded.watch.ended(_ended("failed", "InternalError"))
    recorded.watch.flush()
    assert recorded.events == [], "the window has not ended"
    recorded.now += 10.0
    recorded.watch.flush()
    recorded.watch.flush()
    assert recorded.events == [
        ("requests_refused", {"cause": "Overloaded", "model": "m", "count": 500}),
        ("request_failed", {"cause": "InternalError", "model": "m", "count": 1}),
    ]


def test_the_last_sums_do_not_wait_for_the_end_of_their_window() -> None:
    recorded = Recorded()
    recorded.watch.ended(_ended("failed", "Overloaded"))
    recorded.watch.flush(True)
    assert [kind for kind, _ in recorded.events] == ["requests_refused"]


def test_a_finished_request_is_no_event() -> None:
    recorded = Recorded()
    recorded.watch.ended(_ended("finished", moves=(Move("hand_over", 1.0, "p", "d", "route"),)))
    recorded.now += 60.0
    recorded.watch.flush()
    assert recorded.events == []


def test_a_migration_is_an_event_with_its_request_and_reason() -> None:
    recorded = Recorded()
    recorded.watch.ended(_ended("finished", moves=(Move("migration", 1.0, "d0", "d1", "Unavailable", num_tokens=7),)))
    ((kind, values),) = recorded.events
    assert kind == "request_migrated"
    assert (values["cause"], values["worker"], values["to"]) == ("Unavailable", "d0", "d1")
    assert (values["request_id"], values["num_tokens"]) == ("r1", 7)


def test_a_migration_to_another_class_is_two_events_and_a_hand_over_none() -> None:
    recorded, seam = Recorded(), ClassCrossing(7, "one", "other")
    recorded.watch.ended(_ended("finished", moves=(Move("hand_over", 1.0, "p", "d", "route", seam=seam),)))
    assert recorded.events == []
    recorded.watch.ended(_ended("finished", moves=(Move("migration", 1.0, "d0", "d1", "Draining", seam=seam),)))
    kinds = [kind for kind, _ in recorded.events]
    assert kinds == ["request_migrated", "stream_crossed_class"]
    values = recorded.events[-1][1]
    assert (values["cause"], values["worker"], values["to"], values["request_id"]) == ("Draining", "d0", "d1", "r1")
    assert (values["position"], values["from_class"], values["to_class"]) == (7, "one", "other")


def test_a_storm_of_crossings_is_bounded_like_other_moves() -> None:
    recorded = Recorded()
    crossing = Move("migration", 1.0, "d0", "d1", "Draining", seam=ClassCrossing(7, "one", "other"))
    for _ in range(1_000):
        recorded.watch.ended(_ended("finished", moves=(crossing,)))
    recorded.now += 10.0
    recorded.watch.flush()
    assert len(recorded.events) == 22
    assert [values["count"] for _, values in recorded.events[-2:]] == [990, 990]


def test_a_storm_of_migrations_becomes_a_sum() -> None:
    recorded = Recorded()
    for _ in range(1_000):
        recorded.watch.ended(_ended("finished", moves=(Move("migration", 1.0, "d0", "d1", "Unavailable"),)))
    recorded.now += 10.0
    recorded.watch.flush()
    assert len(recorded.events) == 21
    assert recorded.events[-1][1]["count"] == 980


def test_the_number_of_different_sums_is_bounded() -> None:
    recorded = Recorded()
    for number in range(10_000):
        recorded.watch.ended(_ended("failed", f"Error{number}"))
    recorded.now += 10.0
    recorded.watch.flush()
    assert len(recorded.events) == 200
