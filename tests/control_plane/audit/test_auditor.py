"""The auditor reads all services, reports each finding with its place, and survives failures."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from control_plane.audit import auditor as audit_module
from control_plane.audit import gauges
from control_plane.audit.auditor import AuditReport
from control_plane.audit.checks import KINDS, suspicions
from control_plane.audit.snapshot import Snapshot
from control_plane.audit.suspicion import Suspicion
from control_plane.fleet.registry import WorkerRegistry
from control_plane.fleet.status import FleetStatus
from tandem.v1.tables_pb2 import RegionRow
from tandem_runtime import metrics
from tests.control_plane.audit.audited_services import auditing, scripted_service
from tests.control_plane.scripted_worker import kv_load, kv_service
from tests.control_plane.worker_rows import worker_rows
from tests.kv_transfer_svc.host import until
from tests.otlp_sink import OtlpSink


def region(num_bytes: int) -> RegionRow:
    return RegionRow(region_id="region", owner_incarnation="nobody", num_bytes=num_bytes)


async def test_an_orphan_is_named_where_it_is_until_it_is_gone() -> None:
    registry = WorkerRegistry(3.0, 5.0)
    async with scripted_service(registry) as kv, auditing(registry) as auditor:
        assert (await auditor.verdict()).findings == ()
        kv.tables.regions.append(region(1 << 20))
        assert (await auditor.audit()).orphan_bytes == 0
        report = await auditor.verdict()
        assert report.orphan_bytes == 1 << 20
        assert report.by_service_and_kind() == {("kv-0", "orphaned_region"): 1 << 20}
        (row,) = await worker_rows(FleetStatus(registry, auditor.orphans_of))
        (orphan,) = row["orphans"]
        assert (orphan["name"], orphan["num_bytes"], orphan["what"]) == ("region", 1 << 20, KINDS["orphaned_region"])
        kv.tables.ClearField("regions")
        assert (await auditor.audit()).findings == ()
        assert (await worker_rows(FleetStatus(registry, auditor.orphans_of)))[0]["orphans"] == []


async def test_one_that_does_not_answer_neither_stops_nor_delays_the_audit_of_the_others() -> None:
    registry = WorkerRegistry(3.0, 5.0)
    async with (
        scripted_service(registry) as kv,
        scripted_service(registry, "kv-1") as hangs,
        auditing(registry, "kv-0", "kv-1") as auditor,
    ):
        hangs.may_answer.clear()
        registry.register(kv_service("kv-2", "127.0.0.1:1"), kv_load())
        kv.tables.regions.append(region(64))
        report = await auditor.verdict()
        assert (report.orphan_bytes, report.num_answered, sorted(report.unanswered)) == (64, 1, ["kv-1", "kv-2"])
        hangs.may_answer.set()


async def test_another_life_at_the_same_address_is_not_believed() -> None:
    registry = WorkerRegistry(3.0, 5.0)
    async with scripted_service(registry) as kv, auditing(registry) as auditor:
        kv.tables.incarnation = "kv-0-next-life"
        assert "kv-0-next-life" in (await auditor.audit()).unanswered["kv-0"]


async def test_audits_go_on_by_themselves_and_never_where_they_are_turned_off() -> None:
    registry = WorkerRegistry(3.0, 5.0)
    async with scripted_service(registry) as kv:
        kv.tables.regions.append(region(64))
        async with auditing(registry, audit_seconds=0.05) as auditor, auditing(registry, audit_seconds=0) as off:
            tasks = [asyncio.create_task(each.run()) for each in (auditor, off)]
            await until(lambda: auditor.report.orphan_bytes == 64)
            assert off.report == AuditReport()
            assert not any(task.done() for task in tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_bug_in_an_audit_does_not_end_the_audits(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = WorkerRegistry(3.0, 5.0)
    async with scripted_service(registry) as kv, auditing(registry, audit_seconds=0.01) as auditor:
        kv.tables.regions.append(region(64))
        real, num_calls = auditor._table_reader.read, 0

        async def broken(workers: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 1:
                raise ZeroDivisionError
            return await real(workers)

        monkeypatch.setattr(auditor._table_reader, "read", broken)
        task = asyncio.create_task(auditor.run())
        await until(lambda: auditor.report.orphan_bytes == 64)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_loop_goes_on_while_the_tables_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    registry, compares, may_end = WorkerRegistry(3.0, 5.0), threading.Event(), threading.Event()

    def slow(snapshot: Snapshot) -> list[Suspicion]:
        compares.set()
        assert may_end.wait(30), "the loop waits for the comparison"
        return list(suspicions(snapshot))

    monkeypatch.setattr(audit_module, "suspicions", slow)
    async with scripted_service(registry) as kv, auditing(registry) as auditor:
        kv.tables.regions.append(region(64))
        audit = asyncio.create_task(auditor.audit())
        await until(compares.is_set)
        may_end.set()
        assert (await audit).num_suspicions == 1


async def test_orphans_and_silence_reach_the_collector() -> None:
    report = AuditReport(unanswered={"kv-1": "gone"})
    try:
        async with OtlpSink() as sink:
            metrics.configure("tandem-control", sink.endpoint)
            gauges.export(lambda: report)
            await asyncio.to_thread(metrics.shutdown)
            names = {f"tandem.kv.{name}" for name in ("orphan_bytes", "audit.unanswered", "audit.left_out")}
            await sink.wait_for(lambda it: names <= it.metric_names)
    finally:
        metrics.shutdown()
