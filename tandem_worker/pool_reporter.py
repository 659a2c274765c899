"""Reports which sample points and ends the engine's pool has to the KV service of the host, which tells gateways.

A stream begins with all points; changes follow, at most four times a second. Each second it carries a heartbeat of this
worker, too: a gateway gets those of a host in one message. A KV service of a release without such
reports is not asked again; gateways learn from requests then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import kv_transfer_pb2 as kv
from tandem_engine import messages
from tandem_engine.scheduling.sample_points import NUM_KEY_BYTES
from tandem_runtime.errors import TandemError, Unsupported
from tandem_runtime.log import get_logger
from tandem_runtime.tasks import pause_seconds, supervised
from tandem_worker.kv_link import KvLink, lost_is_unavailable

log = get_logger(__name__)

_REPORT_SECONDS = 0.25
_HEARTBEAT_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 2.0


class PoolReporter:
    """Keeps the points of one pool, and one stream to the KV service; every method runs on the event loop."""

    def __init__(self, link: KvLink, incarnation: str) -> None:
        self._link = link
        self._incarnation = incarnation
        self._points: dict[bytes, None] = {}
        self._pending: dict[bytes, bool] = {}
        """Since the last report: whether a point is there now."""
        self._changed = asyncio.Event()
        self._heartbeat: Callable[[], cp.HeartbeatRequest] | None = None
        self._on_lost: Callable[[], None] = lambda: None
        self._reporting: asyncio.Task[None] | None = None

    def relay(self, heartbeat: Callable[[], cp.HeartbeatRequest], on_lost: Callable[[], None]) -> None:
        """Send a heartbeat each second, too; `on_lost` is called when the KV service takes no more of them."""
        self._heartbeat, self._on_lost = heartbeat, on_lost

    def start(self) -> None:
        """Begin to report: the engine is loaded, and will tell of its pool."""
        loop = supervised("pool-report", self._run, longest_pause_seconds=_LONGEST_PAUSE_SECONDS)
        self._reporting = asyncio.create_task(loop, name="pool-report")

    def take(self, points: messages.PoolPoints) -> None:
        """Take in what a step has changed."""
        for key in _keys(points.evicted):
            self._points.pop(key, None)
            self._pending[key] = False
        for key in _keys(points.stored):
            self._points[key] = None
            self._pending[key] = True
        self._changed.set()

    async def close(self) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
            await asyncio.gather(self._reporting, return_exceptions=True)

    async def _run(self) -> None:
        num_failures = 0
        while True:
            client, _ = await self._link.wait_client()
            try:
                with lost_is_unavailable():
                    await client.report_pool(self._reports())
            except Unsupported:
                log.info("pool_reports_unsupported", address=client.address)
                await self._link.wait_gone(client)
            except TandemError as error:
                num_failures += 1
                log.debug("pool_report_interrupted", error=error.message)
                self._on_lost()
            await asyncio.sleep(pause_seconds(max(1, num_failures), _LONGEST_PAUSE_SECONDS))

    async def _reports(self) -> AsyncIterator[kv.PoolReport]:
        self._pending.clear()
        loop = asyncio.get_running_loop()
        report = kv.PoolReport(incarnation=self._incarnation, is_whole=True, stored=b"".join(self._points))
        beat_at = loop.time()
        while True:
            self._changed.clear()
            if self._heartbeat is not None and loop.time() >= beat_at:
                report.heartbeat.CopyFrom(self._heartbeat())
                beat_at = loop.time() + _HEARTBEAT_SECONDS
            yield report
            await asyncio.sleep(_REPORT_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(beat_at if self._heartbeat is not None else None):
                    await self._changed.wait()
            pending, self._pending = self._pending, {}
            stored = b"".join(key for key, is_stored in pending.items() if is_stored)
            evicted = b"".join(key for key, is_stored in pending.items() if not is_stored)
            report = kv.PoolReport(incarnation=self._incarnation, stored=stored, evicted=evicted)


def _keys(packed: bytes) -> list[bytes]:
    return [packed[start : start + NUM_KEY_BYTES] for start in range(0, len(packed), NUM_KEY_BYTES)]
