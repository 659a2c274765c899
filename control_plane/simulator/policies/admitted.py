"""Tandem's router behind its admission: a request goes only where room is expected, as in a gateway.

`WorkerRooms` and `TokenTimes` are the gateway's. The walk over the candidates of a route follows `RoomKeeper.narrowed`,
which knows links and an event loop.
"""

from __future__ import annotations

from functools import partial

import msgspec

from control_plane.admission import worker_rooms
from control_plane.admission.worker_rooms import SentCall, WorkerRooms
from control_plane.fleet.registry import Worker
from control_plane.routing.cost_model import RoutingRequest
from control_plane.routing.room_search import Lack, find_room
from control_plane.routing.router import Route
from control_plane.simulator.engine import Job, Report
from control_plane.simulator.policies.policy import Placement, PlacementPrice
from control_plane.simulator.policies.tandem import GRAIN, Flight, TandemPolicy, worker_id
from control_plane.simulator.profiles import FleetProfile
from control_plane.simulator.traces import TraceRequest
from tandem_runtime.errors import Overloaded

_MAX_CANDIDATES = 3
_LONGEST_QUEUE_MS = 1000.0
_SHORT_QUEUE_TOKENS = 4096


class AdmittedTandemPolicy(TandemPolicy):
    """One gateway; with an `AdmissionLine`."""

    def __init__(self, fleet: FleetProfile, seed: int, token_seconds: float | None = None) -> None:
        """`token_seconds`: the budget per output token; None: any time."""
        super().__init__(fleet, seed)
        self._token_seconds = token_seconds
        self._rooms = WorkerRooms()
        self._work: dict[int, tuple[float, float]] = {}
        self._sent: dict[int, tuple[SentCall | None, SentCall]] = {}
        """By request: the calls to its prefill and its decode worker."""

    def report(self, report: Report, now: float) -> None:
        super().report(report, now)
        profile = self.fleet.profile_of(report.number)
        work = self._rooms.reported(
            worker_id(report.number),
            worker_rooms.Report(
                num_free_tokens=max(0, report.num_total_tokens - report.num_used_tokens),
                num_total_tokens=report.num_total_tokens,
                tokens_per_block=GRAIN,
                num_live=report.num_running + report.num_waiting,
                max_running=profile.max_num_seqs,
                num_running=report.num_running,
                num_steps=report.num_steps,
                step_seconds=report.step_seconds,
                num_tokens_generated=report.num_generated,
            ),
        )
        self._work[report.number] = work.step_seconds, work.num_tokens

    def decodes(self, number: int) -> bool:
        return number >= self.fleet.num_prefill

    # -------------------------------------------------------------------------------------------- where there is room

    def routed(self, routing: RoutingRequest) -> Route | None:
        try:
            return find_room(self.router, routing, (), partial(self._narrowed, request=routing))
        except Overloaded:
            return None

    def _narrowed(self, route: Route, *, request: RoutingRequest, may_offer: bool) -> Route | Lack:
        if route.prefill is not None and not self._takes_prompt(route.prefill, request):
            return Lack.PREFILL
        decodes = []
        for rank, worker in enumerate(route.decodes):
            if route.prefill is None and not self._takes_prompt(worker, request):
                continue
            has_room = self._rooms.has_room(
                worker.incarnation,
                self._num_needed(route, worker, request.num_prompt_tokens),
                token_seconds=self._token_seconds,
                may_offer=may_offer and rank < _MAX_CANDIDATES,
            )
            if has_room:
                decodes.append(worker)
        return msgspec.structs.replace(route, decodes=tuple(decodes[:_MAX_CANDIDATES])) if decodes else Lack.DECODE

    def _takes_prompt(self, worker: Worker, request: RoutingRequest) -> bool:
        num_queued = self.router.in_flight.prefill_tokens[worker.incarnation]
        if num_queued + request.num_prompt_tokens <= _SHORT_QUEUE_TOKENS or not num_queued:
            return True
        return 1000.0 * num_queued / self.router.costs.tokens_per_second(worker) <= _LONGEST_QUEUE_MS

    def _num_needed(self, route: Route, worker: Worker, num_prompt_tokens: int) -> int:
        estimate = route.estimate(worker)
        return max(1, num_prompt_tokens - (estimate.cached.own if estimate is not None else 0))

    def has_room(self, number: int, num_tokens: int) -> bool:
        return self._rooms.has_room(worker_id(number), num_tokens, token_seconds=self._token_seconds)

    def refused(self, number: int, request: TraceRequest) -> None:
        self._rooms.sent(worker_id(number), request.num_prompt_tokens).refused()

    # -------------------------------------------------------------------------------------------------- what was sent

    def accepted(self, request: TraceRequest, placement: Placement, decode: int) -> None:
        super().accepted(request, placement, decode)
        route, prefill = _flight_of(placement).route, None
        if placement.prefill is not None:
            prefill = self._send(placement.prefill, route, request)
        self._sent[request.number] = prefill, self._send(decode, route, request)

    def _send(self, number: int, route: Route, request: TraceRequest) -> SentCall:
        needed = self._num_needed(route, self.worker(number), request.num_prompt_tokens)
        call = self._rooms.sent(worker_id(number), needed)
        call.accepted()
        return call

    def prompt_read(self, request: TraceRequest, worker: int, job: Job, *, was_pulled: bool) -> None:
        super().prompt_read(request, worker, job, was_pulled=was_pulled)
        prefill, _ = self._sent[request.number]
        if prefill is not None and not was_pulled:
            prefill.ended()

    def ended(self, request: TraceRequest, decode: int, hand_over_seconds: float | None) -> None:
        super().ended(request, decode, hand_over_seconds)
        _, call = self._sent.pop(request.number)
        call.ended()

    # --------------------------------------------------------------------------------------------------- what it costs

    def price(self, placement: Placement) -> PlacementPrice:
        route = _flight_of(placement).route
        estimate = route.estimate(route.prefill or route.decodes[0])
        if estimate is None:
            return PlacementPrice(0, 0.0)
        return PlacementPrice(estimate.num_computed_tokens, estimate.compute_ms)

    def work(self, number: int) -> tuple[float, float]:
        return self._work.get(number, (0.0, 0.0))

    def model_of(self, number: int) -> str:
        return self.fleet.model_of(number)


def _flight_of(placement: Placement) -> Flight:
    assert isinstance(placement.handle, Flight), "the router's own placement"
    return placement.handle
