"""A far link delays and paces packets, and each way of a prompt is judged by the other one."""

from __future__ import annotations

import pytest

from benchmarks.far_hosts.__main__ import Asked, Pair, enter
from benchmarks.far_hosts.link import Direction
from benchmarks.lib import namespaces
from benchmarks.lib.command import Outcome


def _asked(ms: float, *, is_handed_over: bool, delay_ms: float = 0.0, num_twice: int = 0) -> Asked:
    return Asked(is_handed_over, ms / 2, ms, delay_ms, 0 if is_handed_over else 100, num_twice)


def _pair(handed_over_ms: float, local_ms: float, *, is_handed_over: bool, **changes: float) -> Pair:
    """Return a pair of 100 tokens; the time of decode includes none of the delay of others."""
    ways = _asked(handed_over_ms, is_handed_over=True), _asked(local_ms, is_handed_over=False, delay_ms=100.0)
    chosen, other = ways if is_handed_over else reversed(ways)
    return Pair(100, int(changes.get("num_cached", 0)), chosen, other, (0.0, 0.0))


def test_a_link_delays_each_packet_and_sends_no_faster_than_its_rate() -> None:
    direction = Direction(-1, -1, delay_seconds=0.04, bytes_per_second=1000.0)
    for packet in (b"a" * 10, b"b" * 20):
        direction.take(packet, 1.0)
    assert direction.next_at == pytest.approx(1.05)
    assert [*direction.arrived(1.049)] == []
    assert [*direction.arrived(1.051)] == [b"a" * 10]
    assert direction.next_at == pytest.approx(1.07), "it has waited for the packet before it"
    assert [*direction.arrived(2.0)] == [b"b" * 20] and direction.next_at is None
    direction.take(b"c" * 10, 3.0)
    assert direction.next_at == pytest.approx(3.05), "the line was free"


def test_a_full_link_loses_packets_and_takes_them_again_once_some_have_arrived() -> None:
    direction = Direction(-1, -1, delay_seconds=0.0, bytes_per_second=1e12)
    packet = bytes(16 << 20)
    for _ in range(5):
        direction.take(packet, 0.0)
    assert sum(map(len, direction.arrived(1.0))) == 64 << 20
    direction.take(packet, 2.0)
    assert sum(map(len, direction.arrived(3.0))) == len(packet)


def test_a_way_costs_its_own_time_and_half_of_what_others_wait() -> None:
    assert _asked(100.0, is_handed_over=False, delay_ms=60.0).cost_ms == 130.0
    near = _pair(145.0, 100.0, is_handed_over=False)  # 150 against 145
    assert not near.is_wrong and near.regret_ms == pytest.approx(5.0)
    assert _pair(130.0, 100.0, is_handed_over=False).is_wrong and not _pair(130.0, 100.0, is_handed_over=True).is_wrong
    assert _pair(170.0, 100.0, is_handed_over=True).regret_ms == pytest.approx(20.0)


def _found(*pairs: Pair) -> tuple[Outcome, list[bool]]:
    outcome = Outcome()
    enter(outcome, pairs)
    return outcome, [target.is_met for target in outcome.targets]


def test_figures_and_targets_are_those_of_the_pairs() -> None:
    pairs = (_pair(400.0, 100.0, is_handed_over=False), _pair(100.0, 250.0, is_handed_over=True, num_cached=90))
    outcome, are_met = _found(*pairs)
    assert are_met == [True, True, True]
    assert (outcome.figures["num_pairs"], outcome.figures["num_handed_over"]) == (2, 1)
    assert outcome.figures["chosen_over_best"] == 1.0
    assert outcome.figures["num_later_for_itself"] == 0
    for_others = _pair(130.0, 100.0, is_handed_over=True)
    assert _found(for_others)[0].figures["num_later_for_itself"] == 1
    assert outcome.figures["always_over_best"] == pytest.approx(500 / 250)
    assert outcome.figures["never_over_best"] == pytest.approx(450 / 250)


def test_a_dear_way_one_way_for_all_and_a_prompt_computed_twice_each_miss_a_target() -> None:
    right, wrong = _pair(400.0, 100.0, is_handed_over=False), _pair(400.0, 100.0, is_handed_over=True)
    outcome, are_met = _found(right, wrong)
    assert are_met == [False, True, True]
    assert (outcome.figures["num_wrongly_handed_over"], outcome.figures["num_wrongly_local"]) == (1, 0)
    assert _found(right)[1] == [True, False, True]
    handed_over = Pair(
        100, 0, _asked(100.0, is_handed_over=True, num_twice=7), _asked(300.0, is_handed_over=False), (0.0, 0.0)
    )
    outcome, are_met = _found(right, handed_over)
    assert are_met == [True, True, False] and outcome.figures["num_computed_twice"] == 7


def test_without_the_command_that_makes_networks_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "install iproute2" in namespaces.why_not()
