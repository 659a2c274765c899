"""The percentiles of a client and of a scrape are compared as they are, and a short run completes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.lib.command import Outcome
from benchmarks.percentiles import __main__ as percentiles
from benchmarks.percentiles.__main__ import Load, enter
from tests.scrape import Scrape

LOAD = Load(0.5, 4, 1)
NAME = "gen_ai_server_time_to_first_token_seconds"


def _scrape(*counts: int) -> Scrape:
    """Return a histogram with so many observations up to 0.5, 1 and 2 seconds."""
    labels = f'gen_ai_response_model="{LOAD.model}"'
    buckets = zip(("0.5", "1", "2", "+Inf"), (*counts, counts[-1]), strict=True)
    lines = [f"# TYPE {NAME} histogram", *(f'{NAME}_bucket{{{labels},le="{le}"}} {count}' for le, count in buckets)]
    return Scrape(
        "\n".join([*lines, f"{NAME}_count{{{labels}}} {counts[-1]}", f"{NAME}_sum{{{labels}}} 1", ""]).encode()
    )


def test_what_was_counted_before_is_left_out_and_the_worst_difference_is_judged() -> None:
    found = _scrape(3, 7, 7).since(_scrape(3, 3, 3))
    outcome = Outcome()
    enter(outcome, {LOAD: [0.75] * 4}, found)
    assert outcome.figures["0.5s.p50.ratio"] == pytest.approx(1.0)
    assert outcome.figures["worst_difference"] == pytest.approx(1 / 3, abs=0.02)
    assert not outcome.targets[0].is_met


def test_requests_that_the_gateway_did_not_count_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="4 requests were asked, 3 are counted"):
        enter(Outcome(), {LOAD: [0.75] * 4}, _scrape(0, 3, 3))


def test_a_short_run_has_a_ratio_for_every_percentile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(percentiles, "QUICK", (Load(0.01, 8, 2), Load(0.05, 8, 4)))
    assert percentiles.main(["--quick", "--json", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert {f"{median}s.p{quantile}.ratio" for median in ("0.01", "0.05") for quantile in (50, 90, 95, 99)} <= set(
        figures
    )
