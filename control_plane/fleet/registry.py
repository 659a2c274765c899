"""Keeps the registered workers and the last report of each."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import StaleIncarnation
from tandem_runtime.log import get_logger

log = get_logger(__name__)

RESTART_SECONDS = 15.0
"""How long requests wait for a worker that died or drains to be back: about the time to load a model."""

_LONG_PAUSE_SECONDS = 1.0
_MAX_REPLACED = 1024

Listener = Callable[["Worker", bool], None]
"""Called with a worker and whether it is registered, after every change except a heartbeat's load."""


@dataclass(frozen=True, eq=False)
class Worker:
    """A worker as of its last heartbeat; a snapshot that never changes."""

    info: pb.WorkerInfo
    load: pb.LoadReport
    last_heartbeat: float
    """time.monotonic() seconds."""
    is_suspected: bool = False
    info_version: int = 0

    @property
    def worker_id(self) -> str:
        return self.info.worker_id

    @property
    def incarnation(self) -> str:
        return self.info.incarnation

    @property
    def role(self) -> pb.WorkerRole.ValueType:
        return self.info.role

    @property
    def is_usable(self) -> bool:
        """Whether new requests may go there."""
        return self.load.state == pb.WORKER_STATE_READY and not self.is_suspected

    def serves(self, model_id: str) -> bool:
        return self.is_usable and self.info.card.model_id == model_id


class WorkerRegistry:
    """The only writer of the fleet's soft state; on one event loop. `clock` gives monotonic seconds."""

    def __init__(
        self, suspect_seconds: float, gone_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._suspect_seconds = suspect_seconds
        self._gone_seconds = gone_seconds
        self._clock = clock
        self._workers: dict[str, Worker] = {}
        self._listeners: list[Listener] = []
        self._replaced: OrderedDict[str, None] = OrderedDict()
        self._last_sweep = clock()

    def listen(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def workers(self, role: pb.WorkerRole.ValueType | None = None) -> list[Worker]:
        return [worker for worker in self._workers.values() if role is None or worker.role == role]

    def get(self, worker_id: str) -> Worker | None:
        return self._workers.get(worker_id)

    def kv_services(self, host_id: str | None = None) -> list[cp.KvServiceAddress]:
        """Return the addresses of the KV services, of one host or of all."""
        return [
            cp.KvServiceAddress(
                address=worker.info.address,
                incarnation=worker.incarnation,
                host_id=worker.info.host_id,
                socket=worker.info.kv_socket,
            )
            for worker in self.workers(pb.WORKER_ROLE_KV)
            if worker.is_usable and (host_id is None or worker.info.host_id == host_id)
        ]

    def store_of(self, host_id: str) -> Worker | None:
        """Return the KV service of a host if its last report has a block store."""
        for worker in self.workers(pb.WORKER_ROLE_KV):
            if worker.is_usable and worker.info.host_id == host_id and worker.load.kv_service.HasField("store"):
                return worker
        return None

    def register(self, info: pb.WorkerInfo, load: pb.LoadReport, info_version: int = 0) -> None:
        """Add a worker or update it; another incarnation replaces the earlier one for good.

        A call that a later call overtook changes nothing: the worker would otherwise stay in an old state for good.
        Raises StaleIncarnation for a replaced incarnation: two processes of one name would otherwise take turns.
        """
        if info.incarnation in self._replaced:
            raise StaleIncarnation(
                f"worker {info.worker_id} was started again after incarnation {info.incarnation}; to run both, "
                "give each its own --worker-id"
            )
        previous = self._workers.get(info.worker_id)
        if previous is not None and previous.incarnation == info.incarnation and info_version < previous.info_version:
            log.info("late_registration_ignored", worker=info.worker_id, version=info_version)
            return
        if previous is not None and previous.incarnation != info.incarnation:
            self._forget(previous, "replaced")
            self._replaced[previous.incarnation] = None
            if len(self._replaced) > _MAX_REPLACED:
                self._replaced.popitem(last=False)
        worker = Worker(info, load, self._clock(), info_version=info_version)
        self._workers[info.worker_id] = worker
        log.info(
            "worker_registered",
            worker=info.worker_id,
            role=pb.WorkerRole.Name(info.role),
            address=info.address,
            model=info.card.model_id,
        )
        self._notify(worker, True)

    def heartbeat(self, beat: cp.HeartbeatRequest) -> bool:
        """Return False if the sender has to register (again); raises StaleIncarnation for an earlier incarnation."""
        worker = self._workers.get(beat.worker_id)
        if worker is None:
            return False
        if worker.incarnation != beat.incarnation:
            raise StaleIncarnation(
                f"worker {beat.worker_id} is incarnation {worker.incarnation} now, the heartbeat came from "
                f"{beat.incarnation}"
            )
        if beat.info_version != worker.info_version:  # a late heartbeat, or a registration was missed
            return beat.info_version < worker.info_version
        info = worker.info
        if beat.kv_address != info.kv_address:
            info = pb.WorkerInfo()
            info.CopyFrom(worker.info)
            info.kv_address = beat.kv_address
        fresh = Worker(info, beat.load, self._clock(), info_version=worker.info_version)
        self._workers[beat.worker_id] = fresh
        if worker.load.state != fresh.load.state or worker.is_suspected:
            self._notify(fresh, True)
        return True

    def deregister(self, worker_id: str, incarnation: str) -> None:
        worker = self._workers.get(worker_id)
        if worker is not None and worker.incarnation == incarnation:
            self._forget(worker, "deregistered")

    def sweep(self) -> None:
        """Suspect and forget silent workers; called a few times a second.

        While this process was stopped or starved, no heartbeat could arrive: that time does not count as silence.
        """
        now, pause = self._clock(), self._clock() - self._last_sweep
        self._last_sweep = now
        if pause > _LONG_PAUSE_SECONDS:
            log.warning("sweep_late", seconds=round(pause, 1))
            self._workers = {
                worker_id: replace(worker, last_heartbeat=worker.last_heartbeat + pause)
                for worker_id, worker in self._workers.items()
            }
            return
        for worker in self.workers():
            silence = now - worker.last_heartbeat
            if silence > self._gone_seconds:
                self._forget(worker, "silent")
            elif silence > self._suspect_seconds and not worker.is_suspected:
                suspected = replace(worker, is_suspected=True)
                self._workers[worker.worker_id] = suspected
                log.warning("worker_suspected", worker=worker.worker_id, silent_seconds=round(silence, 1))
                self._notify(suspected, True)

    def _forget(self, worker: Worker, reason: str) -> None:
        del self._workers[worker.worker_id]
        log.info("worker_gone", worker=worker.worker_id, incarnation=worker.incarnation, reason=reason)
        self._notify(worker, False)

    def _notify(self, worker: Worker, is_here: bool) -> None:
        for listener in self._listeners:
            listener(worker, is_here)
