"""Lets the few workers of a table go on to the comparison that could win it, by the scores of all.

The scores leave out caches: workers that have a part of the prompt, and the session's last one, are candidates whatever
their score. `Router` compares the candidates with all that is known.
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
from control_plane.routing.block_stores import PromptCaches
from control_plane.routing.cost_model import CostModel, HandOver, PrefillEstimate, RoutingRequest
from control_plane.routing.groups import Group
from control_plane.routing.pair_columns import PairColumns
from control_plane.routing.prefix_index import PrefixMatch
from control_plane.routing.scoring import (
    NUM_CANDIDATES,
    Choice,
    Scored,
    Scoring,
    Way,
    is_short,
    num_picked,
    num_queued,
    pick,
    rates_of,
)
from control_plane.routing.session_affinity import SessionRoute
from control_plane.routing.worker_table import (
    ANSWER_RATE,
    ANSWERS,
    BLOCK,
    HELD,
    LARGEST,
    POOL,
    WAITS,
    Bools,
    Floats,
    TableKey,
    WorkerTable,
)
from tandem.v1 import types_pb2 as pb

_NUM_HOLDERS = 2
"""Candidates for the sake of their pools, and as many for that of their hosts' stores."""
_NUM_OTHERS = 2
"""Decode candidates beside those, at least. With as few prefill candidates the median prompt waits 2 % longer."""
_LATER_ROUNDS = (4 * NUM_CANDIDATES, 16 * NUM_CANDIDATES, 64 * NUM_CANDIDATES)
"""Workers that are looked at, until one of them is well."""


@dataclass(eq=False, slots=True)
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
    """The workers of the key: this request goes there unless others are much sooner, as nobody has its beginning."""
    choices: dict[tuple[TableKey, bool], Choice] = field(default_factory=dict)
    """By table, and whether it is the last resort."""
    drawn_tie: int | None = None
    """Which of the best prefill workers the compiled library's comparison took; None: it made none."""
    _found: dict[bytes, tuple[PrefixMatch, PromptCaches | None]] = field(default_factory=dict)
    _keys: list[int | None] = field(default_factory=list)

    @property
    def key(self) -> int | None:
        if not self._keys:
            self._keys.append(rendezvous.key_of(self.request))
        return self._keys[0]

    def match(self, space: bytes) -> PrefixMatch:
        """Return where the prompt's blocks are, of an index space."""
        return (self._found.get(space) or self._find(space))[0]

    def caches(self, space: bytes) -> PromptCaches | None:
        """Return what workers find of the prompt, by that."""
        return (self._found.get(space) or self._find(space))[1]

    def _find(self, space: bytes) -> tuple[PrefixMatch, PromptCaches | None]:
        """Look once per request."""
        match = self.costs.match(self.request, space)
        found = self._found[space] = match, self.costs.caches(self.request, match)
        return found


class Shortlist:
    """Finds the candidates of a request in tables. `among`: only these, well or not; None: all that are well."""

    def __init__(
        self,
        registry: WorkerRegistry,
        costs: CostModel,
        health: WorkerHealth,
        scoring: Scoring,
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry, self._costs, self._health, self._scoring = registry, costs, health, scoring
        self._rng, self._clock = rng, clock

    def prefills(self, table: WorkerTable, query: Query, among: Collection[str] | None = None) -> list[Worker]:
        """Return the prefill workers that may have the prompt soonest."""
        choice = self.choice(table, query, query.last.prefill, is_last_resort=among is not None)
        scored = self._scoring.prefills(table, query.request, choice)
        return self._candidates(table, scored, query, query.last.prefill, among)

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
        way = None
        if prefill is not None and not is_short(table):
            way = self._way(table, query.request, prefill, is_forced=hand_over == "always")
        choice = self.choice(table, query, query.last.decode, is_last_resort=among is not None)
        scored = self._scoring.decodes(table, query.request, way, choice)
        found = self._candidates(table, scored, query, query.last.decode, among)
        return self._with_an_idle_one(table, scored.score, found) if among is None else found

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

    def _way(self, table: WorkerTable, request: RoutingRequest, prefill: PrefillEstimate, *, is_forced: bool) -> Way:
        """Return the hand-over from a prefill worker to the workers of a table."""
        shown, from_host = self._costs.shown(prefill, request.num_prompt_tokens), prefill.worker.figures.host_id
        bytes_per_token = table.workers[0].figures.bytes_per_token
        return Way(self.pairs(table), shown, from_host, bytes_per_token, prefill.total_ms, is_forced)

    def pairs(self, table: WorkerTable) -> PairColumns:
        """Return what hand-overs to the hosts of a table take."""
        if table.pairs is None:
            table.pairs = PairColumns(table.hosts.ids, self._costs.hand_overs, self._clock)
        return table.pairs

    def _free_speed(self, table: WorkerTable, out: Collection[str]) -> float:
        """Return prompt tokens per second; a queue of a second halves them."""
        rates = rates_of(table, self._costs)
        speeds = rates / (1 + num_queued(table, rates, self._clock()) / rates)
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

    def choice(self, table: WorkerTable, query: Query, last: str, *, is_last_resort: bool = False) -> Choice:
        """Return which workers a request may go to. `last`: its session's last worker of the table's role, or "".

        The worker of its key is looked for unless the session has a worker here. Where workers of the table have half
        of the prompt or more, they win over the key's worker; with less (the beginning that all prompts have) the costs
        decide. What is drawn for a request stays.
        """
        found = query.choices.get((table.key, is_last_resort))
        if found is None:
            key = None if last in table.row_of or query.key is None or _is_held(table, query) else query.key
            out = table.rows(self._health.out) if self._health.out else []
            avoid = table.rows(query.avoid) if query.avoid else []
            if table.key.role == pb.WORKER_ROLE_PREFILL:  # others get a prompt's cache through its KV service
                avoid = avoid + table.unreached(self._registry.kv_addresses())
            if not is_last_resort:
                avoid, out = avoid + out + table.detached(self._health.attached), []
            is_new_session = bool(query.request.session_id)
            found = Choice(key, avoid, out, is_new_session, self.drawn())
            query.choices[table.key, is_last_resort] = found
        return found

    def drawn(self) -> float:
        return self._rng.random()

    def _candidates(
        self, table: WorkerTable, scored: Scored, query: Query, last: str, among: Collection[str] | None
    ) -> list[Worker]:
        """Return some of the workers with the least scores, and those with some of the prompt; inf: never."""
        score, home, picked = scored.score, scored.home, scored.picked
        if home is not None:
            last = table.incarnations[home]
            query.homes.add(last)
        if among is not None:
            score[[each not in among for each in table.incarnations]] = np.inf
            picked = pick(score, num_picked(table), self.drawn())
        if is_short(table):
            return self._able(table, picked, among)
        match = query.match(table.key.index_space)
        wanted = table.rows([last, *_deepest(match.pools, table.row_of)])
        for host in _deepest(match.hosts, table.rows_by_host):
            wanted.append(min(table.rows_by_host[host], key=score.item))
        rows = dict.fromkeys([row for row in wanted if score.item(row) < math.inf])
        num_others = NUM_CANDIDATES
        if table.key.role == pb.WORKER_ROLE_DECODE:
            num_others = max(_NUM_OTHERS, NUM_CANDIDATES - len(rows))
        for number in (*_LATER_ROUNDS, 0):
            others = [row for row in picked if row not in rows][:num_others]
            able = self._able(table, [*rows, *others], among)
            if len(able) == len(rows) + len(others) or not number or not picked:
                break
            if not {*picked}.isdisjoint([table.row_of[each.incarnation] for each in able]):
                break
            score[[*rows, *others]] = np.inf
            picked, num_others = pick(score, number, self.drawn()), number
        return able[: len(rows) + NUM_CANDIDATES]

    def _with_an_idle_one(self, table: WorkerTable, score: Floats, found: list[Worker]) -> list[Worker]:
        """Add a worker at which a request need not wait, if there is one, and none was found."""
        waits = table.columns[WAITS]
        for worker in found:
            if not waits.item(table.row_of[worker.incarnation]):
                return found
        idle = np.where(waits > 0, np.inf, score)
        return found + self._able(table, pick(idle, 1, self.drawn()), None)

    def _able(self, table: WorkerTable, rows: Iterable[int], among: Collection[str] | None) -> list[Worker]:
        """Return the workers of rows that are well."""
        workers = [table.workers[row] for row in rows]
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
    match = query.match(table.key.index_space)
    if not (match.pools or match.hosts):
        return False
    least = max(1, len(query.request.block_hashes) // 2)
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
