"""A worker reports its pool's sample points to the KV service of its host, through restarts of that service."""

from __future__ import annotations

from pathlib import Path

from structlog.testing import capture_logs

from tandem_engine.messages import PoolPoints
from tandem_runtime.server import GrpcServer
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
