"""What the metrics tell of a request is what its explanation tells; no label has a caller's words."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest

from control_plane.accounts.ledger import Closing
from control_plane.explain.explanation import (
    CachedTokens,
    Candidate,
    Explanation,
    Move,
    RouteExplanation,
    Segment,
    Summary,
    UsageExplanation,
)
from control_plane.explain.requests import Requests
from control_plane.explain.timeline import Timeline
from control_plane.generation import Usage
from control_plane.request_metrics import RequestMetrics
from tandem_runtime import metrics
from tandem_runtime.metrics_endpoint import MetricsEndpoint
from tests.scrape import Scrape

MODEL = "@tandem/demo"

SUMMARY = Summary(
    id="r-1",
    account="team-a",
    model=MODEL,
    operation="chat",
    state="finished",
    started_ms=1_700_000_000_000,
    ttft_ms=200.0,
    duration_ms=1_400.0,
    prompt_tokens=100,
    cached_tokens=60,
    completion_tokens=13,
    prefill="prefill-1",
    decode="decode-1",
)
ROUTE = RouteExplanation(
    "handed_over",
    "prefill-1",
    "decode-1",
    "the fastest",
    {"prefill": 100.0, "hand_over": 130.0},
    (
        Candidate("prefill", "prefill-1", 130, 0, 0, 100, 30, CachedTokens(32, 16, 8), is_chosen=True),
        Candidate("prefill", "prefill-2", 140, 10, 0, 100, 30),
        Candidate("decode", "decode-1", 400, 0, 0, 400, cached_tokens=CachedTokens(1, 1, 1), is_chosen=True),
    ),
)
SEGMENTS = (
    Segment("text", "text", 0.0, 10.0),
    Segment("queue", "gateway", 10.0, 25.0),
    Segment("submit", "gateway", 35.0, 5.0),
    Segment("prefill", "prefill", 40.0, 140.0),
    Segment("transport", "gateway", 180.0, 5.0),
    Segment("write", "gateway", 185.0, 15.0),
)
REQUEST = Explanation(
    SUMMARY,
    requested_model="demo",
    segments=SEGMENTS,
    route=ROUTE,
    moves=(Move("hand_over", 150.0, "prefill-1", "decode-1", "route", 4096, 100, 30.0, "shm"),),
    usage=UsageExplanation(100, 40, 60, 40, 16, 4, 13, bytes_moved=4096),
)


class Live:
    def num_by_model(self) -> dict[tuple[str, str], int]:
        return {("queued", MODEL): 3, ("running", MODEL): 5, ("running", "other"): 1}


@pytest.fixture
def recorder() -> Iterator[RequestMetrics]:
    metrics.configure("tandem-test", None)
    yield RequestMetrics(Live())
    metrics.shutdown()


def scrape() -> Scrape:
    return Scrape(metrics.exposition())


def test_a_finished_request_is_in_every_metric_with_the_numbers_of_its_explanation(recorder: RequestMetrics) -> None:
    recorder.ended(REQUEST)
    found = scrape()
    names = {"gen_ai_operation_name": "chat", "gen_ai_request_model": "demo", "gen_ai_response_model": MODEL}
    sums = {
        "gen_ai_server_request_duration_seconds": 1.4,
        "gen_ai_server_time_to_first_token_seconds": 0.2,
        "gen_ai_server_time_per_output_token_seconds": 0.1,
    }
    for name, expected in sums.items():
        assert found.labels(f"{name}_sum") == [names]
        assert found.value(f"{name}_sum") == pytest.approx(expected)
        assert found.value(f"{name}_count") == 1
    model = {"model": MODEL}
    assert found.value("tandem_queue_wait_seconds_sum", **model) == pytest.approx(0.025)
    assert {
        labels["type"]: value for labels, value in found.series("tandem_tokens_total") if labels["model"] == MODEL
    } == {"input": 40, "cached_input": 60, "output": 13}
    assert found.value("tandem_route_decisions_total", mode="handed_over", **model) == 1
    compared = {labels["role"]: value for labels, value in found.series("tandem_route_candidates_total")}
    assert compared == {"prefill": 2, "decode": 1}
    assert found.value("tandem_route_predicted_ttft_seconds_total", **model) == pytest.approx(0.1)
    assert found.value("tandem_route_actual_ttft_seconds_total", **model) == pytest.approx(0.15)
    assert found.value("tandem_route_ttft_ratio_sum", **model) == pytest.approx(1.5)
    assert found.value("tandem_cache_prompt_tokens_total", **model) == 100
    assert found.value("tandem_cache_predicted_tokens_total", **model) == 56
    assert mispredicted(found) == {"missing": 0, "unexpected": 4}
    hits = {labels["tier"]: value for labels, value in found.series("tandem_cache_hit_tokens_total")}
    assert hits == {"pool": 40, "store": 16, "remote": 4}
    assert found.value("tandem_hand_over_size_bytes_total", transport="shm", **model) == 4096
    assert found.value("tandem_hand_over_duration_seconds_sum", transport="shm", **model) == pytest.approx(0.03)
    assert found.series("tandem_refusals_total") == found.series("tandem_migrations_total") == []


def mispredicted(found: Scrape) -> dict[str, float]:
    return {labels["kind"]: value for labels, value in found.series("tandem_cache_mispredicted_tokens_total")}


def test_what_is_found_in_caches_is_compared_with_what_the_router_expected_of_each_prompt(
    recorder: RequestMetrics,
) -> None:
    recorder.ended(REQUEST)  # 56 tokens expected, 60 found
    recorder.ended(replace(REQUEST, usage=UsageExplanation(100, 80, 20, 20, 0, 0, 13)))
    assert mispredicted(scrape()) == {"missing": 36, "unexpected": 4}
    # A request that ended before its prompt was read says nothing about caches.
    recorder.ended(replace(REQUEST, usage=UsageExplanation(100, 0, 0)))
    recorder.ended(replace(REQUEST, usage=UsageExplanation()))
    assert mispredicted(scrape()) == {"missing": 36, "unexpected": 4}


@pytest.mark.parametrize("order", ["text first", "role first", "not a stream"])
def test_the_time_to_a_streams_first_token_is_recorded_once_when_that_token_leaves(
    recorder: RequestMetrics, order: str
) -> None:
    requests = Requests()
    requests.listen(recorder.ended)
    requests.listen_to_first_tokens(recorder.first_token_left)
    timeline = Timeline()
    journal = requests.open(timeline, "r-1", "team-a", "chat")
    journal.model_found(MODEL, "demo")
    journal.admitted()
    marks = {
        "text first": [journal.text_arrived, timeline.written],
        "role first": [timeline.written, journal.text_arrived],
        "not a stream": [journal.text_arrived],
    }
    for mark in marks[order]:
        assert not scrape().series("gen_ai_server_time_to_first_token_seconds_count")
        mark()
    if order != "not a stream":
        assert scrape().value("gen_ai_server_time_to_first_token_seconds_count") == 1
    journal.closed(Closing("r-1", "finished", Usage(1, 1, 0, 2)))
    found = scrape()
    assert found.value("gen_ai_server_time_to_first_token_seconds_count", gen_ai_request_model="demo") == 1
    assert journal.ttft_seconds is not None
    assert found.value("gen_ai_server_time_to_first_token_seconds_sum") == pytest.approx(journal.ttft_seconds)


def test_a_stream_that_ends_before_its_first_token_has_left_counts_once(recorder: RequestMetrics) -> None:
    requests = Requests()
    requests.listen(recorder.ended)
    requests.listen_to_first_tokens(recorder.first_token_left)
    timeline = Timeline()
    journal = requests.open(timeline, "r-1", "team-a", "chat")
    journal.admitted()
    journal.text_arrived()
    journal.closed(Closing("r-1", "cancelled", Usage(1, 1, 0, 1)))
    timeline.written()
    assert scrape().value("gen_ai_server_time_to_first_token_seconds_count") == 1


def test_seams_are_counted_by_model(recorder: RequestMetrics) -> None:
    recorder.ended(REQUEST)
    assert scrape().series("tandem_class_seams_total") == []
    for _ in range(2):
        recorder.ended(replace(REQUEST, usage=replace(REQUEST.usage, seams=3)))
    assert scrape().series("tandem_class_seams_total") == [({"model": MODEL}, 6)]


@pytest.mark.parametrize("median_ms", [12.0, 80.0, 600.0, 4_000.0, 25_000.0])
async def test_percentiles_of_a_real_scrape_are_within_five_percent_of_those_of_the_requests(
    recorder: RequestMetrics, median_ms: float
) -> None:
    """From 5 ms to 60 s. `Scrape.quantile` has the formula of Prometheus' histogram_quantile."""
    chance = random.Random(median_ms)
    times_ms = [min(59_900.0, max(5.0, chance.lognormvariate(math.log(median_ms), 0.35))) for _ in range(3_000)]
    for ttft_ms in times_ms:
        recorder.ended(Explanation(replace(SUMMARY, ttft_ms=ttft_ms, duration_ms=ttft_ms), "demo"))
    endpoint = MetricsEndpoint("127.0.0.1:0")
    await endpoint.start()
    async with httpx.AsyncClient(trust_env=False) as http:
        found = Scrape((await http.get(f"http://{endpoint.address}/metrics")).content)
    await endpoint.stop()
    for quantile in (0.5, 0.9, 0.95, 0.99):
        truth = sorted(times_ms)[math.ceil(quantile * len(times_ms)) - 1] / 1000
        for name in ("gen_ai_server_time_to_first_token_seconds", "gen_ai_server_request_duration_seconds"):
            assert found.quantile(name, quantile, gen_ai_response_model=MODEL) == pytest.approx(truth, rel=0.05)


def test_a_refused_request_is_counted_by_its_error_and_has_no_first_token(recorder: RequestMetrics) -> None:
    refused = replace(SUMMARY, state="failed", error="Overloaded", ttft_ms=None, completion_tokens=0, prefill="")
    recorder.ended(Explanation(refused))
    found = scrape()
    assert found.series("tandem_refusals_total") == [({"cause": "Overloaded"}, 1)]
    assert found.value("gen_ai_server_request_duration_seconds_count", error_type="Overloaded") == 1
    assert found.series("gen_ai_server_time_to_first_token_seconds_count") == []
    assert found.series("tandem_route_decisions_total") == found.series("tandem_tokens_total") == []


def test_an_error_in_the_middle_of_an_answer_is_no_refusal_and_its_tokens_count(recorder: RequestMetrics) -> None:
    recorder.ended(replace(REQUEST, summary=replace(SUMMARY, state="failed", error="Aborted")))
    found = scrape()
    assert found.series("tandem_refusals_total") == []
    assert found.value("gen_ai_server_request_duration_seconds_count", error_type="Aborted") == 1
    assert found.value("gen_ai_server_time_to_first_token_seconds_count") == 1
    assert found.value("tandem_tokens_total", type="output") == 13


def test_a_cancelled_request_is_neither_refused_nor_an_error(recorder: RequestMetrics) -> None:
    recorder.ended(Explanation(replace(SUMMARY, state="cancelled", ttft_ms=None)))
    found = scrape()
    assert found.series("tandem_refusals_total") == []
    [labels] = found.labels("gen_ai_server_request_duration_seconds_count")
    assert "error_type" not in labels


def test_a_migrated_request_is_counted_by_its_cause_and_says_nothing_of_the_prediction(
    recorder: RequestMetrics,
) -> None:
    moved = Move("migration", 300.0, "decode-1", "decode-2", "Unavailable", 0, 5)
    recorder.ended(replace(REQUEST, moves=(*REQUEST.moves, moved)))
    found = scrape()
    assert found.series("tandem_migrations_total") == [({"model": MODEL, "cause": "Unavailable"}, 1)]
    assert found.series("tandem_route_ttft_ratio_count") == []


def test_a_model_that_nobody_knows_is_called_unknown(recorder: RequestMetrics) -> None:
    refused = replace(SUMMARY, model="", state="failed", error="ModelNotFound", ttft_ms=None)
    recorder.ended(Explanation(refused, requested_model=""))
    [labels] = scrape().labels("gen_ai_server_request_duration_seconds_count")
    assert (labels["gen_ai_request_model"], labels["gen_ai_response_model"]) == ("unknown", "unknown")


def test_requests_that_have_not_ended_are_counted_by_model(recorder: RequestMetrics) -> None:
    found = scrape()
    assert found.series("tandem_queue_length") == [({"model": MODEL}, 3)]
    assert found.series("tandem_requests_running") == [({"model": MODEL}, 5), ({"model": "other"}, 1)]
