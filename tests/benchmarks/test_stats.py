"""The timings of many requests give the right figures."""

from __future__ import annotations

import pytest

from benchmarks.lib.stats import (
    Answer,
    Trace,
    covered_seconds,
    flat,
    latency_figures,
    percentile,
    ratio_figures,
    share_figures,
)


def _answer(*token_times: float, num_output_tokens: int | None = None) -> Answer:
    return Answer(
        trace_id="t",
        sent=10.0,
        token_times=token_times,
        ended=token_times[-1] + 0.01,
        num_prompt_tokens=8,
        num_cached_tokens=0,
        num_output_tokens=num_output_tokens or len(token_times),
    )


@pytest.mark.parametrize(
    ("percent", "value"), [(0, 1.0), (50, 2.5), (95, pytest.approx(3.85)), (100, 4.0)], ids=lambda each: str(each)
)
def test_a_percentile_between_two_values_is_in_proportion(percent: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == value


def test_a_percentile_of_one_value_is_that_value_and_of_none_an_error() -> None:
    assert percentile([7.0], 99) == 7.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_latencies_follow_the_glossary() -> None:
    figures = latency_figures([_answer(10.1, 10.4, 10.5, 10.6)])
    assert figures["ttft_ms.p50"] == pytest.approx(100)
    assert figures["hand_over_gap_ms.p50"] == pytest.approx(300)
    assert figures["itl_ms.p50"] == pytest.approx(100)
    assert figures["tpot_ms.p50"] == pytest.approx(500 / 3)
    assert figures["request_ms.p99"] == pytest.approx(610)


def test_tokens_that_came_as_one_text_do_not_count_as_gaps() -> None:
    whole, merged = _answer(10.1, 10.2, 10.3), _answer(10.1, 10.9, num_output_tokens=3)
    figures = latency_figures([whole, merged])
    assert figures["itl_ms.p99"] == pytest.approx(100)
    assert figures["ttft_ms.p50"] == pytest.approx(100)


def test_overlapping_time_is_covered_once() -> None:
    assert covered_seconds([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.6)]) == pytest.approx(4.0)
    assert covered_seconds([]) == 0.0


def test_shares_are_of_the_whole_time_and_the_rest_is_uncovered() -> None:
    # whole    0---------10
    # compute   1---5
    # transfer     4--6
    # stream           8--10, and on after the gateway has ended its span
    trace = Trace((0.0, 10.0), {"prefill.compute": (1.0, 5.0), "kv.transfer": (4.0, 6.0), "decode.stream": (8.0, 11.0)})
    figures = share_figures([trace])
    assert figures["share.prefill.compute"] == pytest.approx(0.4)
    assert figures["share.kv.transfer"] == pytest.approx(0.2)
    assert figures["share.decode.queue"] == 0.0
    assert figures["step_ms.kv.transfer"] == pytest.approx(2000)
    assert figures["share.uncovered"] == pytest.approx(0.3)


def test_ratios_are_of_medians_and_name_what_they_compare_with() -> None:
    names = ("ttft_ms.p50", "itl_ms.p50", "hand_over_gap_ms.p50", "request_ms.p50")
    apart = dict(zip(names, (30.0, 4.0, 10.0, 90.0), strict=True))
    together = dict(zip(names, (20.0, 4.0, 4.0, 60.0), strict=True))
    assert ratio_figures({"disaggregated": apart, "aggregated": together}) == {
        "ratio.hand_over_gap_to_itl": 2.5,
        "ratio.ttft_to_aggregated": 1.5,
        "ratio.itl_to_aggregated": 1.0,
        "ratio.request_to_aggregated": 1.5,
    }


def test_flat_figures_have_their_prefix_and_six_digits() -> None:
    assert flat("demo.c1", {"itl_ms.p50": 4.123456789}) == {"demo.c1.itl_ms.p50": 4.12346}
