"""Turns the registry's snapshots of workers into events: joined, ready, draining, failed, suspected, left, lost.

Errors of devices come with heartbeats, which nobody is told of: some workers at a time are looked at for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from control_plane.fleet.registry import Worker, WorkerRegistry
from tandem.v1 import types_pb2 as pb

_STATES = {
    pb.WORKER_STATE_READY: "worker_ready",
    pb.WORKER_STATE_DRAINING: "worker_draining",
    pb.WORKER_STATE_FAILED: "worker_failed",
}

_LOOKED_AT_ONCE = 100

ErrorCounts = dict[tuple[str, str], int]
"""By device and cause."""


class WorkerWatch:
    """Remembers what was last said of each worker, and says what is new. On the registry's event loop."""

    def __init__(self, registry: WorkerRegistry, record: Callable[..., None]) -> None:
        self._registry = registry
        self._record = record
        self._said: dict[str, tuple[str, str, bool, str]] = {}
        """By worker id: incarnation, kind of its state, whether it is suspected, why it is kept apart."""
        self._served: set[str] = set()
        self._device_errors: dict[str, tuple[str, ErrorCounts]] = {}
        """By worker id: incarnation, and what was last seen. Workers without devices are not there."""
        self._to_look_at: list[str] = []
        registry.listen(self.changed)

    def changed(self, worker: Worker, is_here: bool) -> None:
        """Take in a snapshot; `is_here` is false for a worker that is gone."""
        said = self._said.pop(worker.worker_id, None)
        if is_here:
            self._say(worker, said)
        else:
            self._device_errors.pop(worker.worker_id, None)
        if not is_here and said is not None:
            kind = (
                "worker_left" if worker.gone_for in ("deregistered", "moved") else "worker_lost"
            )  # a crash says no good-bye
            self._record(kind, cause=worker.gone_for, **_about(worker))
        self._check_model(worker.info.card.model_id)

    def look(self, is_last: bool = False) -> None:
        """Look at some workers for new errors of devices; call about once a second. `is_last` changes nothing."""
        if not self._to_look_at:
            self._to_look_at = [worker.worker_id for worker in self._registry.workers()]
        ids = self._to_look_at[-_LOOKED_AT_ONCE:]
        del self._to_look_at[-_LOOKED_AT_ONCE:]
        for worker_id in ids:
            if (worker := self._registry.get(worker_id)) is not None and worker.load.memory.devices:
                self._look(worker)

    def _look(self, worker: Worker) -> None:
        counts = dict(_error_counts(worker.load.memory))
        incarnation, before = self._device_errors.get(worker.worker_id, ("", {}))
        self._device_errors[worker.worker_id] = worker.incarnation, counts
        if incarnation != worker.incarnation:  # what it had before this gateway saw it is no news
            return
        for (device, cause), count in counts.items():
            num_new = count - before.get((device, cause), 0)
            if num_new > 0:
                self._record("device_error", device=device, cause=cause, count=num_new, **_about(worker))

    def _say(self, worker: Worker, said: tuple[str, str, bool, str] | None) -> None:
        state = _STATES.get(worker.load.state, "")
        now = worker.incarnation, state, worker.is_suspected, worker.apart_for
        self._said[worker.worker_id] = now
        if said is None or said[0] != worker.incarnation:
            self._record("worker_joined", address=worker.info.address, version=worker.info.version, **_about(worker))
            said = worker.incarnation, "", False, ""
        if worker.is_suspected and not said[2]:
            self._record("worker_suspected", **_about(worker))
        elif state and (state != said[1] or said[2]) and not worker.is_suspected:
            self._record(state, error=worker.load.error, **_about(worker))
        if worker.apart_for and worker.apart_for != said[3]:
            self._record("worker_apart", cause=worker.apart_for, **_about(worker))

    def _check_model(self, model_id: str) -> None:
        """Say when the last worker of a model that answered is no longer there."""
        if not model_id:
            return
        if self._registry.serves(model_id):
            self._served.add(model_id)
        elif model_id in self._served:
            self._served.discard(model_id)
            self._record("model_unready", model=model_id)


def _about(worker: Worker) -> dict[str, Any]:
    info = worker.info
    role = pb.WorkerRole.Name(info.role).removeprefix("WORKER_ROLE_").lower()
    return {"role": role, "worker": worker.worker_id, "host": info.host_id, "model": info.card.model_id}


def _error_counts(memory: pb.MemoryReport) -> Iterator[tuple[tuple[str, str], int]]:
    for device in memory.devices:
        name = f"GPU {device.index}"
        for number, count in device.xid_errors.items():
            yield (name, f"XID {number}"), count
        if device.num_uncorrected_ecc_errors:
            yield (name, "uncorrected ECC"), device.num_uncorrected_ecc_errors
