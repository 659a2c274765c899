"""Chooses the prefill and the decode worker of a request, and explains the choice."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from statistics import fmean
from typing import Any, Literal

from control_plane.explain.explanation import RouteExplanation
from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.fleet.worker_health import WorkerHealth
from control_plane.routing.comparison import MAX_COMPARED, NOTHING_COMPARED, ComparedDecode, ComparedPrefill, Comparison
from control_plane.routing.cost_model import (
    ASSUMED_STEP_MS,
    EXPECTED_ANSWER_TOKENS,
    CostModel,
    HandOver,
    InFlight,
    PrefillEstimate,
    RoutingRequest,
    step_ms,
)
from control_plane.routing.groups import TIE, Group, free_capacities, groups_of, index_space, preferred
from control_plane.routing.prefix_index import PrefixMatch
from control_plane.routing.sample_points import SamplePointIndex
from control_plane.routing.session_affinity import SessionAffinity, SessionRoute
from control_plane.routing.worker_columns import WorkerColumns, WorkerTable
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import ContextTooLong, ModelNotFound, Overloaded, TandemError, Unavailable

_AFFINITY_SLACK = 1.25
"""A session stays at its worker while that worker is at most this many times as loaded as the best."""


@dataclass(frozen=True, eq=False)
class Route:
    """The workers for a request. Decode workers are in order of preference; the first that accepts is used."""

    prefill: Worker | None
    """None: the decode worker computes the prompt."""
    decodes: tuple[Worker, ...]
    reason: str
    predicted_ms: dict[str, float]
    estimates: Mapping[str, PrefillEstimate] = field(default_factory=dict)
    """By incarnation, of the workers that may compute the prompt: the prefill worker, or each decode worker."""
    comparison: Comparison = NOTHING_COMPARED
    """What the route was compared to."""
    cost: tuple[bool, float] = (False, 0.0)
    """Of the first decode worker: whether its pool seems full, and the predicted ms of prompt and answer."""

    @property
    def workers(self) -> tuple[Worker, ...]:
        return self.decodes if self.prefill is None else (self.prefill, *self.decodes)

    @property
    def prefill_id(self) -> str:
        return self.prefill.worker_id if self.prefill else ""

    @property
    def decode_id(self) -> str:
        return self.decodes[0].worker_id

    @property
    def expects_cached(self) -> bool:
        """Whether the worker that computes the prompt has, or gets, some of it from a cache."""
        estimate = self.estimate(self.prefill or self.decodes[0])
        return estimate is not None and any((estimate.cached.own, estimate.cached.host, estimate.cached.remote))

    def explained(self) -> RouteExplanation:
        """Return the decision with its inputs, for the explanation of a request."""
        return self.comparison.explained(self.prefill_id, self.decode_id, self.reason, self.predicted_ms)

    def estimate(self, worker: Worker) -> PrefillEstimate | None:
        return self.estimates.get(worker.incarnation)

    def describe(self) -> dict[str, Any]:
        estimate = self.estimate(self.prefill or self.decodes[0])
        return {
            "prefill": self.prefill_id,
            "decode": self.decode_id,
            "reason": self.reason,
            **{f"predicted_{name}_ms": round(value, 3) for name, value in self.predicted_ms.items()},
            **(_cached(estimate) if estimate else {}),
        }


class Router:
    """Chooses by tokens in flight per worker, free KV blocks, measured speeds and the places of the prompt's blocks."""

    def __init__(
        self,
        registry: WorkerRegistry,
        local_prefill: Literal["auto", "never"] = "auto",
        prefixes: SamplePointIndex | None = None,
        rng: random.Random | None = None,
        health: WorkerHealth | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`rng` decides between workers whose costs are about equal, and draws groups. `clock` gives seconds."""
        self._rng = rng or random.Random()  # seeded by the system: two gateways do not choose alike
        self._registry = registry
        self._local_prefill = local_prefill
        self.in_flight = InFlight()
        self.affinity = SessionAffinity()
        self.health = health or WorkerHealth(registry)
        self.prefixes = SamplePointIndex() if prefixes is None else prefixes  # an empty one is falsy
        self.costs = CostModel(registry, self.in_flight, self.prefixes, clock)
        self._columns = WorkerColumns(registry, self.in_flight, self.costs, self.health, self._rng, clock)

    def choose(self, request: RoutingRequest, avoid: Collection[str] = ()) -> Route:
        """Return a route, whose workers are of one group; `avoid` holds incarnations that refused or failed.

        Once all decode workers of a group are in `avoid`, the route is of another group. Raises ModelNotFound if no
        worker serves the model, Unavailable if none is ready, Overloaded if all ready ones are in `avoid`,
        ContextTooLong if no pool could ever hold the request.
        """
        tables = self._columns.tables(request)
        if tables is not None and (route := self._route_of_many(*tables, request, avoid)) is not None:
            return route
        fitting = self._large_enough(self._usable(request, pb.WORKER_ROLE_DECODE, ()), request)
        groups = groups_of(fitting, self._usable(request, pb.WORKER_ROLE_PREFILL, avoid), avoid)
        if not groups:
            raise self._no_worker_error(request.model_id, avoid)
        groups = preferred(groups, request)
        last_route = self.affinity.of(request.session_id) or SessionRoute("", "")
        matches: dict[bytes, PrefixMatch] = {}
        routes = [self._route_within(group, request, last_route, matches) for group in groups]
        return routes[0] if len(routes) == 1 else self._choose_group(groups, routes, request, last_route)

    def _route_of_many(
        self, decodes: WorkerTable, prefills: WorkerTable | None, request: RoutingRequest, avoid: Collection[str]
    ) -> Route | None:
        """Return the route of a large group, of its candidates; None if no decode worker is able to take the request.

        The costs of one request are those of a few workers, however many there are.
        """
        last_route = self.affinity.of(request.session_id) or SessionRoute("", "")
        match = self.costs.match(request, decodes.key.index_space)
        remote: list[PrefillEstimate] = []
        if prefills is not None and request.hand_over != "never":
            able = self._columns.prefills(prefills, request, match, last_route.prefill, avoid)
            remote = [self.costs.estimate(each, request, match) for each in able]
        prefill = self._best_prefill(remote, last_route)
        hand_over = self._hand_over(request, prefill, self._columns.could_hold_choices(decodes, request))
        ms = None if prefill is None or hand_over == "never" else self.costs.hand_over_ms(prefill)
        able = self._columns.decodes(decodes, request, match, last_route.decode, avoid, ms, hand_over)
        if not able:
            return None
        local = {worker.incarnation: self.costs.estimate(worker, request, match) for worker in able}
        return self._compared(request, last_route, remote, prefill, hand_over, local, len(prefills or ()), len(decodes))

    def _choose_group(
        self, groups: Sequence[Group], routes: Sequence[Route], request: RoutingRequest, last_route: SessionRoute
    ) -> Route:
        """Return one group's route: the session's, that of a known prefix, or one by free capacity.

        As with workers, the session's group may be somewhat busier than others, and the one with the prefix must be
        sooner.
        """
        every = list(zip(groups, routes, strict=True))
        able = [(group, route) for group, route in every if not route.cost[0] and not self.is_busy(route.decodes)]
        able = able or every
        if self._must_hand_over(request):
            able = [(group, route) for group, route in able if route.prefill is not None] or able
        least_load = min(self._decode_load(route.decodes[0]) for _, route in able)
        for _, route in able:
            first = route.decodes[0]
            if first.incarnation == last_route.decode and self._decode_load(first) <= _AFFINITY_SLACK * least_load:
                return route
        weights = free_capacities([group for group, _ in able], self.costs, self.in_flight)
        ((_, drawn),) = self._rng.choices(able, weights)
        best = min((route for _, route in able if route.expects_cached), key=lambda route: route.cost, default=drawn)
        chosen = drawn if drawn.cost[1] <= TIE * best.cost[1] else best
        return replace(chosen, reason=f"{chosen.reason}; in one of {len(routes)} groups that share KV blocks")

    def _route_within(
        self, group: Group, request: RoutingRequest, last_route: SessionRoute, matches: dict[bytes, PrefixMatch]
    ) -> Route:
        """Return the route of a group. `matches`: where the prompt's blocks are, by space; found once per request."""

        def estimate(worker: Worker) -> PrefillEstimate:
            space = index_space(worker)
            if space not in matches:
                matches[space] = self.costs.match(request, space)
            return self.costs.estimate(worker, request, matches[space])

        prefills = group.prefills
        remote = [estimate(worker) for worker in self._reachable(prefills)]
        prefill = self._best_prefill(remote, last_route) if request.hand_over != "never" else None
        local = {worker.incarnation: estimate(worker) for worker in group.decodes}
        hand_over = self._hand_over(request, prefill, _could_hold_choices(group.fitting, request))
        num_prefills, num_decodes = len(prefills), len(group.decodes)
        return self._compared(request, last_route, remote, prefill, hand_over, local, num_prefills, num_decodes)

    def _compared(
        self,
        request: RoutingRequest,
        last_route: SessionRoute,
        remote: Sequence[PrefillEstimate],
        prefill: PrefillEstimate | None,
        hand_over: HandOver,
        local: Mapping[str, PrefillEstimate],
        num_prefills: int,
        num_decodes: int,
    ) -> Route:
        """Return the best of the routes with these estimates; the numbers are of all workers, for the reason."""
        ranked = self._rank_decodes(local, request, prefill, hand_over)
        decodes = self._with_affinity(list(ranked), last_route)
        first = local[decodes[0].incarnation]
        comparison = self._comparison(request, remote, prefill, [local[each.incarnation] for each in decodes])
        if prefill is not None and self._is_handed_over(first, prefill, hand_over):
            route = self._handed_over_route(prefill, first, decodes, num_prefills, num_decodes, comparison)
        else:
            has_prefills = num_prefills > 0 and request.hand_over != "never"
            route = self._local_route(prefill, first, decodes, local, comparison, has_prefills=has_prefills)
        return replace(route, cost=ranked[decodes[0]])

    def is_busy(self, decodes: Collection[Worker]) -> bool:
        """Whether a request would have to wait at each of these decode workers."""
        return all(
            worker.load.num_waiting > 0 or worker.load.kv.num_free_blocks + worker.load.kv.num_cached_blocks == 0
            for worker in decodes
        )

    # --------------------------------------------------------------------------------------------- candidate workers

    def _usable(self, request: RoutingRequest, role: pb.WorkerRole.ValueType, avoid: Collection[str]) -> list[Worker]:
        serving = [
            worker
            for worker in self._registry.workers(role)
            if worker.serves(request.model_id) and (not request.identity or worker.identity == request.identity)
        ]
        return [worker for worker in self.health.usable(serving) if worker.incarnation not in avoid]

    def _large_enough(self, workers: list[Worker], request: RoutingRequest) -> list[Worker]:
        """Return the workers that could hold the request alone; raises ContextTooLong if none could."""
        fitting = [worker for worker in workers if _could_hold(worker, request.num_prompt_tokens + request.max_tokens)]
        if workers and not fitting:
            raise ContextTooLong(
                f"{request.num_prompt_tokens:,} prompt tokens and up to {request.max_tokens:,} answer tokens fit no "
                f"decode worker's KV pool, the largest has {max(map(_pool_tokens, workers)):,}; lower max_tokens, "
                "shorten the prompt or give the workers more KV memory",
                field="max_tokens",
            )
        return fitting

    def _reachable(self, workers: list[Worker]) -> list[Worker]:
        """Return the workers whose KV service is registered, so that others can get their KV cache."""
        return [worker for worker in workers if self._registry.has_kv_service(worker.info.kv_address)]

    def _no_worker_error(self, model_id: str, avoid: Collection[str]) -> TandemError:
        served = sorted({worker.info.card.model_id for worker in self._registry.workers() if worker.info.card.model_id})
        if avoid and model_id in served:
            return Overloaded("every worker refused the request; try again", retry_after_seconds=1.0)
        if model_id in served:
            return Unavailable(
                f"no decode worker for {model_id!r} is ready; see GET /v1/workers", retry_after_seconds=2.0
            )
        return ModelNotFound(f"no worker serves {model_id!r}; served here: {', '.join(served) or 'nothing yet'}")

    # -------------------------------------------------------------------------------------- comparing predicted costs

    def _hand_over(self, request: RoutingRequest, prefill: PrefillEstimate | None, could_hold: bool) -> HandOver:
        """`could_hold`: whether all choices fit the pools at once."""
        if prefill is None or not could_hold:
            return "never"
        return "always" if self._must_hand_over(request) else request.hand_over

    def _must_hand_over(self, request: RoutingRequest) -> bool:
        """Return whether a prefill worker computes the prompt wherever there is one."""
        return request.hand_over == "always" or (request.hand_over != "never" and self._local_prefill == "never")

    def _is_handed_over(self, local: PrefillEstimate, prefill: PrefillEstimate, hand_over: HandOver) -> bool:
        if not local.worker.info.kv_address or hand_over == "never":
            return False
        return hand_over == "always" or self.costs.hand_over_ms(prefill) < self.costs.local_ms(local)

    def _rank_decodes(
        self,
        local: Mapping[str, PrefillEstimate],
        request: RoutingRequest,
        prefill: PrefillEstimate | None,
        hand_over: HandOver,
    ) -> dict[Worker, tuple[bool, float]]:
        """Order workers by whether the prompt's blocks seem to fit, then by the predicted time of prompt and answer.

        The fuller the pool, the longer the answer's steps: those of a full pool take about twice as long. Of workers
        that are about as good as the best, one at random comes first. Returns what they are ordered by, too.
        """
        workers = [estimate.worker for estimate in local.values()]
        measured = [ms for worker in workers if (ms := step_ms(worker)) is not None]
        answer_ms = min(request.max_tokens, EXPECTED_ANSWER_TOKENS) * (fmean(measured) if measured else ASSUMED_STEP_MS)

        def prompt_ms(worker: Worker) -> float:
            estimate = local[worker.incarnation]
            if prefill is not None and self._is_handed_over(estimate, prefill, hand_over):
                return self.costs.hand_over_ms(prefill)
            return self.costs.local_ms(estimate)

        def cost(worker: Worker) -> tuple[bool, float]:
            share = self._decode_load(worker, request.num_prompt_tokens + request.max_tokens)
            return self._is_tight(worker, request), prompt_ms(worker) + answer_ms * share

        costs = sorted(((cost(worker), worker) for worker in workers), key=lambda each: (each[0], each[1].worker_id))
        (is_tight, least), best = costs[0]
        # What prefill takes is the same for each of them: the rest is compared.
        is_handed_over = prefill is not None and self._is_handed_over(local[best.incarnation], prefill, hand_over)
        common = prompt_ms(best) if is_handed_over else 0.0
        limit = least + (TIE - 1) * (least - common)
        ties = [worker for (tight, ms), worker in costs if tight == is_tight and ms <= limit]
        first = self._rng.choice(ties) if len(ties) > 1 else best
        return {worker: each for each, worker in sorted(costs, key=lambda each: each[1] is not first)}

    def _with_affinity(self, decodes: list[Worker], last_route: SessionRoute) -> list[Worker]:
        """Put the session's last worker first, unless it is much busier than the best."""
        preferred = sorted(decodes, key=lambda worker: worker.incarnation != last_route.decode)  # stable
        if self._decode_load(preferred[0]) > _AFFINITY_SLACK * self._decode_load(decodes[0]):
            return decodes
        return preferred

    def _is_tight(self, worker: Worker, request: RoutingRequest) -> bool:
        pool = worker.load.kv
        num_free_tokens = (pool.num_free_blocks + pool.num_cached_blocks) * max(1, pool.tokens_per_block)
        num_mine = self.in_flight.decode_tokens[worker.incarnation]
        return num_free_tokens < request.num_prompt_tokens + num_mine - worker.load.num_tokens_in_flight

    def _decode_load(self, worker: Worker, num_tokens: int = 1) -> float:
        """Return the share of its pool's tokens that a decode worker would have in flight with `num_tokens` more."""
        num_mine = self.in_flight.decode_tokens[worker.incarnation]
        num_in_flight = max(num_mine, worker.load.num_tokens_in_flight) + num_tokens
        return num_in_flight / max(1, _pool_tokens(worker))

    def _best_prefill(self, estimates: list[PrefillEstimate], last_route: SessionRoute) -> PrefillEstimate | None:
        """Return the session's last worker if it is about as soon as the soonest, or one of the soonest at random."""
        estimates = sorted(estimates, key=lambda estimate: (estimate.total_ms, estimate.worker.worker_id))
        least_ms = estimates[0].total_ms if estimates else 0.0
        for estimate in estimates:
            is_last = estimate.worker.incarnation == last_route.prefill
            if is_last and estimate.total_ms <= _AFFINITY_SLACK * least_ms:
                return estimate
        ties = [estimate for estimate in estimates if estimate.total_ms <= TIE * least_ms]
        return self._rng.choice(ties) if len(ties) > 1 else next(iter(ties), None)

    # --------------------------------------------------------------------------------------------- explaining a route

    def _comparison(
        self,
        request: RoutingRequest,
        prefills: Sequence[PrefillEstimate],
        best: PrefillEstimate | None,
        decodes: Sequence[PrefillEstimate],
    ) -> Comparison:
        """Keep what an explanation shows of the decision: a few workers of each role, with their figures of now."""
        if len(prefills) > MAX_COMPARED:  # the session's worker may not be among the soonest
            prefills = nsmallest(MAX_COMPARED, prefills, key=lambda each: (each is not best, each.total_ms))
        num_tokens = request.num_prompt_tokens + request.max_tokens
        return Comparison(
            [ComparedPrefill(estimate, self.costs.hand_over_ms(estimate)) for estimate in prefills],
            [
                ComparedDecode(estimate, self.costs.local_ms(estimate), self._decode_load(estimate.worker, num_tokens))
                for estimate in decodes[:MAX_COMPARED]
            ],
            may_hand_over=request.hand_over != "never",
        )

    def _handed_over_route(
        self,
        prefill: PrefillEstimate,
        local: PrefillEstimate,
        decodes: list[Worker],
        num_prefills: int,
        num_decodes: int,
        comparison: Comparison,
    ) -> Route:
        predicted = {
            "decode_step": step_ms(decodes[0]) or ASSUMED_STEP_MS,
            **_parts("prefill", prefill),
            "hand_over": self.costs.hand_over_ms(prefill),
            "local": self.costs.local_ms(local),
        }
        reason = f"{prefill}, the soonest of {num_prefills} prefill workers; {num_decodes} decode workers"
        estimates = {prefill.worker.incarnation: prefill}
        return Route(prefill.worker, tuple(decodes), reason, predicted, estimates, comparison)

    def _local_route(
        self,
        prefill: PrefillEstimate | None,
        first: PrefillEstimate,
        decodes: list[Worker],
        estimates: Mapping[str, PrefillEstimate],
        comparison: Comparison,
        *,
        has_prefills: bool,
    ) -> Route:
        predicted = {"decode_step": step_ms(decodes[0]) or ASSUMED_STEP_MS, **_parts("local", first)}
        predicted["local"] = self.costs.local_ms(first)
        if prefill is None or not first.worker.info.kv_address:
            why = "no KV service" if has_prefills else "no prefill worker"
            reason = f"{why}: decode computes the prompt"
            return Route(None, tuple(decodes), reason, predicted, estimates, comparison)
        predicted["hand_over"] = self.costs.hand_over_ms(prefill)
        reason = f"decode computes the prompt: {first}; handing over would take {predicted['hand_over']:.1f} ms"
        return Route(None, tuple(decodes), reason, predicted, estimates, comparison)


def _parts(name: str, estimate: PrefillEstimate) -> dict[str, float]:
    return {
        name: estimate.total_ms,
        "queue": estimate.queue_ms,
        "load": estimate.load_ms,
        "compute": estimate.compute_ms,
    }


def _cached(estimate: PrefillEstimate) -> dict[str, Any]:
    return {
        "cached_own_tokens": estimate.cached.own,
        "cached_host_tokens": estimate.cached.host,
        "cached_remote_tokens": estimate.cached.remote,
        "prefix_source": estimate.source,
    }


def _pool_tokens(worker: Worker) -> int:
    return worker.load.kv.num_total_blocks * worker.load.kv.tokens_per_block


def _could_hold_choices(workers: Sequence[Worker], request: RoutingRequest) -> bool:
    """Return whether all choices fit the workers' pools at once; each needs its prompt's blocks, and one to grow into.

    A hand-over begins when all choices have their blocks. Choices of a prompt that decode computes wait in its queue.
    """
    if request.num_choices == 1 or not all(map(_pool_tokens, workers)):  # a pool is not reported yet
        return True
    blocks = [-(-(request.num_prompt_tokens + 1) // worker.load.kv.tokens_per_block) + 1 for worker in workers]
    most = sum(worker.load.kv.num_total_blocks // each for worker, each in zip(workers, blocks, strict=True))
    return most >= request.num_choices


def _could_hold(worker: Worker, num_tokens: int) -> bool:
    """Return whether a pool has enough tokens, or is not reported yet. The last token's KV is never needed."""
    num_needed = min(num_tokens, worker.info.card.context_length + 1) - 1
    return not _pool_tokens(worker) or num_needed <= _pool_tokens(worker)
