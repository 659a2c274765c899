"""Every rule and every panel is evaluated by a real Prometheus, over series that real processes export."""

from __future__ import annotations

import pytest

from tests.alerts.names import all_expressions, dashboard_queries, filled, metric_names
from tests.alerts.scene import Scene

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.services, pytest.mark.timeout(180)]

_NOT_HERE = {
    "tandem_background_failures_total",  # no background loop fails
    "tandem_class_seams_total",  # all workers are of one numerics class
    "tandem_fleet_ejections_total",  # no worker is sick
    "tandem_http_refusals_total",  # nobody exceeds a limit of HTTP
    "tandem_kv_link_bytes_per_second",  # one host
    "tandem_kv_link_errors_total",
    "tandem_kv_link_fallbacks_total",
    "tandem_text_kills_total",  # no body exceeds a bound
    "tandem_worker_calls_total",  # no encode worker
}
"""Names that this fleet has no reason to export. The page of metrics has them, and its own test."""


async def test_all_queries_are_evaluated_over_what_the_fleet_exports(scene: Scene) -> None:
    async with scene.traffic():
        await scene.prometheus.has_series("tandem_inter_token_latency_seconds_count")
    exported = await scene.prometheus.names()
    used = set().union(*(metric_names(filled(each)) for each in all_expressions()))
    assert used - exported == _NOT_HERE
    for each in all_expressions():
        await scene.prometheus.query(filled(each))
    assert await scene.prometheus.rule_errors() == {}


async def test_every_panel_shows_something(scene: Scene) -> None:
    """A query whose two sides have different labels is no error, and has no series."""
    empty = []
    for panel, query in dashboard_queries():
        if not metric_names(filled(query)) & _NOT_HERE and not await scene.prometheus.query_range(filled(query), 120):
            empty.append((panel, query))
    assert empty == []


@pytest.mark.parametrize(("model", "role"), [("@tandem/demo|other", "prefill|decode"), ("no such model", "none")])
async def test_every_panel_takes_what_the_variables_hold(scene: Scene, model: str, role: str) -> None:
    for _, query in dashboard_queries():
        await scene.prometheus.query(filled(query, model, role))
