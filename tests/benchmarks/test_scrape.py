"""The figures of a scrape follow from what loop and reader saw, and a short run completes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.lib.command import Outcome
from benchmarks.scrape import __main__ as scrape
from benchmarks.scrape.__main__ import FULL, Reading, Size, enter
from tandem_runtime import metrics
from tests.scrape import Scrape


def reading(longest: float, num_bytes: int) -> Reading:
    return Reading([0.0001, longest, 0.0002], 0.4, [num_bytes, num_bytes - 1], [0.05, 0.07])


def test_each_target_is_met_or_missed_by_its_own_figure() -> None:
    outcome = Outcome()
    enter(outcome, FULL, [0.0001, 0.001], {"gzip": reading(0.009, 2 << 20), "identity": reading(0.011, 30 << 20)})
    assert [target.is_met for target in outcome.targets] == [True, False, False]
    assert outcome.figures["gzip_longest_ms"] == pytest.approx(9.0)
    assert outcome.figures["gzip_cpu_ms"] == pytest.approx(200.0)


def test_the_gateway_that_is_scraped_has_series_of_every_model_and_none_of_a_worker() -> None:
    metrics.configure("tandem-test", None)
    try:
        scrape.fill(Size(30, 3, 1))
        text = metrics.exposition()
    finally:
        metrics.shutdown()
    found = Scrape(text)
    assert found.value("tandem_fleet_workers") == 30
    models = {
        labels["gen_ai_response_model"] for labels in found.labels("gen_ai_server_time_to_first_token_seconds_sum")
    }
    assert models == {f"organisation/model-{number}-instruct" for number in range(3)}
    assert found.value("tandem_inter_token_latency_seconds_count") > 0
    assert b"worker-" not in text


def test_a_short_run_completes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "QUICK", Size(20, 2, 2))
    assert scrape.main(["--quick", "--json", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert 0 < figures["gzip_bytes"] < figures["identity_bytes"]
