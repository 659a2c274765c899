"""Every rule and every panel is evaluated by a real Prometheus, over series that real processes export."""

from __future__ import annotations

import pytest

from tests.alerts.names import all_expressions, dashboard_queries, filled, metric_names
from tests.alerts.scene import Scene
from tests.system.fleet import until

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.services, pytest.mark.timeout(180)]

_OF_FAULTS = {
    "tandem_admission_predicted_wait_seconds",  # somebody waits for room
    "tandem_admission_refusals_total",
    "tandem_admission_waiting",
    "tandem_fleet_ejections_total",  # a worker seems sick
}
"""Names that this fleet exports only once a fault was injected: other tests of this scene do that."""
_NOT_HERE = _OF_FAULTS | {
    "tandem_background_failures_total",  # no background loop fails
    "tandem_class_seams_total",  # all workers are of one numerics class
    "tandem_http_refusals_total",  # nobody exceeds a limit of HTTP
    "tandem_kv_link_bytes_per_second",  # one host
    "tandem_kv_link_errors_total",
    "tandem_kv_link_fallbacks_total",
    "tandem_text_kills_total",  # no body exceeds a bound
    "tandem_worker_calls_total",  # no encode worker
}
"""Names that this fleet has no reason to export. The page of metrics has them, and its own test."""


async def test_all_queries_are_evaluated_over_what_the_fleet_exports(scene: Scene) -> None:
    used = set().union(*(metric_names(filled(each)) for each in all_expressions()))
    missing = used

    async def all_are_there() -> bool:
        nonlocal missing
        missing = used - await scene.prometheus.names()
        return _NOT_HERE - _OF_FAULTS <= missing <= _NOT_HERE

    async with scene.traffic():
        await until(all_are_there, 60, lambda: f"{sorted(missing ^ _NOT_HERE)}")
    for each in all_expressions():
        await scene.prometheus.query(filled(each))
    assert await scene.prometheus.rule_errors() == {}


async def test_every_panel_shows_something(scene: Scene) -> None:
    """A query whose two sides have different labels is no error, and has no series."""
    empty = [each for each in dashboard_queries() if not metric_names(filled(each[1])) & _NOT_HERE]

    async def none_is_empty() -> bool:
        nonlocal empty
        empty = [each for each in empty if not await scene.prometheus.query_range(filled(each[1]), 120)]
        return not empty

    async with scene.traffic():
        await until(none_is_empty, 60, lambda: f"{empty}")


@pytest.mark.parametrize(("model", "role"), [("@tandem/demo|other", "prefill|decode"), ("no such model", "none")])
async def test_every_panel_takes_what_the_variables_hold(scene: Scene, model: str, role: str) -> None:
    for _, query in dashboard_queries():
        await scene.prometheus.query(filled(query, model, role))
