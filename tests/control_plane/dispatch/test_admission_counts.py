"""What waits and what is refused is counted, with bounded labels."""

from __future__ import annotations

import asyncio

import pytest
from opentelemetry.metrics import CallbackOptions

from control_plane.admission.model_admission import Waiter
from control_plane.dispatch import admission_counts
from control_plane.dispatch.admission_queue import AdmissionQueue
from tandem_runtime import metrics
from tandem_runtime.errors import Overloaded
from tests.control_plane.dispatch.test_admission_queue import begin, end
from tests.control_plane.harness import FULL, harness, new_request
from tests.control_plane.scripted_worker import MODEL, ScriptedWorker, refuse_with
from tests.scrape import Scrape
from tests.tandem_worker.kv_harness import until

OPTIONS = CallbackOptions()


async def test_waiting_requests_are_counted_by_class_and_refusals_by_cause() -> None:
    queue = AdmissionQueue(3, 60.0, 3)
    waiting = [await begin(queue, "m"), await begin(queue, "m", service_class=-1), await begin(queue, "m", "b")]
    found = {(each.attributes["model"], each.attributes["class"]): each.value for each in queue.counts.waiting(OPTIONS)}  # type: ignore[index]
    assert found == {("m", "default"): 2, ("m", "batch"): 1}
    for _ in range(2):
        with pytest.raises(Overloaded):
            await queue.wait(Waiter("m", "c"), Overloaded("full"), 60.0)
    await end(*waiting)
    with pytest.raises(Overloaded):
        await queue.wait(Waiter("m", "c"), Overloaded("full"), 0.0)
    assert {each.value for each in queue.counts.waiting(OPTIONS)} == {0}
    refused = {each.attributes["cause"]: each.value for each in queue.counts.refusals(OPTIONS)}  # type: ignore[index]
    assert refused == {"max_waiting": 2, "waited": 1}


async def test_the_predicted_wait_is_that_of_the_last_request_that_began_to_wait() -> None:
    now = 10.0
    queue = AdmissionQueue(8, 60.0, clock=lambda: now)
    queue.room("m").enter(Waiter("m", "always", cost_ms=750.0), now)
    for _ in range(4):
        now += 1.0
        queue.room("m").let_in(Waiter("m", "a", cost_ms=500.0, order=0), 0.0, now)
    second = await begin(queue, "m", cost_ms=1000.0)
    (predicted,) = queue.counts.predicted(OPTIONS)
    assert predicted.value == pytest.approx(2.0, rel=0.2), "750 and half of 500 ms at 500 ms of devices a second"
    await end(second)
    assert [each.value for each in queue.counts.predicted(OPTIONS)] == [0.0]


async def test_accounts_that_wait_and_how_far_their_counters_are_apart_are_exported_by_class() -> None:
    metrics.configure("tandem-test", None)
    try:
        queue = AdmissionQueue(8, 60.0)
        admission_counts.export([queue], lambda: {("m", "decode"): 3, ("m", "prefill"): 2})
        ahead, behind = Waiter("m", "a", cost_ms=10.0), Waiter("m", "b")
        waiting = [await begin(queue, "m", "a"), await begin(queue, "m", "b"), await begin(queue, "m", "b")]
        queue.room("m").let_in(ahead, 2_500.0, 0.0)
        queue.room("m").let_in(behind, 1_000.0, 0.0)
        found = Scrape(metrics.exposition())
        labels = {"model": "m", "class": "default"}
        assert found.value("tandem_admission_accounts", **labels) == 2
        assert found.value("tandem_admission_counter_spread_seconds", **labels) == pytest.approx(1.5)
        granted = {labels["role"]: value for labels, value in found.series("tandem_admission_granted")}
        assert granted == {"decode": 3, "prefill": 2}
        await end(*waiting)
        found = Scrape(metrics.exposition())
        assert found.value("tandem_admission_accounts", **labels) == 0
        assert found.value("tandem_admission_counter_spread_seconds", **labels) == 0
    finally:
        metrics.shutdown()


async def test_an_explanation_has_how_the_request_stood() -> None:
    full = ScriptedWorker("a", behave=refuse_with(FULL))
    async with harness(full, queue_seconds=60) as here:
        first, second = new_request(request_id="1"), new_request(request_id="2", priority=-1)
        waiting = []
        for number, request in enumerate((first, second), start=1):
            waiting.append(asyncio.create_task(here.dispatcher.submit(request)))
            await until(lambda number=number: here.dispatcher.queue.num_waiting(MODEL) == number)  # type: ignore[misc]
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        standings = [request.history.standing for request in (first, second)]
        assert [(each.service_class, each.num_waiting) for each in standings if each] == [("default", 0), ("batch", 1)]
        assert all(each.cost_ms > 0 for each in standings if each)
