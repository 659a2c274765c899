"""Keeps which encode workers of a model may be used, and draws some of them where there are many."""

from __future__ import annotations

import random
from collections.abc import Iterable

from control_plane.fleet.registry import Worker, WorkerRegistry
from tandem.v1 import types_pb2 as pb

MAX_COMPARED = 32
"""Workers that one look compares. The least loaded of so many, drawn at random, is nearly the least loaded of all."""


class EncodeWorkers:
    """Listens to the registry; on one event loop."""

    def __init__(self, registry: WorkerRegistry, rng: random.Random | None = None) -> None:
        self._registry = registry
        self._rng = rng or random.Random()  # seeded by the system: two gateways do not draw alike
        self._ids: dict[str, list[str]] = {}
        """Of usable workers, by model; of models that were asked for since one of their workers has changed."""
        registry.listen(self._changed)

    def some(self, model_id: str, first: Iterable[str] = ()) -> list[Worker]:
        """Return all usable workers of a model, or of many 32: those with the ids `first`, and others at random."""
        ids = self._ids.get(model_id)
        if ids is None:
            of_model = self._registry.workers_of(model_id)
            ids = self._ids[model_id] = [each.worker_id for each in of_model if _is_usable(each, model_id)]
        if len(ids) > MAX_COMPARED:
            ids = list(dict.fromkeys([*first, *self._rng.sample(ids, MAX_COMPARED)]))[:MAX_COMPARED]
        workers = map(self._registry.get, ids)
        return [each for each in workers if each is not None and _is_usable(each, model_id)]

    def _changed(self, worker: Worker, is_here: bool) -> None:
        if worker.role == pb.WORKER_ROLE_ENCODE:
            self._ids.pop(worker.info.card.model_id, None)


def _is_usable(worker: Worker, model_id: str) -> bool:
    return worker.role == pb.WORKER_ROLE_ENCODE and worker.is_usable and worker.info.card.model_id == model_id
