"""Gaps, first tokens and goodput are counted as documented, and a run leaves nothing behind."""

from __future__ import annotations

import asyncio
import time

import pytest

from benchmarks.isolation_itl.load import Load, calibrate, observe
from benchmarks.isolation_itl.stats import (
    InTime,
    Observed,
    Prompt,
    all_figures,
    best_chunk,
    figures,
    price_sheet,
    sheets,
    target,
)

_IN_TIME = InTime(ttft_seconds=2.0, itl_seconds=0.1)
_LOAD = Load(
    vocab_size=100,
    num_streams=2,
    stream_prompt_tokens=4,
    stream_tokens=6,
    prompt_tokens=16,
    prompt_answer_tokens=2,
    alone_seconds=0.01,
    loaded_seconds=0.05,
    wait_seconds=5.0,
)


def _observed(streams: list[list[float]], prompts: list[Prompt]) -> Observed:
    """Alone from 0 to 10, loaded from 10 to 20."""
    return Observed(streams, prompts, (0.0, 10.0), (10.0, 20.0), 0.0)


def _prompt(sent: float, *times: float) -> Prompt:
    return Prompt(sent, 2048, times)


def test_a_gap_counts_where_it_ends_and_none_lies_between_two_answers() -> None:
    run = _observed([[1.0, 1.5, 9.0, 10.5], [10.6, 10.8, 20.5]], [])
    assert run.gaps(run.alone) == [0.5, 7.5]
    assert run.gaps(run.loaded) == pytest.approx([1.5, 0.2])


def test_prompts_are_in_time_if_first_token_and_pace_are() -> None:
    prompts = [
        _prompt(10.0, 11.0, 11.1),
        _prompt(12.0, 14.5, 14.6),  # too late
        _prompt(13.0, 14.0, 14.5),  # too slow
        _prompt(14.0, 15.0),
    ]
    found = figures([_observed([[1.0, 2.0, 10.5, 10.55, 10.85]], prompts)], _IN_TIME)
    assert found["prompts_in_time_per_second"] == pytest.approx(0.2)
    assert found["stream_tokens_per_second"] == pytest.approx(0.3)
    assert found["stream_tokens_in_time_per_second"] == pytest.approx(0.1)
    assert found["prompt_tokens_per_second"] == pytest.approx(4 * 2048 / 10)
    assert found["ttft_s.p50"] == pytest.approx(1.0)


def test_prompts_that_are_answered_later_take_that_time() -> None:
    found = figures([_observed([[1.0, 2.0, 10.5, 10.6]], [_prompt(10.0, 30.0)])], _IN_TIME)
    assert found["prompt_tokens_per_second"] == pytest.approx(2048 / 20)


def test_a_prompt_without_an_answer_is_late_for_ever_and_stays_out_of_the_json() -> None:
    found = figures([_observed([[1.0, 2.0, 10.5, 10.6]], [_prompt(10.0)])], _IN_TIME)
    assert (found["ttft_s.p50"], found["num_unanswered_prompts"]) == (float("inf"), 1)
    assert found["prompts_in_time_per_second"] == 0
    assert "x.ttft_s.p50" not in all_figures({"x": found})
    price = price_sheet({"disaggregated": found, "aggregated": found})
    assert price is not None
    assert price.rows[0][4] == "-"


def test_one_prompt_without_an_answer_leaves_the_median_of_the_others() -> None:
    prompts = [_prompt(10.0, 11.0), _prompt(10.0, 12.0), _prompt(10.0)]
    found = figures([_observed([[1.0, 2.0, 10.5, 10.6]], prompts)], _IN_TIME)
    assert (found["ttft_s.p50"], found["ttft_s.p99"]) == (2.0, float("inf"))


def test_runs_of_a_system_count_together() -> None:
    quiet = _observed([[1.0, 2.0, 10.0, 10.1, 10.2]], [_prompt(10.0, 11.0)])
    shaken = _observed([[1.0, 2.0, 10.0, 10.1, 12.1]], [_prompt(10.0, 12.0)])
    found = figures([quiet, shaken], _IN_TIME)
    assert found["num_gaps"] == 6
    assert found["itl_ms.max"] == pytest.approx(8000)
    assert found["stream_tokens_per_second"] == pytest.approx(6 / 20)


def test_the_best_chunk_has_the_shortest_tail_of_those_that_are_soon_enough() -> None:
    by_chunk = {
        32: {"itl_ms.p99": 50.0, "ttft_s.p50": 9.0},
        64: {"itl_ms.p99": 90.0, "ttft_s.p50": 4.0},
        512: {"itl_ms.p99": 500.0, "ttft_s.p50": 2.0},
    }
    assert best_chunk(by_chunk, max_ttft_seconds=5.0) == 64
    assert best_chunk(by_chunk, max_ttft_seconds=10.0) == 32
    assert best_chunk(by_chunk, max_ttft_seconds=1.0) == 512


def test_what_it_wins_and_what_it_costs_stand_in_one_table() -> None:
    apart = figures([_observed([[1.0, 9.9, 10.0, 10.5, 11.0]], [_prompt(10.0, 16.0)])], _IN_TIME)
    together = figures([_observed([[1.0, 9.9, 10.0, 10.25, 12.25]], [_prompt(10.0, 12.0)])], _IN_TIME)
    found = all_figures({"disaggregated": apart, "aggregated": together})
    assert found["ratio.disaggregated_to_aggregated.ttft_s.p50"] == pytest.approx(3.0)
    price = price_sheet({"disaggregated": apart, "aggregated": together})
    assert price is not None
    assert price.rows == [("aggregated", "0.25", "0.25", "2.00", "3.00", "1.00")]
    assert price_sheet({"disaggregated": apart}) is None
    latencies, throughputs = sheets("t", {"disaggregated": apart})
    assert len(latencies.head) == len(latencies.rows[0])
    assert len(throughputs.head) == len(throughputs.rows[0])


def test_the_target_is_met_at_its_limit() -> None:
    assert target({"itl_p99_to_p50": 1.5}).is_met
    assert not target({"itl_p99_to_p50": 1.51}).is_met


class _Client:
    """Answers a token per turn of the event loop; long prompts not at all where it `is_deaf`."""

    def __init__(self, is_deaf: bool = False) -> None:
        self._is_deaf = is_deaf
        self.num_open = 0
        self.lengths: list[int] = []

    async def answer(self, prompt: list[int], num_tokens: int, times: list[float]) -> None:
        self.num_open += 1
        self.lengths.append(len(prompt))
        try:
            if self._is_deaf and len(prompt) == _LOAD.prompt_tokens and len(self.lengths) > _LOAD.num_warm_ups:
                await asyncio.Event().wait()
            for _ in range(num_tokens):
                await asyncio.sleep(0)
                times.append(time.perf_counter())
        finally:
            self.num_open -= 1


async def test_streams_go_on_while_prompts_arrive_at_even_intervals_and_nothing_is_left() -> None:
    client = _Client()
    run = await observe(client, _LOAD, interval_seconds=0.02, seed=1)
    assert len(run.prompts) == 3  # at 0, 0.02 and 0.04 of 0.05 seconds
    assert all(len(prompt.token_times) == 2 for prompt in run.prompts)
    assert run.prompts[1].sent - run.prompts[0].sent >= 0.015
    assert len(run.streams) > _LOAD.num_streams  # those that ended began again
    assert run.alone[1] <= run.loaded[0]
    assert client.num_open == 0


async def test_prompts_that_are_never_answered_are_given_up() -> None:
    client = _Client(is_deaf=True)
    load = Load(**{**vars(_LOAD), "wait_seconds": 0.0})
    run = await observe(client, load, interval_seconds=0.02, seed=1)
    assert [prompt.token_times for prompt in run.prompts] == [(), (), ()]
    assert client.num_open == 0


async def test_the_rate_is_measured_with_one_prompt_at_a_time() -> None:
    client = _Client()
    seconds = await calibrate(client, _LOAD, num_prompts=3)
    assert len(seconds) == 3
    assert client.lengths == [16, 16, 16]


async def test_a_stream_that_breaks_ends_the_run() -> None:
    class Broken(_Client):
        async def answer(self, prompt: list[int], num_tokens: int, times: list[float]) -> None:
            await super().answer(prompt, num_tokens, times)
            if len(prompt) == _LOAD.stream_prompt_tokens:
                raise RuntimeError("the server is gone")

    client = Broken()
    with pytest.raises(RuntimeError, match="a stream broke off"):
        await observe(client, _LOAD, interval_seconds=0.02, seed=1)
    assert client.num_open == 0
