"""Columns of figures of a model's workers of one role: an entry per worker, changed one at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from control_plane.fleet.registry import Worker
from tandem.v1 import types_pb2 as pb

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

(
    RATE,
    BEAT,
    REPORTED,
    RUNNING,
    LIVE,
    MAX_RUNNING,
    POOL,
    BLOCK,
    ROOM,
    LARGEST,
    STEP,
    WAITS,
    ANSWER_RATE,
    MY_PROMPTS,
    MY_TOKENS,
    MY_ANSWERS,
) = range(16)
"""Columns, in units and meaning:

    RATE, ANSWER_RATE        prompt tokens and sampled tokens per second; 0: not known
    BEAT                     when the last report came, monotonic seconds
    REPORTED                 tokens in flight, by that report
    RUNNING, LIVE            requests that run, at least 1; that run or wait
    MAX_RUNNING              most requests at once; inf: not known
    POOL, BLOCK              tokens of the KV pool, 0: not reported yet; and of one of its blocks
    ROOM                     tokens of the pool that are free or in flight, by the report
    LARGEST                  tokens of the largest request, prompt and answer, that the pool could hold
    STEP                     mean milliseconds of a step; 0: not known
    WAITS                    1 if requests wait or no block is free
    MY_PROMPTS, MY_TOKENS, MY_ANSWERS    what this gateway has sent: prompt tokens to compute, all tokens, answers
"""


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


class WorkerTable:
    """The columns of some workers; a row each."""

    def __init__(self, key: TableKey) -> None:
        self.key = key
        self.incarnations: list[str] = []
        self.workers: list[Worker] = []
        """As of their last reports."""
        self.row_of: dict[str, int] = {}
        self.on_host: dict[str, dict[str, None]] = {}
        self.columns: Floats = np.zeros((MY_ANSWERS + 1, 0))
        """[columns, rows], a view of the rows in use."""
        self.step_ms: float | None = None
        """The mean of those that are known."""
        self.hashes = np.zeros(0, np.uint64)
        """Of the workers' ids; [rows]."""
        self.host_numbers = np.zeros(0, np.intp)
        """Of the workers' hosts, places in `host_hashes`; [rows]."""
        self.host_hashes = np.zeros(0, np.uint64)
        """Of the hosts' ids; [hosts]."""
        self._values = np.zeros((MY_ANSWERS + 1, 16))
        self._hosts: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self.incarnations)

    def put(self, worker: Worker, values: Sequence[float]) -> None:
        """Add a worker or change its row."""
        row = self.row_of.get(worker.incarnation)
        if row is None:
            row = len(self)
            if row == self._values.shape[1]:
                self._values = np.concatenate([self._values, np.zeros_like(self._values)], axis=1)
            self.row_of[worker.incarnation] = row
            self.incarnations.append(worker.incarnation)
            self.workers.append(worker)
            self._hosts[worker.incarnation] = worker.info.host_id
            self.on_host.setdefault(worker.info.host_id, {})[worker.incarnation] = None
            self._resized()
        self.workers[row] = worker
        self.columns[:, row] = values
        self._rows_changed()

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
        self._rows_changed()

    def _resized(self) -> None:
        """A worker has come or gone, which is seldom: hashes and numbers of hosts are made anew."""
        self.columns = self._values[:, : len(self)]
        number_of = {host: number for number, host in enumerate(self.on_host)}
        self.hashes = np.array([hash_of(worker.worker_id) for worker in self.workers], np.uint64)
        self.host_numbers = np.array([number_of[self._hosts[each]] for each in self.incarnations], np.intp)
        self.host_hashes = np.array([hash_of(host) for host in self.on_host], np.uint64)

    def _rows_changed(self) -> None:
        steps = self.columns[STEP]
        num_known = int(np.count_nonzero(steps))
        self.step_ms = float(steps.sum()) / num_known if num_known else None

    def rows(self, incarnations: Collection[str]) -> list[int]:
        """Return the rows of those workers that are in this table."""
        return [row for each in incarnations if (row := self.row_of.get(each)) is not None]


@lru_cache(maxsize=1 << 15)
def hash_of(name: str) -> int:
    """Return 64 bits that stand for a worker or a host at every gateway."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
