"""Workers hear what waits at a gateway, and that nothing does any more, whenever their streams begin."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import cast

import pytest

from control_plane.dispatch.admission_queue import AdmissionQueue
from control_plane.dispatch.demand_reports import DemandReports
from control_plane.fleet.registry import Worker, WorkerRegistry
from tandem.v1 import types_pb2 as pb
from tests.control_plane.dispatch.test_admission_queue import begin, end, queue_of
from tests.tandem_worker.kv_harness import until

MODEL = "m"


def decode_worker(name: str) -> Worker:
    info = pb.WorkerInfo(worker_id=name, incarnation=name, role=pb.WORKER_ROLE_DECODE)
    info.card.model_id = MODEL
    return Worker(info, pb.LoadReport(), time.monotonic())


class _Workers:
    """All of one model; keeps how many requests each has last heard of."""

    def __init__(self, *names: str) -> None:
        self.all = {name: decode_worker(name) for name in names}
        self.heard: dict[str, int] = {}
        self.num_heard = 0

    def reports(self, queue: AdmissionQueue) -> DemandReports:
        registry = SimpleNamespace(workers_of=lambda model_id: list(self.all.values()))
        return DemandReports(cast(WorkerRegistry, registry), self, queue)

    def report_waiting(self, incarnation: str, waiting: pb.WaitingRequests) -> bool:
        self.num_heard += 1
        self.heard[incarnation] = waiting.num_requests
        return True


async def test_a_worker_that_attaches_hears_what_the_others_have_heard() -> None:
    queue, workers = queue_of(), _Workers("a")
    reports = workers.reports(queue)
    waiting = [await begin(queue, MODEL) for _ in range(3)]
    await until(lambda: workers.heard == {"a": 3})
    workers.all["b"] = decode_worker("b")
    reports.attached(workers.all["b"])
    assert workers.heard == {"a": 3, "b": 3}
    await end(*waiting)
    await until(lambda: workers.heard == {"a": 0, "b": 0})
    reports.close()


async def test_a_worker_that_attaches_before_a_report_does_not_believe_in_requests_that_have_left() -> None:
    queue, workers = queue_of(), _Workers("a")
    reports = workers.reports(queue)
    first = await begin(queue, MODEL)
    await until(lambda: workers.heard == {"a": 1})
    await end(first)
    await until(lambda: workers.heard == {"a": 0})  # the next report is 50 ms away
    second = await begin(queue, MODEL)
    reports.attached(workers.all["a"])
    await end(second)
    third = await begin(queue, MODEL)
    await end(third)
    assert workers.heard == {"a": 0}
    reports.close()


async def test_what_waits_is_told_again_and_a_change_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("control_plane.dispatch.demand_reports._AGAIN_SECONDS", 0.1)
    queue, workers = queue_of(), _Workers("a")
    reports = workers.reports(queue)
    first = await begin(queue, MODEL)
    await until(lambda: workers.num_heard >= 3)
    assert workers.heard == {"a": 1}
    monkeypatch.setattr("control_plane.dispatch.demand_reports._AGAIN_SECONDS", 1e6)
    loop = asyncio.get_running_loop()
    await until(lambda: (timer := reports._models[MODEL].timer) is not None and timer.when() > loop.time() + 1e5)
    second = await begin(queue, MODEL)
    await until(lambda: workers.heard == {"a": 2})
    await end(first, second)
    await until(lambda: workers.heard == {"a": 0})
    await until(lambda: not reports._models)
    reports.close()
