"""Tells workers what waits for their model at this gateway, so that they divide their room among gateways by it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from control_plane.admission.elsewhere import AccountTurn, LetIn
from control_plane.admission.waiting_demand import WaitingDemand
from control_plane.dispatch.admission_queue import AdmissionQueue
from control_plane.fleet.registry import Worker, WorkerRegistry
from tandem.v1 import types_pb2 as pb

_LEAST_SECONDS = 0.05
_SECONDS_PER_WORKER = 0.001
"""The workers of a model hear of what waits for it in messages so far apart, on average."""
_AGAIN_SECONDS = 1.0
"""While requests wait, workers hear of them so often, also if they are the same: else the gateway may be lost."""
_NOTHING = WaitingDemand()


@dataclass(eq=False)
class _Model:
    sent: dict[pb.WorkerRole.ValueType, WaitingDemand] = field(default_factory=dict)
    """By role."""
    is_changed: bool = False
    told_at: dict[pb.WorkerRole.ValueType, float] = field(default_factory=dict)
    """By role."""
    not_before: float = 0.0
    """By the loop's time: when they may be told again."""
    timer: asyncio.TimerHandle | None = None

    def sent_to(self, role: pb.WorkerRole.ValueType) -> WaitingDemand:
        return self.sent.get(role, _NOTHING)

    def again_at(self, role: pb.WorkerRole.ValueType) -> float:
        """Return when workers of a role hear of what waits again, though nothing has changed."""
        return self.told_at.get(role, 0.0) + _AGAIN_SECONDS


class Links(Protocol):
    def report_waiting(self, incarnation: str, waiting: pb.WaitingRequests) -> bool:
        """Tell a worker what waits; return False, and send nothing, if it does not grant, or hears nothing now."""


class DemandReports:
    """Listens to the admission queue; on one event loop."""

    def __init__(
        self,
        registry: WorkerRegistry,
        links: Links,
        queue: AdmissionQueue,
        roles: Sequence[pb.WorkerRole.ValueType] = (pb.WORKER_ROLE_PREFILL, pb.WORKER_ROLE_DECODE),
    ) -> None:
        """`roles`: of the workers that hear of it; those of the last one generate the answers."""
        self._roles = roles
        self._registry = registry
        self._links = links
        self._queue = queue
        self._models: dict[str, _Model] = {}
        """Those that any request waits for, or did a moment ago."""
        queue.listen(self._changed)

    def attached(self, worker: Worker) -> None:
        """A worker has answered on a new stream, or has loaded its model: it hears what the others have heard.

        What has changed since then all of them hear with the next report. Told sooner, this one would believe for ever
        in requests that wait no more by then: the others have never heard of those.
        """
        model = self._models.get(worker.info.card.model_id)
        sent = _NOTHING if model is None else model.sent_to(worker.role)
        if sent.num_requests:
            num_workers = len(self._registry.workers_of(worker.info.card.model_id))
            self._links.report_waiting(worker.incarnation, _message(sent, self._queue.now(), num_workers))

    def close(self) -> None:
        for model in self._models.values():
            if model.timer is not None:
                model.timer.cancel()
        self._models.clear()
        self._queue.listen(lambda model_id: None)

    def _changed(self, model_id: str) -> None:
        loop = asyncio.get_running_loop()
        model = self._models.setdefault(model_id, _Model())
        model.is_changed = True
        at = max(loop.time(), model.not_before)
        if model.timer is None or model.timer.when() > at:
            self._look(model_id, model, at)

    def _look(self, model_id: str, model: _Model, at: float) -> None:
        if model.timer is not None:
            model.timer.cancel()
        model.timer = asyncio.get_running_loop().call_at(at, self._report, model_id)

    def _report(self, model_id: str) -> None:
        model, now = self._models[model_id], asyncio.get_running_loop().time()
        model.timer = None
        if not model.is_changed and not any(demand.num_requests for demand in model.sent.values()):
            del self._models[model_id]
            return
        model.is_changed = False
        demands = {role: self._demand(model_id, role) for role in self._roles}
        told = {
            role: demand
            for role, demand in demands.items()
            if demand.differs(model.sent_to(role)) or (demand.num_requests and now >= model.again_at(role))
        }
        if told:
            model.told_at.update(dict.fromkeys(told, now))
            model.not_before = now + max(_LEAST_SECONDS, _SECONDS_PER_WORKER * self._tell(model_id, told))
            model.sent.update(told)
        again_at = min((model.again_at(role) for role, sent in model.sent.items() if sent.num_requests), default=0.0)
        self._look(model_id, model, max(model.not_before, again_at))

    def _tell(self, model_id: str, demands: Mapping[pb.WorkerRole.ValueType, WaitingDemand]) -> int:
        """Tell the model's workers of these roles what waits; return how many hear of it."""
        workers = self._registry.workers_of(model_id)
        messages = {role: _message(each, self._queue.now(), len(workers)) for role, each in demands.items()}
        return sum(
            self._links.report_waiting(worker.incarnation, messages[worker.role])
            for worker in workers
            if worker.role in messages
        )

    def _demand(self, model_id: str, role: pb.WorkerRole.ValueType) -> WaitingDemand:
        is_prefill = role == pb.WORKER_ROLE_PREFILL
        return self._queue.prompt_demand(model_id) if is_prefill else self._queue.demand(model_id)


def _message(demand: WaitingDemand, now: float, num_workers: int) -> pb.WaitingRequests:
    accounts = [
        pb.AccountDemand(
            fairness_key=each.account,
            service_class=each.service_class,
            num_requests=each.num_requests,
            work=each.work,
            waited_ms=max(0, int(1000 * (now - each.since))),
        )
        for each in demand.accounts
    ]
    return pb.WaitingRequests(
        num_tokens=demand.num_tokens,
        num_requests=demand.num_requests,
        first_tokens=demand.first_tokens,
        first_requests=demand.first_requests,
        num_workers=num_workers,
        accounts=accounts,
    )


def turns_of(grant: pb.Grant) -> list[AccountTurn]:
    """Return what a worker's grant tells of all that waits."""
    return [
        AccountTurn(
            each.fairness_key,
            each.service_class,
            each.lead,
            each.num_elsewhere,
            each.work_elsewhere,
            each.work_per_second_elsewhere,
        )
        for each in grant.turns
    ]


def let_in_of(grant: pb.Grant) -> LetIn:
    """Return what other gateways have let in since the stream began, as a grant tells."""
    return LetIn(grant.work_elsewhere, grant.num_elsewhere)
