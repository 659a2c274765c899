"""A worker reports its pool's sample points to the KV service of its host, through restarts of that service."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import types_pb2 as pb
from tandem_engine.messages import PoolPoints
from tandem_runtime.server import GrpcServer
from tandem_worker import pool_reporter
from tandem_worker.pool_reporter import PoolReporter
from tests.kv_transfer_svc.host import Host, running_host
from tests.tandem_worker.kv_harness import FollowedLink, until

A, B, C = (bytes([number]) * 8 for number in (1, 2, 3))


def points_at(host: Host) -> set[bytes] | None:
    """Return what a KV service knows of the worker's pool; None: it knows of no such pool."""
    places = dict(host.service.points.items())
    return set(places["worker-1"]) if "worker-1" in places else None


async def test_each_kv_service_gets_all_points_first_and_then_changes(tmp_path: Path) -> None:
    async with running_host(tmp_path) as first, running_host(tmp_path) as second:
        link = FollowedLink(first)
        reporter = PoolReporter(link, "worker-1")
        reporter.start()
        # 1. An empty pool is reported too: from now on gateways are told of it.
        await until(lambda: points_at(first) == set())
        reporter.take(PoolPoints(A + B, b""))
        await until(lambda: points_at(first) == {A, B})
        reporter.take(PoolPoints(C, A))
        reporter.take(PoolPoints(A, C))
        reporter.take(PoolPoints(b"", B))
        await until(lambda: points_at(first) == {A})
        # 2. Another service takes over: it gets all, and the first one forgets the pool.
        link.move(second)
        await until(lambda: points_at(second) == {A} and points_at(first) is None)
        reporter.take(PoolPoints(B, A))
        await until(lambda: points_at(second) == {B})
        # 3. The worker ends.
        await reporter.close()
        await until(lambda: points_at(second) is None)
        await link.close()


async def test_a_heartbeat_goes_with_the_reports_and_its_loss_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_reporter, "_HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(pool_reporter, "_REPORT_SECONDS", 0.01)
    numbers, lost = itertools.count(), asyncio.Event()

    def heartbeat() -> cp.HeartbeatRequest:
        load = pb.LoadReport(num_running=next(numbers))
        return cp.HeartbeatRequest(worker_id="w", incarnation="worker-1", load=load)

    async with running_host(tmp_path) as host:
        link = FollowedLink(host)
        reporter = PoolReporter(link, "worker-1")
        reporter.relay(heartbeat, lost.set)
        with host.service.points.read() as reader:
            seen: list[int] = []

            def has_three() -> bool:
                seen.extend(beat.load.num_running for batch in reader.take() for beat in batch.heartbeats)
                return len(seen) >= 3

            reporter.start()
            await until(has_three)
            assert seen == sorted(set(seen)) and not lost.is_set(), "the pool has not changed, and each one is newer"
        reporter.take(PoolPoints(A, b""))
        await until(lambda: points_at(host) == {A})
    async with asyncio.timeout(20):
        await lost.wait()
    await reporter.close()
    await link.close()


async def test_a_service_without_such_reports_is_asked_once(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host:
        old = GrpcServer("127.0.0.1:0", lambda server: None, [])  # knows none of the methods
        host.address, address = await old.start(), host.address
        link = FollowedLink(host)
        with capture_logs() as lines:
            reporter = PoolReporter(link, "worker-1")
            reporter.start()
            await until(lambda: "pool_reports_unsupported" in [line["event"] for line in lines])
        host.address = address
        host.incarnation = "updated"  # the host is upgraded
        link.move(host)
        await until(lambda: points_at(host) == set())
        await reporter.close()
        await link.close()
        await old.stop(0)
