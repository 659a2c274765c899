"""Keeps the tables of all workers that requests may go to.

Registrations, load reports, measured rates and calls in flight change single rows; nothing is built for a request.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import numpy as np

from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.fleet.worker_health import WorkerHealth
from control_plane.routing.cost_model import SHARE_OF_OTHERS, CostModel, InFlight, RoutingRequest
from control_plane.routing.groups import Group, index_space
from control_plane.routing.hand_overs import chunk_tokens
from control_plane.routing.pair_columns import PairColumns
from control_plane.routing.session_affinity import SessionAffinity
from control_plane.routing.store_columns import StoreColumns
from control_plane.routing.worker_table import (
    ANSWER_RATE,
    ANSWERS,
    BEGAN,
    DELAY,
    FREE,
    HELD,
    MY_PROMPTS,
    MY_QUEUE,
    PREDICTED,
    RATE,
    ROOM,
    TableKey,
    WorkerTable,
)
from tandem.v1 import types_pb2 as pb

_WITH_SENT = (MY_PROMPTS, MY_QUEUE, HELD, ANSWERS, DELAY, ROOM, FREE)
_ROLES = (pb.WORKER_ROLE_PREFILL, pb.WORKER_ROLE_DECODE)


class WorkerColumns:
    """The tables by role and model. Listens to registry, calls in flight, cost model, health and sessions."""

    def __init__(
        self,
        registry: WorkerRegistry,
        in_flight: InFlight,
        costs: CostModel,
        health: WorkerHealth,
        affinity: SessionAffinity,
    ) -> None:
        self._in_flight, self._costs, self._health = in_flight, costs, health
        self._tables: dict[tuple[pb.WorkerRole.ValueType, str], dict[TableKey, WorkerTable]] = {}
        self._table_of: dict[str, WorkerTable] = {}
        self._groups: dict[tuple[str, bytes], list[Group]] = {}
        """By model and identity, as they were asked for; empty after a table has come or gone."""
        registry.listen(self._changed)
        registry.listen_to_loads(self._reported)
        in_flight.listen(self._sent)
        costs.listen(self._measured)
        costs.hand_overs.listen(self)
        costs.stores.listen(self)
        costs.ask_means(self)
        health.listen(self._waits)
        affinity.listen(self._session_came)
        for worker in registry.workers():
            self._changed(worker, True)

    def groups(self, request: RoutingRequest) -> list[Group]:
        """Return the groups that have decode workers for a request, in the order of their first ones."""
        found = self._groups.get((request.model_id, request.identity))
        if found is None:
            found = self._found_groups(request)
            if found:  # of names that nobody serves there may be any number
                self._groups[request.model_id, request.identity] = found
        return found

    def _found_groups(self, request: RoutingRequest) -> list[Group]:
        groups: dict[tuple[bytes, str], Group] = {}
        for table in self._of(pb.WORKER_ROLE_DECODE, request):
            key = table.key.space, table.key.numerics_class
            groups.setdefault(key, Group(table.key.space, [], [])).decodes.append(table)
        for table in self._of(pb.WORKER_ROLE_PREFILL, request):
            for group in groups.values():
                if group.space == table.key.space:
                    group.prefills.append(table)
        return list(groups.values())

    def prompt_rate(self, model_id: str, role: pb.WorkerRole.ValueType) -> float | None:
        """Return the mean of the known rates of a model's workers."""
        return self._mean(RATE, model_id, role)

    def answer_rate(self, model_id: str, role: pb.WorkerRole.ValueType) -> float | None:
        return self._mean(ANSWER_RATE, model_id, role)

    def _mean(self, column: int, model_id: str, role: pb.WorkerRole.ValueType) -> float | None:
        rates = [table.columns[column] for table in self._tables.get((role, model_id), {}).values()]
        num_known = sum(int(np.count_nonzero(each)) for each in rates)
        return sum(float(each.sum()) for each in rates) / num_known if num_known else None

    def _of(self, role: pb.WorkerRole.ValueType, request: RoutingRequest) -> list[WorkerTable]:
        tables = self._tables.get((role, request.model_id), {})
        return [each for each in tables.values() if not request.identity or each.key.identity == request.identity]

    # -------------------------------------------------------------------------------------------------- following

    def _changed(self, worker: Worker, is_here: bool) -> None:
        self._remove(worker.incarnation)
        model_id = worker.info.card.model_id
        if is_here and worker.role in _ROLES and worker.is_usable and model_id:
            decode_class = worker.figures.numerics_class if worker.role == pb.WORKER_ROLE_DECODE else ""
            key = TableKey(worker.role, model_id, worker.identity, worker.space, index_space(worker), decode_class)
            tables = self._tables.setdefault((worker.role, model_id), {})
            if (table := tables.get(key)) is None:
                table = tables[key] = WorkerTable(key)
                self._groups.clear()
            self._table_of[worker.incarnation] = table
            table.put(worker, self._values(worker))

    def _remove(self, incarnation: str) -> None:
        table = self._table_of.pop(incarnation, None)
        if table is None:
            return
        table.remove(incarnation)
        if not len(table):
            of_model = (table.key.role, table.key.model_id)
            self._groups.clear()
            del self._tables[of_model][table.key]
            if not self._tables[of_model]:
                del self._tables[of_model]

    def pair_changed(self, from_host: str, to_host: str) -> None:
        for pairs in self._pairs():
            pairs.pair_changed(from_host, to_host)

    def arena_changed(self, host_id: str) -> None:
        for pairs in self._pairs():
            pairs.arena_changed(host_id)

    def host_changed(self, host_id: str) -> None:
        for pairs in self._pairs():
            pairs.host_changed(host_id)

    def store_changed(self, host_id: str) -> None:
        for stores in self._stores():
            stores.store_changed(host_id)

    def hit_rate_changed(self, host_id: str) -> None:
        for stores in self._stores():
            stores.hit_rate_changed(host_id)

    def links_changed(self, host_id: str, addresses: Collection[str]) -> None:
        for stores in self._stores():
            stores.links_changed(host_id, addresses)

    def missed_changed(self, from_host: str, to_host: str) -> None:
        for stores in self._stores():
            stores.missed_changed(from_host, to_host)

    def _pairs(self) -> list[PairColumns]:
        return [table.pairs for table in self._each_table() if table.pairs is not None]

    def _stores(self) -> list[StoreColumns]:
        return [table.stores for table in self._each_table() if table.stores is not None]

    def _each_table(self) -> Iterator[WorkerTable]:
        return (table for of_model in self._tables.values() for table in of_model.values())

    def _reported(self, worker: Worker) -> None:
        table = self._table_of.get(worker.incarnation)
        if table is not None:
            table.put(worker, self._values(worker))

    def _measured(self, incarnation: str) -> None:
        table = self._table_of.get(incarnation)
        if table is not None and table.key.role == pb.WORKER_ROLE_DECODE:  # prefill workers report theirs
            row = table.row_of[incarnation]
            worker = table.workers[row]
            table.set_rate(row, self._costs.computed_rate(worker) or 0.0, *self._costs.computed_lately(worker))

    def _sent(self, incarnation: str) -> None:
        table = self._table_of.get(incarnation)
        if table is not None:
            row, columns = table.row_of[incarnation], table.columns
            for column, value in zip(_WITH_SENT, self._with_sent(table.workers[row]), strict=True):
                columns[column][row] = value

    def _waits(self, incarnation: str) -> None:
        table = self._table_of.get(incarnation)
        if table is not None:
            row, columns = table.row_of[incarnation], table.columns
            columns[BEGAN][row], columns[PREDICTED][row] = self._health.oldest_begun(incarnation)

    def _session_came(self, incarnation: str, left: str) -> None:
        table = self._table_of.get(incarnation)
        if table is not None:
            table.session_came(incarnation, left)

    def _values(self, worker: Worker) -> tuple[float, ...]:
        """Return a row, in the order of the columns, but for the last one."""
        figures = worker.figures
        is_whole = not figures.pool_tokens or figures.context_length <= figures.pool_tokens
        return (
            self._costs.measured_rate(worker) or 0.0,
            worker.last_heartbeat,
            figures.num_tokens_in_flight,
            figures.pool_tokens,
            max(1, figures.tokens_per_block),
            math.inf if is_whole else figures.pool_tokens + 1,  # the last token's KV is never needed
            figures.step_ms or 0.0,
            figures.num_waiting > 0 or not figures.has_free_blocks,
            figures.answer_rate or 0.0,
            *self._with_sent(worker),
            *self._costs.computed_lately(worker),
            bool(figures.kv_address),
            chunk_tokens(figures),
            figures.bytes_per_token,
            *self._health.oldest_begun(worker.incarnation),
        )

    def _with_sent(self, worker: Worker) -> tuple[float, ...]:
        """Return the values in which counts what this gateway has sent, in the order of `_WITH_SENT`."""
        figures, flight, incarnation = worker.figures, self._in_flight, worker.incarnation
        num_tokens, num_answers = flight.decode_tokens.get(incarnation, 0), flight.answers.get(incarnation, 0)
        num_live = max(num_answers, figures.num_running + figures.num_waiting)
        is_full = figures.max_running is not None and num_live >= figures.max_running > 0
        num_prompt_tokens = flight.prefill_tokens.get(incarnation, 0)
        num_free = figures.free_tokens + figures.num_tokens_in_flight - num_tokens
        return (
            num_prompt_tokens,
            1000 * num_prompt_tokens,
            max(num_tokens, figures.num_tokens_in_flight),
            num_live,
            1000 + 1000 * SHARE_OF_OTHERS * max(1, self._costs.num_answers(worker)),
            -math.inf if is_full else num_free,
            num_free,
        )
