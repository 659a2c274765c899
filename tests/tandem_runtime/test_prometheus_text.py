"""What Prometheus reads of a process is what the process measured."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tandem_runtime import metrics, prometheus_text
from tandem_runtime.metric_reader import SnapshotReader
from tests.scrape import Scrape


@pytest.fixture(autouse=True)
def measured() -> Iterator[None]:
    metrics.configure("tandem-test", None)
    yield
    metrics.shutdown()


@pytest.mark.parametrize("median_seconds", [0.01, 0.05, 0.2, 1.0, 5.0, 25.0])
@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.95, 0.99])
def test_a_percentile_of_the_scrape_is_within_five_percent_of_the_true_one(
    median_seconds: float, quantile: float
) -> None:
    """`Scrape.quantile` has the formula of Prometheus' histogram_quantile."""
    histogram = metrics.meter().create_histogram(
        "tandem.test", unit="s", explicit_bucket_boundaries_advisory=metrics.SECONDS
    )
    chance = random.Random(f"{median_seconds} {quantile}")
    values = [min(59.0, max(0.005, chance.lognormvariate(math.log(median_seconds), 0.4))) for _ in range(5_000)]
    for value in values:
        histogram.record(value)
    truth = sorted(values)[math.ceil(quantile * len(values)) - 1]
    found = Scrape(metrics.exposition()).quantile("tandem_test_seconds", quantile)
    assert found == pytest.approx(truth, rel=0.05)


def test_the_boundaries_are_steps_of_a_tenth_from_a_millisecond_to_a_minute() -> None:
    assert (metrics.SECONDS[0], metrics.SECONDS[-1]) == (0.001, 60.0)
    steps = [after / before for before, after in zip(metrics.SECONDS, metrics.SECONDS[1:], strict=False)]
    assert all(1.0 < step <= 1.101 for step in steps)
    assert sum(step > 1.099 for step in steps) >= len(steps) - 1


def test_names_labels_and_values_are_those_of_the_exporter_of_opentelemetry() -> None:
    registry, ours = CollectorRegistry(), SnapshotReader()
    theirs = PrometheusMetricReader(registry=registry, scope_info_enabled=False)
    provider = MeterProvider([theirs, ours])
    _measure(provider.get_meter("tandem"))
    data = ours.read()
    assert data is not None
    assert _samples(b"".join(prometheus_text.render(data))) == _samples(generate_latest(registry))
    provider.shutdown()


def _measure(meter: Meter) -> None:
    for name, unit in (("a.b", "s"), ("tokens", "{token}"), ("c.bytes", "By"), ("d_total", ""), ("e.f", "J")):
        counter = meter.create_counter(name, unit, f'of "{name}"\\ and\nmore')
        counter.add(3, {"model": 'a "quoted"\\ name\nin two lines', "gen_ai.request.model": "x"})
        counter.add(2.5, {"model": "other"})
    for name, unit in (("g.ratio", "1"), ("h", "Cel"), ("i", "W"), ("j.k", "By/s"), ("l.bytes_per_second", "By/s")):
        meter.create_gauge(name, unit).set(-1.5e-7, {"device": 0, "is.set": "True"})
    meter.create_observable_gauge("nothing", [lambda options: []], "s")
    meter.create_observable_gauge("strange", [_strange])
    meter.create_up_down_counter("up.down", "{request}").add(-4)
    histogram = meter.create_histogram("m", "s", explicit_bucket_boundaries_advisory=metrics.SECONDS)
    for value in (0.0, 0.001, 0.4, 60.0, 61.5):
        histogram.record(value)
        histogram.record(value, {"model": "m"})


def _strange(options: CallbackOptions) -> list[Observation]:
    values = {"large": 1e300, "small": -1e-300, "infinite": math.inf}
    return [Observation(value, {"what": name}) for name, value in values.items()]


def _samples(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], tuple[str, float]]:
    """Return type and value of each sample by name and labels, without labels that are empty."""
    return {
        (sample.name, frozenset((key, value) for key, value in sample.labels.items() if value)): (
            family.type,
            sample.value,
        )
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_readings_of_several_threads_are_each_complete() -> None:
    metrics.meter().create_counter("seen").add(1)
    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(lambda _: metrics.exposition(), range(64)))
    assert all(b"seen_total 1" in text.splitlines() for text in texts)


def test_a_process_that_does_not_measure_has_an_empty_scrape() -> None:
    metrics.shutdown()
    assert metrics.exposition() == b""


def test_the_process_itself_is_measured() -> None:
    scrape = Scrape(metrics.exposition())
    assert scrape.value("process_memory_usage_bytes") > 1e6
    assert scrape.value("process_cpu_time_seconds_total") > 0
    assert scrape.value("tandem_process_start_time_seconds") > 1.6e9
    assert scrape.labels("target_info")[0]["service_name"] == "tandem-test"
