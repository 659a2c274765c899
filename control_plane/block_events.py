"""Reads from the KV service of each host what its store and its workers' pools have, into the router's index.

One stream per KV service, for as long as the service is registered. A stream begins with everything, so a gateway that
starts, or reconnects, soon knows what its neighbours know. Changes of all hosts are taken in together, 20 times a
second. A service of a release without block events is not asked again: the index learns from requests there. The
auditor's questions for a service's tables go over the same stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from functools import partial

import numpy as np

from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.routing.point_arrays import Keys
from control_plane.routing.sample_points import PlaceChanges, SamplePointIndex
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_engine.scheduling.sample_points import NUM_KEY_BYTES
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.errors import TandemError, Unsupported
from tandem_runtime.kv.client import KvClient, expected_service
from tandem_runtime.kv.table_parts import TableQuestions
from tandem_runtime.log import get_logger
from tandem_runtime.tasks import TaskSet, Turns, pause_seconds, supervised

log = get_logger(__name__)

_APPLY_SECONDS = 0.05
_MAX_KEYS = 4_096
"""Some 0.6 ms of work, 2 ms in numpy: so many are taken in at once, in a turn of the event loop of their own."""
_LONGEST_PAUSE_SECONDS = 2.0
_KEY = np.dtype("<u8")
_NO_KEYS: Keys = np.zeros(0, _KEY)


class BlockEventReader:
    """Follows the block events of all hosts; of the KV service that counts for each, by the registry.

    Listens to the registry; all on the event loop.
    """

    def __init__(
        self,
        index: SamplePointIndex,
        registry: WorkerRegistry,
        incarnation: str,
        member: FleetMember | None = None,
        on_heartbeat: Callable[[cp.HeartbeatRequest, str], object] = lambda beat, host_id: None,
    ) -> None:
        """`on_heartbeat` is called with each heartbeat that a host passes on, and the host's id; it may raise."""
        self._index = index
        self._registry = registry
        self._on_heartbeat = on_heartbeat
        self._refused: set[str] = set()
        """Hosts of which a heartbeat was refused: that is logged once."""
        self._incarnation = incarnation
        self._member = member
        self._tasks = TaskSet()
        self._following: dict[str, _Following] = {}
        """The KV service of each host."""
        self._pending: dict[str, list[PlaceChanges]] = {}
        """What was read and is not in the index yet, by host: the changes of one batch of each."""
        self._timer: asyncio.TimerHandle | None = None
        self._turns = Turns()
        self.num_batches = 0
        """Of all hosts."""
        registry.listen(self._changed)

    def _changed(self, worker: Worker, is_here: bool) -> None:
        """Take in that a worker is here, has changed or is gone."""
        if worker.role != pb.WORKER_ROLE_KV:
            if not is_here:
                self._apply(worker.info.host_id)
                self._index.forget_pool(worker.incarnation)
            return
        host_id = worker.info.host_id
        following, service = self._following.get(host_id), self._registry.kv_service_of(host_id)
        if service is None:
            self._stop(host_id)
            self._index.forget_host(host_id)
        elif following is None or _service(following.worker) != _service(service):
            self._stop(host_id)
            following = self._following[host_id] = _Following(service)
            loop = supervised(
                "block-events", partial(self._follow, following), longest_pause_seconds=_LONGEST_PAUSE_SECONDS
            )
            following.task = self._tasks.spawn(loop, name=f"block-events-{host_id}")

    def questions(self, worker: Worker) -> TableQuestions | None:
        """Return what asks a KV service for its tables on its stream; None: it is not read from here."""
        following = self._following.get(worker.info.host_id)
        return following.tables if following is not None and _service(following.worker) == _service(worker) else None

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.cancel()

    def _stop(self, host_id: str) -> None:
        following = self._following.pop(host_id, None)
        if following is not None:
            assert following.task is not None, "it was started as the service was followed"
            following.task.cancel()
            self._apply(host_id)
            self._index.stream_ended(host_id)

    async def _follow(self, following: _Following) -> None:
        """Read a service's events until it has none, or until this task is cancelled."""
        worker = following.worker
        host_id, num_failures = worker.info.host_id, 0
        address = worker.info.address
        expect = expected_service(self._member, worker.worker_id, address)
        await self._turns.next()  # hundreds of hosts may be new at once
        client = KvClient(address, self._incarnation, member=self._member, expect=expect)
        try:
            while True:
                following.num_batches = 0
                try:
                    await self._read(client, following)
                except Unsupported:
                    log.info("block_events_unsupported", host=host_id, worker=worker.worker_id)
                    following.tables.opened(None)
                    return
                except TandemError as error:
                    num_failures = 1 if following.num_batches else num_failures + 1
                    log.info("block_events_interrupted", host=host_id, worker=worker.worker_id, error=error.message)
                finally:
                    self._apply(host_id)
                    self._index.stream_ended(host_id)
                await asyncio.sleep(pause_seconds(num_failures, _LONGEST_PAUSE_SECONDS))
        finally:
            await client.close()

    async def _read(self, client: KvClient, following: _Following) -> None:
        host_id = following.worker.info.host_id
        try:
            async with aclosing(client.block_events(following.questions)) as batches:
                async for batch in batches:
                    if batch.HasField("tables"):
                        following.tables.received(batch.tables)
                        continue
                    if batch.is_snapshot:
                        following.tables.opened(following.questions.put_nowait if batch.answers_tables else None)
                    self.num_batches += 1
                    following.num_batches += 1
                    for beat in batch.heartbeats:
                        self._take_heartbeat(beat, host_id)
                    if batch.places or batch.is_snapshot:
                        if host_id in self._pending:
                            await self._turns.next()  # the snapshots of many hosts may come at once
                        self._take(batch, host_id)
        finally:
            following.stream_ended()

    # ------------------------------------------------------------------------------------------------- taking in

    def _take_heartbeat(self, beat: cp.HeartbeatRequest, host_id: str) -> None:
        """Pass a heartbeat on; one that is refused ends neither the stream nor the events of others."""
        try:
            self._on_heartbeat(beat, host_id)
        except TandemError as error:
            if host_id not in self._refused:
                self._refused.add(host_id)
                log.warning("heartbeat_refused", host=host_id, worker=beat.worker_id[:64], error=error.message)

    def _take(self, batch: kv.BlockEventBatch, host_id: str) -> None:
        self._apply(host_id)  # what is taken in together has no order
        if batch.is_snapshot:
            self._index.begin_snapshot(host_id)
        changes = self._pending[host_id] = []
        for place in batch.places:
            if place.is_gone:
                self._index.forget_pool(place.incarnation)
            else:
                changes.append(PlaceChanges(place.incarnation, host_id, _keys(place.stored), _keys(place.evicted)))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_APPLY_SECONDS, self._apply_some)

    def _apply(self, host_id: str) -> None:
        """Bring what was read from a host into the index."""
        if pending := self._pending.pop(host_id, None):
            self._index.report(pending)

    def _apply_some(self) -> None:
        """Bring what was read from some hosts into the index, and go on in the next turn if there is more."""
        self._timer = None
        changes: list[PlaceChanges] = []
        num_keys = 0
        while self._pending and num_keys < _MAX_KEYS:
            host_id = next(iter(self._pending))
            num_keys += self._num_pending(host_id)
            changes += self._pending.pop(host_id)
        self._index.report(changes)
        if self._pending:
            self._timer = asyncio.get_running_loop().call_later(0, self._apply_some)

    def _num_pending(self, host_id: str) -> int:
        return sum(len(change.stored) + len(change.evicted) for change in self._pending.get(host_id, ()))


class _Following:
    """The KV service of a host, the task that reads its events, and the questions on the stream that is open now."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.task: asyncio.Task[None] | None = None
        self.questions: asyncio.Queue[pb.AskTables | None] = asyncio.Queue()
        self.tables = TableQuestions(f"KV service {worker.worker_id}")
        self.num_batches = 0
        """On the stream that is open now."""

    def stream_ended(self) -> None:
        """The next stream has its own queue, so a dead one takes no later question."""
        self.questions.put_nowait(None)
        self.questions = asyncio.Queue()
        self.tables.closed()


def _service(worker: Worker) -> tuple[str, str]:
    return worker.incarnation, worker.info.address


def _keys(packed: bytes) -> Keys:
    num_keys = len(packed) // NUM_KEY_BYTES
    return np.frombuffer(packed, _KEY, num_keys) if num_keys else _NO_KEYS
