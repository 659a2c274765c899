"""Keeps which encode workers of a model may be used, and draws some of them where there are many."""

from __future__ import annotations

import random

from control_plane.fleet.registry import Worker, WorkerRegistry
from tandem.v1 import types_pb2 as pb

MAX_COMPARED = 32
"""Workers that one look compares. The least loaded of so many, drawn at random, is nearly the least loaded of all."""
_MAX_TOLD = MAX_COMPARED // 2


class EncodeWorkers:
    """Listens to the registry; on one event loop."""

    def __init__(self, registry: WorkerRegistry, rng: random.Random | None = None) -> None:
        self._registry = registry
        self._rng = rng or random.Random()  # seeded by the system: two gateways do not draw alike
        self._ids: dict[str, list[str]] = {}
        """Of usable workers, by model; of models that were asked for since one of their workers has changed."""
        self._told: dict[str, dict[str, None]] = {}
        """By model: the ids of the workers that told last of room, the latest last."""
        registry.listen(self._changed)

    def told(self, worker: Worker) -> None:
        """A worker may have room: looks compare it until sixteen others have told of theirs."""
        told = self._told.setdefault(worker.info.card.model_id, {})
        told.pop(worker.worker_id, None)
        told[worker.worker_id] = None
        if len(told) > _MAX_TOLD:
            del told[next(iter(told))]

    def some(self, model_id: str, first: str = "") -> list[Worker]:
        """Return all usable workers of a model, or of many 32: that with the id `first`, those that told last of room,
        and others at random.
        """
        ids = self._ids.get(model_id)
        if ids is None:
            of_model = self._registry.workers_of(model_id)
            ids = self._ids[model_id] = [each.worker_id for each in of_model if _is_usable(each, model_id)]
        if len(ids) > MAX_COMPARED:
            told = reversed(self._told.get(model_id, {}))
            ids = list(dict.fromkeys([first, *told, *self._rng.sample(ids, MAX_COMPARED)]))[:MAX_COMPARED]
        workers = map(self._registry.get, ids)
        return [each for each in workers if each is not None and _is_usable(each, model_id)]

    def _changed(self, worker: Worker, is_here: bool) -> None:
        if worker.role == pb.WORKER_ROLE_ENCODE:
            model_id = worker.info.card.model_id
            self._ids.pop(model_id, None)
            if not is_here and model_id in self._told:
                self._told[model_id].pop(worker.worker_id, None)
                if not self._told[model_id]:
                    del self._told[model_id]


def _is_usable(worker: Worker, model_id: str) -> bool:
    return worker.role == pb.WORKER_ROLE_ENCODE and worker.is_usable and worker.info.card.model_id == model_id
