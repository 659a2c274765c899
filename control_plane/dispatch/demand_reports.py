"""Tells workers what waits for their model at this gateway, so that they divide their room among gateways by it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from control_plane.admission.waiting_demand import WaitingDemand
from control_plane.dispatch.admission_queue import AdmissionQueue
from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.fleet.worker_links import LinkPool
from tandem.v1 import types_pb2 as pb

_LEAST_SECONDS = 0.05
_SECONDS_PER_WORKER = 0.001
"""The workers of a model hear of what waits for it in messages so far apart, on average."""


@dataclass(eq=False)
class _Model:
    sent: WaitingDemand = field(default_factory=WaitingDemand)
    is_changed: bool = False
    timer: asyncio.TimerHandle | None = None


class DemandReports:
    """Listens to the admission queue; on one event loop."""

    def __init__(self, registry: WorkerRegistry, links: LinkPool, queue: AdmissionQueue) -> None:
        self._registry = registry
        self._links = links
        self._queue = queue
        self._models: dict[str, _Model] = {}
        """Those that any request waits for, or did a moment ago."""
        queue.listen(self._changed)

    def attached(self, worker: Worker) -> None:
        """A worker has answered on a new stream, or has loaded its model: it hears what waits."""
        demand = self._queue.demand(worker.info.card.model_id)
        if demand.num_requests:
            self._links.report_waiting(worker.incarnation, _message(demand))

    def take_parts(self, model_id: str, parts: Mapping[int, float]) -> None:
        """Let accounts that wait at other gateways too have less here: what a grant says of them."""
        model = self._models.get(model_id)
        if model is not None:
            accounts = [name for name, _ in model.sent.accounts if _digest(name) in parts]
            self._queue.room(model_id).counters.wait_elsewhere({name: parts[_digest(name)] for name in accounts})

    def close(self) -> None:
        for model in self._models.values():
            if model.timer is not None:
                model.timer.cancel()
        self._models.clear()
        self._queue.listen(lambda model_id: None)

    def _changed(self, model_id: str) -> None:
        model = self._models.setdefault(model_id, _Model())
        model.is_changed = True
        if model.timer is None:
            model.timer = asyncio.get_running_loop().call_later(0.0, self._report, model_id)

    def _report(self, model_id: str) -> None:
        model = self._models[model_id]
        model.timer = None
        if not model.is_changed:
            if not model.sent.num_requests:
                self.take_parts(model_id, {})
                del self._models[model_id]
            return
        model.is_changed = False
        demand, num_workers = self._queue.demand(model_id), 0
        if demand.differs(model.sent):
            model.sent, message = demand, _message(demand)
            for worker in self._registry.workers_of(model_id):
                if worker.role == pb.WORKER_ROLE_DECODE:
                    num_workers += self._links.report_waiting(worker.incarnation, message)
        seconds = max(_LEAST_SECONDS, _SECONDS_PER_WORKER * num_workers)
        model.timer = asyncio.get_running_loop().call_later(seconds, self._report, model_id)


def _message(demand: WaitingDemand) -> pb.WaitingRequests:
    accounts = [pb.AccountDemand(account=_digest(name), num_tokens=tokens) for name, tokens in demand.accounts]
    return pb.WaitingRequests(
        num_tokens=demand.num_tokens,
        num_requests=demand.num_requests,
        first_tokens=demand.first_tokens,
        first_requests=demand.first_requests,
        accounts=accounts,
    )


@lru_cache(maxsize=1024)
def _digest(account: str) -> int:
    """Return a number that is the same at every gateway."""
    return int.from_bytes(hashlib.blake2b(account.encode(), digest_size=8).digest(), "little")
