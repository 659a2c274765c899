"""Columns of figures of a model's workers of one role: an entry per worker, changed one at a time."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Collection, Sequence, Set
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from control_plane.fleet.attached import Attached
from control_plane.fleet.registry import Worker
from control_plane.routing.compiled_library import TableMemory, address
from control_plane.routing.pair_columns import PairColumns
from control_plane.routing.store_columns import StoreColumns
from tandem.v1 import types_pb2 as pb

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

(
    RATE,
    BEAT,
    REPORTED,
    POOL,
    BLOCK,
    LARGEST,
    STEP,
    WAITS,
    ANSWER_RATE,
    MY_PROMPTS,
    MY_QUEUE,
    HELD,
    ANSWERS,
    DELAY,
    ROOM,
    FREE,
    OWN_TOKENS,
    OWN_SECONDS,
    KV,
    CHUNK,
    BYTES,
    BEGAN,
    PREDICTED,
    SESSIONS,
) = range(24)
"""Columns, in units and meaning:

    RATE, ANSWER_RATE        prompt tokens and sampled tokens per second; 0: not known
    BEAT                     when the last report came, monotonic seconds
    REPORTED                 tokens in flight, by that report
    POOL, BLOCK              tokens of the KV pool, 0: not reported yet; and of one of its blocks
    LARGEST                  tokens of the largest request, prompt and answer, that the pool could hold
    STEP                     mean milliseconds of a step; 0: not known
    WAITS                    1 if requests wait or no block is free

What this gateway has sent counts in these. Each changes far less often than it is read:

    MY_PROMPTS               prompt tokens to compute that this gateway has sent
    MY_QUEUE                 milliseconds of these at one token a second
    HELD                     tokens in flight: those reported, or those sent if they are more
    ANSWERS                  requests that run or wait: those reported, or those sent if they are more
    DELAY                    milliseconds that a prompt token between these answers costs at one token a second
    ROOM                     tokens of the pool that are left for prompts; -inf: there are as many requests as may run
    FREE                     the same, however many requests there are

What only the comparison of a few workers reads:

    OWN_TOKENS, OWN_SECONDS  prompt tokens that a decode worker has computed lately, and in what time; -1: none yet
    KV                       1 if the worker has a KV service
    CHUNK                    prompt tokens that the worker computes in a step
    BYTES                    of a token in its KV pool
    BEGAN                    when the call that waits the longest began, seconds of the workers' health; inf: none has
    PREDICTED                seconds that it was to take until its first token

What only the choice of a new session's worker reads:

    SESSIONS                 sessions that this gateway has sent to the worker; the older ones count for less and less
"""
NUM_COLUMNS = SESSIONS + 1
_MAX_SESSIONS = 64
"""Of a worker, in the mean: once there are more, each counts for half."""


class TableKey(NamedTuple):
    """What the workers of a table have in common."""

    role: pb.WorkerRole.ValueType
    model_id: str
    identity: bytes
    space: bytes
    index_space: bytes
    """The space of the workers' blocks in the prefix index."""
    numerics_class: str
    """Of decode workers; "" for prefill workers, which compute for all classes of a space."""


class Hosts:
    """Some hosts; one object for all tables with the same ones."""

    def __init__(self, ids: Sequence[str]) -> None:
        self.ids = ids
        self.hashes = np.array([hash_of(host) for host in ids], np.uint64)


class Weights(NamedTuple):
    """How many keys the workers of a table shall get, in proportion."""

    of_rows: Floats
    of_hosts: Floats
    total: float


class Memory:
    """A table as the compiled library sees it, until a worker comes or goes."""

    def __init__(self, table: WorkerTable, values: Floats) -> None:
        num_rows, host_hashes = len(table), table.hosts.hashes
        hashes = np.array([hash_of(worker.worker_id) for worker in table.workers], np.uint64)
        names = [worker.worker_id for worker in table.workers]
        ranks = {name: rank for rank, name in enumerate(sorted(names))}
        name_ranks = np.array([ranks[name] for name in names], np.int64)
        self._kept = values, table.host_numbers, host_hashes, hashes, name_ranks
        self.score, self._weights, self._loads, self._local_ms = scratch = np.empty((4, num_rows))
        self._of_hosts = np.empty(len(table.hosts.ids))
        self._table = TableMemory(
            address(values, np.float64),
            values.shape[1],
            num_rows,
            len(self._of_hosts),
            address(table.host_numbers, np.int64),
            address(host_hashes, np.uint64),
            address(hashes, np.uint64),
            address(name_ranks, np.int64),
            *(address(each, np.float64) for each in (*scratch, self._of_hosts)),
        )
        self.address = ctypes.addressof(self._table)


class WorkerTable:
    """The columns of some workers; a row each."""

    def __init__(self, key: TableKey) -> None:
        self.key = key
        self.incarnations: list[str] = []
        self.workers: list[Worker] = []
        """As of their last reports."""
        self.row_of: dict[str, int] = {}
        self.on_host: dict[str, dict[str, None]] = {}
        self.columns: list[Floats] = []
        """Of the rows in use; each [rows]."""
        self.rows_on: list[list[int]] = []
        """By the number of a host."""
        self.rows_by_host: dict[str, list[int]] = {}
        """The same lists."""
        self._memory: Memory | None = None
        self.host_numbers = np.zeros(0, np.intp)
        """Of the workers' hosts, places in `hosts`; [rows]."""
        self.hosts = _hosts_of(())
        self.number_of: dict[str, int] = {}
        """Of the hosts."""
        self.pairs: PairColumns | None = None
        """Of decode workers: what hand-overs to their hosts take, in the hosts' order; None: nobody has asked."""
        self.stores: StoreColumns | None = None
        """Of their hosts' block stores, in the hosts' order; None: nobody has asked."""
        self._values = np.zeros((NUM_COLUMNS, 16))
        self._hosts: dict[str, str] = {}
        self._pool_weights: Weights | None = None
        self._least_largest: float | None = None
        self._steps: tuple[float, int] | None = None
        """The sum of the known means of steps, and their number."""
        self._rates: tuple[float, Floats] | None = None
        """What is typical, and RATE with that."""
        self._has_all_rates: bool | None = None
        """Whether all are known. All five: None after a change."""
        self._detached: tuple[Attached, int, list[int]] | None = None
        self._unreached: tuple[Set[str], list[int]] | None = None
        """What these two were asked with, and their answers; None after a change."""

    def __len__(self) -> int:
        return len(self.incarnations)

    def put(self, worker: Worker, values: Sequence[float]) -> None:
        """Add a worker or change its row. `values`: all columns but SESSIONS.

        A new worker counts as having had as many sessions as the others: it gets as many of the next ones, not all.
        """
        row = self.row_of.get(worker.incarnation)
        if row is None:
            row = len(self)
            if row == self._values.shape[1]:
                self._values = np.concatenate([self._values, np.zeros_like(self._values)], axis=1)
            self._values[SESSIONS, row] = round(float(self._values[SESSIONS, :row].mean())) if row else 0
            self.row_of[worker.incarnation] = row
            self.incarnations.append(worker.incarnation)
            self.workers.append(worker)
            self._hosts[worker.incarnation] = worker.info.host_id
            self.on_host.setdefault(worker.info.host_id, {})[worker.incarnation] = None
            self._resized()
        elif self.workers[row].figures.kv_address != worker.figures.kv_address:
            self._unreached = None
        self.workers[row] = worker
        was = self._values[:, row].tolist()
        self._values[:SESSIONS, row] = values
        if was[POOL] != values[POOL] or was[LARGEST] != values[LARGEST]:  # seldom: when a pool is reported first
            self._pool_weights = self._least_largest = None
        if was[STEP] != values[STEP]:
            self._steps = None
        if was[RATE] != values[RATE]:
            self._rates = self._has_all_rates = None

    def remove(self, incarnation: str) -> None:
        """Move the last row to that of a worker that is gone."""
        row, last = self.row_of.pop(incarnation), len(self) - 1
        host = self._hosts.pop(incarnation)
        del self.on_host[host][incarnation]
        if not self.on_host[host]:
            del self.on_host[host]
        self.incarnations[row], self.workers[row] = self.incarnations[last], self.workers[last]
        self.incarnations.pop()
        self.workers.pop()
        if row != last:
            self.row_of[self.incarnations[row]] = row
            self._values[:, row] = self._values[:, last]
        self._resized()

    def _resized(self) -> None:
        """A worker has come or gone, which is seldom: hashes and numbers of hosts are made anew."""
        self.columns = [*self._values[:, : len(self)]]
        self._pool_weights = self._least_largest = self._steps = None
        self._rates = self._has_all_rates = self._memory = self._detached = self._unreached = None
        self.hosts = _hosts_of(tuple(sorted(self.on_host)))
        self.number_of = {host: number for number, host in enumerate(self.hosts.ids)}
        self.host_numbers = np.array([self.number_of[self._hosts[each]] for each in self.incarnations], np.intp)
        self.rows_on = [sorted(self.rows(self.on_host[host])) for host in self.hosts.ids]
        self.rows_by_host = dict(zip(self.hosts.ids, self.rows_on, strict=True))
        if self.pairs is not None and self.pairs.hosts != self.hosts.ids:
            self.pairs = None
        if self.stores is not None and self.stores.hosts != self.hosts.ids:
            self.stores = None

    @property
    def memory(self) -> Memory:
        if self._memory is None:
            self._memory = Memory(self, self._values)
        return self._memory

    @property
    def step_ms(self) -> float | None:
        """The mean of the mean steps that are known."""
        if self._steps is None:
            steps = self.columns[STEP]
            self._steps = float(steps.sum()), int(np.count_nonzero(steps))
        total, num_known = self._steps
        return total / num_known if num_known else None

    @property
    def pool_weights(self) -> Weights:
        """By the tokens of the workers' pools, at least 1."""
        if self._pool_weights is None:
            self._pool_weights = self.weights(np.maximum(1.0, self.columns[POOL]))
        return self._pool_weights

    @property
    def least_largest(self) -> float:
        """The tokens of a request that every pool could hold."""
        if self._least_largest is None:
            self._least_largest = float(self.columns[LARGEST].min())
        return self._least_largest

    def weights(self, of_rows: Floats) -> Weights:
        """Return these weights of the workers, and their sums."""
        of_hosts = np.asarray(np.bincount(self.host_numbers, of_rows, len(self.hosts.ids)), np.float64)
        return Weights(of_rows, of_hosts, float(np.add.reduce(of_rows)))

    @property
    def has_all_rates(self) -> bool:
        if self._has_all_rates is None:
            self._has_all_rates = np.count_nonzero(self.columns[RATE]) == len(self)
        return self._has_all_rates

    def rates(self, typical: Callable[[], float]) -> Floats:
        """Return RATE, with what is typical where it is not known yet."""
        rates = self.columns[RATE]
        if self.has_all_rates:
            return rates
        rate = typical()
        if self._rates is None or self._rates[0] != rate:
            self._rates = rate, np.where(rates > 0, rates, rate)
        return self._rates[1]

    def set_rate(self, row: int, rate: float, own_tokens: float, own_seconds: float) -> None:
        columns = self.columns
        columns[RATE][row], columns[OWN_TOKENS][row], columns[OWN_SECONDS][row] = rate, own_tokens, own_seconds
        self._rates = self._has_all_rates = None

    def session_came(self, incarnation: str, left: str) -> None:
        """Count a session at a worker, and no more at the one that it left; "" if it is new."""
        sessions, row = self.columns[SESSIONS], self.row_of.get(left)
        if row is not None:
            sessions[row] = max(0.0, sessions.item(row) - 1)
        sessions[self.row_of[incarnation]] += 1
        if float(sessions.sum()) > _MAX_SESSIONS * len(self):
            sessions *= 0.5

    def detached(self, attached: Attached) -> list[int]:
        """Return the rows of the workers to which this gateway has no stream."""
        found = self._detached
        if found is None or found[0] is not attached or found[1] != attached.version:
            rows = [row for row, each in enumerate(self.incarnations) if each not in attached]
            found = self._detached = attached, attached.version, rows
        return found[2]

    def unreached(self, addresses: Set[str]) -> list[int]:
        """Return the rows whose KV service is none of these, which are another set once they change."""
        found = self._unreached
        if found is None or found[0] is not addresses:
            rows = [row for row, each in enumerate(self.workers) if each.figures.kv_address not in addresses]
            found = self._unreached = addresses, rows
        return found[1]

    def rows(self, incarnations: Collection[str]) -> list[int]:
        """Return the rows of those workers that are in this table."""
        return [row for each in incarnations if (row := self.row_of.get(each)) is not None]


@lru_cache(maxsize=128)
def _hosts_of(ids: tuple[str, ...]) -> Hosts:
    return Hosts(ids)


@lru_cache(maxsize=1 << 15)
def hash_of(name: str) -> int:
    """Return 64 bits that stand for a worker or a host at every gateway."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
