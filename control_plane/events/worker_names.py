"""Remembers what operators call each worker, also for some time after the worker has left."""

from __future__ import annotations

from collections import OrderedDict

from control_plane.fleet.registry import MAX_WORKERS, Worker, WorkerRegistry
from control_plane.fleet.status import worker_name

_MAX_NAMES = 2 * MAX_WORKERS


class WorkerNames:
    """With certificates the id of a worker is not its --worker-id, which is the one that people know."""

    def __init__(self, registry: WorkerRegistry) -> None:
        self._names: OrderedDict[str, str] = OrderedDict()
        registry.listen(self._changed)

    def of(self, worker_id: str) -> str:
        """Return the name of a worker that is or was registered, else its id. May be called in any thread."""
        return self._names.get(worker_id, worker_id)

    def _changed(self, worker: Worker, is_here: bool) -> None:
        if not is_here:
            return
        self._names[worker.worker_id] = worker_name(worker.info)
        self._names.move_to_end(worker.worker_id)
        if len(self._names) > _MAX_NAMES:
            self._names.popitem(last=False)
