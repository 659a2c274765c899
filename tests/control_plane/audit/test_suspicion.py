"""A difference becomes an orphan only if it lasts."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from control_plane.audit.checks import suspicions
from control_plane.audit.snapshot import Snapshot
from control_plane.audit.suspicion import Suspicion, Suspicions, orphan_bytes
from tandem.v1.tables_pb2 import (
    ReaderRow,
)
from tests.control_plane.audit.audit_tables import (
    KV,
    handle,
    hold,
    pull,
    service,
    snapshot,
)
from tests.control_plane.scripted_worker import DECODE, PREFILL


def suspicion(name: str = "a", num_bytes: int = 10, **changes: Any) -> Suspicion:
    fields: dict[str, Any] = {"kind": "overdue", "service": "kv", "incarnation": "kv-life", "place": "prefill-life"}
    fields |= {"name": name, "num_bytes": num_bytes, "needs": frozenset({"kv-life"})}
    return Suspicion(**{**fields, **changes})


class Watch:
    """Audits by hand, with a patience of 15 seconds."""

    def __init__(self) -> None:
        self.suspicions = Suspicions()

    def at(self, now: float, *found: Suspicion, silent: tuple[str, ...] = ()) -> list[tuple[str, float, int]]:
        self.suspicions.update(found, frozenset(silent), now, patience_seconds=15.0, gap_seconds=7.0)
        findings = self.suspicions.findings(15.0)
        return [(each.suspicion.name, each.seconds, each.num_bytes) for each in findings]


def test_a_difference_counts_only_once_it_has_outlasted_every_lease() -> None:
    watch = Watch()
    for now in (0, 5, 10, 14.9):
        assert watch.at(now, suspicion()) == []
    assert watch.at(15, suspicion()) == [("a", 15, 10)]
    assert watch.at(20, suspicion()) == [("a", 20, 10)]
    assert watch.at(21) == []


def test_a_difference_that_goes_away_begins_anew() -> None:
    watch = Watch()
    for now in (0, 5, 10):
        assert watch.at(now, suspicion()) == []
    watch.at(12)
    assert [watch.at(now, suspicion()) for now in (14, 20, 26)] == [[], [], []]
    assert watch.at(29, suspicion()) == [("a", 15, 10)]


def test_what_nobody_looked_at_for_long_begins_anew_unless_it_is_known_already() -> None:
    watch = Watch()
    assert [watch.at(now, suspicion()) for now in (0, 1, 20)] == [[], [], []]
    assert [watch.at(now, suspicion()) for now in (26, 32)] == [[], []]
    assert watch.at(38, suspicion()) == [("a", 18, 10)]
    assert watch.at(90, suspicion()) == [("a", 70, 10)]


def test_silence_neither_confirms_nor_clears() -> None:
    watch = Watch()
    for now in (0, 5, 10):
        watch.at(now, suspicion())
    assert watch.at(16, silent=("kv-life",)) == []
    assert watch.at(17, suspicion()) == [("a", 17, 10)]
    assert watch.at(18, silent=("kv-life",)) == [("a", 17, 10)]
    assert watch.at(19) == []


def test_of_what_varies_the_least_that_there_was_all_the_while_counts() -> None:
    watch = Watch()
    for now, num_bytes in ((0, 50), (5, 20), (10, 90)):
        watch.at(now, suspicion(num_bytes=num_bytes))
    assert watch.at(15, suspicion(num_bytes=70)) == [("a", 15, 20)]


def test_nothing_is_counted_twice() -> None:
    watch = Watch()
    region = suspicion("region", 1000, kind="orphaned_region", place="dead")
    inside = suspicion("in it", 100, kind="owner_gone", place="dead")
    twice = [suspicion("b", 7, kind="unknown_to_kv", service="prefill"), suspicion("b", 7, kind="end_undelivered")]
    for now in (0, 5, 10, 15):
        watch.at(now, region, inside, *twice)
    counted = {each.suspicion.name: num for each, num in orphan_bytes(watch.suspicions.findings(15.0)).items()}
    assert counted == {"region": 1000, "in it": 0, "b": 7}


LAGS = st.floats(0, 3.5)


@given(
    st.lists(st.tuples(st.floats(0, 60), st.floats(0, 40), LAGS, LAGS, LAGS, LAGS, LAGS, LAGS), max_size=12),
    st.lists(st.floats(0.1, 12), min_size=5, max_size=30),
)
def test_a_healthy_fleet_shows_nothing_however_busy_it_is_and_whenever_one_looks(
    lives: list[tuple[float, ...]], gaps: list[float]
) -> None:
    watch, now = Watch(), 0.0
    for gap in gaps:
        now += gap
        assert watch.at(now, *suspicions(_at(now, lives))) == []


def _at(now: float, lives: list[tuple[float, ...]]) -> Snapshot:
    """The tables of a moment. Each party hears of each request's begin and end a little later than the gateway."""
    handles, holds, pulls, running = [], [], [], set()
    for number, (begin, seconds, *lags) in enumerate(lives):
        handle_id, end = bytes([number]) * 16, begin + seconds
        kv, prefill, decode = ((begin + lags[i] <= now < end + lags[i + 3]) for i in range(3))
        if begin <= now < end:
            running |= {("prefill-life", f"q{number}", 0), ("decode-life", f"q{number}-0", 0)}
        reader = ReaderRow(reader_id=f"q{number}-0", incarnation="decode-life")
        names = {"handle_id": handle_id, "request_id": f"q{number}"}
        handles += [handle(**names, readers=[reader])] if kv else []
        holds += [hold(**names)] if prefill else []
        pulls += [pull(handle_id=handle_id, reader_id=f"q{number}-0")] if decode else []
    return snapshot(
        service("kv", KV, handles=handles),
        service("prefill", PREFILL, holds=holds),
        service("decode", DECODE, pulls=pulls),
        running=frozenset(running),
    )
