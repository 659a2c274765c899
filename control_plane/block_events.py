"""Reads from the KV service of each host what its store and its workers' pools have, into the router's index.

One stream per KV service, for as long as the service is registered. A stream begins with everything, so a gateway that
starts, or reconnects, soon knows what its neighbours know. Changes of all hosts are taken in together, 20 times a
second. A service of a release without block events is not asked again: the index learns from requests there.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import partial

import numpy as np

from control_plane.fleet.registry import Worker
from control_plane.routing.sample_points import Keys, PlaceChanges, SamplePointIndex
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_engine.scheduling.sample_points import NUM_KEY_BYTES
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.errors import TandemError, Unsupported
from tandem_runtime.kv.client import KvClient
from tandem_runtime.log import get_logger
from tandem_runtime.tasks import TaskSet, Turns, pause_seconds, supervised

log = get_logger(__name__)

_APPLY_SECONDS = 0.05
_MAX_KEYS = 4_096
"""Some 3 ms of work: so many are taken in at once, in a turn of the event loop of their own."""
_LONGEST_PAUSE_SECONDS = 2.0


class BlockEventReader:
    """Follows the block events of all hosts. `changed` is a listener of the registry; all on the event loop."""

    def __init__(self, index: SamplePointIndex, incarnation: str, member: FleetMember | None = None) -> None:
        self._index = index
        self._incarnation = incarnation
        self._member = member
        self._tasks = TaskSet()
        self._following: dict[str, tuple[Worker, asyncio.Task[None]]] = {}
        """The KV service of each host, and the task that reads its events."""
        self._pending: dict[str, list[PlaceChanges]] = {}
        """What was read and is not in the index yet, by host: the changes of one batch of each."""
        self._timer: asyncio.TimerHandle | None = None
        self._turns = Turns()
        self.num_batches = 0

    def changed(self, worker: Worker, is_here: bool) -> None:
        """Take in that a worker is here, has changed or is gone."""
        if worker.role != pb.WORKER_ROLE_KV:
            if not is_here:
                self._apply(worker.info.host_id)
                self._index.forget_pool(worker.incarnation)
            return
        host_id = worker.info.host_id
        following = self._following.get(host_id)
        is_same = following is not None and _service(following[0]) == _service(worker)
        if is_here and not is_same:
            self._stop(host_id)
            loop = supervised(
                "block-events", partial(self._follow, worker), longest_pause_seconds=_LONGEST_PAUSE_SECONDS
            )
            self._following[host_id] = worker, self._tasks.spawn(loop, name=f"block-events-{host_id}")
        elif not is_here and is_same:
            self._stop(host_id)
            self._index.forget_host(host_id)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.cancel()

    def _stop(self, host_id: str) -> None:
        following = self._following.pop(host_id, None)
        if following is not None:
            following[1].cancel()
            self._apply(host_id)
            self._index.stream_ended(host_id)

    async def _follow(self, worker: Worker) -> None:
        """Read a service's events until it has none, or until this task is cancelled."""
        host_id, num_failures = worker.info.host_id, 0
        member, address = self._member, worker.info.address
        expect = member.expected_or_role("kv", worker.worker_id, address) if member is not None else "kv"
        client = KvClient(address, self._incarnation, member=member, expect=expect)
        try:
            while True:
                num_before = self.num_batches
                try:
                    await self._read(client, host_id)
                except Unsupported:
                    log.info("block_events_unsupported", host=host_id, worker=worker.worker_id)
                    return
                except TandemError as error:
                    num_failures = 1 if self.num_batches > num_before else num_failures + 1
                    log.info("block_events_interrupted", host=host_id, worker=worker.worker_id, error=error.message)
                finally:
                    self._apply(host_id)
                    self._index.stream_ended(host_id)
                await asyncio.sleep(pause_seconds(num_failures, _LONGEST_PAUSE_SECONDS))
        finally:
            await client.close()

    async def _read(self, client: KvClient, host_id: str) -> None:
        async with aclosing(client.block_events()) as batches:
            async for batch in batches:
                self.num_batches += 1
                self._take(batch, host_id)
                if self._num_pending(host_id) >= _MAX_KEYS:
                    await self._turns.next()  # the snapshots of many hosts may come at once
                    self._apply(host_id)

    # ------------------------------------------------------------------------------------------------- taking in

    def _take(self, batch: kv.BlockEventBatch, host_id: str) -> None:
        self._apply(host_id)  # what is taken in together has no order
        if batch.is_snapshot:
            self._index.begin_snapshot(host_id)
        for place in batch.places:
            if place.is_gone:
                self._index.forget_pool(place.incarnation)
        self._pending[host_id] = [
            PlaceChanges(place.incarnation, host_id, _keys(place.stored), _keys(place.evicted))
            for place in batch.places
            if not place.is_gone
        ]
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


def _service(worker: Worker) -> tuple[str, str]:
    return worker.incarnation, worker.info.address


def _keys(packed: bytes) -> Keys:
    whole = len(packed) - len(packed) % NUM_KEY_BYTES
    return np.frombuffer(packed[:whole], "<u8")
