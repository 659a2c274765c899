"""Scores all workers of a table at once, and lets the few go on to the comparison that could win it.

The scores leave out caches and links: workers that have a part of the prompt, and the session's last one, are
candidates whatever their score. `Router` compares the candidates with all that is known.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.fleet.worker_health import WorkerHealth
from control_plane.routing import rendezvous
from control_plane.routing.comparison import MAX_COMPARED
from control_plane.routing.cost_model import (
    ASSUMED_STEP_MS,
    EXPECTED_ANSWER_TOKENS,
    CostModel,
    HandOver,
    PrefillEstimate,
    RoutingRequest,
)
from control_plane.routing.groups import TIE, Group
from control_plane.routing.pair_columns import PairColumns
from control_plane.routing.prefix_index import PrefixMatch
from control_plane.routing.session_affinity import SessionRoute
from control_plane.routing.worker_table import (
    ANSWER_RATE,
    ANSWERS,
    BEAT,
    BLOCK,
    DELAY,
    HELD,
    LARGEST,
    MY_PROMPTS,
    MY_QUEUE,
    POOL,
    REPORTED,
    ROOM,
    WAITS,
    Bools,
    Floats,
    WorkerTable,
)
from tandem.v1 import types_pb2 as pb

NUM_CANDIDATES = 4
"""Of a table with more workers than an explanation shows. A shorter one is compared whole."""
_NUM_HOLDERS = 2
"""Candidates for the sake of their pools, and as many for that of their hosts' stores."""
_ROUNDS = (NUM_CANDIDATES, 4 * NUM_CANDIDATES, 16 * NUM_CANDIDATES, 64 * NUM_CANDIDATES)
"""Workers that are looked at, until one of them is well."""
_LIGHT_LOAD = 0.125
"""Of all pools' tokens. With less held, steps are as short as they get, and keys stay where every gateway looks."""
_LAST = 1e12
"""Added to the score of workers that come after all others."""


@dataclass(eq=False)
class Query:
    """A request that is routed, and what is the same for all groups of workers."""

    request: RoutingRequest
    avoid: Collection[str]
    """Incarnations that refused the request or failed."""
    last: SessionRoute
    costs: CostModel
    numerics_class: str = ""
    """Only decode workers of this class; "": of any."""
    homes: set[str] = field(default_factory=set)
    """Workers that this request goes to at any gateway, unless others are much sooner: nobody has its beginning."""
    _matches: dict[bytes, PrefixMatch] = field(default_factory=dict)
    _keys: list[int | None] = field(default_factory=list)

    @property
    def key(self) -> int | None:
        if not self._keys:
            self._keys.append(rendezvous.key_of(self.request))
        return self._keys[0]

    def match(self, space: bytes) -> PrefixMatch:
        """Return where the prompt's blocks are, of an index space; found once per request."""
        found = self._matches.get(space)
        if found is None:
            found = self._matches[space] = self.costs.match(self.request, space)
        return found


class Shortlist:
    """Finds the candidates of a request in tables. `among`: only these, well or not; None: all that are well."""

    def __init__(
        self,
        registry: WorkerRegistry,
        costs: CostModel,
        health: WorkerHealth,
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry, self._costs, self._health = registry, costs, health
        self._rng, self._clock = rng, clock

    def prefills(self, table: WorkerTable, query: Query, among: Collection[str] | None = None) -> list[Worker]:
        """Return the prefill workers that may have the prompt soonest."""
        rates = self._rates(table)
        queued = self._num_queued(table, rates)
        score = (queued + query.request.num_prompt_tokens) / rates
        home = self._home(table, query, query.last.prefill, queued, score, rates)
        return self._candidates(table, score, query, home, among)

    def decodes(
        self,
        table: WorkerTable,
        query: Query,
        prefill: PrefillEstimate | None,
        hand_over: HandOver,
        among: Collection[str] | None = None,
    ) -> list[Worker]:
        """Return the decode workers that may have prompt and answer soonest, of those whose pools could hold them.

        `prefill`: the best prefill worker's estimate, if the prompt may be handed over.
        """
        if query.numerics_class not in ("", table.key.numerics_class):
            return []
        request, columns = query.request, table.columns
        num_tokens = request.num_prompt_tokens + request.max_tokens
        score = columns[HELD] + num_tokens
        score /= table.pool_weights.of_rows
        score *= min(request.max_tokens, EXPECTED_ANSWER_TOKENS) * (table.step_ms or ASSUMED_STEP_MS)
        is_short = len(table) <= MAX_COMPARED  # all are compared: nobody reads what the prompt takes
        hand_over_ms = None if is_short or prefill is None else self._hand_over_ms(table, request, prefill)
        if hand_over_ms is not None and hand_over == "always":
            score += hand_over_ms
        elif hand_over_ms is not None:
            local_ms = self._local_ms(table, request)
            score += np.minimum(local_ms, hand_over_ms)
        elif not is_short:
            score += self._local_ms(table, request)
        are_late = columns[ROOM] < request.num_prompt_tokens
        if 0 < np.count_nonzero(are_late) < len(table):
            score[are_late] += _LAST
        if table.least_largest < num_tokens:
            score[columns[LARGEST] < num_tokens] = np.inf
        if prefill is not None and hand_over_ms is not None:
            best = score.argmin()
            if hand_over == "always" or local_ms[best] >= hand_over_ms[best]:
                score -= prefill.total_ms  # the same for all that are about as good: the rest is compared
        home = self._home(table, query, query.last.decode, columns[HELD], score)
        found = self._candidates(table, score, query, home, among)
        return self._with_an_idle_one(table, score, found) if among is None else found

    def least_bad(self, tables: Iterable[WorkerTable], avoid: Collection[str]) -> set[str]:
        """Return the workers to use when none is well."""
        workers = [worker for table in tables for worker in table.workers]
        return {each.incarnation for each in self._health.usable(workers) if each.incarnation not in avoid}

    def free_capacities(self, groups: Sequence[Group], query: Query) -> list[float]:
        """Return a weight for each group, as `groups.py` says; all are 1 if nothing is free anywhere."""
        out, request = [*query.avoid, *self._health.out], query.request
        speeds = [sum(self._free_speed(table, out) for table in group.prefills) for group in groups]
        tokens = [sum(_free_tokens(table, request, out) for table in group.decodes) for group in groups]
        weights = [
            (min(speed, share) if group.prefills else share) * self._answer_speed(group)
            for group, speed, share in zip(groups, _shares(speeds), _shares(tokens), strict=True)
        ]
        return weights if sum(weights) > 0 else [1.0] * len(groups)

    # ---------------------------------------------------------------------------------------------------- columns

    def _rates(self, table: WorkerTable) -> Floats:
        """Return the prompt tokens per second of each worker; the mean of its peers before its first prompt."""
        key = table.key
        return table.rates(lambda: self._costs.typical_rate(key.model_id, key.numerics_class, key.role))

    def _num_queued(self, table: WorkerTable, rates: Floats) -> Floats:
        """Return `CostModel.num_queued` of each prefill worker."""
        since = self._clock() - table.columns[BEAT]
        since *= rates
        queued: Floats = np.maximum(table.columns[MY_PROMPTS], table.columns[REPORTED] - since)
        return queued

    def _local_ms(self, table: WorkerTable, request: RoutingRequest) -> Floats:
        """Return `CostModel.local_ms` of each worker, were nothing cached."""
        local_ms = table.columns[DELAY] * request.num_prompt_tokens
        local_ms += table.columns[MY_QUEUE]
        local_ms /= self._rates(table)
        return local_ms

    def _hand_over_ms(self, table: WorkerTable, request: RoutingRequest, prefill: PrefillEstimate) -> Floats:
        """Return when each worker would have the cache from a prefill worker, were nothing cached there."""
        if table.pairs is None:
            table.pairs = PairColumns(table.hosts.ids, self._costs.hand_overs, self._clock)
        shown, figures = self._costs.shown(prefill, request.num_prompt_tokens), table.workers[0].figures
        of_hosts = table.pairs.ms(shown, prefill.worker.figures.host_id, figures.bytes_per_token)
        of_hosts += prefill.total_ms
        return of_hosts.take(table.host_numbers)

    def _free_speed(self, table: WorkerTable, out: Collection[str]) -> float:
        """Return prompt tokens per second; a queue of a second halves them."""
        rates = self._rates(table)
        speeds = rates / (1 + self._num_queued(table, rates) / rates)
        speeds[table.rows(out)] = 0.0
        return float(speeds.sum())

    def _answer_speed(self, group: Group) -> float:
        """Return the tokens per second that one more answer would get at a worker, if all answers there get as many."""
        total = 0.0
        for table in group.decodes:
            rates = table.columns[ANSWER_RATE]
            if not rates.all():
                typical = self._costs.typical_answer_rate(table.key.model_id, table.key.role)
                rates = np.where(rates > 0, rates, typical)
            total += float(np.sum(rates / (1 + table.columns[ANSWERS])))
        return total / group.num_decodes

    # --------------------------------------------------------------------------------------------------- choosing

    def _home(
        self,
        table: WorkerTable,
        query: Query,
        last: str,
        loads: Floats,
        score: Floats,
        rates: Floats | None = None,
    ) -> str:
        """Return the worker that the request had better go to: its session's last one, or that of its key; or "".

        `rates`: keys are spread by these; None: by the workers' pools, while they are nearly empty whatever they hold.
        Where workers of the table have half of the prompt or more, they win over the key's worker; with less (the
        beginning that all prompts have) the costs decide. Takes workers to avoid out of the scores: inf.
        """
        if query.avoid:
            score[table.rows(query.avoid)] = np.inf
        if last in table.row_of:
            return last
        if query.key is None or _is_held(table, query):
            return ""
        may_take = score < _LAST / 2
        if self._health.out:
            may_take[table.rows(self._health.out)] = False
        weights = table.pool_weights if rates is None else table.weights(rates)
        light_load = _LIGHT_LOAD * weights.total if rates is None else 0.0
        row = rendezvous.home(table, query.key, weights, loads, may_take, light_load)
        if row is None:
            return ""
        query.homes.add(table.incarnations[row])
        return table.incarnations[row]

    def _candidates(
        self, table: WorkerTable, score: Floats, query: Query, home: str, among: Collection[str] | None
    ) -> list[Worker]:
        """Return some of the workers with the least scores, and those with some of the prompt; inf: never."""
        if among is not None:
            score[[each not in among for each in table.incarnations]] = np.inf
        if len(table) <= MAX_COMPARED:
            return self._able(table, (score < np.inf).nonzero()[0].tolist(), among)
        match = query.match(table.key.index_space)
        wanted = [home, *_deepest(match.pools, table.row_of)]
        for host in _deepest(match.hosts, table.on_host):
            wanted.append(min(table.on_host[host], key=lambda each: score.item(table.row_of[each])))
        rows = dict.fromkeys([row for row in table.rows(wanted) if score.item(row) < math.inf])
        for number in _ROUNDS:
            picked = self._pick(score, number)
            able = self._able(table, {**rows, **dict.fromkeys(picked)}, among)
            if not picked or not {*picked}.isdisjoint([table.row_of[each.incarnation] for each in able]):
                return able[: len(rows) + NUM_CANDIDATES]
            score[picked] = np.inf
        return able

    def _with_an_idle_one(self, table: WorkerTable, score: Floats, found: list[Worker]) -> list[Worker]:
        """Add a worker at which a request need not wait, if there is one, and none was found."""
        waits = table.columns[WAITS]
        for worker in found:
            if not waits.item(table.row_of[worker.incarnation]):
                return found
        idle = np.where(waits > 0, np.inf, score)
        return found + self._able(table, self._pick(idle, 1), None)

    def _pick(self, score: Floats, number: int) -> list[int]:
        """Return rows of the least scores: at random if more than `number` are about as good as the best."""
        least = score.item(score.argmin())
        if least == math.inf:
            return []
        ties = (score <= TIE * least).nonzero()[0]
        if (num_ties := len(ties)) > number:
            first, stride = int(self._rng.random() * num_ties), num_ties // number  # each is as likely as others
            return [ties.item((first + each * stride) % num_ties) for each in range(number)]
        if len(score) <= number:
            return (score < np.inf).nonzero()[0].tolist()
        if number <= NUM_CANDIDATES:
            return _least(score, number)
        return [row for row in np.argpartition(score, number)[:number].tolist() if score[row] < np.inf]

    def _able(self, table: WorkerTable, rows: Iterable[int], among: Collection[str] | None) -> list[Worker]:
        """Return the workers that are well; of prefill, also with a KV service through which others get their cache."""
        workers = [table.workers[row] for row in rows]
        if table.key.role == pb.WORKER_ROLE_PREFILL:
            has_kv_service = self._registry.has_kv_service
            workers = [worker for worker in workers if has_kv_service(worker.figures.kv_address)]
        return self._health.well(workers) if among is None else workers


def could_hold(table: WorkerTable, num_tokens: int) -> Bools:
    """Return whether each pool has enough tokens for a request, or is not reported yet."""
    return np.asarray(table.columns[LARGEST] >= num_tokens)


def could_hold_choices(tables: Iterable[WorkerTable], request: RoutingRequest) -> bool:
    """Return whether all choices fit the workers' pools at once; each needs its prompt's blocks, and one to grow into.

    A hand-over begins when all choices have their blocks. Choices of a prompt that decode computes wait in its queue.
    """
    if request.num_choices == 1:
        return True
    most = 0.0
    for table in tables:
        pool, block = table.columns[POOL], table.columns[BLOCK]
        if not pool.all():  # one is not reported yet
            return True
        fits = could_hold(table, request.num_prompt_tokens + request.max_tokens)
        num_blocks = np.ceil((request.num_prompt_tokens + 1) / block) + 1
        most += float(np.sum(pool / block // num_blocks, where=fits))
    return most >= request.num_choices


def _least(score: Floats, number: int) -> list[int]:
    """Return the rows of a few least scores, in order; a third of what argpartition takes for 500 rows."""
    found: list[tuple[int, float]] = []
    for _ in range(number):
        row = int(score.argmin())
        value = score.item(row)
        if value == math.inf:
            break
        found.append((row, value))
        score[row] = np.inf
    for row, value in found:
        score[row] = value
    return [row for row, _ in found]


def largest_pool(groups: Iterable[Group]) -> int:
    """Return the tokens of the largest pool of the groups' decode workers."""
    return int(max(table.columns[POOL].max() for group in groups for table in group.decodes))


def _free_tokens(table: WorkerTable, request: RoutingRequest, out: Collection[str]) -> float:
    """Return the tokens of KV pools that no request has taken; 1 for a pool that is not reported yet."""
    pool = table.columns[POOL]
    free = pool - table.columns[HELD]
    free = np.where(pool > 0, np.maximum(0.0, free), 1.0)
    free *= could_hold(table, request.num_prompt_tokens + request.max_tokens)
    free[table.rows(out)] = 0.0
    return float(free.sum())


def _shares(values: Sequence[float]) -> list[float]:
    total = sum(values)
    return [value / total if total else 0.0 for value in values]


def _is_held(table: WorkerTable, query: Query) -> bool:
    """Return whether a worker of the table, or its host, has half of the prompt or more."""
    match, least = query.match(table.key.index_space), max(1, len(query.request.block_hashes) // 2)
    for places, known in ((match.pools, table.row_of), (match.hosts, table.on_host)):
        for place, number in places.items():
            if number >= least and place in known:
                return True
    return False


def _deepest(places: Mapping[str, int], known: Container[str]) -> list[str]:
    """Return the known places that have the most blocks."""
    here = [place for place in places if place in known]
    if len(here) > 1:
        here.sort(key=places.__getitem__, reverse=True)
    return here[:_NUM_HOLDERS]
