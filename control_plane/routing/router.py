"""Chooses the prefill and the decode worker of a request, and explains the choice."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from heapq import nsmallest
from typing import Any, Literal

import msgspec

from control_plane.explain.explanation import RouteExplanation
from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.fleet.worker_figures import WorkerFigures
from control_plane.fleet.worker_health import WorkerHealth
from control_plane.routing.comparison import MAX_COMPARED, NOTHING_COMPARED, ComparedDecode, Comparison
from control_plane.routing.compiled_comparing import CompiledComparing, Remote
from control_plane.routing.compiled_library import CompiledRouting
from control_plane.routing.compiled_scoring import CompiledScoring
from control_plane.routing.cost_model import (
    ASSUMED_STEP_MS,
    EXPECTED_ANSWER_TOKENS,
    CostModel,
    HandOver,
    InFlight,
    PrefillEstimate,
    RoutingRequest,
)
from control_plane.routing.groups import SAME_QUEUE, TIE, Group, preferences
from control_plane.routing.hand_over_ways import HandOverWays
from control_plane.routing.sample_points import SamplePointIndex
from control_plane.routing.scoring import NumpyScoring
from control_plane.routing.session_affinity import SessionAffinity, SessionRoute
from control_plane.routing.shortlist import Query, Shortlist, could_hold, could_hold_choices, largest_pool
from control_plane.routing.worker_columns import WorkerColumns
from tandem_runtime.errors import ContextTooLong, ModelNotFound, Overloaded, TandemError, Unavailable

_AFFINITY_SLACK = 1.25
"""A session stays at its worker while that worker is at most this many times as loaded as the best."""
_SLACK_MS = 5.0
"""Whoever waits so much longer does not notice, and a session that begins elsewhere stays there."""
_NO_ROUTE = SessionRoute("", "")


class Route(msgspec.Struct, frozen=True, gc=False):
    """The workers for a request. Decode workers are in order of preference; the first that accepts is used."""

    prefill: Worker | None
    """None: the decode worker computes the prompt."""
    decodes: tuple[Worker, ...]
    predicted_ms: dict[str, float]
    estimates: Mapping[str, PrefillEstimate]
    """By incarnation, of the workers that may compute the prompt: the prefill worker, or each decode worker."""
    comparison: Comparison = NOTHING_COMPARED
    """What the route was compared to."""
    cost: tuple[bool, float] = (False, 0.0)
    """Of the first decode worker: whether its pool seems full, and the predicted ms of prompt and answer."""
    num_in_group: tuple[int, int] = (0, 0)
    """Prefill and decode workers."""
    num_groups: int = 1
    """That have a route, and share no KV blocks."""

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
    def reason(self) -> str:
        """Why these workers, in words; nobody reads this of a route through workers that turn out to be full."""
        if not self.comparison.decodes:
            return "nothing was compared"
        (num_prefills, num_decodes), first = self.num_in_group, self.comparison.decodes[0]
        if self.prefill is not None:
            soonest = f"{self.estimate(self.prefill)}, the soonest of {num_prefills} prefill workers"
            reason = f"{soonest}; {num_decodes} decode workers"
        elif (hand_over_ms := self.predicted_ms.get("hand_over")) is not None:
            reason = f"decode computes the prompt: {first.estimate}; handing over would take {hand_over_ms:.1f} ms"
        else:
            lack = "KV service" if num_prefills and self.comparison.may_hand_over else "prefill worker"
            reason = f"no {lack}: decode computes the prompt"
        return reason if self.num_groups == 1 else f"{reason}; in one of {self.num_groups} groups that share KV blocks"

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens that the prefill worker would compute; 0: there is none."""
        estimate = self.estimate(self.prefill) if self.prefill is not None else None
        return estimate.num_computed_tokens if estimate is not None else 0

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

    def own_tokens(self, decode: Worker) -> int:
        """Return how many of the prompt's tokens the router expects in a decode worker's pool."""
        compared = (each.estimate for each in self.comparison.decodes)
        return next((each.cached.own for each in compared if each.worker.incarnation == decode.incarnation), 0)

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
        compiled: CompiledRouting | None = None,
    ) -> None:
        """`rng` decides between workers whose costs are about equal, and draws groups. `clock` gives seconds.

        `compiled`: None: numpy does the same.
        """
        self._rng = rng or random.Random()  # seeded by the system: two gateways do not choose alike
        self._registry = registry
        self._local_prefill = local_prefill
        self.in_flight = InFlight()
        self.affinity = SessionAffinity()
        self.health = health or WorkerHealth(registry)
        self.prefixes = SamplePointIndex() if prefixes is None else prefixes  # an empty one is falsy
        self.costs = CostModel(registry, self.in_flight, self.prefixes, clock)
        self._columns = WorkerColumns(registry, self.in_flight, self.costs, self.health, self.affinity)
        scoring = CompiledScoring(compiled, self.costs, clock) if compiled else NumpyScoring(self.costs, clock)
        self._shortlist = Shortlist(registry, self.costs, self.health, scoring, self._rng, clock)
        self._comparing = None
        if isinstance(scoring, CompiledScoring):
            self._comparing = CompiledComparing(scoring, self.costs, self.health, self._shortlist)

    def choose(self, request: RoutingRequest, avoid: Collection[str] = ()) -> Route:
        """Return a route, whose workers are of one group; `avoid` holds incarnations that refused or failed.

        Once all decode workers of a group are in `avoid`, the route is of another group. Raises ModelNotFound if no
        worker serves the model, Unavailable if none is ready, Overloaded if all ready ones are in `avoid`,
        ContextTooLong if no pool could ever hold the request.
        """
        query = Query(request, avoid, self.affinity.of(request.session_id) or _NO_ROUTE, self.costs)
        groups = self._columns.groups(request)
        if self._comparing is not None and len(groups) == 1:
            compiled = self._compiled_route(self._comparing, groups[0], query)
            if compiled is not None:
                return compiled
        for is_last_resort in (False, True):
            for wanted, query.numerics_class in preferences(groups, request):
                routes = self._routes(wanted, query, is_last_resort=is_last_resort)
                if routes:
                    return routes[0][1] if len(routes) == 1 else self._choose_group(routes, query)
        raise self._no_route_error(request, groups, avoid)

    def _compiled_route(self, comparing: CompiledComparing, group: Group, query: Query) -> Route | None:
        """Return the same as `_route_within` of a group with one table of each role; None: it has to be asked."""
        request, prefills = query.request, group.prefills
        if len(group.decodes) > 1 or len(prefills) > 1 or request.preferred_space or request.preferred_class:
            return None
        remote = comparing.prefills(prefills[0], query) if prefills else Remote()
        if remote is None:
            return None
        number = self._best_of(remote, query) if request.hand_over != "never" else None
        prefill = None if number is None else remote.estimates[number]
        hand_over = self._hand_over(request, prefill, could_hold_choices(group.decodes, request))
        found = comparing.decodes(group.decodes[0], query, remote, number, hand_over)
        if found is None:
            return None
        return self._compared(group, query, remote.estimates, prefill, *found)

    def _routes(self, groups: Sequence[Group], query: Query, *, is_last_resort: bool) -> list[tuple[Group, Route]]:
        """Return the routes of the groups that have one. `is_last_resort`: through workers that are not well."""
        among = None
        if is_last_resort:
            among = self._shortlist.least_bad([table for group in groups for table in group.decodes], query.avoid)
        remote = self._prefill_estimates(groups, query)
        found = [
            (group, self._route_within(group, each, query, among)) for group, each in zip(groups, remote, strict=True)
        ]
        return [(group, route) for group, route in found if route is not None]

    def _choose_group(self, routes: Sequence[tuple[Group, Route]], query: Query) -> Route:
        """Return one group's route: the session's, that of a known prefix, or one by free capacity.

        As with workers, the session's group may be somewhat busier than others unless one of these has more of the
        prompt, and the one with the prefix must be sooner.
        """
        able = [(group, route) for group, route in routes if not route.cost[0] and not self.is_busy(route.decodes)]
        able = able or list(routes)
        if self.must_hand_over(query.request):
            able = [(group, route) for group, route in able if route.prefill is not None] or able
        least_load = min(self._decode_load(route.decodes[0]) for _, route in able)
        most_own = max(route.own_tokens(route.decodes[0]) for _, route in able)
        for _, route in able:
            first = route.decodes[0]
            if first.incarnation != query.last.decode or route.own_tokens(first) < most_own:
                continue
            if self._decode_load(first) <= _AFFINITY_SLACK * least_load:
                return route
        weights = self._shortlist.free_capacities([group for group, _ in able], query)
        ((_, drawn),) = self._rng.choices(able, weights)
        best = min((route for _, route in able if route.expects_cached), key=lambda route: route.cost, default=drawn)
        chosen = drawn if drawn.cost[1] <= TIE * best.cost[1] else best
        return msgspec.structs.replace(chosen, num_groups=len(routes))

    def _prefill_estimates(self, groups: Sequence[Group], query: Query) -> list[list[PrefillEstimate]]:
        """Return the estimates of each group's prefill candidates: of those that are well, if there are any."""

        def of(group: Group, among: Collection[str] | None) -> list[PrefillEstimate]:
            found: list[PrefillEstimate] = []
            for table in group.prefills:
                workers = self._shortlist.prefills(table, query, among)
                found += self.costs.estimates(workers, query.request, query.caches(table.key.index_space))
            return found

        found = [of(group, None) for group in groups]
        if any(found):
            return found
        among = self._shortlist.least_bad([table for group in groups for table in group.prefills], query.avoid)
        return [of(group, among) for group in groups] if among else found

    def _route_within(
        self, group: Group, remote: Sequence[PrefillEstimate], query: Query, among: Collection[str] | None
    ) -> Route | None:
        """Return the route of a group, of its candidates; None if no decode worker is able to take the request.

        The costs of one request are those of a few workers, however many there are.
        """
        request = query.request
        ordered = sorted([(each.total_ms, each.worker.worker_id, each) for each in remote])
        prefill = self._best_prefill(ordered, query) if request.hand_over != "never" else None
        hand_over = self._hand_over(request, prefill, could_hold_choices(group.decodes, request))
        ways = None
        if prefill is not None and hand_over != "never":
            slack = (_AFFINITY_SLACK, _SLACK_MS) if self._is_home(prefill, query) else (TIE, 0.0)
            ways = HandOverWays(self.costs, request.num_prompt_tokens, prefill, ordered, *slack)
        local: list[PrefillEstimate] = []
        for table in group.decodes:
            workers = self._shortlist.decodes(table, query, None if ways is None else prefill, hand_over, among)
            local += self.costs.estimates(workers, request, query.caches(table.key.index_space))
        if not local:
            return None
        return self._compared(group, query, remote, prefill, *self._rank_decodes(local, request, ways, hand_over))

    def _compared(
        self,
        group: Group,
        query: Query,
        remote: Sequence[PrefillEstimate],
        prefill: PrefillEstimate | None,
        options: list[ComparedDecode],
        num_ties: int,
    ) -> Route:
        """Return the best of the routes; of the decode workers that are about as good, one at random comes first."""
        options.insert(0, options.pop(self._one_of(num_ties)))
        ranked = self._with_affinity(options, query)
        first, decodes = ranked[0], tuple([option.estimate.worker for option in ranked])
        if first.prefill is not None:
            prefill = first.prefill
        comparison = self._comparison(query.request, remote, prefill, ranked)
        num_in_group = group.num_prefills, group.num_decodes
        predicted = {"decode_step": decodes[0].figures.step_ms or ASSUMED_STEP_MS}
        if first.is_handed_over and prefill is not None:
            predicted |= {**_parts("prefill", prefill), "hand_over": first.hand_over_ms, "local": first.local_ms}
            estimates = {prefill.worker.incarnation: prefill}
            return Route(prefill.worker, decodes, predicted, estimates, comparison, first.cost, num_in_group)
        predicted |= {**_parts("local", first.estimate), "local": first.local_ms}
        if prefill is not None and decodes[0].figures.kv_address:
            predicted["hand_over"] = first.hand_over_ms
        estimates = {option.estimate.worker.incarnation: option.estimate for option in ranked}
        return Route(None, decodes, predicted, estimates, comparison, first.cost, num_in_group)

    def is_busy(self, decodes: Collection[Worker]) -> bool:
        """Whether a request would have to wait at each of these decode workers."""
        return all(each.figures.num_waiting > 0 or not each.figures.has_free_blocks for each in decodes)

    def _no_route_error(self, request: RoutingRequest, groups: Sequence[Group], avoid: Collection[str]) -> TandemError:
        num_tokens = request.num_prompt_tokens + request.max_tokens
        if groups and not any(could_hold(table, num_tokens).any() for group in groups for table in group.decodes):
            return ContextTooLong(
                f"{request.num_prompt_tokens:,} prompt tokens and up to {request.max_tokens:,} answer tokens fit no "
                f"decode worker's KV pool, the largest has {largest_pool(groups):,}; lower max_tokens, "
                "shorten the prompt or give the workers more KV memory",
                field="max_tokens",
            )
        model_id = request.model_id
        if not self._registry.has_model(model_id):
            served = ", ".join(self._registry.model_ids()) or "nothing yet"
            return ModelNotFound(f"no worker serves {model_id!r}; served here: {served}")
        if avoid:
            return Overloaded("every worker refused the request; try again", retry_after_seconds=1.0)
        return Unavailable(f"no decode worker for {model_id!r} is ready; see GET /v1/workers", retry_after_seconds=2.0)

    # -------------------------------------------------------------------------------------- comparing predicted costs

    def _hand_over(self, request: RoutingRequest, prefill: PrefillEstimate | None, could_hold: bool) -> HandOver:
        """`could_hold`: whether all choices fit the pools at once."""
        if prefill is None or not could_hold:
            return "never"
        return "always" if self.must_hand_over(request) else request.hand_over

    def must_hand_over(self, request: RoutingRequest) -> bool:
        """Return whether a prefill worker computes the prompt wherever there is one."""
        return request.hand_over == "always" or (request.hand_over != "never" and self._local_prefill == "never")

    def _rank_decodes(
        self,
        local: Sequence[PrefillEstimate],
        request: RoutingRequest,
        ways: HandOverWays | None,
        hand_over: HandOver,
    ) -> tuple[list[ComparedDecode], int]:
        """Order workers by whether the prompt's blocks seem to fit, then by the predicted time of prompt and answer.

        The fuller the pool, the longer the answer's steps: those of a full pool take about twice as long. Return also
        how many of the first are about as good.
        """
        total_ms, num_measured = 0.0, 0
        for estimate in local:  # `sum` rounds otherwise from Python 3.12 on, and otherwise than the library
            if (ms := estimate.worker.figures.step_ms) is not None:
                total_ms, num_measured = total_ms + ms, num_measured + 1
        step_ms = total_ms / num_measured if num_measured else ASSUMED_STEP_MS
        answer_ms = min(request.max_tokens, EXPECTED_ANSWER_TOKENS) * step_ms
        num_prompt_tokens, num_tokens = request.num_prompt_tokens, request.num_prompt_tokens + request.max_tokens
        sent, ranked = self.in_flight.decode_tokens.get, []
        for estimate, local_ms in zip(local, self.costs.all_local_ms(local), strict=True):
            worker = estimate.worker
            figures, num_mine = worker.figures, sent(worker.incarnation, 0)
            prompt_ms, load = local_ms, _load(figures, num_mine, num_tokens)
            is_handed_over, prefill, hand_over_ms = False, None, 0.0
            if ways is not None and figures.kv_address:
                prefill, hand_over_ms = ways.best(estimate)
                if hand_over == "always" or hand_over_ms < local_ms:
                    is_handed_over, prompt_ms = True, hand_over_ms
            is_tight = figures.free_tokens < num_prompt_tokens + num_mine - figures.num_tokens_in_flight
            cost_ms = prompt_ms + answer_ms * load
            cost = is_tight, cost_ms
            option = ComparedDecode(cost, estimate, local_ms, load, is_handed_over, prefill, hand_over_ms)
            ranked.append((is_tight, cost_ms, worker.worker_id, option))
        ranked.sort()
        options = [option for _, _, _, option in ranked]
        best = options[0]
        # What prefill takes is the same for each of them: the rest is compared.
        common = best.prefill.total_ms if best.is_handed_over and best.prefill is not None else 0.0
        limit = best.cost[1] + (TIE - 1) * (best.cost[1] - common)
        num_ties = 1
        while num_ties < len(options) and options[num_ties].cost <= (best.cost[0], limit):
            num_ties += 1
        return options, num_ties

    def _with_affinity(self, options: list[ComparedDecode], query: Query) -> list[ComparedDecode]:
        """Put the worker of the session or of the request's key first, unless it is much later than the best."""
        best, place = options[0], self._favoured(options, query)
        if place:
            option = options[place]
            worker, most_ms, is_near = option.estimate.worker, _most_ms(best.cost[1]), False
            if worker.incarnation == query.last.decode:
                most_ms = best.cost[1] + _SLACK_MS
                is_near = self._decode_load(worker) <= _AFFINITY_SLACK * self._decode_load(best.estimate.worker)
            if is_near or (option.cost[0] <= best.cost[0] and option.cost[1] <= most_ms):
                options.insert(0, options.pop(place))
        return options

    def _favoured(self, options: Sequence[ComparedDecode], query: Query) -> int | None:
        """Return the place of the worker to prefer: the session's last one, if no other has more of the prompt.

        Else another gateway has sent the session elsewhere, and this is the worker that has most of the prompt, if it
        has half. Without either, the worker of the request's key.
        """
        if query.request.session_id:
            last, most, holder, num_holders = None, 0, 0, 0
            for place, option in enumerate(options):
                estimate = option.estimate
                if estimate.worker.incarnation == query.last.decode:
                    last = place
                if (num_own := estimate.cached.own) > most:
                    most, holder, num_holders = num_own, place, 1
                elif num_own == most:
                    num_holders += 1
            if last is not None and options[last].estimate.cached.own == most:
                return last
            if num_holders == 1 and 2 * most >= query.request.num_prompt_tokens:
                return holder
        if not query.homes:
            return None
        return next((n for n, each in enumerate(options) if each.estimate.worker.incarnation in query.homes), None)

    def _decode_load(self, worker: Worker) -> float:
        """Return the share of its pool's tokens that a decode worker would have in flight with one more."""
        return _load(worker.figures, self.in_flight.decode_tokens.get(worker.incarnation, 0), 1)

    def _is_home(self, estimate: PrefillEstimate, query: Query) -> bool:
        return estimate.worker.incarnation == query.last.prefill or estimate.worker.incarnation in query.homes

    def _best_prefill(
        self, ordered: Sequence[tuple[float, str, PrefillEstimate]], query: Query
    ) -> PrefillEstimate | None:
        """Return the session's last worker or the key's if it is about as soon as the soonest, or one of these.

        `ordered`: by their milliseconds, which come first.
        """
        if not ordered:
            return None
        least_ms, _, soonest = ordered[0]
        most_ms = _most_ms(least_ms)
        for total_ms, _, estimate in ordered:
            if total_ms > most_ms:
                break
            if self._is_home(estimate, query):
                return estimate
        most_ms, most_wait_ms = TIE * least_ms, TIE * soonest.wait_ms + SAME_QUEUE * soonest.compute_ms
        ties = [each for total_ms, _, each in ordered if total_ms <= most_ms and each.wait_ms <= most_wait_ms]
        drawn, query.drawn_tie = query.drawn_tie, None
        return ties[self._one_of(len(ties)) if drawn is None else min(drawn, len(ties) - 1)]

    def _best_of(self, remote: Remote, query: Query) -> int | None:
        """Return the same of those that the compiled library compared: its number."""
        if remote.near is not None or not remote.ties:
            return remote.near
        query.drawn_tie = self._one_of(len(remote.ties))
        return remote.ties[query.drawn_tie]

    def _one_of(self, number: int) -> int:
        return self._rng.choice(range(number)) if number > 1 else 0

    # --------------------------------------------------------------------------------------------- explaining a route

    def _comparison(
        self,
        request: RoutingRequest,
        prefills: Sequence[PrefillEstimate],
        best: PrefillEstimate | None,
        decodes: Sequence[ComparedDecode],
    ) -> Comparison:
        """Keep what an explanation shows of the decision: a few workers of each role, with their figures of now."""
        if len(prefills) > MAX_COMPARED:  # the session's worker may not be among the soonest
            prefills = nsmallest(MAX_COMPARED, prefills, key=lambda each: (each is not best, each.total_ms))
        first, hand_overs, num_tokens = decodes[0].estimate, self.costs.hand_overs, request.num_prompt_tokens
        return Comparison(
            prefills,
            hand_overs.pairs([each.worker.figures.host_id for each in prefills], first.worker.figures.host_id),
            decodes[:MAX_COMPARED],
            num_tokens,
            hand_overs.reader(first.worker, num_tokens, first.cached.own),
            may_hand_over=request.hand_over != "never",
        )


def _most_ms(least_ms: float) -> float:
    """Return how long the session's or the key's worker may take where the soonest takes so long."""
    return max(_AFFINITY_SLACK * least_ms, least_ms + _SLACK_MS)


def _load(figures: WorkerFigures, num_sent: int, num_tokens: int) -> float:
    """Return the share of its pool's tokens that a decode worker would have in flight with `num_tokens` more."""
    num_reported = figures.num_tokens_in_flight
    return ((num_sent if num_sent > num_reported else num_reported) + num_tokens) / (figures.pool_tokens or 1)


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
        "prefix_source": estimate.cached.source,
    }
