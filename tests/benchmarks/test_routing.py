"""Each fleet of the routing benchmark has its own figures and target, and a short run completes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.lib.command import Outcome
from benchmarks.routing import __main__ as routing
from benchmarks.routing.__main__ import Fleet, Size, enter, in_quiet_moments


def test_each_target_is_met_or_missed_by_its_own_figure() -> None:
    outcome = Outcome()
    enter(outcome, [], Size(10, 1, 1_000, 2), [0.1, 0.2], [0.1, 0.1])
    enter(outcome, [], Size(20, 1, 1_000, 2), [0.1, 0.4], [0.2, 0.2])
    assert [target.is_met for target in outcome.targets] == [True, False]
    assert outcome.figures["20w_1m_1k_p50_ms"] == pytest.approx(0.25)


def test_a_decision_counts_as_undisturbed_between_two_loops_that_were() -> None:
    loops = [1.0, 1.0, 1.05, 1.2, 1.0, 0.9, 3.0, 1.0, 1.0, 1.0]
    assert in_quiet_moments([*range(10)], loops) == [1, 2, 5, 8, 9]
    outcome = Outcome()
    enter(outcome, [], Size(10, 1, 1_000, 2), [0.1, 0.2, 0.4], [1.0, 1.0, 9.0])
    assert outcome.figures["10w_1m_1k_quiet_p99_ms"] == 0.2
    assert outcome.figures["10w_1m_1k_quiet_share"] == pytest.approx(1 / 3)
    assert not outcome.targets[0].is_met  # a disturbed decision counts, too


def test_half_of_the_prompts_are_known_and_what_is_sent_ends() -> None:
    fleet = Fleet(Size(4, 1, 20_000, 1))
    requests = [fleet.request(number) for number in range(40)]
    routes = []
    for request in requests:
        routes.append(fleet.router.choose(request))
        fleet.sent(request, routes[-1])
    assert [route.expects_cached for route in routes] == [False, True] * 20
    assert fleet.router.in_flight.answers.total() == 8


def test_a_short_run_completes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "QUICK", (Size(4, 2, 2_000, 20),))
    assert routing.main(["--quick", "--json", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert 0 < figures["4w_2m_2k_p50_ms"] <= figures["4w_2m_2k_p99_ms"]
