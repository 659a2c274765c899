"""The gaps between tokens are sampled without bias."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from control_plane.text.telemetry import GAPS_PER_SAMPLE, GapSampler, GenerationMeter
from tandem_runtime import metrics
from tests.scrape import Scrape


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The sampler's clock: the first entry."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    metrics.configure("tandem-test", None)
    yield clock
    metrics.shutdown()


def arrive(sampler: GapSampler, clock: list[float], gaps: list[float]) -> None:
    """A token, and one more after each gap."""
    sampler.arrived()
    for gap in gaps:
        clock[0] += gap
        sampler.arrived()


def test_one_gap_of_each_32_is_measured_and_it_is_the_true_one(now: list[float]) -> None:
    arrive(GapSampler(GenerationMeter().gaps, "m", 3), now, [float(position) for position in range(100)])
    found = Scrape(metrics.exposition())
    name = "tandem_inter_token_latency_seconds"
    assert found.value(f"{name}_count", model="m") == 4
    assert found.value(f"{name}_sum") == 2 + 34 + 66 + 98, "after the 3rd, 35th, 67th and 99th token"


def test_every_gap_is_measured_by_one_of_32_first_positions(now: list[float]) -> None:
    gaps = [0.001 * 2**position for position in range(50)]
    meter = GenerationMeter()
    for first in range(1, GAPS_PER_SAMPLE + 1):
        arrive(GapSampler(meter.gaps, "m", first), now, gaps)
    found = Scrape(metrics.exposition())
    assert found.value("tandem_inter_token_latency_seconds_count") == len(gaps)
    assert found.value("tandem_inter_token_latency_seconds_sum") == pytest.approx(sum(gaps), rel=1e-6)


def test_first_positions_are_spread_over_all_32() -> None:
    metrics.configure("tandem-test", None)
    meter = GenerationMeter()
    firsts = {GapSampler(meter.gaps, "m")._num_left for _ in range(2_000)}
    metrics.shutdown()
    assert firsts == set(range(1, GAPS_PER_SAMPLE + 1))
