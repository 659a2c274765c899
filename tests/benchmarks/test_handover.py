"""The gap is compared with the decode step of the same answers, and the KV wait with TTFT."""

from __future__ import annotations

import pytest

from benchmarks.handover.__main__ import add, side_figures, targets
from benchmarks.lib.arrangements import Workload, one_core_each
from benchmarks.lib.command import Outcome
from benchmarks.lib.measuring import Measured, Sample
from benchmarks.lib.stats import Answer, Trace


def _answer(gaps_ms: list[float], num_cached_tokens: int = 0, num_output_tokens: int | None = None) -> Answer:
    """Sent at 0; token one comes after 100 ms."""
    times = [0.1]
    for gap in gaps_ms:
        times.append(times[-1] + gap / 1000)
    num_tokens = num_output_tokens or len(times)
    return Answer("t", 0.0, tuple(times), times[-1], 32, num_cached_tokens, num_tokens)


def _sample(*answers: Answer, lookup_seconds: float = 0.001) -> Sample:
    steps = {"kv.lookup": (7.0, 7.0 + lookup_seconds)} if lookup_seconds else {}
    return Sample(answers, [Trace((0.0, 1.0), steps)] * len(answers))


def test_the_first_gap_is_no_decode_step() -> None:
    figures = side_figures(_sample(_answer([9, 3]), _answer([15, 5])))
    assert figures["gap_ms.p50"] == pytest.approx(12)
    assert figures["gap_ms.p99"] == pytest.approx(14.94)
    assert figures["decode_step_ms"] == pytest.approx(4)
    assert figures["gap_less_step_ms"] == pytest.approx(8)


def test_the_kv_services_share_is_of_the_time_to_token_one() -> None:
    figures = side_figures(_sample(_answer([4, 4]), _answer([4, 4]), lookup_seconds=0.003))
    assert figures["kv_share_of_ttft"] == pytest.approx(0.03)
    assert figures["kv_wait_ms.p50"] == pytest.approx(3)


def test_targets_are_met_at_their_limits_and_missed_beyond() -> None:
    assert [each.is_met for each in targets("x", {"gap_less_step_ms": 5.0, "kv_share_of_ttft": 0.02})] == [True, True]
    assert [each.is_met for each in targets("x", {"gap_less_step_ms": 5.1, "kv_share_of_ttft": 0.021})] == [False] * 2


def test_answers_that_say_nothing_of_gaps_are_no_figures() -> None:
    with pytest.raises(RuntimeError, match="1 of 2 answers did not come token by token"):
        side_figures(_sample(_answer([4, 4]), _answer([4, 4], num_output_tokens=4)))
    with pytest.raises(RuntimeError, match="16 prompt tokens were cached"):
        side_figures(_sample(_answer([4, 4], num_cached_tokens=16)))


def test_figures_stand_under_shape_length_and_arrangement() -> None:
    samples = {
        "disaggregated": _sample(_answer([8, 4, 4])),
        "aggregated": _sample(_answer([5, 4, 4]), lookup_seconds=0.0),
    }
    outcome = Outcome()
    add(outcome, "0.5b", Measured(Workload(32, 4, 1, 1), {}, {}, 0.03, samples))
    assert outcome.figures["0_5b.p32.disaggregated.gap_less_step_ms"] == pytest.approx(4)
    assert outcome.figures["0_5b.p32.aggregated.kv_share_of_ttft"] == 0
    assert outcome.figures["0_5b.p32.ratio.gap_to_aggregated"] == pytest.approx(1.6)
    assert outcome.figures["0_5b.p32.foreign_cpu_share"] == 0.03
    assert [row[0] for row in outcome.sheets[0].rows] == ["disaggregated", "aggregated"]
    assert [target.is_met for target in outcome.targets] == [True, True]


def test_decode_has_the_same_core_in_both_arrangements() -> None:
    apart, together = one_core_each()
    assert apart.hands_over and not together.hands_over
    assert apart.environment["TANDEM_DECODE_CPUS"] == together.environment["TANDEM_DECODE_CPUS"]
    assert apart.environment["TANDEM_PREFILL_CPUS"] != apart.environment["TANDEM_DECODE_CPUS"]


def test_prompts_of_another_length_are_other_prompts() -> None:
    assert len({Workload(size, 16, concurrency, 1).seed for size in (32, 128, 2048) for concurrency in (1, 8)}) == 6
