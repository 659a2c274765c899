"""Keeps the workers' grants, or an estimate of their room, and tells the admission queue when there may be more."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import msgspec

from control_plane.admission.budgets import BudgetTable
from control_plane.admission.model_admission import Waiter
from control_plane.admission.worker_rooms import Report, SentCall, WorkerRooms
from control_plane.dispatch.admission_queue import AdmissionQueue
from control_plane.dispatch.demand_reports import DemandReports, let_in_of, turns_of
from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.fleet.worker_links import LinkPool
from control_plane.routing.cost_model import PrefillEstimate, RoutingRequest
from control_plane.routing.room_search import Lack
from control_plane.routing.router import Route, Router
from tandem.v1 import types_pb2 as pb

MAX_CANDIDATES = 3
"""Decode workers that one attempt asks."""
_LONGEST_QUEUE_MS = 1000.0
"""Predicted time of this gateway's prompts that may wait at one worker: what waits here is in a fair order."""
_SHORT_QUEUE_TOKENS = 4096
"""So many tokens may wait in any case: some chunks, so that a worker's steps are full."""
_ROLES = {pb.WORKER_ROLE_PREFILL: "prefill", pb.WORKER_ROLE_DECODE: "decode"}


class RoomKeeper:
    """Listens to registry and links; on one event loop."""

    def __init__(
        self,
        registry: WorkerRegistry,
        links: LinkPool,
        router: Router,
        queue: AdmissionQueue,
        budgets: BudgetTable,
        *,
        reports_waiting: bool = True,
    ) -> None:
        """`reports_waiting`: workers hear what waits in `queue`; of one gateway, they hear of one queue."""
        self._registry = registry
        self._budgets = budgets
        self._router = router
        self._queue = queue
        self._links = links
        self.rooms = WorkerRooms(links.attachment, time.monotonic)
        self._reports = DemandReports(registry, links, queue) if reports_waiting else None
        self._kinds: dict[str, tuple[str, str]] = {}
        """Model id and role of each worker, by incarnation."""
        self._decode_grants: set[str] = set()
        """Models whose decode workers grant: they hear of all that waits, prefill workers of a part."""
        for worker in registry.workers():
            self._take(worker)
        registry.listen(self._changed)
        registry.listen_to_loads(self._reported)
        links.listen_to_attached(self._attached)
        links.listen_to_grants(self._granted)

    def close(self) -> None:
        if self._reports is not None:
            self._reports.close()

    def num_granted(self) -> Counter[tuple[str, str]]:
        """Return how many requests may be sent by the grants of workers, by model and role; called in any thread."""
        granted: Counter[tuple[str, str]] = Counter()
        for incarnation, kind in list(self._kinds.items()):
            attachment = self._links.attachment(incarnation)
            left = attachment.left() if attachment is not None else None
            if left is not None:
                granted[kind] += left.num_requests
        return granted

    def sent(self, worker: Worker, num_tokens: int) -> SentCall:
        return self.rooms.sent(worker.incarnation, num_tokens)

    def on_room(self, worker: Worker) -> Callable[[], None]:
        """Return what to call when a call to the worker has ended, or has left its queue of prompts."""
        model_id = worker.info.card.model_id
        return lambda: self._queue.release_next(model_id)

    def narrowed(self, route: Route, request: RoutingRequest, *, may_offer: bool = False) -> Route | Lack:
        """Return the route with those of its decode workers that are expected to take the request, at most three.

        Return the half of which no worker is. `may_offer`: see `WorkerRooms.has_room`; of the first three.
        """
        if route.prefill is not None:
            is_granted = self._is_granted(route)
            if not (self._takes_prompt(route.prefill, request) if is_granted is None else is_granted):
                return Lack.PREFILL
        cached = {each.estimate.worker.incarnation: each.estimate for each in route.comparison.decodes}
        token_seconds = self._budgets.of(request.model_id).token_seconds
        decodes = []
        for rank, worker in enumerate(route.decodes):
            num_tokens = _num_needed(request, cached.get(worker.incarnation))
            if route.prefill is not None:
                num_tokens *= request.num_choices
            elif not self._takes_prompt(worker, request):
                continue
            is_offer = may_offer and rank < MAX_CANDIDATES
            if self.rooms.has_room(
                worker.incarnation,
                num_tokens,
                request.num_choices,
                token_seconds=token_seconds,
                may_offer=is_offer,
            ):
                decodes.append(worker)
                if len(decodes) == MAX_CANDIDATES:
                    break
        return msgspec.structs.replace(route, decodes=tuple(decodes)) if decodes else Lack.DECODE

    def is_out_of_turn(self, route: Route) -> bool:
        """Whether a route's prefill worker has work, grants, and has not granted this gateway room for the prompt."""
        prefill = route.prefill
        return prefill is not None and self._is_granted(route) is False and self._router.costs.num_queued(prefill) > 0

    def _is_granted(self, route: Route) -> bool | None:
        """Return whether the prefill worker of a route has granted room for its prompt; None: it grants nothing."""
        assert route.prefill is not None, "the caller has looked"
        return self.rooms.is_granted(route.prefill.incarnation, max(1, route.num_prefill_tokens))

    def may_take(self, worker: Worker, num_tokens: int) -> bool:
        """Return whether a worker is expected to go on with an answer of so many tokens, or may be offered it."""
        return self.rooms.has_room(worker.incarnation, num_tokens, may_offer=True, is_moving=True)

    def _takes_prompt(self, worker: Worker, request: RoutingRequest) -> bool:
        """Return whether few enough prompts of this gateway wait at a worker."""
        num_queued = self._router.in_flight.prefill_tokens[worker.incarnation]
        if num_queued + request.num_prompt_tokens <= _SHORT_QUEUE_TOKENS or not num_queued:
            return True
        return 1000.0 * num_queued / self._router.costs.tokens_per_second(worker) <= _LONGEST_QUEUE_MS

    def _take(self, worker: Worker) -> None:
        if worker.role in _ROLES:
            self.rooms.reported(worker.incarnation, report_of(worker))
            if worker.info.card.model_id:
                self._kinds[worker.incarnation] = worker.info.card.model_id, _ROLES[worker.role]

    def _changed(self, worker: Worker, is_here: bool) -> None:
        if not is_here:
            self.rooms.forget(worker.incarnation)
            self._kinds.pop(worker.incarnation, None)
            self._queue.worker_gone(worker.info.card.model_id, worker.incarnation)
            return
        self._take(worker)
        if worker.is_usable and worker.info.card.model_id:
            if self._reports is not None:
                self._reports.attached(worker)
            self._queue.release_next(worker.info.card.model_id)

    def _reported(self, worker: Worker) -> None:
        """Take in a load report, and let the next request of the model look if it may be taken."""
        if worker.role not in _ROLES:
            return
        work = self.rooms.reported(worker.incarnation, report_of(worker))
        if worker.role == pb.WORKER_ROLE_DECODE and worker.info.card.model_id:
            self._queue.stepped(worker.info.card.model_id, worker.incarnation, work.step_seconds, work.num_tokens)
        self._queue.reported(worker.info.card.model_id, lambda waiter: self._has_room(worker, waiter))

    def _has_room(self, worker: Worker, waiter: Waiter) -> bool:
        """Return whether a worker is expected to take a request that waits, all of its choices, or has granted it."""
        if worker.role == pb.WORKER_ROLE_PREFILL:
            num_tokens = waiter.num_tokens if waiter.num_prefill_tokens is None else waiter.num_prefill_tokens
            return num_tokens > 0 and bool(self.rooms.is_granted(worker.incarnation, num_tokens))
        num_choices, token_seconds = waiter.num_choices, self._budgets.of(waiter.model_id).token_seconds
        num_tokens = waiter.num_tokens * num_choices
        return self.rooms.has_room(worker.incarnation, num_tokens, num_choices, token_seconds=token_seconds)

    def _granted(self, worker: Worker, grant: pb.Grant) -> None:
        """Take in a grant, and let the next request of the model look if it is within it."""
        if not self._registry.is_here(worker):
            return  # it drains on its open stream, and what it tells would never be forgotten
        self.rooms.granted(worker.incarnation)
        model_id = worker.info.card.model_id
        if worker.role == pb.WORKER_ROLE_DECODE and model_id not in self._decode_grants:
            self._decode_grants.add(model_id)
            for other in self._registry.workers_of(model_id):
                if other.role == pb.WORKER_ROLE_PREFILL:
                    self._queue.worker_gone(model_id, other.incarnation)
        if worker.role == pb.WORKER_ROLE_DECODE or model_id not in self._decode_grants:
            self._queue.granted(model_id, worker.incarnation, turns_of(grant), let_in_of(grant))
        self._queue.reported(model_id, lambda waiter: self._has_room(worker, waiter), may_offer=False)

    def _attached(self, worker: Worker) -> None:
        if self._reports is not None:
            self._reports.attached(worker)
        self._queue.release_next(worker.info.card.model_id)


def report_of(worker: Worker) -> Report:
    """Return what a worker's last load report shows of its room."""
    load, pool = worker.load, worker.load.kv
    max_running = worker.info.settings.get("max_num_seqs", "")
    return Report(
        num_free_tokens=(pool.num_free_blocks + pool.num_cached_blocks) * pool.tokens_per_block,
        num_total_tokens=pool.num_total_blocks * pool.tokens_per_block,
        tokens_per_block=pool.tokens_per_block,
        num_live=load.num_running + load.num_waiting,
        max_running=int(max_running) if max_running.isdecimal() and max_running.isascii() else None,
        num_running=load.num_running,
        num_steps=load.counters.get("steps", 0.0),
        step_seconds=load.counters.get("step_seconds", 0.0),
        num_tokens_generated=load.counters.get("tokens_generated", 0.0),
    )


def _num_needed(request: RoutingRequest, estimate: PrefillEstimate | None) -> int:
    """Return the tokens that a pool must have free: running requests may use the blocks that are cached there."""
    return max(1, request.num_prompt_tokens - (estimate.cached.own if estimate is not None else 0))
