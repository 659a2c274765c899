"""Scores all workers of a model and role at once, and lets the few go on to the comparison that could win it.

A table has a column per figure and a row per worker, of one model, role, identity and space. Registrations, load
reports and calls in flight change single rows; nothing is built for a request. The scores leave out caches and links:
workers that have a part of the prompt, and the session's last one, are candidates whatever their score. `Router`
compares the candidates with all that is known.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from heapq import nlargest
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.fleet.worker_health import WorkerHealth
from control_plane.routing.comparison import MAX_COMPARED
from control_plane.routing.cost_model import (
    ASSUMED_STEP_MS,
    EXPECTED_ANSWER_TOKENS,
    SHARE_OF_OTHERS,
    CostModel,
    HandOver,
    InFlight,
    RoutingRequest,
    step_ms,
)
from control_plane.routing.groups import TIE, index_space
from control_plane.routing.prefix_index import PrefixMatch
from tandem.v1 import types_pb2 as pb

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]

NUM_CANDIDATES = MAX_COMPARED
"""As many as an explanation shows. Fleets with at most so many workers of a role are compared whole."""
_NUM_HOLDERS = 2
"""Candidates for the sake of their pools, and as many for that of their hosts' stores."""
_ROUNDS = (NUM_CANDIDATES, 4 * NUM_CANDIDATES, 16 * NUM_CANDIDATES, 64 * NUM_CANDIDATES)
"""Workers that are looked at, until one of them is well."""
_LAST = 1e12
"""Added to the score of workers that come after all others."""

_ROLES = (pb.WORKER_ROLE_PREFILL, pb.WORKER_ROLE_DECODE)
(
    _RATE,
    _BEAT,
    _REPORTED,
    _RUNNING,
    _LIVE,
    _MAX_RUNNING,
    _POOL,
    _BLOCK,
    _FREE,
    _CONTEXT,
    _STEP,
    _WAITS,
    _MY_PROMPTS,
    _MY_TOKENS,
    _MY_ANSWERS,
) = range(15)
"""Columns. 0 is "not known" for rate, pool, step and most running requests."""


class TableKey(NamedTuple):
    """What the workers of a table have in common."""

    role: pb.WorkerRole.ValueType
    model_id: str
    identity: bytes
    numerics_class: str
    space: bytes
    index_space: bytes
    """The space of the workers' blocks in the prefix index."""


class WorkerTable:
    """The columns of some workers; `values` is [columns, rows], of which the first `len` rows are used."""

    def __init__(self, key: TableKey) -> None:
        self.key = key
        self.incarnations: list[str] = []
        self.worker_ids: list[str] = []
        self.row_of: dict[str, int] = {}
        self.on_host: dict[str, dict[str, None]] = {}
        self._hosts: dict[str, str] = {}
        self._values = np.zeros((15, 16))

    def __len__(self) -> int:
        return len(self.incarnations)

    def column(self, which: int) -> Floats:
        return self._values[which, : len(self)]

    def put(self, worker: Worker, values: Sequence[float]) -> None:
        """Add a worker or change its row."""
        row = self.row_of.get(worker.incarnation)
        if row is None:
            row = len(self)
            if row == self._values.shape[1]:
                self._values = np.concatenate([self._values, np.zeros_like(self._values)], axis=1)
            self.row_of[worker.incarnation] = row
            self.incarnations.append(worker.incarnation)
            self.worker_ids.append(worker.worker_id)
            self._hosts[worker.incarnation] = worker.info.host_id
            self.on_host.setdefault(worker.info.host_id, {})[worker.incarnation] = None
        self._values[:, row] = values

    def remove(self, incarnation: str) -> None:
        """Move the last row to that of a worker that is gone."""
        row, last = self.row_of.pop(incarnation), len(self) - 1
        host = self._hosts.pop(incarnation)
        del self.on_host[host][incarnation]
        if not self.on_host[host]:
            del self.on_host[host]
        if row != last:
            self.incarnations[row], self.worker_ids[row] = self.incarnations[last], self.worker_ids[last]
            self.row_of[self.incarnations[row]] = row
            self._values[:, row] = self._values[:, last]
        self.incarnations.pop()
        self.worker_ids.pop()


class WorkerColumns:
    """The tables of all models, kept up to date by the registry and the calls in flight."""

    def __init__(
        self,
        registry: WorkerRegistry,
        in_flight: InFlight,
        costs: CostModel,
        health: WorkerHealth,
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry, self._in_flight, self._costs, self._health = registry, in_flight, costs, health
        self._rng, self._clock = rng, clock
        self._tables: dict[tuple[pb.WorkerRole.ValueType, str], dict[TableKey, WorkerTable]] = {}
        self._table_of: dict[str, WorkerTable] = {}
        registry.listen(self._changed)
        registry.listen_to_loads(self._reported)
        in_flight.listen(self._sent)
        for worker in registry.workers():
            self._changed(worker, True)

    def tables(self, request: RoutingRequest) -> tuple[WorkerTable, WorkerTable | None] | None:
        """Return the tables of decode and prefill workers that a request may go to, if one of them is long.

        None: few workers serve the model, or they have several classes or spaces, of which groups are made.
        """
        decodes = self._of(pb.WORKER_ROLE_DECODE, request)
        if len(decodes) != 1:
            return None
        (decode,) = decodes
        prefills = [each for each in self._of(pb.WORKER_ROLE_PREFILL, request) if each.key.space == decode.key.space]
        if max(map(len, (decode, *prefills))) <= NUM_CANDIDATES or len(prefills) > 1:
            return None
        prefill = next(iter(prefills), None)
        return (decode, prefill) if prefill is None or prefill.key.index_space == decode.key.index_space else None

    def prefills(
        self, table: WorkerTable, request: RoutingRequest, match: PrefixMatch, last: str, avoid: Collection[str]
    ) -> list[Worker]:
        """Return the prefill workers that may have the prompt soonest; `last` is the session's incarnation."""
        rate, mine = self._rates(table), table.column(_MY_PROMPTS)
        since = np.maximum(0.0, self._clock() - table.column(_BEAT))
        queued = np.maximum(mine, table.column(_REPORTED) - since * rate)
        score = (queued + request.num_prompt_tokens) / rate
        return self._candidates(table, score, match, last, avoid)

    def decodes(
        self,
        table: WorkerTable,
        request: RoutingRequest,
        match: PrefixMatch,
        last: str,
        avoid: Collection[str],
        hand_over_ms: float | None,
        hand_over: HandOver,
    ) -> list[Worker]:
        """Return the decode workers that may have prompt and answer soonest; none if no pool could hold the request.

        `hand_over_ms`: of the best prefill worker; None: decode computes the prompt.
        """
        num_tokens = request.num_prompt_tokens + request.max_tokens
        pool, reported, mine = table.column(_POOL), table.column(_REPORTED), table.column(_MY_TOKENS)
        share = (np.maximum(mine, reported) + num_tokens) / np.maximum(1.0, pool)
        steps = table.column(_STEP)
        num_steps = np.count_nonzero(steps)
        mean_ms = float(steps.sum()) / num_steps if num_steps else ASSUMED_STEP_MS
        score = min(request.max_tokens, EXPECTED_ANSWER_TOKENS) * mean_ms * share
        local_ms = self._local_ms(table, request) if hand_over_ms is None or hand_over != "always" else None
        if local_ms is not None:
            score += local_ms if hand_over_ms is None else np.minimum(local_ms, hand_over_ms)
        is_late = table.column(_FREE) < request.num_prompt_tokens + mine - reported
        most = table.column(_MAX_RUNNING)
        is_late |= (most > 0) & (np.maximum(table.column(_LIVE), table.column(_MY_ANSWERS)) >= most)
        if not is_late.all():
            score[is_late] += _LAST
        num_needed = np.minimum(num_tokens, table.column(_CONTEXT) + 1) - 1
        score[(pool > 0) & (num_needed > pool)] = np.inf
        if local_ms is not None and hand_over_ms is not None and local_ms[score.argmin()] >= hand_over_ms:
            score -= hand_over_ms  # the same for all that are about as good: the rest is compared
        found = self._candidates(table, score, match, last, avoid)
        return self._with_an_idle_one(table, score, found)

    def could_hold_choices(self, table: WorkerTable, request: RoutingRequest) -> bool:
        """Return whether all choices fit the pools at once; see `could_hold_choices` of the router."""
        pool, block = table.column(_POOL), table.column(_BLOCK)
        if request.num_choices == 1 or not pool.all():
            return True
        num_blocks = np.ceil((request.num_prompt_tokens + 1) / block) + 1
        return bool(np.sum(pool / block // num_blocks) >= request.num_choices)

    def _local_ms(self, table: WorkerTable, request: RoutingRequest) -> Floats:
        """Return `CostModel.local_ms` of each worker, were nothing cached."""
        num_answers = np.maximum(1.0, np.maximum(table.column(_RUNNING), table.column(_MY_ANSWERS)))
        num_delayed = request.num_prompt_tokens * (1.0 + SHARE_OF_OTHERS * num_answers)
        return np.asarray(1000.0 * (table.column(_MY_PROMPTS) + num_delayed) / self._rates(table))

    # --------------------------------------------------------------------------------------------------- choosing

    def _candidates(
        self, table: WorkerTable, score: Floats, match: PrefixMatch, last: str, avoid: Collection[str]
    ) -> list[Worker]:
        for incarnation in avoid:
            if (row := table.row_of.get(incarnation)) is not None:
                score[row] = np.inf
        wanted = [last, *_deepest(match.pools, table.row_of)]
        for host in _deepest(match.hosts, table.on_host):
            wanted.append(min(table.on_host[host], key=lambda each: score[table.row_of[each]]))
        rows = {row: None for each in wanted if (row := table.row_of.get(each)) is not None and score[row] < np.inf}
        found = {worker.incarnation: worker for worker in self._able(table, rows)}
        for number in _ROUNDS:
            picked = self._pick(score, number)
            if able := self._able(table, picked):
                found |= {worker.incarnation: worker for worker in able[:NUM_CANDIDATES]}
                break
            score[picked] = np.inf
        return list(found.values())

    def _with_an_idle_one(self, table: WorkerTable, score: Floats, found: list[Worker]) -> list[Worker]:
        """Add a worker at which a request need not wait, if there is one, and none was found."""
        waits = table.column(_WAITS)
        if any(not waits[table.row_of[worker.incarnation]] for worker in found):
            return found
        idle = np.where(waits > 0, np.inf, score)
        return found + self._able(table, self._pick(idle, 1))

    def _pick(self, score: Floats, number: int) -> list[int]:
        """Return rows of the least scores: at random if more than `number` are about as good as the best."""
        least = float(score.min())
        if least == np.inf:
            return []
        ties = np.flatnonzero(score <= TIE * least)
        if len(ties) > number:
            return [int(ties[each]) for each in self._rng.sample(range(len(ties)), number)]
        if len(score) <= number:
            rows: Rows = np.arange(len(score))
        else:
            rows = np.argpartition(score, number)[:number]
        return [int(row) for row in rows if score[row] < np.inf]

    def _able(self, table: WorkerTable, rows: Iterable[int]) -> list[Worker]:
        """Return the workers that are well; of prefill, also with a KV service through which others get their cache."""
        known = [self._registry.get(table.worker_ids[row]) for row in rows]
        workers = [worker for worker in known if worker is not None]
        if table.key.role == pb.WORKER_ROLE_PREFILL:
            workers = [worker for worker in workers if self._registry.has_kv_service(worker.info.kv_address)]
        return self._health.well(workers)

    def _rates(self, table: WorkerTable) -> Floats:
        """Return the prompt tokens per second of each worker; the mean of its peers before its first prompt."""
        rates = table.column(_RATE)
        if rates.all():
            return rates
        return np.where(rates > 0, rates, self._costs.typical_rate(table.key.model_id, table.key.role))

    def _of(self, role: pb.WorkerRole.ValueType, request: RoutingRequest) -> list[WorkerTable]:
        tables = self._tables.get((role, request.model_id), {})
        return [each for each in tables.values() if not request.identity or each.key.identity == request.identity]

    # -------------------------------------------------------------------------------------------------- following

    def _changed(self, worker: Worker, is_here: bool) -> None:
        self._remove(worker.incarnation)
        model_id = worker.info.card.model_id
        if is_here and worker.role in _ROLES and worker.is_usable and model_id:
            numerics_class = worker.info.card.fingerprint.numerics_class
            space = index_space(worker)
            key = TableKey(worker.role, model_id, worker.identity, numerics_class, worker.space, space)
            tables = self._tables.setdefault((worker.role, model_id), {})
            table = self._table_of[worker.incarnation] = tables.setdefault(key, WorkerTable(key))
            table.put(worker, self._values(worker))

    def _remove(self, incarnation: str) -> None:
        table = self._table_of.pop(incarnation, None)
        if table is None:
            return
        table.remove(incarnation)
        if not len(table):
            of_model = (table.key.role, table.key.model_id)
            del self._tables[of_model][table.key]
            if not self._tables[of_model]:
                del self._tables[of_model]

    def _reported(self, worker: Worker) -> None:
        table = self._table_of.get(worker.incarnation)
        if table is not None:
            table.put(worker, self._values(worker))

    def _sent(self, incarnation: str) -> None:
        table = self._table_of.get(incarnation)
        if table is not None:
            row, flight = table.row_of[incarnation], self._in_flight
            table.column(_MY_PROMPTS)[row] = flight.prefill_tokens[incarnation]
            table.column(_MY_TOKENS)[row] = flight.decode_tokens[incarnation]
            table.column(_MY_ANSWERS)[row] = flight.answers[incarnation]

    def _values(self, worker: Worker) -> tuple[float, ...]:
        """Return a row, in the order of the columns."""
        load, pool, flight, incarnation = worker.load, worker.load.kv, self._in_flight, worker.incarnation
        num_free = pool.num_free_blocks + pool.num_cached_blocks
        most = worker.info.settings.get("max_num_seqs", "")
        return (
            self._costs.measured_rate(worker) or 0.0,
            worker.last_heartbeat,
            load.num_tokens_in_flight,
            load.num_running,
            load.num_running + load.num_waiting,
            float(most) if most.isdecimal() and most.isascii() else 0.0,
            pool.num_total_blocks * pool.tokens_per_block,
            max(1, pool.tokens_per_block),
            num_free * max(1, pool.tokens_per_block),
            worker.info.card.context_length,
            step_ms(worker) or 0.0,
            load.num_waiting > 0 or num_free == 0,
            flight.prefill_tokens[incarnation],
            flight.decode_tokens[incarnation],
            flight.answers[incarnation],
        )


def _deepest(places: Mapping[str, int], known: Container[str]) -> list[str]:
    """Return the known places that have the most blocks."""
    return nlargest(_NUM_HOLDERS, (place for place in places if place in known), key=lambda place: places[place])
