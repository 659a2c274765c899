"""Each alert's fault, injected into real processes: a real Prometheus shows the alert, and its end after the repair.

The rules are those of production with short windows. `python -m tests.alerts` does the same several times and prints
seconds.
"""

from __future__ import annotations

import pytest

from infra.observability.alerts import alerts
from infra.observability.pace import PRODUCTION
from tests.alerts.faults import CERTIFICATES, DEVICE_ERRORS, FAULTS, THROTTLED, Fault
from tests.alerts.scene import Scene
from tests.system.fleet import until

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.services, pytest.mark.timeout(180)]


async def test_metrics_beyond_loopback_are_read_over_tls_with_the_fleets_authorities(scene: Scene) -> None:
    read: set[tuple[str, str]] = set()

    async def are_all_read() -> bool:
        targets = await scene.prometheus.targets()
        read.update((each["labels"]["role"], each["scrapeUrl"].partition(":")[0]) for each in targets)
        return len(targets) == 5 and all(each["health"] == "up" for each in targets)

    await until(are_all_read, 20, lambda: f"read are {read}")
    loopback = {(role, "http") for role in ("gateway", "kv", "prefill", "decode")}
    assert read == {*loopback, ("decode", "https")}


async def test_errors_and_heat_of_a_device_are_seen(scene: Scene) -> None:
    for alert, labels in [*DEVICE_ERRORS, THROTTLED]:
        await scene.prometheus.fires(alert, labels)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
async def test_a_fault_raises_its_alerts_and_they_end_after_the_repair(scene: Scene, fault: Fault) -> None:
    for alert, labels in fault.alerts:
        await scene.prometheus.is_quiet(alert, labels)
    async with fault.inject(scene):
        for alert, labels in fault.alerts:
            await scene.prometheus.fires(alert, labels)
    for alert, labels in [*fault.alerts, *fault.ended]:
        await scene.prometheus.is_quiet(alert, labels)


async def test_errors_of_a_device_are_an_alert_until_they_are_old(scene: Scene) -> None:
    for alert, labels in DEVICE_ERRORS:
        await scene.prometheus.has_fired_and_ended(alert, labels, seconds=15)
        await scene.prometheus.is_quiet(alert, labels)


async def test_a_certificate_that_is_not_renewed_yet_is_an_alert_until_it_is(scene: Scene) -> None:
    for alert, labels in CERTIFICATES:
        await scene.prometheus.has_fired_and_ended(alert, labels, seconds=60)


def test_every_alert_has_a_fault() -> None:
    raised = {alert for fault in FAULTS for alert, _ in fault.alerts}
    raised |= {alert for alert, _ in [*DEVICE_ERRORS, THROTTLED, *CERTIFICATES]}
    assert raised == {alert.name for alert in alerts(PRODUCTION)}
